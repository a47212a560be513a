"""Balances what the bundled model's routers choose on its own tasks, by several predictors.

Letters: N rows of all prompts, L MoE layers, d model width, K picks a row, m experts, G devices.
"""

import json
from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from benchmarks.mesh.balance import NUM_REPLICAS, SEED, Step, libra, none
from benchmarks.mesh.traces import imbalance
from jmoe.model import layers_of
from jmoe.parallel import predictor
from jmoe.parallel.probe import Probe, fit_probe
from training.lookahead import routing_of

NUM_PROMPTS, ROWS = 2000, 128  # rows a device in a batch
LENGTH, PROMPTS_AT_ONCE = 64, 20  # of one program; longer prompts are cut
BUILD = 0.5  # of the prompts, for the probe and Lina's table; the rest is measured on
PATH = 4  # layers back that Lina's paths go
DEVICES = 8


class Routing(NamedTuple):
    """Rows of all prompts in one shuffled order, prompt by prompt."""

    x: np.ndarray  # [L, N, d] float32: before each layer's MoE block
    ids: np.ndarray  # [L, N, K] int32: chosen
    logits: np.ndarray  # [L, N, m] float32
    built: np.ndarray  # [N] bool: of the prompts to learn from


def capture(model: jmoe.Model, num_prompts: int, seed: int) -> Routing:
    """Runs the prompts of the bundled tasks through the model, layer by layer."""
    assert model.tokenizer is not None
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    order = np.random.default_rng(seed).permutation(len(lines))[:num_prompts]
    prompts = [model.tokenizer.encode(json.loads(lines[i])["prompt"]) for i in order]
    parts, built = [], []
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        some = [ids[:LENGTH] for ids in prompts[first:][:PROMPTS_AT_ONCE]]
        tokens = np.zeros((PROMPTS_AT_ONCE, LENGTH), np.int32)
        for i, ids in enumerate(some):
            tokens[i, : len(ids)] = ids
            built += [first + i < BUILD * len(prompts)] * len(ids)
        lengths = np.array([len(ids) for ids in some] + [0] * (PROMPTS_AT_ONCE - len(some)))
        real = (np.arange(LENGTH)[None] < lengths[:, None]).ravel()
        found = routing_of(model.config, model.weights, jnp.asarray(tokens))
        parts.append([np.stack(arrays)[:, real] for arrays in zip(*found, strict=True)])
    x, ids, logits = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return Routing(x, ids, logits, np.array(built))


def predictions(model: jmoe.Model, routing: Routing) -> dict[str, np.ndarray]:
    """Returns choices [L, N, K] by predictor; of layer 0, which nothing precedes, they are -1."""
    found: dict[str, list[np.ndarray]] = defaultdict(lambda: [np.full_like(routing.ids[0], -1)])
    layers = [layer for layer, _ in layers_of(model.config, model.params)]
    top_k = routing.ids.shape[2]
    ahead = jax.jit(partial(predictor.lookahead, model.config))
    fit, choose = jax.jit(fit_probe), jax.jit(partial(Probe.choices, top_k=top_k))
    for n in range(1, len(layers)):
        x = jnp.asarray(routing.x[n - 1])
        found["the paper's"].append(np.asarray(ahead(layers[n], x)))
        build = routing.built
        probe = fit(x[build], jnp.asarray(routing.logits[n][build]))
        found["probe"].append(np.asarray(choose(probe, x)))
        found["Lina's table"].append(_by_path(routing, n))
    return {name: np.stack(ids) for name, ids in found.items()}


def _by_path(routing: Routing, layer: int) -> np.ndarray:
    """Returns Lina's choices: the experts seen most after the row's path, its first picks in the
    layers before.

    A path that the table has not is shortened from its older end.
    """
    num_rows, top_k = routing.ids.shape[1:]
    first = routing.ids[max(0, layer - PATH) : layer, :, 0].T
    paths = [[tuple(row[-n:]) for n in range(len(row), 0, -1)] + [()] for row in first.tolist()]
    table: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in np.flatnonzero(routing.built):
        for path in paths[row]:
            table[path].update(routing.ids[layer, row].tolist())
    common = {}
    for path, seen in table.items():
        if len(seen) >= top_k:
            common[path] = [e for e, _ in sorted(seen.items(), key=lambda x: (-x[1], x[0]))[:top_k]]
    out = [next(common[p] for p in paths[row] if p in common) for row in range(num_rows)]
    return np.array(out, np.int32)


def visits(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Returns visits [G, m] of rows [n, K], the first n/G of which are the first device's, and so
    on.
    """
    counts = np.zeros((DEVICES, num_experts), np.int32)
    device = np.repeat(np.arange(DEVICES), len(ids) // DEVICES)
    np.add.at(counts, (device[:, None], ids), 1)
    return counts


def measure(num_prompts: int = NUM_PROMPTS, rows_per_device: int = ROWS) -> dict[str, Any]:
    """Returns mean imbalances without balancing and by replicas and predictor, and accuracies.

    Of batches of rows to measure on, in order, in every layer but the first, which nothing
    predicts.
    """
    model = jmoe.load("bundled", dtype="float32")
    routing = capture(model, num_prompts, SEED)
    guesses = predictions(model, routing)
    experts, test = routing.logits.shape[2], np.flatnonzero(~routing.built)
    size = DEVICES * rows_per_device
    steps = []
    for layer in range(1, len(routing.ids)):
        for n in range(len(test) // size):
            batch = test[n * size : (n + 1) * size]
            guess = {name: visits(ids[layer][batch], experts) for name, ids in guesses.items()}
            steps.append((visits(routing.ids[layer][batch], experts), guess))

    def mean(by: str, num_replicas: int) -> float:
        cases = (Step(made, of[by], made, made, num_replicas, None) for made, of in steps)
        return float(np.mean([imbalance(libra(case)) for case in cases]))

    accuracy = jax.jit(predictor.count_accuracy)
    return {
        "none": float(
            np.mean([imbalance(none(Step(made, made, made, made))) for made, _ in steps])
        ),
        "imbalance": {n: {by: mean(by, n) for by in guesses} for n in (NUM_REPLICAS, 2)},
        "count_accuracy": {
            by: float(np.mean([accuracy(of[by], made) for made, of in steps])) for by in guesses
        },
    }
