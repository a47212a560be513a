"""Mosaic GPU kernels of paged decode attention, for Hopper (sm_90a).

Two kernels: `attend` streams keys and values once and leaves results and, of what its blocks share,
pieces; `merge` joins the pieces by their log-sum-exps. The floor is reading every key and value
once from memory.

- Keys and values are on wgmma's M side (64 keys; 64 elements of a head) and the query rows of one
  kv head on its N side, padded to eight: scores are `K q^T`, results `V^T p^T`. Groups of one to
  eight query heads waste a fraction of the tensor cores' time and few registers, where 64 padded
  query rows would cost 64 rows of softmax and of accumulators.
- Work is shared out as in `schedule`: persistent blocks, as many as fit the multiprocessors at once
  (`tiles.occupancy`), take equal runs of tiles, which cut sequences where they must. The number of
  splits follows from the lengths, no block idles while another streams a long sequence, and none is
  started for nothing, as most of a grid over (sequence, kv head, split) would be that has room for
  the longest sequence.
- A (sequence, kv head) that is whole is divided and written as a result by the block that has it.
  The pieces of one that is cut go through the merge, in float32; a block has at most two, so that
  the merge has no more to do than there are blocks, whatever the batch. It writes into the array
  that the first kernel has written, which XLA copies nowhere.
- A block is one warpgroup. It asks for a tile as soon as it is done with the one in whose place the
  tile goes, keys and values apart. Up to eight query heads a kv head, three blocks live on a
  multiprocessor and hide one another's latencies (of softmax, of the end of a sequence), and
  nothing has to be handed from warp to warp: memory at its peak delivers a tile to each of them
  every 4,700 cycles, which is several times what the chain of latencies from one tile to the next
  adds up to. What a tile needs, page ids too, is asked for whole tiles ahead and on across
  sequences, queries while the last tile before them is at work.
- Pages come by TMA, one copy each (or a part of one, if pages are larger than tiles), to where
  wgmma takes them from.
- What lies past the end of a sequence in its last tile may be infinite or NaN. Scores of such keys
  are masked; such values are overwritten by zeros in shared memory.
- Over a window a sequence is what is in it, from the first page on that has a part there: the plan
  counts no tile before it, no block reads a page's id or a page. What that first page has before
  the window is the sequence's own, and so finite: scores of such keys are masked.
- Pages in eight bits come with their scales, a tile within a page. A tile is widened through
  registers into one of bfloat16, which holds every number of e4m3 as it is, and its place is free
  for the next at once. Scores are multiplied by the scales of keys, weights by those of values.
- A sink is taken in where a segment begins, as the score of a key without a value: by the one piece
  that has its first tile, so that the merge has nothing to do with it.
- Latents, keys whose first elements are the values, have an `attend` of their own (`latent`).
- What no layer changes is made once a step (`op.plan`): where each run starts, and what is cut. A
  block reads its line and asks for its first tile. Groups of up to eight are padded inside.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import num_sms
from pallas_kernels.fp8_pages import E4M3, AnyPages, Fp8Pages
from pallas_kernels.layouts import by_row, of_rows, product
from pallas_kernels.paged_attention.common import (
    NONE,
    PARAMS,
    TINY,
    Part,
    Sizes,
    clear_rows,
    copy_parts,
    iota,
    latent_sizes,
    locate,
    sizes_of,
    splat,
)
from pallas_kernels.paged_attention.latent import attend as attend_to_latents
from pallas_kernels.paged_attention.merge import merge
from pallas_kernels.paged_attention.schedule import At, Run, Schedule
from pallas_kernels.paged_attention.tiles import LATENT_HEADS, MOST_GROUP, MOST_GROUP_FP8, Tile


def supports(q: Any, k_pages: Any, v_pages: Any, latent: int = 0) -> bool:
    """Returns whether the kernels take these: bfloat16, heads of 64, 128 or 256, pages of 16 or
    more (in eight bits, of multiples of 64), and no more query heads a kv head than shared memory
    and registers have room for.

    Latents are one head of up to 576 elements, a multiple of 64, of which up to 512, a multiple of
    128, are values.
    """
    batch, heads, width = q.shape
    if latent:
        bf16 = q.dtype == k_pages.dtype == jnp.bfloat16
        sizes = batch and k_pages.shape[2] == 1 and k_pages.shape[3] >= 16
        rows = width <= 576 and width % 64 == 0 and latent <= min(512, width) and latent % 128 == 0
        few = heads <= num_sms() * LATENT_HEADS
        return bool(bf16 and sizes and rows and few and _sizes(q, k_pages, latent))
    kv_heads, page_size = k_pages.shape[2:4]
    fp8 = isinstance(k_pages, Fp8Pages)
    bf16 = all(a.dtype == jnp.bfloat16 for a in ((q,) if fp8 else (q, k_pages, v_pages)))
    most = MOST_GROUP_FP8.get(k_pages.shape[4], 0) if fp8 else MOST_GROUP
    if not bf16 or batch == 0 or page_size < 16 or heads > most * kv_heads:
        return False
    if k_pages.shape[4] == 256 and heads > 32 * kv_heads:  # registers would spill
        return False
    return sizes_of(q, k_pages, None, None) is not None


def plan(
    q: Any, k_pages: Any, kv_len: Int[Array, "B"], window: int = 0, latent: int = 0
) -> Schedule:
    """Returns what `paged_attention` takes as `todo`, for the tile and the blocks it chooses by
    itself. Of `q` and `k_pages` only sizes count; `supports` says of which.
    """
    sizes = _sizes(q, k_pages, latent, window=window)
    assert sizes is not None, "not supported: ask `supports`"
    return sizes.plan(kv_len)


def _sizes(
    q: Any,
    k_pages: Any,
    latent: int,
    tile: Tile | None = None,
    num_blocks: int | None = None,
    window: int = 0,
) -> Sizes | None:
    if latent:
        batch, heads, width = q.shape
        q = jax.ShapeDtypeStruct((batch, _padded(heads), width), q.dtype)
        return latent_sizes(q, k_pages, latent, tile, num_blocks, window)
    return sizes_of(q, k_pages, tile, num_blocks, window)


def _padded(heads: int) -> int:
    """Returns how many heads latents are attended to with: a multiple of 8, above 64 one of 64."""
    whole = LATENT_HEADS if heads > LATENT_HEADS else 8
    return -(-heads // whole) * whole


def paged_attention(
    q: Float[Array, "B H D"],
    k_pages: AnyPages,
    v_pages: AnyPages | None,
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "N M"],
    kv_len: Int[Array, "B"],
    scale: float,
    window: int = 0,
    sinks: Float[Array, "*B H"] | None = None,
    latent: int = 0,
    sequence: Int[Array, "B"] | None = None,
    todo: Schedule | None = None,
    tile: Tile | None = None,
    num_blocks: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "B H V"]:
    """See `op.paged_attention`; `supports` says for what. `num_blocks`: persistent blocks, > 1.

    `todo` is for the tile and the blocks that are chosen: give no others with it. `interpreted`:
    latents are attended to without what the interpreter has not, sums in accumulators. `sequence`:
    over latents, the line of the block table that each row reads, where they do not go one by one.
    """
    batch, heads, head_dim = q.shape
    sizes = _sizes(q, k_pages, latent, tile, num_blocks, window)
    assert sizes is not None, "not supported: ask `supports`"
    todo = todo or sizes.plan(kv_len)
    if latent and (missing := sizes.group - heads):
        q = jnp.pad(q, ((0, 0), (0, missing), (0, 0)))
        if sinks is not None:
            sinks = jnp.pad(sinks, ((0, 0),) * (sinks.ndim - 1) + ((0, missing),))
    grouped = q if latent else q.reshape(batch, sizes.kv_heads, sizes.group, head_dim)
    if (
        sizes.group > 8 and not latent
    ):  # up to eight rows, TMA adds the zeros; of more it takes whole eights
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, sizes.columns - sizes.group), (0, 0)))
    own = []
    if sinks is not None:
        grouped_sinks = sinks.astype(jnp.float32).reshape(-1, sizes.group)
        padding = (0, 1), (0, sizes.columns - sizes.group)
        own = [jnp.pad(grouped_sinks * math.log2(math.e), padding, constant_values=NONE)]
    paged = [k_pages] if v_pages is None else [k_pages, v_pages]
    if isinstance(k_pages, Fp8Pages) and isinstance(v_pages, Fp8Pages):
        own += [k_pages.scales, v_pages.scales]
        paged = [lax.bitcast_convert_type(each.bits, E4M3) for each in (k_pages, v_pages)]
    kernel = attend(sizes, scale, sinks is not None)
    if latent:
        own = [each for each in (*own, sequence) if each is not None]
        given = sinks is not None, sequence is not None
        kernel = attend_to_latents(sizes, scale, *given, interpreted=interpreted)
    out, pieces, log_sums = kernel(
        kv_len.astype(jnp.int32),
        block_table.astype(jnp.int32),
        layer.astype(jnp.int32).reshape(1),
        todo.before,
        todo.runs,
        grouped,
        *paged,
        *own,
    )
    out, pieces = (a.reshape(len(a), -1, sizes.line) for a in (out, pieces))
    out = merge(sizes, out, todo, pieces, log_sums)
    out = out.reshape(batch, sizes.kv_heads, -1, sizes.head_dim)[:, :, : sizes.group]
    return out.reshape(batch, -1, sizes.head_dim)[:, :heads]


class _Refs(NamedTuple):
    """What `attend` is called with, what it returns, and its scratch memory."""

    kv_len: Any
    table: Any
    layer: Any
    before: Any
    runs: Any
    q: Any
    k: Any
    v: Any
    out: Any
    pieces: Any
    log_sums: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    p_smem: Any
    out_smem: Any  # in one place: as `pieces` has it, and as `out`
    q_full: Any
    k_full: Any
    v_full: Any
    sinks: Any = None  # base-2 ones [kv_heads or segments, columns], then a row of NONE
    k_scales: Any = None  # of pages in eight bits, as are those that follow
    v_scales: Any = None
    scales_smem: Any = None  # [2, stages, tokens]: of keys, of values
    k_wide: Any = None  # a tile in bfloat16
    v_wide: Any = None


def attend(sizes: Sizes, scale: float, has_sinks: bool = False):
    """Runs the kernel: returns results [segments, rows, D] of the segments that are whole, pieces
    [slots, rows, D] of those that are cut, and their base-2 log-sum-exps [slots, columns].
    """
    tile, columns, head_dim = sizes.tile, sizes.columns, sizes.head_dim
    own = ("sinks",) * has_sinks + ("k_scales", "v_scales") * sizes.fp8
    buffers = ("k_wide", "v_wide", "scales_smem") * sizes.fp8
    fields = (*_Refs._fields[:8], *own, *_Refs._fields[8:16], *buffers, *_Refs._fields[16:19])

    def attend_pieces(*refs):
        refs = _Refs(**dict(zip(fields, refs, strict=True)))
        refs = refs._replace(layer=refs.layer[0])
        block = lax.axis_index("block")
        start, stop, *row = (refs.runs[block, field] for field in range(refs.runs.shape[1]))
        run = Run(lambda row: refs.before[row], sizes.kv_heads, start, stop)
        _attend_run(sizes, refs, scale * math.log2(math.e), run, At(start, *row), block)
        plgpu.wait_smem_to_gmem(0)

    smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16)  # tiled and swizzled for wgmma
    copies = tile.tokens // sizes.copy_rows * (2 if sizes.fp8 else 1)
    kept = (sizes.stages, tile.tokens, head_dim), E4M3 if sizes.fp8 else jnp.bfloat16
    scales = plgpu.SMEM((2, sizes.stages, tile.tokens), jnp.float32)
    wide = smem((tile.tokens, head_dim))
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages)
    shape = columns, head_dim
    return plgpu.kernel(
        attend_pieces,
        out_type=[
            jax.ShapeDtypeStruct((sizes.segments, sizes.rows, head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((sizes.slots, sizes.rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((sizes.slots, columns), jnp.float32),
        ],
        grid=(sizes.num_blocks,),
        grid_names=("block",),
        scratch_types=[
            smem(shape),
            plgpu.SMEM(*kept),
            plgpu.SMEM(*kept),
            smem((columns, tile.tokens)),
            plgpu.RefUnion(plgpu.SMEM(shape, jnp.float32), smem(shape)),
            *([wide, wide, scales] if sizes.fp8 else []),
            plgpu.Barrier(),
            full,
            full,
        ],
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=128 * columns),
        kernel_name="paged_attention",
    )


def _attend_run(sizes: Sizes, refs: _Refs, scale: float, run: Run, first: At, block):
    """Attends to all pieces of a run. `ahead` is the tile to load next, `stages` ahead."""
    ahead = first

    @pl.when(run.start < run.stop)
    def _():
        _copy_queries(sizes, refs, run, first)

    for stage in range(sizes.stages):
        parts = locate(sizes, refs, run, ahead, ahead.row)

        @pl.when(ahead.tile < run.stop)
        def _(stage=stage, parts=parts):
            _copy_keys(refs, parts, stage)
            _copy_values(refs, parts, stage)

        ahead = run.step(ahead, 1)

    def one_piece(state):
        at, ahead = state
        after, ahead, sums = _attend_piece(sizes, refs, scale, run, at, ahead)
        kv_head, offset, tiles = run.segment(at)
        is_whole = (offset == 0) & (at.tile + tiles <= run.stop)
        slot = 2 * block + (offset > 0).astype(jnp.int32)
        _store_piece(sizes, refs, is_whole, at.row * sizes.kv_heads + kv_head, slot, *sums)
        return after, ahead

    lax.while_loop(lambda state: state[0].tile < run.stop, one_piece, (first, ahead))


def _attend_piece(sizes: Sizes, refs: _Refs, scale: float, run: Run, at: At, ahead: At):
    """Attends to the keys of the piece that starts at `at`, whose queries are being loaded.

    Exponentials are of base 2, of scores times `scale`. Returns where the next piece starts, the
    tile to ask for next, and the softmax: maximum [columns], sums key by key [tokens, columns],
    weighted sum of values [D, columns].
    """
    tile, columns = sizes.tile, sizes.columns
    length = refs.kv_len[at.row]
    length = length - sizes.begin(length)  # of what is read
    kv_head, offset, tiles = run.segment(at)
    count = lax.min(tiles - offset, run.stop - at.tile)
    after = run.step(at, count)
    plgpu.barrier_wait(refs.q_full)

    def one_tile(i, state):
        ahead, top, norm, acc = state
        stage = lax.rem(at.tile - run.start + i, sizes.stages)
        k_smem, k_full = refs.k_smem.at[stage], refs.k_full.at[stage]
        v_smem, v_full = refs.v_smem.at[stage], refs.v_full.at[stage]
        valid = length - (offset + i) * tile.tokens
        more = ahead.tile < run.stop
        parts = locate(
            sizes, refs, run, ahead, ahead.row
        )  # early: to read their ids takes some time

        plgpu.barrier_wait(k_full)
        if sizes.fp8:
            k_scales = by_row(refs.scales_smem.at[0, stage])
            _widen(k_smem, refs.k_wide)
            plgpu.commit_smem()
            s = product(refs.k_wide, refs.q_smem.T)
            s = s * of_rows(k_scales, s.shape)
        else:
            s = product(k_smem, refs.q_smem.T)
        pl.when(more)(lambda: _copy_keys(refs, parts, stage))
        more_pieces = (i == count - 1) & (after.tile < run.stop)
        pl.when(more_pieces)(lambda: _copy_queries(sizes, refs, run, after))
        live = iota(s.shape, 0) < valid
        if sizes.window:
            live &= iota(s.shape, 0) >= valid - sizes.window
        s = jnp.where(live, s * scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=0))
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(s - _to_rows(new_top, s.shape))
        norm = norm * _to_rows(keep, norm.shape) + p
        if sizes.fp8:
            plgpu.barrier_wait(v_full)
            v_scales = of_rows(by_row(refs.scales_smem.at[1, stage]), p.shape)
            p = jnp.where(live, p * v_scales, 0.0)
            _widen(v_smem, refs.v_wide)
            values = refs.v_wide
        else:
            values = v_smem
        refs.p_smem.T[...] = p.astype(jnp.bfloat16)

        if not sizes.fp8:
            plgpu.barrier_wait(v_full)
        pl.when(valid < tile.tokens)(lambda: clear_rows(values, valid))
        plgpu.commit_smem()
        acc = acc * _to_rows(keep, acc.shape) + product(values.T, refs.p_smem.T)
        pl.when(more)(lambda: _copy_values(refs, parts, stage))
        return run.step(ahead, 1), new_top, norm, acc

    top = splat(NONE, (columns,), plgpu.Layout.WGMMA.reduce(0))
    norm = splat(0.0, (tile.tokens, columns), plgpu.Layout.WGMMA)
    if refs.sinks is not None:
        last = refs.sinks.shape[0] - 1
        own = kv_head if last == sizes.kv_heads else at.row * sizes.kv_heads + kv_head
        row = jnp.where(offset == 0, own, last)
        layout = plgpu.Layout.WGMMA.reduce(0)
        top = plgpu.load(refs.sinks, (row,), layout=layout, optimized=False)
        norm = jnp.where(iota(norm.shape, 0) == jnp.where(offset == 0, 0, -1), 1.0, norm)
    start = top, norm, splat(0.0, (sizes.head_dim, columns), plgpu.Layout.WGMMA)
    ahead, *sums = lax.fori_loop(0, count, one_tile, (ahead, *start))
    return after, ahead, sums


def _store_piece(sizes: Sizes, refs: _Refs, is_whole, segment, slot, top, norm, acc):
    """Divides by the sum of weights and sends the result to its segment, or a piece to its slot."""
    norm = jnp.maximum(jnp.sum(norm, axis=0), TINY)
    acc = acc * _to_rows(1.0 / norm, acc.shape)
    acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
    as_piece, as_result = refs.out_smem
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the piece before

    @pl.when(is_whole)
    def _():
        as_result.T[...] = acc.astype(as_result.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(as_result.at[: sizes.rows], refs.out.at[segment])

    @pl.when(~is_whole)
    def _():
        refs.log_sums[slot] = top + jnp.log2(norm)
        as_piece.T[...] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(as_piece.at[: sizes.rows], refs.pieces.at[slot])


def _copy_queries(sizes: Sizes, refs: _Refs, run: Run, at: At):
    """Starts the copy of the query rows of a tile's kv head."""
    kv_head, *_ = run.segment(at)
    queries = refs.q.at[at.row, kv_head]
    if sizes.group < 8:
        # From a place that is not static, or a group that does not fill a box would be refused.
        # What is past its end arrives as zeros.
        queries = queries.at[pl.ds(pl.multiple_of(at.row * 0, 8), 8)]
    plgpu.copy_gmem_to_smem(queries, refs.q_smem, refs.q_full)


def _copy_keys(refs: _Refs, parts: list[Part], stage) -> None:
    smem, full = refs.k_smem.at[stage], refs.k_full.at[stage]
    copy_parts(refs.k, parts, smem, full)
    if refs.k_scales is not None:
        copy_parts(refs.k_scales, parts, refs.scales_smem.at[0, stage], full)


def _copy_values(refs: _Refs, parts: list[Part], stage) -> None:
    smem, full = refs.v_smem.at[stage], refs.v_full.at[stage]
    copy_parts(refs.v, parts, smem, full)
    if refs.v_scales is not None:
        copy_parts(refs.v_scales, parts, refs.scales_smem.at[1, stage], full)


def _widen(smem, wide) -> None:
    """Writes a tile of eight bits into one of bfloat16, a few columns at a time: with more, three
    blocks would not have the registers.
    """
    for column in range(0, smem.shape[1], 64):
        part = slice(column, column + 64)
        wide.at[:, part][...] = smem.at[:, part][...].astype(jnp.float32).astype(jnp.bfloat16)


def _to_rows(row, shape):
    return lax.broadcast_in_dim(row, shape, (1,))
