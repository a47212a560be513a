"""Measures how evenly one step of one layer is balanced: by Libra as printed and built, by EPLB.

Steps are drawn from a seed. A trace is a prefill step of 2,048 rows a device, 8 visits a row. An
expert's popularity is log-normal; a part of it belongs to the device, as ranks hold different
requests, and a part is new in this step, so that the past tells less than all. Traces whose fullest
device has less than 1.5 times the mean load on the home placement are drawn again: there is little
to balance in them.

EPLB and Libra as printed are written from their papers in plain NumPy; shares and replicas of Libra
as modelled are jmoe's own (`pallas_kernels.planning`). Planning is timed too, on the device that
jax has.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.store import markdown
from jmoe.parallel import placement
from pallas_kernels import planning

NUM_TRACES, SEED = 300, 18
ACCURACIES = (0.85, 0.60)  # of predictions by counts
NUM_REPLICAS, PER_PAIR = 8, 2
MEDIANS, CALLS = 5, 400  # of planning

NUM_ROWS, TOP_K = 2048, 8
LEAST_IMBALANCE = 1.5
DRIFT = 0.5  # of the logarithm of popularity: the part that the past does not know
MOST = 0.9  # an expert is chosen by that part of a device's rows at most
BISECTIONS = 40


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
        for _ in range(BISECTIONS):
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
    for _ in range(2 * BISECTIONS):
        scale = np.sqrt(np.maximum(low, 1e-6) * high)
        few = np.minimum(MOST, scale[:, None] * share).sum(axis=1) < TOP_K
        low, high = np.where(few, scale, low), np.where(few, high, scale)
    return np.minimum(MOST, high[:, None] * share)


# ---- Ways to balance ----

Load = np.ndarray


class Step(NamedTuple):
    """One step of one layer; arrays are visits [G, E]."""

    made: np.ndarray
    predicted: np.ndarray
    history: np.ndarray
    num_replicas: int = NUM_REPLICAS
    per_pair: int | None = PER_PAIR
    seed: int = 0

    @property
    def hosts(self) -> np.ndarray:
        """The home placement [E, G]: ranges of ids."""
        devices, experts = self.made.shape
        return np.asarray(placement.contiguous(1, experts, devices).hosts[0])


def none(step: Step) -> Load:
    """Returns every visit at its expert's home."""
    return step.made.sum(axis=0) @ step.hosts


def eplb(step: Step) -> Load:
    """Balances as EPLB does: experts and replicas are placed anew by past load; a visit goes to a
    replica at random.
    """
    devices, experts = step.made.shape
    past = step.history.sum(axis=0)
    room = placement.slots_per_layer(experts, devices, step.num_replicas)
    copies = np.ones(experts, np.int64)
    for _ in range(devices * step.num_replicas):
        per_copy = np.where(copies < devices, past / copies, -1)
        copies[np.argmax(per_copy)] += 1
    hosts, total = np.zeros((experts, devices), bool), np.zeros(devices)
    for expert in np.argsort(-past / copies, kind="stable"):
        for _ in range(copies[expert]):
            free = (hosts.sum(axis=0) < room) & ~hosts[expert]
            if free.any():
                to = np.argmin(np.where(free, total, np.inf))
                hosts[expert, to] = True
                total[to] += past[expert] / copies[expert]
    rng = np.random.default_rng(step.seed)
    visits = step.made.sum(axis=0)
    drawn = [rng.multinomial(n, h / h.sum()) for n, h in zip(visits, hosts, strict=True)]
    return np.sum(drawn, axis=0)


_replicas = jax.jit(planning.plan_replicas, static_argnames=("num_replicas", "per_pair"))
_shard = jax.jit(planning.shard_visits)


def libra(step: Step) -> Load:
    """Balances as Libra does: replicas by the predicted visits, shares by those that were made."""
    limits = {"num_replicas": step.num_replicas, "per_pair": step.per_pair}
    replicas = _replicas(step.predicted, step.hosts, **limits)
    home = step.hosts.argmax(axis=1).astype(np.int32)
    shares = _shard(step.made, step.hosts | replicas, home=home)
    return (np.asarray(shares.kept) + np.asarray(shares.remote)).sum(axis=1)


def libra_as_printed(step: Step) -> Load:
    """Balances by Libra's Algorithms 1 and 2 as the paper prints them."""
    sizes = step.num_replicas, step.per_pair
    held = printed_replicas(step.predicted, step.hosts, *sizes)
    return printed_shares(step.made, held, step.hosts.argmax(axis=1)).sum(axis=1)


def printed_replicas(
    counts: np.ndarray,
    hosts: np.ndarray,
    num_replicas: int,
    per_pair: int | None = None,
    alpha: float = 0.5,
) -> np.ndarray:
    """Returns hosts and replicas [E, G] by Algorithm 1; a copy that cannot be placed ends it."""
    devices, home, held = len(counts), hosts.argmax(axis=1), hosts.copy()
    slots = np.full(devices, num_replicas)
    pairs = np.full((devices, devices), num_replicas if per_pair is None else per_pair)

    def copy(expert: int, to: int) -> None:
        held[expert, to] = True
        slots[to] -= 1
        pairs[home[expert], to] -= 1

    num_local = int(alpha * num_replicas)
    for device in range(devices):
        for _ in range(num_local):
            wanted = np.where(~held[:, device] & (pairs[home, device] > 0), counts[device], 0)
            if wanted.max() > 0:
                copy(int(wanted.argmax()), device)
    visits, mean = _at_home(counts, held, home), counts.sum() // devices
    load, others = visits.sum(axis=1), np.where(held.T, 0, counts).sum(axis=0)
    for _ in range((num_replicas - num_local) * devices):
        source = int(load.argmax())
        remote = np.where(home == source, others, 0)
        expert = int(remote.argmax())
        can = ~held[expert] & (slots > 0) & (pairs[source] > 0)
        target = int(np.where(can, load, np.inf).argmin())
        gained = counts[target, expert]
        overloaded = load[source] > mean and remote[expert] > 0
        if not (overloaded and can[target] and gained <= mean - load[target]):
            break
        others[expert] -= gained
        load[source] -= gained
        load[target] += gained
        copy(expert, target)
    return held


