"""The kernel that attends to latents: keys of which the first elements are the values.

All query heads share one key head, so that a tile has work for the tensor cores: 128 heads over 576
elements do 242 operations for each byte that is read, as many as an H100 or H200 has time for.

- Query heads are on wgmma's M side, 64 of them in a block, keys on its N side. More heads are
  split over blocks that take the same run of tiles at the same time: what one has read from memory,
  the next reads from L2. Fewer are padded: of 16 heads the products still take less time than the
  bytes.
- Two warpgroups hold half of a value's elements each: 128 registers a thread for 64 heads by 256.
  The first one finds the weights of a tile and hands them over in shared memory; the second one
  asks for tiles. While the first is at the next tile's softmax, the second's product is under way.
- A tile of 64 keys by 576 elements is 72 KB, queries are as much: two tiles and the weights fill
  shared memory (`tiles.latent_shared_bytes`), and results go from registers to device memory.
- Schedule, tails, windows, sinks and the merge of pieces are `mosaic`'s.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import accumulate, of_rows, product
from pallas_kernels.paged_attention.common import (
    NONE,
    PARAMS,
    TINY,
    Sizes,
    clear_rows,
    copy_parts,
    iota,
    locate,
    splat,
)
from pallas_kernels.paged_attention.schedule import At, Run
from pallas_kernels.paged_attention.tiles import LATENT_HEADS, LATENT_WARPGROUPS

_BY_HEAD = plgpu.Layout.WGMMA.reduce(1)


class _Refs(NamedTuple):
    """What the kernel is called with, what it returns, and its scratch memory."""

    kv_len: Any
    table: Any
    layer: Any
    before: Any
    runs: Any
    q: Any
    pages: Any
    out: Any
    pieces: Any
    log_sums: Any
    q_smem: Any
    tiles: Any
    weights: Any
    factors: Any  # of each head's sum: by what it shrinks, or at last 1 / the sum of weights
    q_full: Any
    full: Any
    ready: Any  # weights and factors are there
    taken: Any  # weights and factors may be written again
    done: Any  # the first warpgroup is done with the tile
    acc: Any = None  # interpreted: [warpgroups, heads, elements]
    sinks: Any = None  # base-2 ones [1 or rows, columns], then a row of NONE
    sequence: Any = None  # line of the table of each row; None: its own


def attend(
    sizes: Sizes,
    scale: float,
    has_sinks: bool = False,
    has_sequence: bool = False,
    *,
    interpreted: bool = False,
):
    """Runs the kernel: returns what `mosaic.attend` does, of heads padded to whole parts."""
    tile, columns, shape = sizes.tile, sizes.columns, (LATENT_HEADS, sizes.latent)
    own = ("sinks",) * has_sinks + ("sequence",) * has_sequence
    fields = (*_Refs._fields[:7], *own, *_Refs._fields[7:19], *("acc",) * interpreted)
    half = sizes.head_dim // LATENT_WARPGROUPS

    def attend_pieces(*refs):
        refs = _Refs(**dict(zip(fields, refs, strict=True)))
        refs = refs._replace(layer=refs.layer[0])
        block, part = lax.axis_index("block"), lax.axis_index("part")
        start, stop, *row = (refs.runs[block, field] for field in range(refs.runs.shape[1]))
        run, first = Run(lambda row: refs.before[row], 1, start, stop), At(start, *row)
        heads = pl.ds(pl.multiple_of(part * LATENT_HEADS, LATENT_HEADS), LATENT_HEADS)
        one = _Warpgroup(sizes, refs, run, block, heads, interpreted)
        lax.cond(
            lax.axis_index("wg") == 0,
            lambda: one.weigh(first, scale * math.log2(math.e)),
            lambda: one.follow(first),
        )

    smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16)  # tiled and swizzled for wgmma
    copies = tile.tokens // sizes.copy_rows
    acc = plgpu.SMEM((LATENT_WARPGROUPS, LATENT_HEADS, half), jnp.float32)
    return plgpu.kernel(
        attend_pieces,
        out_type=[
            jax.ShapeDtypeStruct((sizes.segments, columns, sizes.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((sizes.slots, columns, sizes.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((sizes.slots, columns), jnp.float32),
        ],
        grid=(sizes.num_blocks, sizes.parts),  # the parts of a run side by side
        grid_names=("block", "part"),
        num_threads=LATENT_WARPGROUPS,
        thread_name="wg",
        scratch_types=[
            smem((1, *shape)),
            smem((sizes.stages, tile.tokens, sizes.latent)),
            smem((LATENT_HEADS, tile.tokens)),
            plgpu.SMEM((LATENT_HEADS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
            *([acc] if interpreted else []),
        ],
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=0),  # sums are in warps
        kernel_name="latent_attention",
    )


class _Piece(NamedTuple):
    """The tiles of one segment in a run."""

    row: Any
    length: Any  # of what is read of the sequence
    offset: Any  # of its first tile in the sequence
    first: Any  # its first tile, counted from the start of the run
    count: Any
    is_whole: Any
    after: At

    def valid(self, i, tokens: int):
        """Returns how many keys of tile i, and of those after it, the sequence has."""
        return self.length - (self.offset + i) * tokens


class _Warpgroup(NamedTuple):
    """What both warpgroups of a block do."""

    sizes: Sizes
    refs: _Refs
    run: Run
    block: Any
    heads: Any  # of the block
    interpreted: bool

    def piece(self, at: At) -> _Piece:
        run, length = self.run, self.refs.kv_len[at.row]
        _, offset, tiles = run.segment(at)
        count = lax.min(tiles - offset, run.stop - at.tile)
        return _Piece(
            at.row,
            length - self.sizes.begin(length),
            offset,
            at.tile - run.start,
            count,
            (offset == 0) & (at.tile + tiles <= run.stop),
            run.step(at, count),
        )

    def stage(self, tile):
        return lax.rem(tile, self.sizes.stages)

    def accumulate(self, mine: int, attend_to: Callable[[Any], Any]) -> Any:
        """Calls `attend_to` with an accumulator of zeros for warpgroup `mine`."""
        shape = LATENT_HEADS, self.sizes.head_dim // LATENT_WARPGROUPS
        return accumulate(attend_to, shape, self.refs.acc.at[mine] if self.interpreted else None)

    def add_values(self, mine: int, acc, stage, valid, keep) -> None:
        """Shrinks the sums by `keep` and adds the tile's values by their weights."""
        width = self.sizes.head_dim // LATENT_WARPGROUPS
        tile = self.refs.tiles.at[stage]

        @pl.when(valid < self.sizes.tile.tokens)
        def _():
            clear_rows(tile, valid, range(mine * width, (mine + 1) * width, 64))
            plgpu.commit_smem()

        values = tile.at[:, mine * width : (mine + 1) * width]
        acc[...] = acc[...] * of_rows(keep, acc.shape)
        if self.interpreted:
            acc[...] = acc[...] + product(self.refs.weights, values)
        else:
            plgpu.wgmma(acc, self.refs.weights, values)
            plgpu.wgmma_wait(0)

    def store(self, mine: int, of: _Piece, acc, factor) -> None:
        """Sends a result to its segment, or a piece to its slot."""
        width = self.sizes.head_dim // LATENT_WARPGROUPS
        result = acc[...] * of_rows(factor, acc.shape)
        columns = pl.ds(mine * width, width)

        @pl.when(of.is_whole)
        def _():
            self.refs.out[of.row, self.heads, columns] = result.astype(jnp.bfloat16)

        @pl.when(~of.is_whole)
        def _():
            self.refs.pieces[self.slot(of), self.heads, columns] = result

    def slot(self, of: _Piece):
        return 2 * self.block + (of.offset > 0).astype(jnp.int32)

    # ---- The first warpgroup ----

    def weigh(self, first: At, scale: float) -> None:
        """Finds weights, and sums up its part of the values."""
        pl.when(self.run.start < self.run.stop)(lambda: self.copy_queries(first))

        def one_piece(at):
            of = self.piece(at)
            self.accumulate(0, lambda acc: self.weigh_piece(of, acc, scale))
            return of.after

        lax.while_loop(lambda at: at.tile < self.run.stop, one_piece, first)
        plgpu.barrier_wait(self.refs.taken)

    def weigh_piece(self, of: _Piece, acc, scale: float) -> None:
        refs, tokens = self.refs, self.sizes.tile.tokens
        plgpu.barrier_wait(refs.q_full)

        def one_tile(i, state):
            top, norm = state
            stage, valid = self.stage(of.first + i), of.valid(i, tokens)
            plgpu.barrier_wait(refs.full.at[stage])
            # Plus zero, but not as far as the compiler knows: their many descriptors would be held
            # in registers through the loop.
            s = product(refs.q_smem.at[lax.min(stage, 0)], refs.tiles.at[stage].T)
            more_pieces = (i == of.count - 1) & (of.after.tile < self.run.stop)
            pl.when(more_pieces)(lambda: self.copy_queries(of.after))
            live = iota(s.shape, 1) < valid
            if self.sizes.window:
                live &= iota(s.shape, 1) >= valid - self.sizes.window
            s = jnp.where(live, s * scale, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(s, axis=1))
            keep = jnp.exp2(top - new_top)
            p = jnp.exp2(s - of_rows(new_top, s.shape))
            norm = norm * keep + jnp.sum(p, axis=1)
            plgpu.barrier_wait(refs.taken)
            refs.weights[...] = p.astype(jnp.bfloat16)
            refs.factors[...] = keep
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.ready)
            self.add_values(0, acc, stage, valid, keep)
            plgpu.barrier_arrive(refs.done)
            return new_top, norm

        top, norm = (splat(x, (LATENT_HEADS,), _BY_HEAD) for x in (NONE, 0.0))
        if refs.sinks is not None:
            last = refs.sinks.shape[0] - 1
            row = jnp.where(of.offset == 0, 0 if last == 1 else of.row, last)
            top = plgpu.load(refs.sinks, (row, self.heads), layout=_BY_HEAD, optimized=False)
            norm = norm + jnp.where(of.offset == 0, 1.0, 0.0)
        top, norm = lax.fori_loop(0, of.count, one_tile, (top, norm))
        norm = jnp.maximum(norm, TINY)
        plgpu.barrier_wait(refs.taken)
        refs.factors[...] = 1.0 / norm
        plgpu.barrier_arrive(refs.ready)

        @pl.when(~of.is_whole)
        def _():
            refs.log_sums[self.slot(of), self.heads] = top + jnp.log2(norm)

        self.store(0, of, acc, 1.0 / norm)

    def copy_queries(self, at: At) -> None:
        """Starts the copy of the block's heads."""
        queries, smem = self.refs.q.at[at.row], self.refs.q_smem.at[0]
        if self.sizes.group < LATENT_HEADS:  # what else there is of the rows is not stored
            plgpu.copy_gmem_to_smem(queries, smem.at[: self.sizes.group], self.refs.q_full)
        else:
            plgpu.copy_gmem_to_smem(queries.at[self.heads], smem, self.refs.q_full)

    # ---- The second warpgroup ----

    def follow(self, first: At) -> None:
        """Asks for tiles, and sums up its part of the values by the weights that it is given."""
        plgpu.barrier_arrive(self.refs.taken)
        ahead = first
        for stage in range(self.sizes.stages):
            ahead = self.copy_tile(ahead, stage)

        def one_piece(state):
            at, ahead = state
            of = self.piece(at)
            return of.after, self.accumulate(1, lambda acc: self.follow_piece(of, ahead, acc))

        lax.while_loop(lambda state: state[0].tile < self.run.stop, one_piece, (first, ahead))

    def copy_tile(self, ahead: At, stage) -> At:
        """Starts the copies of a tile, if the run has it; returns the next one."""
        own = ahead.row if self.refs.sequence is None else self.refs.sequence[ahead.row]
        parts = locate(self.sizes, self.refs, self.run, ahead, own)

        @pl.when(ahead.tile < self.run.stop)
        def _():
            full = self.refs.full.at[stage]
            copy_parts(self.refs.pages, parts, self.refs.tiles.at[stage], full)

        return self.run.step(ahead, 1)

    def follow_piece(self, of: _Piece, ahead: At, acc) -> At:
        refs, tokens = self.refs, self.sizes.tile.tokens

        def factor():
            plgpu.barrier_wait(refs.ready)
            return plgpu.load(refs.factors, layout=_BY_HEAD, optimized=False)

        def one_tile(i, ahead):
            stage = self.stage(of.first + i)
            plgpu.barrier_wait(refs.full.at[stage])
            keep = factor()
            self.add_values(1, acc, stage, of.valid(i, tokens), keep)
            plgpu.barrier_wait(refs.done)
            plgpu.barrier_arrive(refs.taken)
            return self.copy_tile(ahead, stage)

        ahead = lax.fori_loop(0, of.count, one_tile, ahead)
        last = factor()
        plgpu.barrier_arrive(refs.taken)
        self.store(1, of, acc, last)
        return ahead
