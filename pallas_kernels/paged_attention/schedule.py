"""How tiles of keys are shared out among persistent blocks: in equal runs, whatever the lengths.

The tiles of all sequences, kv head by kv head, lie in one row; a (sequence, kv head) is a segment
of it. Each active block takes one run of neighbouring tiles, all runs equally long but for one
tile. A run cuts a segment where it begins or ends, so a segment consists of the pieces of one or
several neighbouring blocks. Piece (segment s, block w) is written to slot s + w: going from piece
to piece either s or w grows, so no two share a slot, and those of a segment lie side by side.

Scalars may be ints, or int32 traced in a kernel or outside.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Share(NamedTuple):
    """Runs of tiles: `extra` blocks have `base + 1`, those after them `base`."""

    total: Any  # tiles there are
    active: Any  # blocks that have any
    base: Any
    extra: Any

    def start(self, block: Any) -> Any:
        """First tile of a block's run, which ends where the next one starts."""
        block = lax.min(jnp.int32(block), self.active)
        return block * self.base + lax.min(block, self.extra)

    def owner(self, tile: Any) -> Any:
        """Block whose run has the tile."""
        long = self.extra * (self.base + 1)
        after = self.extra + lax.div(lax.max(tile - long, 0), lax.max(self.base, 1))
        return jnp.where(tile < long, lax.div(tile, self.base + 1), after)


def share(total: Any, num_blocks: int, min_tiles: int) -> Share:
    """Shares out `total` tiles, at least `min_tiles` a block while there are as many."""
    total = jnp.int32(total)
    active = lax.clamp(jnp.int32(1), lax.div(total, jnp.int32(min_tiles)), jnp.int32(num_blocks))
    base = lax.div(total, active)
    return Share(total, active, base, total - base * active)


def num_slots(num_segments: int, num_blocks: int) -> int:
    """Slots for pieces."""
    return num_segments + num_blocks - 1


class At(NamedTuple):
    """A tile of a run, and the row of the batch it is of: tiles [row_start, row_end).

    Tiles are counted over all rows and kv heads.
    """

    tile: Any
    row: Any
    row_start: Any
    row_end: Any


class Run(NamedTuple):
    """Tiles [start, stop), the work of one block."""

    before: Callable  # tiles of one kv head in the rows before a row
    batch: int
    kv_heads: int
    start: Any
    stop: Any

    def first(self) -> At:
        """Where the run starts; in some row if it is empty."""

        def halve(_, bounds):
            low, high = bounds
            middle = lax.div(low + high, 2)
            left = self.before(middle) * self.kv_heads <= self.start
            return jnp.where(left, middle, low), jnp.where(left, high, middle)

        # The last row that has no tile past `start` before it.
        steps = max(1, math.ceil(math.log2(self.batch)))
        row, _ = lax.fori_loop(0, steps, halve, (jnp.int32(0), jnp.int32(self.batch)))
        end = self.before(row + 1) * self.kv_heads
        return At(self.start, row, self.before(row) * self.kv_heads, end)

    def step(self, at: At, count: Any) -> At:
        """`count` tiles on; past the end of the run the row stays."""

        def next_row(at):  # several times if rows have no tiles
            end = self.before(at.row + 2) * self.kv_heads
            return At(at.tile, at.row + 1, at.row_end, end)

        def past(at):
            return (at.row_end <= at.tile) & (at.tile < self.stop)

        return lax.while_loop(past, next_row, at._replace(tile=at.tile + count))

    def segment(self, at: At) -> tuple[Any, Any, Any]:
        """The kv head of a tile, its place in the segment, and the segment's length in tiles."""
        tiles = lax.max(lax.div(at.row_end - at.row_start, self.kv_heads), 1)
        kv_head = lax.div(at.tile - at.row_start, tiles)
        return kv_head, at.tile - at.row_start - kv_head * tiles, tiles
