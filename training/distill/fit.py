"""Training of one layer's united experts: all groups at once, over all devices."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.activation import SILU, Activation
from training.distill.config import DistillConfig
from training.distill.expert import Experts, Stacked
from training.distill.objectives import (
    brownout_error,
    degraded_to,
    equation_4_error,
    mean_answers,
)
from training.distill.parallel import data_mesh, loss_and_grads, on_all_rows, on_host, over_devices
from training.distill.stream import LayerRows

HELD_OUT = 2**31 - 1
"""Number of a step that is never taken: the key of what is measured."""

Note = Callable[[int, int, dict[str, float]], None]
"""`(steps done, steps in all, losses by name)`."""


class DistillError(RuntimeError):
    """A distillation that cannot go on; what was finished is kept."""


def membership(groups: Int[np.ndarray, " m"]) -> Float[np.ndarray, "U m"]:
    """Returns the averaging matrix: row j holds 1/|group j| at its members."""
    one_hot = (groups[None] == np.arange(groups.max() + 1)[:, None]).astype(np.float32)
    return one_hot / one_hot.sum(axis=1, keepdims=True)


class Problem(NamedTuple):
    """One layer and way: what every step reads and none changes."""

    rows: LayerRows  # all training rows
    groups: Int[Array, "m"]
    members: Stacked  # routed experts; only equation 4 asks them
    average: Float[Array, "U m"]


def _share(
    params: Stacked,
    problem: Problem,
    index: Int[Array, "r"],
    key: Array,
    config: DistillConfig,
    activation: Activation,
) -> Array:
    """Returns one device's part of the relative error; of equation 4, mean over groups."""
    rows, united = jax.tree.map(lambda leaf: leaf[index], problem.rows), Experts(params, activation)
    h = rows.h.astype(config.dtype)
    if config.objective == "equation4":
        target = mean_answers(problem.members, problem.average, rows.h, config.dtype, activation)
        error, scale = equation_4_error(united, h, target)
    else:
        draw = partial(
            degraded_to, groups=problem.groups, key=key, decode_batch=config.decode_batch
        )
        objective, united_ids = config.objective, on_all_rows(draw, rows.ids)
        error, scale = brownout_error(united, rows._replace(h=h), united_ids, objective=objective)
    # Over all devices, so that the parts add up; it says nothing of the parameters.
    return jnp.mean(error / jnp.maximum(over_devices(scale), 1e-12))


def optimizer(config: DistillConfig, peak: float, steps: int) -> optax.GradientTransformation:
    """Makes the optimizer that the settings name, with clipping; its learning rate rises over a
    short warmup to `peak`, and falls to 3 % of it unless the schedule is constant.
    """
    warmup, last = min(20, steps // 4), 0.03 * peak
    steps = max(steps, warmup + 1)
    first = 0.0 if warmup else peak
    if config.schedule == "cosine":
        rate = optax.warmup_cosine_decay_schedule(first, peak, warmup, steps, last)
    else:
        end = last if config.schedule == "linear" else peak
        parts = [(first, peak, warmup), (peak, end, steps - warmup)]
        rate = optax.join_schedules([optax.linear_schedule(*part) for part in parts], [warmup])
    makers = {
        "adam": partial(optax.adam, b2=0.98),
        "adamw": partial(optax.adamw, b2=0.98, weight_decay=0.01),
        "lion": optax.lion,
        "sgd": partial(optax.sgd, momentum=0.9),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), makers[config.optimizer](rate))


def _optimizer(config: DistillConfig, d_model: int) -> optax.GradientTransformation:
    return optimizer(config, config.rate(d_model), config.steps)


@partial(jax.jit, static_argnames=("config", "activation", "mesh", "count"), donate_argnums=(0, 1))
def _steps(
    params: Stacked,
    state: Any,
    problem: Problem,
    first: Int[Array, ""],
    key: Array,
    config: DistillConfig,
    activation: Activation,
    mesh: Mesh,
    count: int,
) -> tuple[Stacked, Any, Array]:
    """Runs `count` optimizer steps from step `first`; randomness depends on the step alone."""
    num_rows, d_model = problem.rows.h.shape
    of_config = _optimizer(config, d_model)

    def step(carry: Any, number: Array) -> tuple[Any, Array]:
        params, state = carry
        pick, plan = jax.random.split(jax.random.fold_in(key, number))
        index = jax.random.randint(pick, (config.batch,), 0, num_rows)
        share = partial(_share, config=config, activation=activation)
        loss, grads = loss_and_grads(share, mesh, params, problem, index, plan)
        updates, state = of_config.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    numbers = first + jnp.arange(count, dtype=jnp.int32)
    (params, state), losses = jax.lax.scan(step, (params, state), numbers)
    return params, state, jnp.mean(losses)


