"""Skewed visits of one MoE layer's step, drawn from a seed, and predictions that are partly wrong.

A trace is a prefill step of 2,048 rows a device, 8 visits a row. An expert's popularity is
log-normal; a part of it belongs to the device, as ranks hold different requests, and a part is new
in this step, so that the past tells less than all. Traces whose fullest device has less than 1.5
times the mean load on the home placement are drawn again: there is little to balance in them.
"""

from dataclasses import dataclass

import numpy as np

NUM_ROWS, TOP_K = 2048, 8
LEAST_IMBALANCE = 1.5
DRIFT = 0.5  # of the logarithm of popularity: the part that the past does not know
MOST = 0.9  # an expert is chosen by that part of a device's rows at most
STEPS = 40  # of bisections


@dataclass(frozen=True)
class Trace:
    """Visits [G, E] that were made, and what a load balancer may know of them before."""

    made: np.ndarray
    history: np.ndarray  # expected visits of the past, float
    number: int  # of the draws so far: with the seed, it names this one
    seed: int

    @property
    def at_home(self) -> np.ndarray:
        """Load of each device [G] if nothing is balanced: a range of experts each."""
        return self.made.sum(axis=0).reshape(self.made.shape[0], -1).sum(axis=1)

    def predicted(self, accuracy: float) -> np.ndarray:
        """Returns visits as a predictor of this accuracy (by counts) would have them; the same each
        time.

        What was made, times a log-normal error by expert, half of it common to all devices: a
        mistake about an expert does not average out. Its size is found by bisection.
        """
        rng = np.random.default_rng([self.seed, self.number, 1])
        common, own = rng.normal(size=self.made.shape[1]), rng.normal(size=self.made.shape)
        error = (common + own) / np.sqrt(2)

        def guess(size: float) -> np.ndarray:
            wrong = self.made * np.exp(size * error)
            return wrong * (self.made.sum(axis=1) / wrong.sum(axis=1))[:, None]

        low, high = 0.0, 8.0
        for _ in range(STEPS):
            size = (low + high) / 2
            right = np.minimum(guess(size), self.made).sum() / self.made.sum()
            low, high = (size, high) if right > accuracy else (low, size)
        return np.rint(guess(low)).astype(np.int32)


def imbalance(load: np.ndarray) -> float:
    """Returns the load of the fullest device over the mean."""
    return float(load.max() / load.mean())


def draw(num: int, seed: int, devices: int = 8, experts: int = 128) -> list[Trace]:
    """`num` skewed traces; each depends on the seed and its number only.

    `experts` is a multiple of `devices`. Raises ValueError for fewer than four times TOP_K: their
    traces are hardly ever skewed.
    """
    if experts < 4 * TOP_K:
        raise ValueError(f"experts is {experts}; it must be {4 * TOP_K} or more")
    found: list[Trace] = []
    number = 0
    while len(found) < num:
        trace = _draw(seed, number, devices, experts)
        if imbalance(trace.at_home) >= LEAST_IMBALANCE:
            found.append(trace)
        number += 1
    return found


def _draw(seed: int, number: int, devices: int, experts: int) -> Trace:
    rng = np.random.default_rng([seed, number, 0])
    skew, by_device = rng.uniform(0.8, 2.0), rng.uniform()
    past, new = rng.normal(size=(2, experts))
    own = rng.normal(size=(devices, experts))
    common = np.sqrt(1 - DRIFT**2) * past + DRIFT * new
    now = np.sqrt(1 - by_device**2) * common[None] + by_device * own
    made = rng.binomial(NUM_ROWS, _chosen(np.exp(skew * now)))
    before = np.sqrt(1 - by_device**2) * past[None] + by_device * own
    history = NUM_ROWS * _chosen(np.exp(skew * before))
    return Trace(made.astype(np.int32), history, number, seed)


def _chosen(popularity: np.ndarray) -> np.ndarray:
    """Probabilities, proportional to popularity up to MOST, that add up to TOP_K a device."""
    share = popularity / popularity.sum(axis=1, keepdims=True)
    low, high = np.zeros(len(share)), np.full(len(share), 1e6)
    for _ in range(2 * STEPS):
        scale = np.sqrt(np.maximum(low, 1e-6) * high)
        few = np.minimum(MOST, scale[:, None] * share).sum(axis=1) < TOP_K
        low, high = np.where(few, scale, low), np.where(few, high, scale)
    return np.minimum(MOST, high[:, None] * share)
