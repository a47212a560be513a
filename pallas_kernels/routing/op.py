"""Public routing ops. Letters: T rows, K picks a row, m routed experts, E logical experts."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import native
from pallas_kernels.backend import KERNEL, NATIVE, batched, hopper, note
from pallas_kernels.routing import batched as few_launches
from pallas_kernels.routing import reference, tile_map
from pallas_kernels.routing.reference import brownout_plan, gate
from pallas_kernels.routing.tile_map import RowTiles, TileMap
from pallas_kernels.routing.values import Gating, Grouping, Plan, Scoring

ZERO, FULL, PARTIAL = 0, 1, 2
OWN = 3
"""Of a user's own strategy, which replaces the plan that is partial brownout's for this code."""
STRATEGIES = {"zero": ZERO, "full": FULL, "partial": PARTIAL}


class TableRow(NamedTuple):
    """A layer's row of a table of all layers. The kernel reads it in place: a slice would be a
    copy, and a launch of its own.
    """

    table: Shaped[Array, "layers n"]
    layer: Int[Array, ""] | np.int32


class Dispatch(NamedTuple):
    """Rows sorted by expert, each expert's rows padded to whole blocks of `block_m` rows."""

    row_token: Int[Array, "R"]  # source row of each sorted row; T marks a gap row
    block_slot: Int[Array, "N"]  # pool slot of each block; blocks past num_blocks repeat the last
    num_blocks: Int[Array, ""]
    visit_row: Int[Array, "T K"]  # sorted row that computes the visit; R where there is none
    visit_weight: Float[Array, "T K"]  # gate weight of the visit; 0 where there is none
    expert_rows: Int[Array, "E"]  # rows of each logical expert, repeats counted once
    expert_start: Int[Array, "E"]  # its first sorted row, a multiple of block_m
    expert_slot: Int[Array, "E"]  # its pool slot
    tile_map: TileMap | None = None  # of the tiles that `route` was told


