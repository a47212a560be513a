"""What the kernels of paged attention share: sizes of a call, where tiles lie, a few constants."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.backend import num_sms
from pallas_kernels.fp8_pages import Fp8Pages
from pallas_kernels.paged_attention import schedule
from pallas_kernels.paged_attention.schedule import At, Run
from pallas_kernels.paged_attention.tiles import (
    LATENT_HEADS,
    Tile,
    choose,
    choose_latent,
    latent_stages,
    occupancy,
)

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
    latent: int = 0  # elements of a key, of which values are the first `head_dim`; 0: other arrays

    @property
    def parts(self) -> int:
        """Blocks that take the same tiles of latents, each for `LATENT_HEADS` of the heads."""
        return self.columns // LATENT_HEADS

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
        num_blocks=num_blocks or num_sms() * blocks_per_sm,
        window=window,
        fp8=fp8,
    )


def latent_sizes(
    q: Any, pages: Any, latent: int, tile: Tile | None, num_blocks: int | None, window: int = 0
) -> Sizes | None:
    """Returns the same of keys whose first `latent` elements are values. `num_blocks` share the
    tiles; there are as many for each part of the heads.
    """
    batch, heads, width = q.shape
    page_size = pages.shape[3]
    tile = tile or choose_latent(page_size)
    stages = latent_stages(width, tile) if tile else 0
    if tile is None or stages < 2:
        return None
    columns = -(-heads // LATENT_HEADS) * LATENT_HEADS
    return Sizes(
        batch,
        kv_heads=1,
        group=heads,
        columns=columns,
        rows=heads,
        head_dim=latent,
        page_size=page_size,
        tile=tile,
        stages=stages,
        num_blocks=num_blocks or num_sms() // (columns // LATENT_HEADS),
        window=window,
        latent=width,
    )


def splat(value, shape, layout):
    """Returns a float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(shape, axis):
    """Returns row (0) or column numbers (1)."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


class Part(NamedTuple):
    """The place of a tile's keys: the whole or a part of one page."""

    index: tuple  # of the paged arrays
    rows: slice  # of the tile


def locate(sizes: Sizes, refs: Any, run: Run, at: At, line: Any) -> list[Part]:
    """Returns the pages of a tile by a line of the table; of no tile, if `at` is past the run.

    The table's ids past the end of the sequence are nobody's: in their place the tile's first page
    is taken again. They are read all the same, so as not to wait for the length before the ids.
    Over a window that is waited for: ids before its first page are not read.
    """
    page_size, tokens, size = sizes.page_size, sizes.tile.tokens, sizes.copy_rows
    kv_head, offset, _ = run.segment(at)
    length = refs.kv_len[at.row]
    begin = sizes.begin(length)
    starts = [begin + offset * tokens + row for row in range(0, tokens, size)]
    last_column = refs.table.shape[1] - 1
    columns = [lax.min(lax.div(start, page_size), last_column) for start in starts]
    pages = [refs.table[line, column] for column in columns]
    parts = []
    for start, page in zip(starts, pages, strict=True):
        index = refs.layer, jnp.where(start < length, page, pages[0]), kv_head
        if size < page_size:
            index = *index, pl.ds(pl.multiple_of(lax.rem(start, page_size), size), size)
        parts.append(Part(index, slice(len(parts) * size, (len(parts) + 1) * size)))
    return parts


def copy_parts(paged: Any, parts: list[Part], smem: Any, full: Any) -> None:
    """Starts the copies of one tile; `full` counts them."""
    for part in parts:
        plgpu.copy_gmem_to_smem(paged.at[part.index], smem.at[part.rows], full)


def clear_rows(smem: Any, start: Any, columns: range | None = None) -> None:
    """Zeroes rows from `start` on, a few columns at a time: a tile would not fit registers."""
    for column in columns or range(0, smem.shape[1], 64):
        part = smem.at[:, column : column + 64]
        values = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
        part[...] = jnp.where(iota(values.shape, 0) < start, values, jnp.zeros_like(values))
