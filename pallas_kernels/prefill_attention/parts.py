"""What the parts of the prefill attention kernel share: sizes, buffers, the walk over items."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.prefill_attention import work
from pallas_kernels.prefill_attention.tiles import LANES, WARPGROUPS, Expanded, Tile


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tile: Tile
    num_blocks: int
    scale: float
    interpreted: bool
    window: int = 0  # positions that a row sees; 0: all
    rank: int = 0  # of latents: elements of which keys and values are made, `head_dim` of each
    rope: int = 0  # the others, which are part of every head's key
    expanded: Expanded | None = None  # of latents

    @property
    def packs(self) -> int:
        """Sets of heads that are packed together."""
        return self.heads // self.tile.pack

    @property
    def copy_rows(self) -> int:
        """Keys a TMA copy brings: a page, or as much of it as a step takes."""
        return min(self.page_size, self.tile.block_kv)

    @property
    def copies(self) -> int:
        """TMA copies of keys a step."""
        return self.tile.block_kv // self.copy_rows

    @property
    def staged(self) -> int:
        """Columns of results staged at a time: what shared memory has left."""
        return LANES if self.rope else min(self.head_dim, 128)


class Refs(NamedTuple):
    """Arguments, result, buffers and barriers of the kernel."""

    tiles: Any
    count: Any
    layer: Any
    table: Any
    q: Any
    k: Any
    v: Any
    out: Any
    q_smem: Any  # [warpgroup, 64, D]
    k_smem: Any  # [stage, block_kv, D]
    v_smem: Any
    out_smem: Any  # (staging[warpgroup, 64, staged] for stores 8 rows at a time, from any row on)
    q_full: Any
    q_empty: Any
    full: Any  # of each stage of keys, then of values
    empty: Any
    turn: Any  # one a warpgroup: the tensor cores are its own
    clean: Any = None  # both warpgroups have cleaned their part of the last values
    p_smem: Any = None  # weights and results of a warpgroup, while interpreted
    acc_smem: Any = None
    sinks: Any = None  # base-2 ones [packs, 64], of each row of a warpgroup; None: there are none
    latents: Any = None  # what only these have (`expanded`)


def scratch(shape: Shape, dtype) -> dict[str, Any]:
    """Returns the buffers and barriers by the names they have in `Refs`."""
    tile = shape.tile
    step = tile.block_kv, shape.head_dim
    staging = plgpu.SMEM((WARPGROUPS, LANES, shape.staged), dtype)
    scratch = {
        "q_smem": plgpu.SMEM((WARPGROUPS, LANES, shape.head_dim), dtype),
        "k_smem": plgpu.SMEM((tile.key_stages, *step), dtype),
        "v_smem": plgpu.SMEM((tile.value_stages, *step), dtype),
        "out_smem": plgpu.RefUnion(staging, staging),  # a tile of rows needs one of the two
        "q_full": plgpu.Barrier(num_arrivals=WARPGROUPS * tile.pack),
        "q_empty": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "full": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.stages),
        "turn": plgpu.Barrier(num_barriers=WARPGROUPS),
        "clean": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    if shape.interpreted:
        # Race detection takes a union for one piece: one warpgroup's part of a form would overlap
        # the other warpgroup's part of the other.
        scratch["out_smem"] = staging, staging
        scratch["p_smem"] = plgpu.SMEM((WARPGROUPS, LANES, tile.block_kv), dtype)
        scratch["acc_smem"] = plgpu.SMEM((WARPGROUPS, LANES, shape.head_dim), jnp.float32)
    return scratch


class Item(NamedTuple):
    """A tile of rows for one set of packed heads."""

    row: Any
    lo: Any
    hi: Any
    offset: Any
    blocks: Any
    chunk: Any
    kv_len: Any
    head: Any  # first query head
    base: Any = 0
    number: Any = None  # of all


def read_item(shape: Shape, refs: Refs, number) -> Item:
    """Returns an item of the plan."""
    tile = lax.div(number, shape.packs)
    fields = [refs.tiles[tile, field] for field in range(work.KV_LEN + 1)]
    head = lax.rem(number, shape.packs) * shape.tile.pack
    base = refs.tiles[tile, work.BASE] if shape.window else 0
    item = Item(*fields, head=head, base=base, number=number)
    return item._replace(row=pl.multiple_of(item.row, work.ALIGN))


def for_each_item(shape: Shape, refs: Refs, run: Callable[[Item, Any], Any]) -> None:
    """Calls `run(item, steps)` for the block's items: after `steps` over keys, it returns how many
    there are after it.

    Items are dealt out back and forth, so that the block with the longest of one round gets the
    shortest of the next.
    """
    block, blocks = lax.axis_index("block"), shape.num_blocks
    total = refs.count[0] * shape.packs
    rounds = lax.div(total, blocks)

    def place(i):
        return jnp.where(lax.rem(i, 2) == 0, block, blocks - 1 - block)

    items = rounds + jnp.where(place(rounds) < total - rounds * blocks, 1, 0)

    def one(i, steps):
        return run(read_item(shape, refs, i * blocks + place(i)), steps)

    lax.fori_loop(0, items, one, jnp.int32(0))


def drain(shape: Shape, refs: Refs) -> None:
    """Ends the warpgroup that loads: every phase of a barrier is to be seen by someone."""
    for stage in range(shape.tile.stages):
        plgpu.barrier_wait(refs.empty.at[stage])


def zero(at: Item):
    """Returns a zero that the compiler does not recognize: it saves registers where none are to
    spare.

    Addresses that depend on nothing but the thread are computed once, before all items, and held
    through the loops over keys; short loops are unrolled.
    """
    return lax.min(at.lo, 0)
