"""Which routed experts share a united one."""

import numpy as np
from jaxtyping import Float, Int

from jmoe.experts import groups_by_index
from training.distill.stream import LayerRows


def make_groups(
    kind: str, way: int, rows: LayerRows, answers: Float[np.ndarray, "m n d"]
) -> Int[np.ndarray, " m"]:
    """Returns the united expert of each routed one, counted from 0; `way` members each, the last
    may be short.

    Args:
        kind: `index` (the paper's), `similarity` (experts that answer alike) or `coactivation`
            (experts that serve the same rows).
        way: members a group.
        rows: the layer's captured rows.
        answers: every expert's output on the same n rows.
    """
    num_experts = len(answers)
    if kind == "index":
        return groups_by_index(num_experts, way)
    affinity = _alike(answers) if kind == "similarity" else _together(rows.ids, num_experts)
    return _gather(affinity, np.bincount(rows.ids.reshape(-1), minlength=num_experts), way)


def _alike(answers: Float[np.ndarray, "m n d"]) -> Float[np.ndarray, "m m"]:
    """Returns the cosine of the experts' outputs, all rows together."""
    flat = answers.reshape(len(answers), -1)
    flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    return flat @ flat.T


def _together(ids: Int[np.ndarray, "N K"], num_experts: int) -> Float[np.ndarray, "m m"]:
    """Returns how many rows chose both experts, over what chance would give."""
    chosen = np.zeros((len(ids), num_experts), np.float32)
    np.put_along_axis(chosen, ids, 1.0, axis=1)
    alone = chosen.mean(axis=0)
    return (chosen.T @ chosen / len(ids)) / np.maximum(alone[:, None] * alone[None], 1e-9)


def _gather(
    affinity: Float[np.ndarray, "m m"], visits: Int[np.ndarray, " m"], way: int
) -> Int[np.ndarray, " m"]:
    """Groups greedily: the most visited expert left takes those with the most affinity to its
    group.
    """
    groups = np.full(len(visits), -1, np.int32)
    for group in range(-(-len(visits) // way)):
        left = np.flatnonzero(groups < 0)
        members = [left[np.argmax(visits[left])]]
        groups[members[0]] = group
        while len(members) < way and (groups < 0).any():
            left = np.flatnonzero(groups < 0)
            best = left[np.argmax(affinity[left][:, members].mean(axis=1))]
            groups[best] = group
            members.append(best)
    return groups
