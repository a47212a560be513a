"""What the bundled model's routers choose on its own tasks, and what predictors make of it.

Letters: N rows of all prompts, L MoE layers, d model width, K picks a row, m experts, G devices.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from jmoe.model import layers_of
from jmoe.parallel import predictor
from jmoe.parallel.probe import Probe, fit_probe
from training.lookahead import routing_of

LENGTH, PROMPTS_AT_ONCE = 64, 20  # of one program; longer prompts are cut
BUILD = 0.5  # of the prompts, for the probe and Lina's table; the rest is measured on
PATH = 4  # layers back that Lina's paths go


@dataclass(frozen=True)
class Routing:
    """Rows of all prompts in one shuffled order, prompt by prompt."""

    x: np.ndarray  # [L, N, d] float32: before each layer's MoE block
    ids: np.ndarray  # [L, N, K] int32: chosen
    logits: np.ndarray  # [L, N, m] float32
    family: np.ndarray  # [N] of str
    built: np.ndarray  # [N] bool: of the prompts to learn from

    @property
    def num_experts(self) -> int:
        """m."""
        return self.logits.shape[2]


def capture(model: jmoe.Model, num_prompts: int, seed: int) -> Routing:
    """Runs the prompts of the bundled tasks through the model, layer by layer."""
    assert model.tokenizer is not None
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    order = np.random.default_rng(seed).permutation(len(items))[:num_prompts]
    prompts = [(items[i]["family"], model.tokenizer.encode(items[i]["prompt"])) for i in order]
    parts, family, built = [], [], []
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        some = [(name, tokens[:LENGTH]) for name, tokens in prompts[first:][:PROMPTS_AT_ONCE]]
        tokens = np.zeros((PROMPTS_AT_ONCE, LENGTH), np.int32)
        for i, (_, ids) in enumerate(some):
            tokens[i, : len(ids)] = ids
        lengths = np.array([len(ids) for _, ids in some] + [0] * (PROMPTS_AT_ONCE - len(some)))
        real = (np.arange(LENGTH)[None] < lengths[:, None]).ravel()
        found = routing_of(model.config, model.weights, jnp.asarray(tokens))
        stacked = map(np.stack, zip(*found, strict=True))
        parts.append([array[:, real] for array in stacked])
        for i, (name, ids) in enumerate(some):
            family += [name] * len(ids)
            built += [first + i < BUILD * len(prompts)] * len(ids)
    x, ids, logits = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return Routing(x, ids, logits, np.array(family), np.array(built))


def predictions(model: jmoe.Model, routing: Routing) -> dict[str, np.ndarray]:
    """Returns choices [L, N, K] by predictor; of layer 0, which nothing precedes, they are -1."""
    found: dict[str, list[np.ndarray]] = defaultdict(lambda: [np.full_like(routing.ids[0], -1)])
    layers = [layer for layer, _ in layers_of(model.config, model.params)]
    top_k = routing.ids.shape[2]
    ahead = jax.jit(partial(predictor.lookahead, model.config))
    fit, choose = jax.jit(fit_probe), jax.jit(partial(_choices, top_k=top_k))
    for n in range(1, len(layers)):
        x = jnp.asarray(routing.x[n - 1])
        found["the paper's"].append(np.asarray(ahead(layers[n], x)))
        build = routing.built
        probe = fit(x[build], jnp.asarray(routing.logits[n][build]))
        found["probe"].append(np.asarray(choose(probe, x)))
        found["Lina's table"].append(_by_path(routing, n))
    return {name: np.stack(ids) for name, ids in found.items()}


def _choices(probe: Probe, x: jax.Array, *, top_k: int) -> jax.Array:
    return probe.choices(x, top_k)


def _by_path(routing: Routing, layer: int) -> np.ndarray:
    """Returns lina: the experts seen most after the row's path, its first picks in the layers
    before.

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


def visits(ids: np.ndarray, devices: int, num_experts: int) -> np.ndarray:
    """Returns visits [G, m] of rows [n, K], the first n/G of which are the first device's, and so
    on.
    """
    counts = np.zeros((devices, num_experts), np.int32)
    device = np.repeat(np.arange(devices), len(ids) // devices)
    np.add.at(counts, (device[:, None], ids), 1)
    return counts
