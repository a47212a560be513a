"""What both kernels of paged attention need: sizes of a call, and a few constants."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.fp8_pages import Fp8Pages
from pallas_kernels.paged_attention import schedule
from pallas_kernels.paged_attention.tiles import Tile, choose, occupancy

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
    stages: int  # tiles a block has room for; those it is not at work on are in flight
    num_blocks: int
    window: int = 0  # positions that a row sees; 0: all
    fp8: bool = False  # whether pages are in eight bits

    @property
    def segments(self) -> int:
        """(Row, kv head) pairs."""
        return self.batch * self.kv_heads

    @property
    def slots(self) -> int:
        """Slots for pieces of segments that are cut; see `schedule`."""
        return 2 * self.num_blocks

    @property
    def cuts(self) -> int:
        """Entries for segments that are cut."""
        return schedule.num_cuts(self.segments, self.num_blocks)

    @property
    def line(self) -> int:
        """Elements that the merge handles at once: a row, or two of 64. A warpgroup has 128
        threads.
        """
        return max(self.head_dim, 128)

    @property
    def copy_rows(self) -> int:
        """Keys that a copy brings: a page, or as much of one as a tile takes. A power of two."""
        return min(self.page_size, self.tile.tokens)

    def begin(self, kv_len: Any) -> Any:
        """Returns where a sequence of this length is read from: where the copy starts that brings
        the first position in the window.
        """
        return jnp.maximum(kv_len - self.window, 0) & -self.copy_rows if self.window else 0

    def plan(self, kv_len: Int[Array, "B"]) -> schedule.Schedule:
        """Returns the schedule of sequences of these lengths."""
        return schedule.plan(
            kv_len - self.begin(kv_len),
            kv_heads=self.kv_heads,
            tokens=self.tile.tokens,
            num_blocks=self.num_blocks,
            min_tiles=self.tile.min_tiles,
        )


def sizes_of(
    q: Any, k_pages: Any, tile: Tile | None, num_blocks: int | None, window: int = 0
) -> Sizes | None:
    """Returns the sizes of a call with these arguments; None if there is no tile, or no room for
    it.
    """
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    group = heads // kv_heads
    columns = -(-group // 8) * 8
    fp8 = isinstance(k_pages, Fp8Pages)
    tile = tile or choose(head_dim, page_size, fp8=fp8)
    fits = tile and occupancy(columns, head_dim, tile, fp8=fp8)
    if tile is None or fits is None:
        return None
    blocks_per_sm, stages = fits
    line = max(head_dim, 128)
    return Sizes(
        batch,
        kv_heads,
        group,
        columns,
        rows=-(-group * head_dim // line) * line // head_dim,
        head_dim=head_dim,
        page_size=page_size,
        tile=tile,
        stages=stages,
        num_blocks=num_blocks or NUM_SMS * blocks_per_sm,
        window=window,
        fp8=fp8,
    )


def splat(value, shape, layout):
    """Returns a float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
