"""Routing: gate, brownout plan, and the dispatch of rows to blocks of one expert each."""

from pallas_kernels.routing.op import (
    FULL,
    OWN,
    PARTIAL,
    STRATEGIES,
    ZERO,
    Dispatch,
    TableRow,
    dispatch,
    map_tiles,
    max_active_experts,
    max_blocks,
    route,
    row_length,
    row_of,
    threshold_of,
)
from pallas_kernels.routing.reference import BY_WEIGHT, brownout_plan, gate
from pallas_kernels.routing.tile_map import RowTiles
from pallas_kernels.routing.values import Grouping, Plan, Scoring

__all__ = [
    "BY_WEIGHT",
    "FULL",
    "OWN",
    "PARTIAL",
    "STRATEGIES",
    "ZERO",
    "Dispatch",
    "Grouping",
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
    "threshold_of",
]
