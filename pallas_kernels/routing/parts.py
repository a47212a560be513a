"""What the parts of the routing kernel share: sizes, buffers, layouts and small helpers."""

import functools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import BY_SINGLE_COLUMN, I32, ROWS, SINGLE_COLUMNS
from pallas_kernels.routing.reference import BY_WEIGHT, by_score
from pallas_kernels.routing.tile_map import RowTiles, max_tiles
from pallas_kernels.routing.values import Gating

MAX_BLOCKS = 8
"""Blocks of a cluster, the most that every GPU can place."""

MAX_TURNS, FEW_TURNS, FEW_EXPERTS = 8, 4, 64
"""Times that a block takes 64 rows, where a step has more than 512; of more than 64 experts a turn
takes longer, and from 2,048 rows on XLA's many launches should be over sooner (docs/roofline.md).
"""

MAX_SMEM = 220 * 1024
"""Bytes of shared memory that buffers may take; a block has 227 KB, of which barriers take some."""

MAX_ROUTED, MAX_LOGICAL = 256, 512
"""Experts. A row's logits are in registers, 128 of a thread's 255 at the most."""

MAX_ROUTED_IN_TURNS = 128
"""Routed experts of steps of more than 512 rows: a loop's own values need registers, too."""

MAX_PICKS = 16
"""A row's picks are compared with each other in registers."""

FEW_PICKS, MANY_EXPERTS = 8, 128
"""More picks of fewer experts spill up to 72 bytes; no model is known to have them."""

MAX_GROUPS = 8
"""Groups of experts, of each of which a row's logits are looked at apart."""

MAX_BOX = 256
"""Elements of a TMA box along one axis."""

EXPERTS, BY_EXPERT = SINGLE_COLUMNS, BY_SINGLE_COLUMN  # rows by experts

PADDING, DEGRADABLE, EXEMPT = range(3)  # kinds of rows
EXEMPT_VISIT = 1 << 16  # beside which visits that may be degraded are counted
PINNED = 1 << 30
GAP = 256  # sorted rows that are marked as gaps by one copy


