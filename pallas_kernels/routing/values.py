"""Values of the routing ops, with the letters of `op.py`."""

from typing import Literal, NamedTuple

from jaxtyping import Array, Bool, Int

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]


class Grouping(NamedTuple):
    """Groups of experts that follow each other, of one size: picks are of the best groups."""

    count: int
    top: int  # groups that are picked from
    best: int  # experts whose scores add up to their group's


class Gating(NamedTuple):
    """How a router's logits become picks and their weights, as `reference.gate` says."""

    top_k: int
    normalize: bool
    scoring: Scoring = "softmax"
    grouping: Grouping | None = None
    scale: float = 1.0
    jitter: float = 0.0  # of sparsemixer


class Plan(NamedTuple):
    """What a brownout plan decided for one layer of one step."""

    expert_ids: Int[Array, "T K"]  # logical expert of each visit; -1: dropped, or a padding row
    degraded: Bool[Array, "T K"]  # visits that went elsewhere than the router said
    s1: Bool[Array, "m"]  # experts whose visits stay with the original
