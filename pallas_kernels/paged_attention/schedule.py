"""How tiles of keys are shared out among persistent blocks: in equal runs, whatever the lengths.

The tiles of all sequences, kv head by kv head, lie in one row; a (sequence, kv head) is a segment
of it. Each active block takes one run of neighbouring tiles, all runs equally long but for one
tile. A run cuts a segment where it begins or ends, so a segment consists of the pieces of one or
several neighbouring blocks. No more segments are cut than there are ends of runs within the row.

Pieces of cut segments wait in slots. A block has at most one that begins a segment, its last, and
at most one that does not, its first: block w writes them to slots 2 w and 2 w + 1.

`plan` makes all of this once a step, of a few small XLA kernels: no layer changes it, and XLA does
not take it out of a scan over layers by itself. What a block needs is then a line of a table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

START, STOP, ROW, ROW_START, ROW_END = range(5)
"""Fields of a run: tiles [START, STOP); the row of the batch that START is of, and its tiles."""
SEGMENT, FIRST, LAST = range(3)
"""Fields of a cut: a segment, and the blocks that have its first and its last piece."""


class Schedule(NamedTuple):
    """Schedule of a decode step: a pytree, for every layer."""

    before: Int[Array, "B1"]  # tiles in the rows before each row, of all kv heads; and in all rows
    runs: Int[Array, "blocks 5"]
    cuts: Int[Array, "cuts 3"]  # in any order; one whose last block is its first is none


class Share(NamedTuple):
    """Runs of tiles: `extra` blocks have `base + 1`, those after them `base`."""

    total: Any  # tiles there are
    active: Any  # blocks that have any
    base: Any
    extra: Any

    def start(self, block: Any) -> Any:
        """Returns the first tile of a block's run, which ends where the next one starts."""
        block = jnp.minimum(block, self.active)
        return block * self.base + jnp.minimum(block, self.extra)

    def owner(self, tile: Any) -> Any:
        """Returns the block whose run has the tile."""
        long = self.extra * (self.base + 1)
        after = self.extra + _div(jnp.maximum(tile - long, 0), jnp.maximum(self.base, 1))
        return jnp.where(tile < long, _div(tile, self.base + 1), after)


def share(total: Any, num_blocks: int, min_tiles: int) -> Share:
    """Shares out `total` tiles, at least `min_tiles` a block while there are as many."""
    total = jnp.int32(total)
    active = jnp.clip(_div(total, min_tiles), 1, num_blocks)
    base = _div(total, active)
    return Share(total, active, base, total - base * active)


def plan(
    kv_len: Int[Array, "B"], *, kv_heads: int, tokens: int, num_blocks: int, min_tiles: int
) -> Schedule:
    """Returns the schedule of sequences of these lengths, in tiles of `tokens` keys of one kv
    head.
    """
    batch = kv_len.shape[0]
    tiles = _div(kv_len.astype(jnp.int32) + (tokens - 1), tokens) * kv_heads
    # Sums over a triangle: a running sum would be several kernels, a binary search a loop of them.
    earlier = jnp.arange(batch)[None, :] < jnp.arange(batch + 1)[:, None]
    before = jnp.sum(jnp.where(earlier, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    shared = share(before[-1], num_blocks, min_tiles)
    ends = shared.start(jnp.arange(num_blocks + 1, dtype=jnp.int32))
    # Rows that end before it; of a block without tiles, all but the last.
    row = jnp.sum(before[None, 1:-1] <= ends[:-1, None], axis=1, dtype=jnp.int32)
    runs = _table(ends[:-1], ends[1:], row, before[row], before[row + 1])
    return Schedule(before, runs, _cuts(before, shared, runs, kv_heads))


def num_cuts(num_segments: int, num_blocks: int) -> int:
    """Returns the largest number of segments that can be cut."""
    return min(num_segments, num_blocks - 1)


def _cuts(before: Array, shared: Share, runs: Array, kv_heads: int) -> Array:
    """Returns an entry for each segment or, if they are fewer, for each run but the first: for the
    segment that it begins within, unless the run before begins there, too.
    """
    num_segments = (len(before) - 1) * kv_heads
    if num_segments < len(runs):
        segment = jnp.arange(num_segments, dtype=jnp.int32)
        row, kv_head = _div(segment, kv_heads), segment % kv_heads
        tiles = _div(before[row + 1] - before[row], kv_heads)
        first_tile = before[row] + kv_head * tiles
        is_own = jnp.bool_(True)
    else:
        start, _, row, row_start, row_end = runs[1:].T
        tiles = jnp.maximum(_div(row_end - row_start, kv_heads), 1)
        kv_head = _div(start - row_start, tiles)
        first_tile = row_start + kv_head * tiles
        is_own = (runs[:-1, START] <= first_tile) & (first_tile < start)
    first, last = shared.owner(first_tile), shared.owner(first_tile + tiles - 1)
    last = jnp.where(is_own, jnp.maximum(first, last), first)
    return _table(row * kv_heads + kv_head, first, last)


def _table(*columns: Array) -> Array:
    """Returns vectors as columns of a table, by selection rather than stacking: one XLA kernel."""
    table, index = columns[-1][:, None], jnp.arange(len(columns))[None, :]
    for i, column in enumerate(columns[:-1]):
        table = jnp.where(index == i, column[:, None], table)
    return table


def _div(a: Any, b: Any) -> Any:
    """Divides numbers that are not negative: rounding to minus infinity takes XLA many more
    steps.
    """
    return lax.div(*jnp.broadcast_arrays(a, jnp.int32(b)))


class At(NamedTuple):
    """A tile of a run, and the row of the batch it is of: tiles [row_start, row_end).

    Tiles are counted over all rows and kv heads.
    """

    tile: Any
    row: Any
    row_start: Any
    row_end: Any


class Run(NamedTuple):
    """Tiles [start, stop), the work of one block. Scalars of a kernel."""

    before: Callable  # tiles in the rows before a row
    kv_heads: int
    start: Any
    stop: Any

    def step(self, at: At, count: Any) -> At:
        """Advances by `count` tiles; past the end of the run the row stays."""

        def next_row(at):  # several times if rows have no tiles
            return At(at.tile, at.row + 1, at.row_end, self.before(at.row + 2))

        def past(at):
            return (at.row_end <= at.tile) & (at.tile < self.stop)

        return lax.while_loop(past, next_row, at._replace(tile=at.tile + count))

    def segment(self, at: At) -> tuple[Any, Any, Any]:
        """Returns the kv head of a tile, its place in the segment, and the segment's length in
        tiles.
        """
        tiles = lax.max(lax.div(at.row_end - at.row_start, self.kv_heads), 1)
        kv_head = lax.div(at.tile - at.row_start, tiles)
        return kv_head, at.tile - at.row_start - kv_head * tiles, tiles