def whole_fours(count: int) -> int:
    """Returns the next multiple of four: TMA takes rows of whole 16 bytes."""
    return -(-count // 4) * 4


class Sizes(NamedTuple):
    """Static sizes of one call."""

    rows: int
    gating: Gating
    experts: int  # routed
    logical: int
    block_m: int
    sorted_rows: int
    tiles: RowTiles | None  # to be mapped
    interpreted: bool
    biased: bool = False
    by_layer: bool = False  # there is a threshold for each layer

    @property
    def by_score(self) -> bool:
        """Whether experts are chosen by score, not by logit."""
        return by_score(self.biased, self.gating.grouping)

    @property
    def picks(self) -> int:
        """Picks a row."""
        return self.gating.top_k

    @property
    def turns(self) -> int:
        """Turns of 64 rows that a block has; the last block may have fewer."""
        return -(-self.rows // (ROWS * MAX_BLOCKS))

    @property
    def blocks(self) -> int:
        """Blocks of the cluster."""
        return -(-self.rows // (ROWS * self.turns))

    @property
    def width(self) -> int:
        """Columns of what holds a value for each pick."""
        return whole_fours(self.picks)

    @property
    def padded(self) -> int:
        """Room for a vector over routed experts, of which 64 are handled at once."""
        return -(-self.experts // ROWS) * ROWS

    @property
    def chunks(self) -> int:
        """Chunks of 64 logical experts."""
        return -(-self.logical // ROWS)

    @property
    def slot_boxes(self) -> list[tuple[int, int]]:
        """(first, count) of a layer's slots for each copy; none without a tile map."""
        total = self.chunks * ROWS if self.tiles else 0
        return [(i, min(MAX_BOX, total - i)) for i in range(0, total, MAX_BOX)]

    @property
    def map_rows(self) -> int:
        """Rows of the tile map."""
        assert self.tiles is not None
        return max_tiles(self.sorted_rows, self.block_m, self.logical, self.tiles.rows)


class Given(NamedTuple):
    """Arguments of the kernel."""

    logits: Any
    groups: Any  # of all layers in a row
    groups_layer: Any  # [1]
    slots: Any
    slots_layer: Any
    valid: Any
    exempt: Any
    threshold: Any
    strategy: Any
    bias: Any = None
    bias_layer: Any = None


class Out(NamedTuple):
    """What the kernel writes."""

    ids: Any  # [T, width], as the next three
    expert_ids: Any
    visit_row: Any
    visit_weight: Any
    s1: Any  # [m]
    expert_rows: Any  # [E]
    expert_start: Any  # [E]
    num_blocks: Any  # [1]
    row_token: Any  # [R]
    tile_map: Any = None  # [M, 6]


class Smem(NamedTuple):
    """Shared memory and barriers of a block."""

    logits: Any
    groups: Any
    slots: Any
    kind: Any  # [turn, row]; of a turn, [row]
    ids: Any  # [turn, row, pick], as the next three; of a turn, [row, pick]
    expert_ids: Any
    visit_row: Any
    weights: Any
    visits: Any  # of each expert by the block's rows
    shares: Any  # likewise, their gate weights, where experts are kept by weight
    key: Any  # its place in the order, larger first
    s1: Any
    left: Any  # its group, if it is visited and not in S1
    target: Any
    rows: Any  # of each logical expert, [chunk, 64], as the next two
    start: Any  # its first sorted row
    tile: Any  # its first tile
    gap: Any
    visited: Any  # one-hot, [64 experts at once, row, expert]
    earlier: Any  # 1 where the column is before the row
    ones: Any
    full: Any  # barrier of the tables
    loaded: Any  # of a turn's logits
    all_visits: Any = None  # of every block, as the next two
    all_shares: Any = None
    all_rows: Any = None
    first: Any = None  # sorted row of the turn's first visit to each logical expert
    turn_rows: Any = None  # of a turn, as `rows` is of the block
    exchanged: Any = None  # barriers
    met: Any = None
    bias: Any = None
    bias_loaded: Any = None  # barrier


class Block(NamedTuple):
    """A block, or 64 of its rows, and all it works with."""

    sizes: Sizes
    index: Any
    given: Given
    out: Out
    shared: Any  # in memory: what blocks exchange
    smem: Smem
    turn: Any = 0

    @property
    def by_weight(self):
        """Whether experts are kept by weight, not by visits."""
        return self.given.strategy[0] >= BY_WEIGHT

    @property
    def first_row(self):
        """The block's first row of the arrays."""
        return (self.index * self.sizes.turns + self.turn) * ROWS

    @property
    def own(self):
        """The block's rows of the arrays. They may pass the end, where TMA stops."""
        return pl.ds(self.first_row, ROWS)

    def each_turn(self, do) -> None:
        """Calls `do` with the block's rows, 64 at a time."""
        turns = self.sizes.turns
        if turns == 1:
            do(self._at_turn(0))
            return
        left = -(-self.sizes.rows // ROWS) - self.index * turns

        @pl.loop(0, lax.min(left, jnp.int32(turns)))
        def _(turn):
            do(self._at_turn(turn))

    def _at_turn(self, turn) -> "Block":
        names = ("kind", "ids", "expert_ids", "visit_row", "weights")
        views = {name: getattr(self.smem, name).at[turn] for name in names}
        return self._replace(smem=self.smem._replace(**views), turn=turn)


def scratch(sizes: Sizes) -> dict[str, Any]:
    """Returns the shared memory of a block, by the names in `Smem`."""
    swizzled = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    bf16 = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled)
    i32 = functools.partial(plgpu.SMEM, dtype=I32)
    visits, vector, places = (
        (sizes.turns, ROWS, sizes.width),
        (sizes.padded,),
        (sizes.chunks, ROWS),
    )
    scratch = {
        "logits": plgpu.SMEM((ROWS, sizes.experts), jnp.float32),
        "kind": i32((sizes.turns, ROWS)),
        "weights": plgpu.SMEM(visits, jnp.float32),
        "gap": i32((GAP,)),
        "visited": bf16((sizes.chunks, ROWS, ROWS)),
        "earlier": bf16((ROWS, ROWS)),
        "ones": bf16((8, ROWS)),
        "slots": i32((sizes.chunks * ROWS,)),
        "full": plgpu.Barrier(num_arrivals=1 + len(sizes.slot_boxes)),
        "loaded": plgpu.Barrier(),
        **{name: i32(visits) for name in ("ids", "expert_ids", "visit_row")},
        **{
            name: i32(vector)
            for name in ("groups", "visits", "shares", "key", "s1", "left", "target")
        },
        **{name: i32(places) for name in ("rows", "start", "tile")},
    }
    if sizes.biased:
        scratch["bias"] = plgpu.SMEM(vector, jnp.float32)
        scratch["bias_loaded"] = plgpu.Barrier()
    if sizes.blocks > 1:
        scratch |= {
            "all_visits": i32((sizes.blocks, *vector)),
            "all_shares": i32((sizes.blocks, *vector)),
            "all_rows": i32((sizes.blocks, *places)),
            "first": i32(places),
            "exchanged": plgpu.Barrier(num_barriers=3),
        }
        if sizes.turns > 1:
            scratch["turn_rows"] = i32(places)
        if sizes.interpreted:
            scratch["met"] = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=3)
    return scratch


def smem_bytes(sizes: Sizes) -> int:
    """Returns the bytes of shared memory that a block's buffers take."""
    buffers = (made for made in scratch(sizes).values() if isinstance(made, pl.MemoryRef))
    return sum(math.prod(made.shape) * jnp.dtype(made.dtype).itemsize for made in buffers)


def by_expert(ref):
    """Returns a vector that has a value for each routed expert, for use with `EXPERTS`."""
    return plgpu.load(ref, layout=BY_EXPERT, optimized=False)


def by_row_and_expert(ref):
    """Returns an array with a value for each row and routed expert."""
    return plgpu.load(ref, layout=EXPERTS, optimized=False)
