"""Which experts to share so that a family fits its slots: the paper's rule, ours, and baselines.

A rule gives `owners [N, L, m]` as `jmoe.sharing.Sharing` has them. The paper's rule and the
baselines share a position among all models or not at all, so that they may leave up to N - 2 slots
of a budget unused; the functional rule shares among some of them, too, and uses all.
"""

from itertools import combinations

import numpy as np
from jaxtyping import Float, Int

from jmoe.sharing import MERGED

Owners = Int[np.ndarray, "N L m"]
MOST_MODELS = 10
"""For the functional rule, which looks at every subset of the models as owners of a position."""

ROUNDS = 60
"""Of finding how much each model's losses count."""

SWEEPS = 10
"""Over all positions, at most, of evening out what is left."""


def owners_paper(
    distances: Float[np.ndarray, "N N L m"], slots: int, merged: bool = False
) -> Owners:
    """Chooses owners by Algorithm 1 of the Multi-MoE paper: positions whose experts are closest are
    shared by all.

    A position's distance is the sum over all ordered pairs of models. Owners take turns along the
    ranks: the first model owns the closest position, as the paper's text has it. (Its listing
    counts before it assigns and numbers models from 1, N being 0 modulo N: the same.)

    Args:
        distances: L2 distances between the weights of two models' experts at a position.
        slots: the most that may be taken.
        merged: positions are the same, and their owner is MERGED instead of a model.
    """
    shape = distances.shape[1:]
    ranked = np.argsort(distances.sum(axis=0).sum(axis=0).ravel(), kind="stable")
    chosen = ranked[: _shared_by_all(shape[0], len(ranked), slots)]
    turns = np.arange(len(chosen)) % shape[0]
    return _with(shape, chosen, np.full(len(chosen), MERGED) if merged else turns)


def owners_random(shape: tuple[int, int, int], slots: int, seed: int) -> Owners:
    """Returns positions and owners drawn at random. `shape`: models, MoE layers, experts."""
    count, layers, experts = shape
    rng = np.random.default_rng(seed)
    num_shared = _shared_by_all(count, layers * experts, slots)
    chosen = rng.permutation(layers * experts)[:num_shared]
    return _with(shape, chosen, rng.integers(count, size=num_shared))


def _shared_by_all(count: int, positions: int, slots: int) -> int:
    """Returns the positions that all models have to share."""
    return -(-max(0, count * positions - slots) // max(1, count - 1))


def _with(
    shape: tuple[int, ...], chosen: Int[np.ndarray, "n"], owners: Int[np.ndarray, "n"]
) -> Owners:
    """Returns the map in which these positions have these owners, and all others their own."""
    count, layers, experts = shape
    found = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, layers * experts))
    found[:, chosen] = owners
    return found.reshape(shape)


def owners_functional(costs: Float[np.ndarray, "N N L m"], slots: int) -> Owners:
    """Shares where it costs least, so that the model that loses most loses as little as possible.

    Args:
        costs: `[i, j, l, e]`, what model i loses where expert e of layer l is model j's; 0 where
            i is j. In a unit that means the same for all models.
        slots: as many are taken: from one a position to one an expert.

    Losses of a model add up. Each round solves the problem for the weighted sum of all models'
    losses, then a model counts for more if it lost more than the others; of all rounds the one
    whose worst model loses least is kept, and owners of single positions are changed while that
    helps. Raises ValueError for more than MOST_MODELS models.
    """
    count, _, layers, experts = costs.shape
    if count > MOST_MODELS:
        raise ValueError(
            f"{count} models are given; the functional rule takes {MOST_MODELS} at most. Make "
            "families of fewer, or choose --rule paper"
        )
    flat = costs.reshape(count, count, -1).astype(np.float64)
    weights, best, least = np.ones(count), None, np.inf
    for number in range(ROUNDS):
        owners = _least_sum(flat * weights[:, None, None], slots)
        losses = losses_of(flat, owners)
        if best is None or losses.max() < least:
            best, least = owners, losses.max()
        if losses.max() <= 0:
            break
        step = 0.5 / (1 + number / 10)
        weights *= np.exp(step * (losses / losses.max() - (losses / losses.max()).mean()))
        weights /= weights.mean()
    assert best is not None
    return _evened(flat, best).reshape(count, layers, experts).astype(np.int32)


def owners_within(costs: Float[np.ndarray, "N N L m"], most: float) -> Owners:
    """Shares as much as it can while no model loses more than `most`, in the unit of `costs`, by
    `owners_functional`. Raises ValueError as that does.
    """
    count, _, layers, experts = costs.shape
    fewest, enough = layers * experts, count * layers * experts
    owners = owners_functional(costs, enough)
    while fewest < enough:
        slots = (fewest + enough) // 2
        tried = owners_functional(costs, slots)
        if losses_of(costs, tried).max() <= most:
            owners, enough = tried, slots
        else:
            fewest = slots + 1
    return owners


