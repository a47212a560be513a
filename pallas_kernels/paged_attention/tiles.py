"""Tile choices of the paged attention kernels, and how many blocks of them live side by side."""

from dataclasses import dataclass, replace

SHARED_PER_SM = 228 * 1024
"""Bytes of shared memory of a Hopper multiprocessor."""
SHARED_RESERVED = 1024
"""Bytes of it that the system takes for each block."""

MOST_GROUP = 40
"""Query heads a kv head that a block's registers hold: 48 of 64 elements spill."""


MOST_GROUP_FP8 = {64: 40, 128: 32, 256: 16}
"""The same of pages in eight bits, by head size: 40 of 128 elements and 24 of 256 spill."""


LATENT_HEADS = 64
"""Query heads of a block over latents: wgmma's M."""
LATENT_WARPGROUPS = 2
"""Warpgroups of such a block, each with its part of a value's elements."""


@dataclass(frozen=True)
class Tile:
    """How the op is cut: a tile is `tokens` keys and values of one kv head."""

    tokens: int  # a multiple of 64: wgmma's M
    min_tiles: int  # a block is given no fewer, while there are as many
    blocks_per_sm: int = 3  # persistent blocks wanted on one multiprocessor; fewer if they are big
    merge_width: int = 16  # rows of pieces whose loads the merge has in flight


_BY_HEAD_DIM = {
    64: Tile(tokens=128, min_tiles=2),
    128: Tile(tokens=64, min_tiles=4),
    256: Tile(tokens=64, min_tiles=4),
}


def choose(head_dim: int, page_size: int, *, fp8: bool = False) -> Tile | None:
    """Returns the tile for heads of `head_dim` elements in pages of `page_size` tokens, if there is
    one; `fp8` are pages in eight bits, of which a tile is within one page.

    A tile is 32 KB, or 64 KB at 256 elements. `min_tiles` keeps a piece large beside what it costs
    to merge.
    """
    tile = _BY_HEAD_DIM.get(head_dim)
    if tile is None or page_size % 8:
        return None
    if fp8:
        return replace(tile, tokens=64) if page_size % 64 == 0 else None
    return tile if tile.tokens % page_size == 0 or page_size % tile.tokens == 0 else None


def shared_bytes(
    columns: int, head_dim: int, tokens: int, stages: int, *, fp8: bool = False
) -> int:
    """Returns the shared memory of a block, without what the system takes: `attend`'s scratch.

    Queries and probabilities in bfloat16, a piece in float32, scratch of a maximum over keys; then
    tiles of keys and values, and barriers. `fp8`: tiles with scales, and one each in bfloat16.
    """
    of_columns = columns * (2 * head_dim + 2 * tokens + 4 * head_dim + 128)
    wide, scales = 4 * tokens * head_dim, -(-8 * stages * tokens // 1024) * 1024
    of_tiles = wide + stages * wide // 2 + scales if fp8 else stages * wide
    return of_columns + of_tiles + 8 * (1 + 2 * stages)


def occupancy(
    columns: int, head_dim: int, tile: Tile, *, fp8: bool = False
) -> tuple[int, int] | None:
    """Returns the blocks that one multiprocessor holds, and the tiles each has room for (stages).

    The most blocks, of those wanted, that have two stages each: it takes two to load while
    computing. Then as many stages as fit. Three blocks of 2 stages, two of 3 and one of 6 have room
    for the same tiles, and more blocks hide more of one another's latencies. While memory is the
    bottleneck all but the tile at work on are in flight: 96 KB or more, where memory that delivers
    36 bytes a nanosecond to a multiprocessor needs 36 to hide a microsecond. None if there is no
    room for one block.

    Registers bind later: three blocks may have 168 a thread and use about a hundred; in eight bits,
    from which numbers are widened in them, 155, and more than 168 with more than eight query heads.
    """
    most = min(tile.blocks_per_sm, 2) if fp8 and columns > 8 else tile.blocks_per_sm
    for blocks in range(most, 0, -1):
        # Allocated in units of 128 bytes; ptxas adds a byte of its own.
        room = SHARED_PER_SM // blocks - SHARED_RESERVED - 128
        sizes = [shared_bytes(columns, head_dim, tile.tokens, n, fp8=fp8) for n in range(33)]
        stages = sum(size <= room for size in sizes) - 1
        if stages >= 2:
            return blocks, stages
    return None


def choose_latent(page_size: int) -> Tile | None:
    """Returns the tile of latents in pages of `page_size` tokens, if there is one."""
    tile = Tile(tokens=64, min_tiles=4)
    return tile if 64 % page_size == 0 or page_size % 64 == 0 else None


def latent_shared_bytes(width: int, tokens: int, stages: int) -> int:
    """Returns the shared memory of a block over latents of `width` elements: queries, tiles and
    weights in bfloat16, a number a head in float32, barriers.
    """
    queries, weights = 2 * LATENT_HEADS * width, 2 * LATENT_HEADS * tokens
    return queries + stages * 2 * tokens * width + weights + 4 * LATENT_HEADS + 8 * (4 + stages)


def latent_stages(width: int, tile: Tile) -> int:
    """Returns the tiles that a block has room for: one lives on a multiprocessor, for the results
    in its registers leave none to another.
    """
    room = SHARED_PER_SM - SHARED_RESERVED - 128
    sizes = [latent_shared_bytes(width, tile.tokens, stages) for stages in range(9)]
    return sum(size <= room for size in sizes) - 1
