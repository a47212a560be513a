"""Routing: gate, brownout plan, and the dispatch of rows to blocks of one expert each."""

from pallas_kernels.routing.op import (
    FULL,
    PARTIAL,
    STRATEGIES,
    ZERO,
    Dispatch,
    Plan,
    Scoring,
    TableRow,
    brownout_plan,
    dispatch,
    gate,
    map_tiles,
    max_active_experts,
    max_blocks,
    route,
    row_length,
    row_of,
)
from pallas_kernels.routing.tile_map import RowTiles

__all__ = [
    "FULL",
    "PARTIAL",
    "STRATEGIES",
    "ZERO",
    "Dispatch",
    "Plan",
    "RowTiles",
    "Scoring",
    "TableRow",
    "brownout_plan",
    "dispatch",
    "gate",
    "map_tiles",
    "max_active_experts",
    "max_blocks",
    "route",
    "row_length",
    "row_of",
]
