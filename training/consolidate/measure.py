"""How two models' experts at a position differ: in weights, and in outputs for what is routed
there.

One MoE layer of every model is in memory at a time.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.experts import ExpertPool
from jmoe.layers import Layers
from pallas_kernels.activation import Activation
from training.distill.stream import LayerRows, before_layers, each_visit, run_layer
from training.packing import Batch

ROWS = 2048
"""Captured rows that a program takes at a time."""

Advance = Callable[[int], None]
"""Called with the number of model layers done since the last call."""


@dataclass(frozen=True)
class Differences:
    """Differences of all MoE layers' experts, by pair of models (i, j), layer and expert.

    `distances` are L2 norms between weights, symmetric. `costs[i, j]` is what model i loses where
    it uses model j's expert: over model i's own rows that its own router sends there, the squared
    gate weight times the squared error of the output, over the squared length of the row's residual
    stream behind the layer; summed, and divided by the number of all rows, routed there or not. So
    the costs of a layer add up to the mean relative squared error that it adds to a row. None
    without data.
    """

    distances: Float[np.ndarray, "N N L m"]
    costs: Float[np.ndarray, "N N L m"] | None


def measure(
    models: Sequence[Layers], data: Sequence[Batch] | None, advance: Advance = lambda done: None
) -> Differences:
    """Measures the differences; each model runs its own rows with its own weights.

    Args:
        models: of one architecture.
        data: each model's packed rows; None measures distances alone.
        advance: called as layers of models are done.

    Raises CheckpointError.
    """
    cfg = models[0].cfg
    distances, costs = [], []
    streams: list[np.ndarray] = []
    for model, rows in zip(models, data or (), strict=False):
        streams.append(before_layers(cfg, model.top(), rows))
    for index, is_moe in enumerate(cfg.moe_layers):
        pools, captured = [], []
        for number, model in enumerate(models):
            layer, experts = model.layer(index)
            if data is not None:
                found = run_layer(cfg, index, layer, experts, streams[number], data[number])
                captured.append(found)
            pools.append(experts)
            advance(1)
        if not is_moe:
            continue
        distances.append(_distances(pools))
        if data is not None:
            ends = [s[rows.items > 0] for s, rows in zip(streams, data, strict=True)]
            costs.append(_costs(captured, ends, pools, cfg.activation))
    return Differences(np.stack(distances, axis=2), np.stack(costs, axis=2) if costs else None)


def _distances(pools: Sequence[ExpertPool]) -> Float[np.ndarray, "N N m"]:
    count, experts = len(pools), pools[0].num_slots
    found = np.zeros((count, count, experts), np.float32)
    for i in range(count):
        for j in range(i + 1, count):
            found[i, j] = found[j, i] = np.asarray(_distance(pools[i], pools[j]))
    return found


@jax.jit
def _distance(one: ExpertPool, other: ExpertPool) -> Float[Array, " m"]:
    def squared(a: Array, b: Array) -> Array:
        error = (a.astype(jnp.float32) - b.astype(jnp.float32)) ** 2
        return jnp.sum(error.reshape(error.shape[0], -1), axis=1)

    parts = jax.tree.leaves(jax.tree.map(squared, one, other))
    return jnp.sqrt(functools.reduce(jnp.add, parts))


def _costs(
    captured: Sequence[LayerRows],
    ends: Sequence[np.ndarray],
    pools: Sequence[ExpertPool],
    activation: Activation,
) -> Float[np.ndarray, "N N m"]:
    count, experts = len(pools), pools[0].num_slots
    found = np.zeros((count, count, experts), np.float64)
    for i, (rows, end) in enumerate(zip(captured, ends, strict=True)):
        weights = rows.weights / np.linalg.norm(end, axis=1, keepdims=True)
        for start in range(0, len(rows.h), ROWS):
            part = [
                _filled(array[start : start + ROWS])
                for array in (rows.h, rows.ids, weights, rows.outputs)
            ]
            for j, pool in enumerate(pools):
                if j != i:
                    errors = _visited_errors(*part, pool, experts, activation)
                    found[i, j] += np.asarray(errors)
        found[i] /= len(rows.h)
    return found.astype(np.float32)


def _filled(rows: np.ndarray) -> Array:
    """Pads with rows of zeros up to ROWS: one program serves all. Their weights are zero, too."""
    return jnp.asarray(np.pad(rows, [(0, ROWS - len(rows))] + [(0, 0)] * (rows.ndim - 1)))


@functools.partial(jax.jit, static_argnames=("num_experts", "activation"))
def _visited_errors(
    h: Float[Array, "T d"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    outputs: Float[Array, "T K d"],
    pool: ExpertPool,
    num_experts: int,
    activation: Activation,
) -> Float[Array, " m"]:
    other = each_visit(h, ids, pool, activation).astype(jnp.float32)
    error = jnp.sum((outputs.astype(jnp.float32) - other) ** 2, axis=-1) * weights**2
    return jnp.zeros(num_experts, jnp.float32).at[ids.reshape(-1)].add(error.reshape(-1))
