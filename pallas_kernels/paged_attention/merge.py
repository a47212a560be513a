"""The second kernel of paged attention: pieces of results become results."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.backend import num_sms
from pallas_kernels.paged_attention.common import NONE, PARAMS, TINY, Sizes, splat
from pallas_kernels.paged_attention.schedule import FIRST, LAST, SEGMENT, Schedule

_BF16 = jnp.bfloat16


def merge(
    sizes: Sizes,
    results: Float[Array, "segments lines line"],
    todo: Schedule,
    pieces: Float[Array, "slots lines line"],
    log_sums: Float[Array, "slots columns"],
) -> Float[Array, "segments lines line"]:
    """Writes into `results` those of segments that are cut, and zeros where rows have no keys, and
    returns it. All others stay as they are.
    """
    out = jax.new_ref(results)
    _merge(sizes)(todo.cuts, todo.before, pieces, log_sums, out)
    return jax.freeze(out)


class _Refs(NamedTuple):
    """What the kernel is called with; `out` is updated."""

    cuts: Any
    before: Any
    pieces: Any
    log_sums: Any
    out: Any


class Grid(NamedTuple):
    """Blocks of the merge, each for some lines of one entry."""

    entries: int  # segments that are cut, or rows that may be empty: as many as there may be
    num_lines: int  # of a segment
    lines: int  # of them in one block
    width: int  # pieces of each line that a block loads at a time

    @property
    def num_blocks(self) -> int:
        """Blocks: one for `lines` lines of each entry."""
        return self.num_lines // self.lines * self.entries


def grid_of(sizes: Sizes) -> Grid:
    """Returns the grid that the merge is launched with."""
    num_lines = sizes.rows * sizes.head_dim // sizes.line
    # Few segments have many pieces each: a block for each of their lines, and more at a time.
    lines = 1 if sizes.cuts * num_lines <= 8 * num_sms() else math.gcd(num_lines, 8)
    width = max(2, sizes.tile.merge_width // lines)
    return Grid(max(sizes.cuts, sizes.batch), num_lines, lines, width)


def _merge(sizes: Sizes):
    """Runs the kernel. A block has lines of one segment that is cut, and of one row's if that is
    empty.
    """
    grid = grid_of(sizes)
    lines = grid.lines

    def merge_pieces(*refs):
        refs = _Refs(*refs)
        index = lax.axis_index("index")
        first = lax.axis_index("lines") * lines
        at = [first + line for line in range(lines)]
        pl.when(index < sizes.cuts)(lambda: _merge_segment(sizes, refs, index, at))
        pl.when(index < sizes.batch)(lambda: _clear_row(sizes, refs, index, at))

    return plgpu.kernel(
        merge_pieces,
        grid=(grid.num_lines // lines, grid.entries),  # the last may be large
        grid_names=("lines", "index"),
        # Nothing is read that is written, and no thread needs what another has: no barriers.
        compiler_params=dataclasses.replace(PARAMS, unsafe_no_auto_barriers=True),
        kernel_name="paged_attention_merge",
    )


def _clear_row(sizes: Sizes, refs: _Refs, row, lines: list):
    """Zeroes the results of a row that has no tiles."""

    @pl.when(refs.before[row] == refs.before[row + 1])
    def _():
        @pl.loop(0, sizes.kv_heads)
        def _(kv_head):
            for at in lines:
                refs.out[row * sizes.kv_heads + kv_head, at] = _splat(sizes, 0.0).astype(_BF16)


def _merge_segment(sizes: Sizes, refs: _Refs, index, lines: list):
    """Merges the pieces of a segment, several of each line at a time."""
    segment, block, last = (refs.cuts[index, field] for field in (SEGMENT, FIRST, LAST))
    count = last - block + 1
    width = grid_of(sizes).width

    def one_step(i, states):
        # All loads before the first use. Past the end the last piece has no weight.
        pieces = [i * width + u for u in range(width)]
        live = [piece < count for piece in pieces]
        pieces = [lax.min(piece, count - 1) for piece in pieces]
        slots = [2 * (block + piece) + lax.min(piece, 1) for piece in pieces]
        loaded = [[refs.pieces[slot, at] for slot in slots] for at in lines]
        sums = [
            [_log_sum(sizes, refs.log_sums, *of, at) for of in zip(slots, live, strict=True)]
            for at in lines
        ]
        return tuple(map(_join, states, sums, loaded))

    @pl.when(count > 1)
    def _():
        start = tuple(_splat(sizes, x) for x in (NONE, 0.0, 0.0))
        steps = lax.div(count + width - 1, width)
        states = lax.fori_loop(0, steps, one_step, (start,) * len(lines))
        for at, (_, norm, acc) in zip(lines, states, strict=True):
            refs.out[segment, at] = (acc / jnp.maximum(norm, TINY)).astype(_BF16)


def _splat(sizes: Sizes, value: float):
    """Returns a line of one value."""
    return splat(value, (sizes.line,), plgpu.Layout.WG_STRIDED((sizes.line,), sizes.line // 128))


def _log_sum(sizes: Sizes, log_sums, slot, live, at):
    """Returns the log-sum-exps of the rows in line `at` of a piece, one for each element."""
    rows = sizes.line // sizes.head_dim
    shape = (sizes.line,)
    of_rows = [
        jnp.full(shape, jnp.where(live, log_sums[slot, at * rows + r], NONE)) for r in range(rows)
    ]
    if rows == 1:
        return of_rows[0]
    return jnp.where(lax.broadcasted_iota(jnp.int32, shape, 0) < sizes.head_dim, *of_rows)


def _join(state, sums, loaded):
    """Merges more pieces of a line into its state: maximum, sum of weights, weighted sum."""
    top, norm, acc = state
    new_top = functools.reduce(jnp.maximum, sums, top)
    keep = jnp.exp2(top - new_top)
    norm, acc = norm * keep, acc * keep
    for log_sum, values in zip(sums, loaded, strict=True):
        weight = jnp.exp2(log_sum - new_top)
        norm, acc = norm + weight, acc + weight * values
    return new_top, norm, acc
