"""Mosaic GPU kernel of prefill attention, for Hopper (sm_90a).

Attention of long prompts is bound by the tensor cores, and on their way stands the softmax: of a
step of 128 rows by 128 keys (head size 128) the two products take 2,048 cycles of a multiprocessor
at full rate, its exponentials alone 1,024. The floor is 790 TFLOP/s, what a bf16 product reaches
on an H200, if none of that shows; the kernel aims at 620 on one prompt of 16k tokens.

- Two warpgroups of 64 rows multiply, one loads. A warpgroup puts the scores of step j and then the
  values of step j - 1 into the tensor cores' queue, and finds the weights of step j while the
  values are being weighed. The warpgroups queue in turns, so that one's softmax is under the
  other's products. Accumulator (64 registers), scores (64) and the weights of the step before (32)
  are held at once; weights go from registers into wgmma.
- Pages come by TMA, one copy each, into a ring of keys and one of values (`tiles.choose`). The
  pipeline runs on from one tile into the next, whose rows are loaded once the last scores are
  there.
- Query heads that share a kv head are packed beside their rows (`tiles.Tile`), so that keys are
  read once for them and a chunk of a few rows fills a warpgroup.
- Chunks start at any row, TMA reads tiles of 8: a tile starts at the multiple of 8 below and does
  not own its first rows (`work.plan`). So rows need not be copied to aligned places and back, whose
  bytes would take 15 % of the floor of 4k tokens. What a tile owns is stored whole, or from
  unswizzled shared memory in powers of two rows where a chunk begins or ends inside it.
- Steps past the diagonal or before a window are left out, steps between the two have no mask: that
  is another loop. A tile over a window begins with its own first page and counts positions from
  there, so that no page before it is read, nor its id.
- Persistent blocks, tiles dealt out longest first, back and forth: no counter, no atomics.

What lies behind the last position may be infinite or NaN. Scores of such keys are replaced. Their
values are zeroed in shared memory before the last product, for 0 * inf is NaN. A page that a
sequence does not own is never read.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import num_sms
from pallas_kernels.fp8_pages import AnyPages, Fp8Pages, read
from pallas_kernels.prefill_attention import work
from pallas_kernels.prefill_attention.attend import attend
from pallas_kernels.prefill_attention.parts import (
    Item,
    Refs,
    Shape,
    drain,
    for_each_item,
    scratch,
    zero,
)
from pallas_kernels.prefill_attention.tiles import LANES, WARPGROUPS, Tile, choose

LOADER = WARPGROUPS  # index of the warpgroup that loads
REGISTERS = {"load": 24, "multiply": 240}
"""A thread. Together no more than a launch gives: 3 x 168."""


def supports(q: Array, k_pages: Any, v_pages: Any, scale: float) -> bool:
    """Returns whether the kernel takes these shapes and dtypes."""
    pages = () if isinstance(k_pages, Fp8Pages) else (k_pages, v_pages)
    bf16 = all(a.dtype == jnp.bfloat16 for a in (q, *pages))
    kv_heads, page_size, head_dim = k_pages.shape[2:]
    sizes = head_dim in (64, 128, 256) and page_size in (16, 32, 64, 128)
    sizes = sizes and (head_dim, page_size) != (256, 32)  # registers would spill
    # The largest score is found before scaling.
    return bf16 and sizes and q.shape[1] % kv_heads == 0 and scale > 0


def plan(
    num_rows: int,
    heads: int,
    pages: Any,
    *,
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    window: int = 0,
    tile: Tile | None = None,
) -> work.Work:
    """Returns what `prefill_attention` takes as `todo`; see `op.plan`."""
    kv_heads, page_size, head_dim = pages.shape[2:]
    tile = tile or choose(heads // kv_heads, head_dim, window)
    return work.plan(
        q_start,
        kv_len,
        work.aligned(num_rows),
        block_rows=tile.block_rows,
        block_kv=tile.block_kv,
        window=window,
        align=min(page_size, tile.block_kv),
    )


def prefill_attention(
    q: Float[Array, "T H D"],
    k_pages: AnyPages,
    v_pages: AnyPages,
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "N M"],
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    scale: float,
    window: int = 0,
    sinks: Float[Array, "H"] | None = None,
    todo: work.Work | None = None,
    tile: Tile | None = None,
    num_blocks: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T H D"]:
    """See `op.prefill_attention`; `supports` says for what. There are `num_blocks` persistent
    blocks; None: one a multiprocessor.

    `todo` is for the tile that is chosen: give no other with it.

    `interpreted`: the product of probabilities and values is written for the interpreter, which
    has no wgmma with an operand in registers.

    Pages in eight bits that the table names are copied first, in bfloat16.
    """
    num_rows, heads, head_dim = q.shape
    if isinstance(k_pages, Fp8Pages):
        at, size = (layer, block_table), k_pages.shape[2:]
        k_pages, v_pages = (read(p, at, q.dtype).reshape(1, -1, *size) for p in (k_pages, v_pages))
        count = jnp.arange(block_table.size, dtype=jnp.int32)
        layer, block_table = jnp.int32(0), count.reshape(block_table.shape)
    kv_heads, page_size = k_pages.shape[2:4]
    tile = tile or choose(heads // kv_heads, head_dim, window)
    shape = Shape(
        heads,
        kv_heads,
        head_dim,
        page_size,
        tile,
        num_blocks or num_sms(),
        scale,
        interpreted,
        window,
    )
    q = jnp.pad(q, ((0, work.aligned(num_rows) - num_rows), (0, 0), (0, 0)))
    if todo is None:
        rows = {"q_start": q_start, "kv_len": kv_len, "window": window}
        todo = plan(num_rows, heads, k_pages, tile=tile, **rows)
    own = []
    if sinks is not None:  # of the rows of a warpgroup, for each set of packed heads
        rows = jnp.repeat(sinks.astype(jnp.float32) * math.log2(math.e), tile.rows)
        own = [rows.reshape(shape.packs, LANES)]
    out = _call(shape, q, sinks is not None)(
        todo.tiles,
        todo.count,
        layer.astype(jnp.int32)[None],
        block_table.astype(jnp.int32),
        q,
        k_pages,
        v_pages,
        *own,
    )
    return out[:num_rows]


def _call(shape: Shape, q: Array, has_sinks: bool) -> Callable[..., Array]:
    def body(*arrays, **buffers):
        sinks = arrays[-2] if has_sinks else None  # the last that is given; then the result
        own = (*arrays[:-2], arrays[-1]) if has_sinks else arrays
        refs = Refs(*own, **buffers)._replace(sinks=sinks)
        warpgroup = lax.axis_index("wg")

        def load():
            plgpu.set_max_registers(REGISTERS["load"], action="decrease")
            _load(shape, refs)

        def multiply():
            plgpu.set_max_registers(REGISTERS["multiply"], action="increase")
            attend(shape, refs, warpgroup)

        lax.cond(warpgroup == LOADER, load, multiply)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(shape.num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=scratch(shape, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="prefill_attention",
    )


def _load(shape: Shape, refs: Refs) -> None:
    """Runs the warpgroup that loads: query rows of an item, then keys and values in turn."""
    tile, rows, layer = shape.tile, shape.copy_rows, refs.layer[0]
    group = shape.heads // shape.kv_heads

    def item(at: Item, steps):
        kv_head = lax.div(at.head, group)
        last = lax.div(at.kv_len - 1, rows) * rows

        def fetch(pages, smem, first, step):
            stage = lax.rem(steps + step, smem.shape[0])
            plgpu.barrier_wait(refs.empty.at[first + stage])

            @pl.loop(0, shape.copies if shape.copies <= 2 else shape.copies + zero(at))
            def _(i):
                start = pl.multiple_of(i * rows, work.ALIGN)
                # Past the last position any page of the sequence's own will do.
                position = lax.min(step * tile.block_kv + start, last)
                position = position + at.base
                page = refs.table[at.chunk, lax.div(position, shape.page_size)]
                offset = 0
                if rows < shape.page_size:
                    offset = pl.multiple_of(lax.rem(position, shape.page_size), rows)
                plgpu.copy_gmem_to_smem(
                    pages.at[layer, page, kv_head, pl.ds(offset, rows)],
                    smem.at[stage, pl.ds(start, rows)],
                    refs.full.at[first + stage],
                )

        def keys(step):
            fetch(refs.k, refs.k_smem, 0, step)

        def values(step):
            fetch(refs.v, refs.v_smem, tile.key_stages, step)

        @pl.when(at.blocks > 0)
        def _():
            _load_queries(shape, refs, at)
            keys(0)

            @pl.loop(1, at.blocks)
            def _(step):
                keys(step)
                values(step - 1)

            values(at.blocks - 1)

        return steps + at.blocks

    for_each_item(shape, refs, item)
    plgpu.barrier_wait(refs.q_empty)
    drain(shape, refs)


def _load_queries(shape: Shape, refs: Refs, at: Item) -> None:
    rows = shape.tile.rows
    plgpu.barrier_wait(refs.q_empty)
    for warpgroup in range(WARPGROUPS):
        row = pl.multiple_of(at.row + warpgroup * rows, work.ALIGN)

        @pl.loop(0, shape.tile.pack + zero(at))
        def _(i, warpgroup=warpgroup, row=row):
            start = pl.multiple_of(i * rows, work.ALIGN)
            plgpu.copy_gmem_to_smem(
                refs.q.at[pl.ds(row, rows), at.head + i],
                refs.q_smem.at[warpgroup, pl.ds(start, rows)],
                refs.q_full,
            )