def losses_of(
    costs: Float[np.ndarray, "N N *position"], owners: Int[np.ndarray, "N *position"]
) -> Float[np.ndarray, "N"]:
    """Returns what each model loses: the sum of its costs over all positions. No owner is
    MERGED.
    """
    found = np.take_along_axis(costs, owners[:, None], axis=1)
    return found.reshape(len(costs), -1).sum(axis=1)


def _evened(
    costs: Float[np.ndarray, "N N P"], owners: Int[np.ndarray, "N P"]
) -> Int[np.ndarray, "N P"]:
    """Keeps the number of slots at each position, and changes owners where the worst model loses
    less then. The weights of `owners_functional` turn all positions that are alike at once; this
    turns them one by one.
    """
    owners = owners.copy()
    losses = losses_of(costs, owners)
    models = np.arange(len(costs))
    for _ in range(SWEEPS):
        before = losses.max()
        for position in np.flatnonzero((owners != models[:, None]).any(axis=0)):
            own = costs[:, :, position]
            now = owners[:, position]
            others = losses - own[models, now]
            options = _owners_of_one(own, len(set(now.tolist())))
            found = others + own[models, options]  # [options, N]
            best = np.argmin(found.max(axis=1) + 1e-3 * found.mean(axis=1))
            owners[:, position], losses = options[best], found[best]
        if losses.max() > before * (1 - 1e-3):
            break
    return owners


def _owners_of_one(costs: Float[np.ndarray, "N N"], num_owners: int) -> Int[np.ndarray, "S N"]:
    """Returns every choice of so many owners of a position; each model uses the one that costs it
    least.
    """
    found = []
    for members in map(np.array, combinations(range(len(costs)), num_owners)):
        choice = members[costs[:, members].argmin(axis=1)]
        choice[members] = members
        found.append(choice)
    return np.array(found)


def _least_sum(costs: Float[np.ndarray, "N N P"], slots: int) -> Int[np.ndarray, "N P"]:
    """Returns owners of nearly the least summed cost, by greed on the cost of each slot that is
    saved.

    Exact where the budget falls between two steps along the positions' lower convex hulls, and
    within one such step of it elsewhere.
    """
    count, _, positions = costs.shape
    least, owners = _best_groups(costs)
    to_save = count * positions - slots
    taken = np.full(positions, count)  # groups each position is in: at first, each model's own
    for _, position, start, stop in sorted(_hull_steps(least), key=lambda s: (s[0], s[1], -s[2])):
        if start - stop <= to_save and taken[position] == start:
            taken[position] = stop
            to_save -= start - stop
    while to_save > 0:
        left = np.flatnonzero(taken > 1)
        rise = least[taken[left] - 1, left] - least[taken[left], left]
        taken[left[np.argmin(rise)]] -= 1
        to_save -= 1
    return owners[taken, :, np.arange(positions)].T


def _best_groups(
    costs: Float[np.ndarray, "N N P"],
) -> tuple[Float[np.ndarray, "K P"], Int[np.ndarray, "K N P"]]:
    """Returns, for each number of owners k, the least cost of a position with k owners, and whose
    expert each model uses then. Index 0 is unused (infinite).
    """
    count, _, positions = costs.shape
    least = np.full((count + 1, positions), np.inf)
    owners = np.zeros((count + 1, count, positions), np.int32)
    for subset in range(1, 1 << count):
        members = np.array([j for j in range(count) if subset >> j & 1])
        choice = members[costs[:, members].argmin(axis=1)]
        choice[members] = members[:, None]  # an owner keeps its own, whatever else costs nothing
        total = np.take_along_axis(costs, choice[:, None], axis=1)[:, 0].sum(axis=0)
        better = total < least[len(members)]
        least[len(members), better] = total[better]
        owners[len(members)][:, better] = choice[:, better]
    return least, owners


def _hull_steps(least: Float[np.ndarray, "K P"]) -> list[tuple[float, int, int, int]]:
    """Returns the steps of each position's lower convex hull as (cost a slot, position, from, to
    owners).
    """
    steps = []
    count = len(least) - 1
    for position in range(least.shape[1]):
        start = count
        while start > 1:
            slopes = [
                ((least[stop, position] - least[start, position]) / (start - stop), stop)
                for stop in range(1, start)
            ]
            slope, stop = min(slopes)
            steps.append((float(slope), position, start, stop))
            start = stop
    return steps
