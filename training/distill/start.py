"""Where a united expert starts: at its most used member, the members' mean, or an aligned mean."""

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

Weights = dict[str, Float[np.ndarray, "..."]]
"""`gate_up [n, d, 2f]` and `down [n, f, d]` of n experts."""


def make_start(
    kind: str, members: Weights, groups: Int[np.ndarray, " m"], visits: Int[np.ndarray, " m"]
) -> Weights:
    """Returns the weights of every group's united expert before training, float32.

    `aligned` permutes each member's hidden units to match the most used member's before the mean:
    units have no order, so a plain mean adds units that do different things.
    """
    experts = [
        _start(kind, members, np.flatnonzero(groups == g), visits) for g in np.unique(groups)
    ]
    return {key: np.stack([expert[key] for expert in experts]) for key in members}


def _start(
    kind: str, members: Weights, own: Int[np.ndarray, " k"], visits: Int[np.ndarray, " m"]
) -> Weights:
    first = own[np.argmax(visits[own])]
    leader = {key: leaf[first].astype(np.float32) for key, leaf in members.items()}
    if kind == "most_used":
        return leader
    parts = [{key: leaf[e].astype(np.float32) for key, leaf in members.items()} for e in own]
    if kind == "aligned":
        parts = [_permuted(part, _match(leader, part)) for part in parts]
    return {key: np.mean([part[key] for part in parts], axis=0) for key in leader}


def _units(expert: Weights) -> Float[np.ndarray, "f c"]:
    """Returns each hidden unit's weights, scaled so that gate, up and down count the same."""
    first, down = expert["gate_up"], expert["down"]
    parts = [*(part.T for part in np.split(first, first.shape[1] // len(down), axis=1)), down]
    return np.concatenate([p / max(np.linalg.norm(p), 1e-12) for p in parts], axis=1)


def _match(leader: Weights, other: Weights) -> Int[np.ndarray, " f"]:
    """Returns the unit of `other` for each of the leader's: the assignment of greatest
    similarity.
    """
    return linear_sum_assignment(_units(leader) @ _units(other).T, maximize=True)[1]


def _permuted(expert: Weights, order: Int[np.ndarray, " f"]) -> Weights:
    first, width = expert["gate_up"], len(order)
    columns = np.concatenate([at + order for at in range(0, first.shape[1], width)])
    return {"gate_up": first[:, columns], "down": expert["down"][order]}
