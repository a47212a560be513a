"""The built-in rules as machine code, where numba is installed (the extra `aep`).

`decide` is `LayerPicker` and the rules of `rules.py` in one pass over the queues; the tests hold it
to them. Without numba nothing here is called by a picker.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from serving.scheduling.layers.rules import FLFS, MTFS, Rows, Since

try:
    import numba
except ImportError:  # the extra `aep` is not installed
    numba = None

AVAILABLE = numba is not None
NOTHING = -1


def jit(function: Callable[..., Any]) -> Any:
    """Returns the function compiled at its first call, or as it is without numba; results are the
    same.
    """
    if numba is None:
        return function
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(function)


@jit
def decide(
    rule: int,
    weights: Float[np.ndarray, "K"],
    counts: Rows,
    urgent: Rows,
    classes: bool,
    oldest: Since,
    now: float,
    min_batch: int,
    max_wait_s: float,
    max_age_s: float,
) -> int:
    """Returns the queue to run as layer * G + group, or NOTHING; see `LayerPicker.pick`.

    `urgent` counts where `classes` says so. Within a layer all queues have the same lookahead, so
    that a layer's fullest queue stands for it.
    """
    num_layers, num_groups = counts.shape
    fullest, totals = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
    if _survey(counts, counts, oldest, now, min_batch, max_wait_s, max_age_s, fullest, totals):
        return _eldest(counts, oldest)
    seen = counts
    if classes:
        most, all_urgent = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
        _survey(counts, urgent, oldest, now, min_batch, max_wait_s, max_age_s, most, all_urgent)
        if most.any():
            seen, fullest, totals = urgent, most, all_urgent
    best, best_score = NOTHING, -1.0
    for layer in range(num_layers):
        if fullest[layer] == 0:
            continue
        if rule == FLFS:
            best = layer
            break
        ahead, at = 0.0, layer
        if rule != MTFS:
            for k in range(len(weights)):
                at = at + 1 if at + 1 < num_layers else 0
                ahead += totals[at] / num_groups * weights[k]
        score = ahead + fullest[layer]
        if score > best_score:
            best, best_score = layer, score
    if best == NOTHING:
        return NOTHING
    for group in range(num_groups):
        rows, since = counts[best, group], oldest[best, group]
        may_run = rows > 0 and (rows >= min_batch or since + max_wait_s <= now)
        if may_run and seen[best, group] == fullest[best]:
            return best * num_groups + group
    return NOTHING


@jit
def _survey(
    counts: Rows,
    seen: Rows,
    oldest: Since,
    now: float,
    least: int,
    max_wait_s: float,
    max_age_s: float,
    fullest: Int[np.ndarray, "layers"],
    totals: Int[np.ndarray, "layers"],
) -> bool:
    """Fills in, by layer, the most rows `seen` in a queue that may run, 0 for none, and all rows.

    Returns whether any queue's oldest row has waited for `max_age_s`. Without branches, which
    random queues mispredict.
    """
    any_aged = False
    for layer in range(counts.shape[0]):
        most, total = 0, 0
        for group in range(counts.shape[1]):
            rows, since = counts[layer, group], oldest[layer, group]
            filled = rows > 0
            any_aged |= filled & (since + max_age_s <= now)
            may_run = filled & ((rows >= least) | (since + max_wait_s <= now))
            most = max(most, seen[layer, group] * may_run)
            total += seen[layer, group]
        fullest[layer], totals[layer] = most, total
    return any_aged


@jit
def _eldest(counts: Rows, oldest: Since) -> int:
    """Returns the queue with the oldest row; the first of several."""
    best, best_since = NOTHING, np.inf
    for layer in range(counts.shape[0]):
        for group in range(counts.shape[1]):
            if counts[layer, group] > 0 and oldest[layer, group] < best_since:
                best, best_since = layer * counts.shape[1] + group, oldest[layer, group]
    return best