@partial(jax.jit, static_argnames=("config", "activation", "mesh"))
def _measure(
    params: Stacked,
    held_out: Problem,
    key: Array,
    config: DistillConfig,
    activation: Activation,
    mesh: Mesh,
) -> Float[Array, ""]:
    """Returns relative error on the held-out rows, always under the same S2 sets."""
    num_rows = held_out.rows.h.shape[0]
    block = math.lcm(config.decode_batch, mesh.devices.size)
    size = -(-num_rows // block) * block
    index = jnp.arange(size, dtype=jnp.int32) % num_rows
    share = partial(_share, config=config, activation=activation)
    return loss_and_grads(share, mesh, params, held_out, index, key)[0]


class Fit(NamedTuple):
    """United experts of one layer and way, and their relative error on held-out rows."""

    params: Stacked
    error_before: float
    error_after: float
    steps: int


def fit_layer(
    start: dict[str, np.ndarray],
    members: Stacked,
    groups: Int[np.ndarray, " m"],
    rows: LayerRows,
    key: Array,
    config: DistillConfig,
    note: Note = lambda done, total, losses: None,
    activation: Activation = SILU,
) -> Fit:
    """Trains one layer's united experts from `start`; keeps the best on held-out rows.

    Raises DistillError where the loss is not finite.
    """
    mesh = data_mesh()
    training, held_out = _split(rows, members, groups, config, mesh)
    params, state = _begin(start, config, mesh)
    measure = partial(
        _measure,
        held_out=held_out,
        key=jax.random.fold_in(key, HELD_OUT),
        config=config,
        activation=activation,
        mesh=mesh,
    )
    before = best_error = _finite(float(measure(params)), 0, config)
    best, since, done = on_host(params), 0, 0  # a copy: the steps donate
    while done < config.steps:
        count = min(config.eval_every, config.steps - done)
        params, state, loss = _steps(
            params, state, training, jnp.int32(done), key, config, activation, mesh, count
        )
        done += count
        _finite(float(loss), done, config)
        error = _finite(float(measure(params)), done, config)
        note(done, config.steps, {"loss": float(loss), "held-out": error})
        since = 0 if error < 0.999 * best_error else since + 1
        if error < best_error:
            best, best_error = on_host(params), error
        if config.patience and since >= config.patience:
            note(config.steps, config.steps, {})
            break
    return Fit(best, before, best_error, done)


def time_step(
    start: dict[str, np.ndarray],
    members: Stacked,
    groups: Int[np.ndarray, " m"],
    rows: LayerRows,
    key: Array,
    config: DistillConfig,
    activation: Activation = SILU,
) -> float:
    """Returns the seconds of one optimizer step of `fit_layer`, over two that compile nothing."""
    mesh = data_mesh()
    training, _ = _split(rows, members, groups, config, mesh)
    params, state = _begin(start, config, mesh)
    began = 0.0
    for first in (0, 2):
        began = time.perf_counter()
        params, state, _ = jax.block_until_ready(
            _steps(params, state, training, jnp.int32(first), key, config, activation, mesh, 2)
        )
    return (time.perf_counter() - began) / 2


def _begin(start: dict[str, np.ndarray], config: DistillConfig, mesh: Mesh) -> tuple[Stacked, Any]:
    """Returns parameters and the optimizer's state before the first step, on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put({k: jnp.asarray(v, jnp.float32) for k, v in start.items()}, whole)
    init = _optimizer(config, start["down"].shape[-1]).init
    return params, jax.device_put(init(params), whole)


def _split(
    rows: LayerRows,
    members: Stacked,
    groups: Int[np.ndarray, " m"],
    config: DistillConfig,
    mesh: Mesh,
) -> tuple[Problem, Problem]:
    """Splits rows, by the seed, into those to train on and those to measure on."""
    num_rows = len(rows.h)
    order = np.random.default_rng(config.seed).permutation(num_rows)
    cut = max(1, round(config.held_out * num_rows))
    whole = NamedSharding(mesh, PartitionSpec())

    def problem(own: np.ndarray) -> Problem:
        taken = LayerRows(*jax.device_put([np.asarray(a)[own] for a in rows], whole))
        used = members if config.objective == "equation4" else {}
        rest = (np.asarray(groups, np.int32), used, membership(groups))
        return Problem(taken, *jax.device_put(rest, whole))

    return problem(order[cut:]), problem(order[:cut])


def _finite(loss: float, step: int, config: DistillConfig) -> float:
    if not np.isfinite(loss):
        rate = config.learning_rate or "its default"
        raise DistillError(
            f"the loss is {loss} after step {step}: lower the learning rate ({rate} now) or look "
            "for overflow in the model's activations"
        )
    return loss