def max_active_experts(
    threshold_percent: int, num_experts: int, num_united: int, num_visits: int
) -> int:
    """Returns the most experts that one layer can touch under full or partial brownout up to a
    threshold.

    `min(m, ceil(t m) + ceil(m/k), visits)` with ceil(m/k) = `num_united`; it is attained. It needs
    every expert in a group (none -1) and no exempt row; zero brownout may touch all m.
    """
    originals = -(-threshold_percent * num_experts // 100)
    return min(num_experts, originals + num_united, num_visits)


def max_blocks(num_visits: int, max_active: int, block_m: int) -> int:
    """Returns the blocks of `block_m` rows that `num_visits` rows over `max_active` experts can
    fill.
    """
    active = min(max_active, num_visits)
    return max(1, (num_visits + active * (block_m - 1)) // block_m)


def dispatch(
    expert_ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    slots: Int[Array, "E"],
    *,
    block_m: int,
    max_active: int,
    max_visits: int | None = None,
) -> Dispatch:
    """Sorts visits by logical expert and cuts them into blocks of one expert each.

    A row whose picks meet in one expert is computed once with the summed weight. `max_active` and
    `max_visits` (static; None: T K) size the arrays; the caller guarantees that no more experts are
    touched, and no more visits made.
    """
    num_visits = expert_ids.size if max_visits is None else min(max_visits, expert_ids.size)
    num_blocks = max_blocks(num_visits, max_active, block_m)
    return Dispatch(
        *reference.dispatch(expert_ids, weights, slots, block_m=block_m, num_blocks=num_blocks)
    )


def map_tiles(work: Dispatch, tiles: RowTiles) -> Int[Array, "M 6"]:
    """Returns a dispatch's tile map (`tile_map`): its own if it is for these tiles, else a new
    one.
    """
    if work.tile_map is not None and work.tile_map.tiles == tiles:
        return work.tile_map.table
    num_rows, num_blocks = work.row_token.shape[0], work.block_slot.shape[0]
    num_experts = work.expert_rows.shape[0]
    most = tile_map.max_tiles(num_rows, num_rows // num_blocks, num_experts, tiles.rows)
    experts = work.expert_rows, work.expert_start, work.expert_slot
    return tile_map.tile_map(*experts, tiles, most)


def row_length(row: Array | TableRow) -> int:
    """Returns the length of a layer's row."""
    return (row.table if isinstance(row, TableRow) else row).shape[-1]


def row_of(row: Shaped[Array, "n"] | TableRow) -> Shaped[Array, "n"]:
    """Returns a layer's row, sliced out of its table where it still lies in one."""
    return row.table[row.layer] if isinstance(row, TableRow) else row


def threshold_of(row: Int[Array, ""] | Int[Array, "1"] | TableRow) -> Int[Array, ""]:
    """Returns a layer's threshold, which may be a row of one, as `row_of`."""
    return row.reshape(()) if not isinstance(row, TableRow) else row_of(row)[0]


def route(
    logits: Float[Array, "T columns"],
    *,
    top_k: int,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Float[Array, "m"] | TableRow | None = None,
    grouping: Grouping | None = None,
    scale: float = 1.0,
    jitter: float = 0.0,
    groups: Int[Array, "m"] | TableRow,
    slots: Int[Array, "E"] | TableRow,
    threshold_percent: Int[Array, ""] | Int[Array, "1"] | TableRow,
    strategy: Int[Array, ""],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    block_m: int,
    max_active: int,
    tiles: RowTiles | None = None,
) -> tuple[Int[Array, "T {top_k}"], Plan, Dispatch]:
    """Computes a layer's whole routing: `gate`, `brownout_plan` of its picks, and `dispatch` of the
    plan.

    Logits past the m experts that `groups` has are padding, and are not looked at. A threshold in a
    table is that of its layer, the same as that of `groups`. With `tiles`,
    of a multiple of `block_m` rows, the dispatch has a map of them. Returns the experts that the
    router chose, the plan and the dispatch. On Hopper, steps of up to 4,096 rows (of
    more than 64 experts 2,048, of more than 128 512) take one kernel.
    """
    gating = Gating(top_k, normalize, scoring, grouping, scale, jitter)
    planning: dict[str, Any] = {
        "threshold_percent": threshold_percent,
        "strategy": strategy,
        "valid": valid,
        "exempt": exempt,
    }
    num_blocks = max_blocks(logits.shape[0] * top_k, max_active, block_m)
    sizes: dict[str, Any] = {"block_m": block_m, "num_blocks": num_blocks}
    if hopper():
        from pallas_kernels.routing import mosaic  # Pallas is not imported where it is unused

        if mosaic.supports(logits, groups, slots, gating, block_m, bias):
            note("routing", KERNEL)
            tables: dict[str, Any] = {"bias": bias, "groups": groups, "slots": slots}
            return mosaic.route(logits, gating, **tables, **planning, **sizes, tiles=tiles)
    groups, slots = row_of(groups), row_of(slots)
    planning["threshold_percent"] = threshold_of(threshold_percent)
    bias = None if bias is None else row_of(bias)
    if batched():
        note("routing")
        tables = {"bias": bias, "groups": groups, "slots": slots}
        ids, plan, work = few_launches.route(logits, gating, **tables, **planning, **sizes)
        plan, work = Plan(*plan), Dispatch(*work)
    else:
        weights, ids = gate(logits[:, : groups.shape[0]], bias=bias, **gating._asdict())
        if native.routes(weights):
            note("routing", NATIVE)
            tables = {"groups": groups, "slots": slots, "scale": scale}
            plan, work = native.route(ids, weights, **tables, **planning, **sizes)
            plan, work = Plan(*plan), Dispatch(*work)
        else:
            note("routing")
            plan = brownout_plan(ids, weights, scale=scale, groups=groups, **planning)
            work = dispatch(plan.expert_ids, weights, slots, block_m=block_m, max_active=max_active)
    if tiles is not None:
        work = work._replace(tile_map=TileMap(map_tiles(work, tiles), tiles))
    return ids, plan, work
