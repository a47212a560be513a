"""How published routers choose, a row and an expert at a time in float64."""

import numpy as np


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def scored(logits, bias, top_k, *, scoring, groups, top_groups, best, scale, normalize):
    """Returns experts, weights, and how far the choice is from a tie: of DeepSeek and GLM-4.5."""
    logits = np.asarray(logits, np.float64)
    scores = sigmoid(logits) if scoring == "sigmoid" else softmax(logits)
    wanted, size = scores + bias, len(logits) // groups
    worth = [sum(sorted(wanted[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
    by_worth = sorted(range(groups), key=lambda g: -worth[g])
    allowed = [e for e in range(len(logits)) if e // size in by_worth[:top_groups]]
    order = sorted(allowed, key=lambda e: -wanted[e])
    ids = order[:top_k]
    gaps = [wanted[order[top_k - 1]] - wanted[order[top_k]]] if len(order) > top_k else []
    if top_groups < groups:
        gaps.append(worth[by_worth[top_groups - 1]] - worth[by_worth[top_groups]])
    weights = scores[ids]
    return ids, scale * (weights / weights.sum() if normalize else weights), min(gaps, default=1.0)


def sparsemixer(logits, jitter):
    """Returns the same of Phi-3.5-MoE's two experts."""
    logits, left, ids, weights, gaps = (
        np.asarray(logits, np.float64),
        {*range(len(logits))},
        [],
        [],
        [],
    )
    for _ in range(2):
        first, second = sorted(left, key=lambda e: -logits[e])[:2]
        most = logits[first]
        off = {e: (most - logits[e]) / max(abs(logits[e]), most) - 2 * jitter for e in left}
        near = [logits[e] for e in left if off[e] <= 0]
        ids.append(first)
        weights.append(np.exp(most) / np.exp(near).sum())
        gaps += [most - logits[second], *map(abs, off.values())]
        left.remove(first)
    return ids, np.array(weights), min(gaps)
