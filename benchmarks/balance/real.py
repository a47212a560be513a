"""Imbalance and accuracy on the bundled model's real routing, mixed and by task family."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jmoe
from benchmarks.balance import routing, strategies
from benchmarks.balance.strategies import STRATEGIES, Case
from benchmarks.balance.traces import imbalance
from jmoe.parallel import predictor

PREDICTORS = ("Lina's table", "the paper's", "corrected", "probe", "corrected probe", "perfect")
CORRECTS = {"corrected": "the paper's", "corrected probe": "probe"}
SERVED = "probe"  # what the strategies that need one predictor are given
PAPERS = "the paper's"


# Compiled, and so fed with NumPy's arrays.
_corrected = jax.jit(lambda fix, guess, made: (fix.of(guess), fix.seen(guess, made)))
_count_accuracy = jax.jit(predictor.count_accuracy)
_pick_accuracy = jax.jit(predictor.pick_accuracy)


@dataclass(frozen=True)
class Step:
    """One layer of one batch: visits made, predicted by each predictor, and of the past."""

    layer: int
    batch: int
    made: np.ndarray
    predicted: dict[str, np.ndarray]
    history: np.ndarray

    def case(self, by: str, num_replicas: int, per_pair: int | None) -> Case:
        """For a strategy, with predictor `by`."""
        table = self.predicted["Lina's table"]
        guess, seed = self.predicted[by], 1000 * self.layer + self.batch
        return Case(self.made, guess, table, self.history, num_replicas, per_pair, seed)


def steps(
    found: routing.Routing,
    guesses: dict[str, np.ndarray],
    chosen: np.ndarray,
    rows_per_device: int,
    devices: int = 8,
) -> list[Step]:
    """Batches of the `chosen` rows in order, every layer but the first, which nothing predicts.

    Corrections learn from the build prompts' batches first, as they would while serving.
    """
    size, experts = devices * rows_per_device, found.num_experts
    learnt = np.flatnonzero(found.built)
    learnt = learnt[: len(learnt) // size * size]
    rows = np.concatenate([learnt, chosen]).reshape(-1)
    out = []
    for layer in range(1, found.ids.shape[0]):
        history = np.bincount(found.ids[layer][found.built].ravel(), minlength=experts)
        history = np.tile(history / devices, (devices, 1))
        fixes = dict.fromkeys(CORRECTS, predictor.Correction.none(experts))
        for n in range(len(rows) // size):
            batch = rows[n * size : (n + 1) * size]
            made = routing.visits(found.ids[layer][batch], devices, experts)
            guess = {
                name: routing.visits(ids[layer][batch], devices, experts)
                for name, ids in guesses.items()
            }
            for name, base in CORRECTS.items():
                fixed, fixes[name] = _corrected(fixes[name], guess[base], made)
                guess[name] = np.asarray(fixed)
            guess["perfect"] = made
            if n * size >= len(learnt):
                out.append(Step(layer, n - len(learnt) // size, made, guess, history))
    return out


def by_predictor(found: list[Step], num_replicas: int, per_pair: int | None) -> dict[str, Any]:
    """Returns the imbalance with each predictor, and the part of perfect prediction's gain; two
    planners.
    """
    nothing = np.mean([imbalance(strategies.none(s.case(SERVED, 0, None))) for s in found])
    out: dict[str, Any] = {"none": float(nothing)}
    for name in ("Libra, both as printed", "Libra, modelled"):
        mean = {}
        for by in PREDICTORS:
            cases = [s.case(by, num_replicas, per_pair) for s in found]
            mean[by] = summary([imbalance(STRATEGIES[name](case)) for case in cases])
        gain = nothing - mean["perfect"]["mean"]
        for by in PREDICTORS:
            mean[by]["gain"] = float((nothing - mean[by]["mean"]) / gain)
        out[name] = mean
    out["count_accuracy"] = {
        by: float(np.mean([_count_accuracy(s.predicted[by], s.made) for s in found]))
        for by in PREDICTORS
    }
    return out


def by_strategy(found: list[Step], num_replicas: int, per_pair: int | None) -> dict[str, Any]:
    """Returns the imbalance of each strategy; Libra as printed has the paper's predictor, ours the
    probe.
    """
    out = {}
    for name, balance in STRATEGIES.items():
        by = SERVED if name == "Libra, modelled" else PAPERS
        out[name] = summary([imbalance(balance(s.case(by, num_replicas, per_pair))) for s in found])
    return out


def accuracy_by_family(
    found: routing.Routing, guesses: dict[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Returns the paper's Table 1: share of each row's experts that were predicted, over all
    layers.
    """
    out: dict[str, dict[str, float]] = {}
    for family in [*sorted(set(found.family.tolist())), "all"]:
        rows = ~found.built & ((found.family == family) | (family == "all"))
        made = found.ids[1:, rows].reshape(-1, found.ids.shape[2])
        out[family] = {
            name: float(_pick_accuracy(ids[1:, rows].reshape(made.shape), made))
            for name, ids in guesses.items()
        }
    return out


def summary(values: list[float]) -> dict[str, Any]:
    """Returns median, mean, P99, worst, and how many there were."""
    return {
        "median": float(np.median(values)),
        "mean": float(np.mean(values)),
        "p99": float(np.quantile(values, 0.99)),
        "worst": float(np.max(values)),
        "steps": len(values),
    }


def measure(num_prompts: int, seed: int, rows_per_device: int, num_replicas: int) -> dict[str, Any]:
    """Returns the everything that `benchmarks/results/balance.json` says of the bundled model."""
    model = jmoe.load("bundled", dtype="float32")
    found = routing.capture(model, num_prompts, seed)
    guesses = routing.predictions(model, found)
    test = np.flatnonzero(~found.built)
    mixed = steps(found, guesses, test, rows_per_device)
    families = {}
    for family in sorted(set(found.family.tolist())):
        chosen = test[found.family[test] == family]
        some = steps(found, guesses, chosen, rows_per_device // 2)
        if some:
            families[family] = by_predictor(some, num_replicas, None)
    return {
        "prompts": num_prompts,
        "rows_per_device": rows_per_device,
        "num_replicas": num_replicas,
        "pick_accuracy": accuracy_by_family(found, guesses),
        "strategies": {str(bound): by_strategy(mixed, num_replicas, bound) for bound in (None, 2)},
        "predictors": {
            f"N={n}, bound {bound}": by_predictor(mixed, n, bound)
            for n, bound in ((num_replicas, None), (num_replicas, 2), (2, None))
        },
        "families": families,
        "stream": stream(mixed, num_replicas),
    }


def stream(found: list[Step], num_replicas: int) -> dict[str, list[float]]:
    """Returns the paper's Figure 9: imbalance of one layer step by step, families mixed."""
    layer = max(step.layer for step in found)
    out = {}
    for name in ("none", "EPLB", "Lina", "Libra, both as printed", "Libra, modelled"):
        by = SERVED if name == "Libra, modelled" else PAPERS
        cases = [s.case(by, num_replicas, None) for s in found if s.layer == layer]
        out[name] = [imbalance(STRATEGIES[name](case)) for case in cases]
    return out
