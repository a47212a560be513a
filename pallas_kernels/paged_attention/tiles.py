"""Tile choices of the paged attention kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How the op is cut: a tile is `tokens` keys and values of one kv head."""

    tokens: int  # a multiple of 64: wgmma's M
    stages: int  # tiles a block has room for; those it is not at work on are in flight
    blocks_per_sm: int  # persistent blocks that live on one multiprocessor
    min_tiles: int  # a block is given no fewer, while there are as many
    merge_width: int = 16  # rows of pieces whose loads the merge has in flight


_BY_HEAD_DIM = {
    64: Tile(tokens=128, stages=2, blocks_per_sm=3, min_tiles=2),
    128: Tile(tokens=64, stages=2, blocks_per_sm=3, min_tiles=4),
    256: Tile(tokens=64, stages=3, blocks_per_sm=1, min_tiles=4),
}


def choose(head_dim: int, page_size: int) -> Tile | None:
    """The tile for heads of `head_dim` elements in pages of `page_size` tokens, if there is one.

    A tile is 32 KB, or 64 KB at 256 elements. While memory is the bottleneck a multiprocessor waits
    for the tiles its blocks are about to work on and has asked for all those behind them: 128 KB or
    more are in flight, three times what memory of 36 bytes a nanosecond a multiprocessor needs to
    hide a microsecond. `min_tiles` keeps a piece large beside what it costs to merge.
    """
    tile = _BY_HEAD_DIM.get(head_dim)
    if tile is None or page_size % 8:
        return None
    return tile if tile.tokens % page_size == 0 or page_size % tile.tokens == 0 else None