def printed_shares(counts: np.ndarray, held: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Returns the visits [G, E] that each device computes by Algorithm 2: of other devices' rows
    alone some move.
    """
    own = np.where(held.T, counts, 0)
    movable = _at_home(counts, held, home) - own
    mean = -(-counts.sum() // len(counts))
    stuck = np.zeros(len(counts), bool)  # since the last move
    while True:
        load = (own + movable).sum(axis=1)
        source = int(np.where(stuck, -1, load).argmax())
        if stuck[source] or load[source] <= mean:
            return own + movable
        lowest = np.where(held, load, np.inf).min(axis=1)
        below = np.where(lowest < mean, movable[source], 0)
        expert = int(below.argmax())
        amount = int(min(below[expert], max(0, mean - lowest[expert])))
        if amount == 0:
            stuck[source] = True
            continue
        target = int(np.where(held[expert], load, np.inf).argmin())
        movable[source, expert] -= amount
        movable[target, expert] += amount
        stuck[:] = False


def _at_home(counts: np.ndarray, held: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Returns visits [G, E] at their own device where it holds the expert, else at its home."""
    own = np.where(held.T, counts, 0)
    at_home = home == np.arange(len(counts))[:, None]
    return own + np.where(at_home, (counts - own).sum(axis=0), 0)


def libra_one_a_pair(step: Step) -> Load:
    """Balances as `libra` does, with one replica from each other device."""
    return libra(step._replace(num_replicas=len(step.made) - 1, per_pair=1))


STRATEGIES: dict[str, Callable[[Step], Load]] = {
    "none": none,
    "EPLB": eplb,
    "Libra, both as printed": libra_as_printed,
    "Libra, modelled": libra,
    "Libra, one a pair": libra_one_a_pair,
}


def synthetic(dry: bool) -> dict[str, Any]:
    """Returns the imbalance by accuracy in percent and strategy."""
    traces = draw(3 if dry else NUM_TRACES, SEED)
    return {str(round(100 * accuracy)): by_strategy(traces, accuracy) for accuracy in ACCURACIES}


def by_strategy(traces: list[Trace], accuracy: float) -> dict[str, dict[str, float]]:
    """Returns median and P99 of the imbalance by strategy."""
    found = {}
    for name, balance in STRATEGIES.items():
        values = []
        for trace in traces:
            guess = trace.predicted(accuracy)
            step = Step(trace.made, guess, trace.history, seed=trace.number)
            values.append(imbalance(balance(step)))
        p50, p99 = np.quantile(values, [0.5, 0.99])
        found[name] = {"mean": float(np.mean(values)), "median": float(p50), "p99": float(p99)}
    return found


@jax.jit
def _plan(expected, made, hosts):
    replicas = planning.plan_replicas(expected, hosts, num_replicas=NUM_REPLICAS, per_pair=PER_PAIR)
    return planning.shard_visits(made, hosts | replicas, home=planning.home_of(hosts)), replicas


def plan_time(dry: bool) -> dict[str, float]:
    """Returns the milliseconds of a call that waits for its result: the best of some medians.

    One program plans the next layer's replicas and this one's shares.
    """
    devices, experts, calls = (4, 32, 3) if dry else (8, 128, CALLS)
    hosts = jnp.asarray(placement.contiguous(1, experts, devices).hosts[0])
    args = [
        (jnp.asarray(trace.predicted(ACCURACIES[0])), jnp.asarray(trace.made), hosts)
        for trace in draw(8, SEED, devices, experts)
    ]
    medians = []
    for _ in range(MEDIANS):
        times = []
        for n in range(calls + len(args)):
            start = time.perf_counter()
            jax.block_until_ready(_plan(*args[n % len(args)]))
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times[len(args) :]))  # the first ones compile
    return {"ms": min(medians)}


PARTS: dict[str, Callable[[bool], Any]] = {
    "synthetic": synthetic,
    "planning": plan_time,
}


def table(found: dict[str, Any]) -> list[str]:
    """Returns the tables of every part that is there."""
    lines = []
    if by_accuracy := found.get("synthetic"):
        rows: list[list[Any]] = [[name] for name in STRATEGIES]
        for of in by_accuracy.values():
            for row in rows:
                row.append(f"{of[row[0]]['median']:.3f} / {of[row[0]]['p99']:.3f}")
        heads = [f"{accuracy} % right" for accuracy in by_accuracy]
        lines += markdown(["fullest device over mean, median / P99", *heads], rows)
    if "planning" in found:
        lines += ["", "planning {ms:.3f} ms".format(**found["planning"])]
    return lines
