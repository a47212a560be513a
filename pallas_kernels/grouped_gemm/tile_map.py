"""Which rows of which expert each tile of the grouped GEMM holds, from a dispatch plan."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.routing.op import Dispatch

SLOT, ROW, END, HEAD, SIZE, COUNT = range(6)
"""Columns of a tile map: pool slot, first row of the tile's group, end of the expert's rows, first
tile of the group, tiles of the group, tiles of all experts (the same in every row)."""


def max_tiles(plan: Dispatch, block_t: int) -> int:
    """Row tiles a plan can have: every expert's last tile may hold eight rows."""
    num_rows, num_experts = plan.row_token.shape[0], plan.expert_rows.shape[0]
    return min(num_rows // 8, num_rows // block_t + num_experts)


def tile_map(plan: Dispatch, block_t: int, group: int) -> Int[Array, "M 6"]:
    """Cuts each expert's rows into tiles of `block_t`, in order of expert.

    A group is a run of tiles of one expert, at most `group`. Rows past COUNT are zero but for it.
    Sums over comparisons rather than scans and gathers: the tables are small, and XLA makes two
    kernels of it.
    """
    tiles = -(-plan.expert_rows // block_t)
    expert = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    earlier = expert[None, :] < expert[:, None]
    first = jnp.sum(jnp.where(earlier, tiles[None, :], 0), axis=1, dtype=jnp.int32)[None]
    tile = jnp.arange(max_tiles(plan, block_t), dtype=jnp.int32)[:, None]
    slot, start, rows, tiles = (
        a[None] for a in (plan.expert_slot, plan.expert_start, plan.expert_rows, tiles)
    )
    mine = (first <= tile) & (tile < first + tiles)
    ahead = (tile - first) // group * group  # tiles of the expert before this group
    fields = (
        slot,
        start + ahead * block_t,
        start + rows,
        first + ahead,
        jnp.minimum(group, tiles - ahead),
    )
    table = [jnp.where(mine, field, 0) for field in fields]
    table.append(jnp.broadcast_to(tiles, mine.shape))
    return jnp.sum(jnp.stack(table, axis=1), axis=2, dtype=jnp.int32)
