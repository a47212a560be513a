"""Routing: gate, brownout plan, and the dispatch of rows to blocks of one expert each."""

from pallas_kernels.routing.op import (
    FULL,
    PARTIAL,
    STRATEGIES,
    ZERO,
    Dispatch,
    Plan,
    Scoring,
    brownout_plan,
    dispatch,
    gate,
    max_active_experts,
    max_blocks,
    route,
)

__all__ = [
    "FULL",
    "PARTIAL",
    "STRATEGIES",
    "ZERO",
    "Dispatch",
    "Plan",
    "Scoring",
    "brownout_plan",
    "dispatch",
    "gate",
    "max_active_experts",
    "max_blocks",
    "route",
]
