"""Row tiles of a dispatch, for the grouped GEMM: which rows of which expert each of them holds."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

SLOT, ROW, END, HEAD, SIZE, COUNT = range(6)
"""Columns of a tile map: pool slot, first row of the tile's group, end of the expert's rows, first
tile of the group, tiles of the group; and, in the first row, tiles of all experts. Rows from that
number on are undefined.
"""


@jax.tree_util.register_static
@dataclass(frozen=True)
class RowTiles:
    """How experts' rows are cut: tiles of `rows` rows, in groups of at most `group` tiles.

    A group is a run of tiles of one expert.
    """

    rows: int
    group: int


class TileMap(NamedTuple):
    """A tile map, and the tiles it is of."""

    table: Int[Array, "M 6"]
    tiles: RowTiles


def max_tiles(num_rows: int, block_m: int, num_experts: int, tile_rows: int) -> int:
    """Returns the most tiles of `num_rows` sorted rows whose experts start at multiples of
    `block_m`.
    """
    return min(num_rows // min(block_m, tile_rows), num_rows // tile_rows + num_experts)


def tile_map(
    expert_rows: Int[Array, "E"],
    expert_start: Int[Array, "E"],
    expert_slot: Int[Array, "E"],
    tiles: RowTiles,
    num_tiles: int,
) -> Int[Array, "M 6"]:
    """Cuts each expert's rows into tiles, in order of expert; `num_tiles` is the bound on them.

    Sums over comparisons rather than scans and gathers: the tables are small, and XLA makes two
    kernels of it. The routing kernel writes the same map itself.
    """
    count = -(-expert_rows // tiles.rows)
    expert = jnp.arange(count.shape[0], dtype=jnp.int32)
    earlier = expert[None, :] < expert[:, None]
    first = jnp.sum(jnp.where(earlier, count[None, :], 0), axis=1, dtype=jnp.int32)[None]
    tile = jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
    slot, start, rows, count = (a[None] for a in (expert_slot, expert_start, expert_rows, count))
    mine = (first <= tile) & (tile < first + count)
    ahead = (tile - first) // tiles.group * tiles.group  # tiles of the expert before this group
    fields = (
        slot,
        start + ahead * tiles.rows,
        start + rows,
        first + ahead,
        jnp.minimum(tiles.group, count - ahead),
    )
    table = [jnp.where(mine, field, 0) for field in fields]
    table.append(jnp.broadcast_to(count, mine.shape))
    return jnp.sum(jnp.stack(table, axis=1), axis=2, dtype=jnp.int32)
