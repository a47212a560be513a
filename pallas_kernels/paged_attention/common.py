"""What both kernels of paged attention need: sizes of a call, and a few constants."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.backend import SHARED_BYTES
from pallas_kernels.paged_attention import schedule
from pallas_kernels.paged_attention.schedule import Share
from pallas_kernels.paged_attention.tiles import Tile, choose

NUM_SMS = 132
"""Multiprocessors of an H100 or H200."""

NONE = -1e30
"""A maximum that no score was taken into: finite, so that it can be subtracted."""
TINY = 1e-30
PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


class Sizes(NamedTuple):
    """Static sizes of one call."""

    batch: int
    kv_heads: int
    group: int  # query heads a kv head
    columns: int  # the group padded to wgmma's N
    rows: int  # of results that are kept: the group, or one more to fill a line
    head_dim: int
    page_size: int
    tile: Tile
    num_blocks: int

    @property
    def segments(self) -> int:
        """(Row, kv head) pairs."""
        return self.batch * self.kv_heads

    @property
    def slots(self) -> int:
        """For pieces."""
        return schedule.num_slots(self.segments, self.num_blocks)

    @property
    def scan(self) -> int:
        """Length of the running sum over the batch, in whole steps of a warpgroup's threads."""
        return -(-self.batch // 128) * 128

    @property
    def zeros(self) -> int:
        """Zeros before it: no fewer than the farthest of its steps, powers of two, goes back."""
        return max(128, 1 << (self.batch - 1).bit_length() >> 1)

    def tiles_before(self, sums: Any) -> Callable:
        """Function of a row: tiles of one kv head in the rows before it, by `mosaic.attend`."""
        return lambda row: sums[row + (self.zeros - 1)]

    def share(self, before: Callable) -> Share:
        """Who has which tiles. `before`: tiles of one kv head in the rows before a row."""
        total = before(self.batch) * self.kv_heads
        return schedule.share(total, self.num_blocks, self.tile.min_tiles)

    @property
    def stages(self) -> int:
        """The tile's, or as many as shared memory holds beside the queries of a wide group and the
        running sum over a large batch. It takes two to load while computing: fewer is unsupported.
        """
        queries = self.columns * (6 * self.head_dim + 2 * self.tile.tokens + 128)
        left = SHARED_BYTES - queries - 4 * (self.zeros + self.scan)
        return min(self.tile.stages, left // (4 * self.tile.tokens * self.head_dim))

    @property
    def line(self) -> int:
        """Elements the merge handles at once: a row, or two of 64. A warpgroup has 128 threads."""
        return max(self.head_dim, 128)


def sizes_of(q: Any, k_pages: Any, tile: Tile | None, num_blocks: int | None) -> Sizes:
    """Sizes of a call with these arguments."""
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    tile = tile or choose(head_dim, page_size)
    assert tile is not None, "not supported: ask `supports`"
    group = heads // kv_heads
    line = max(head_dim, 128)
    return Sizes(
        batch,
        kv_heads,
        group,
        columns=-(-group // 8) * 8,
        rows=-(-group * head_dim // line) * line // head_dim,
        head_dim=head_dim,
        page_size=page_size,
        tile=tile,
        num_blocks=num_blocks or NUM_SMS * tile.blocks_per_sm,
    )


def splat(value, shape, layout):
    """A float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
