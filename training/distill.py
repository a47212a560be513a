"""Distillation of united experts (BrownoutServe, section IV-B, equation 4).

For each group of k consecutive experts of a layer, one expert of the same architecture is trained
on the layer's inputs to minimise `1/k * sum_i ||H_u - H_o,i||^2`. That sum equals
`||H_u - mean_i H_o,i||^2` plus a constant, so the target is the members' mean output. It starts
from the members' mean weights.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from safetensors.flax import save_file

from jmoe.api import Model, load
from jmoe.checkpoint import UNITED_FILE
from jmoe.experts import groups_by_index
from training.capture import Progress, capture


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Settings of a distillation; the defaults suit the bundled model on a CPU."""

    rows: int = 16_384
    steps: int = 400
    batch: int = 1024
    learning_rate: float = 3e-3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """Mean over groups of `||H_u - mean H_o||^2 / ||mean H_o||^2`, before and after training."""

    way: int
    layer: int
    error_before: float
    error_after: float


class UnitedExpert(nn.Module):
    """A SiLU-gated feed-forward network in the experts' architecture."""

    d_ff: int

    @nn.compact
    def __call__(self, h: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Expert output of every row, `[n, d]` in h's dtype."""
        init = nn.initializers.lecun_normal()
        gate_up = self.param("gate_up", init, (h.shape[-1], 2 * self.d_ff))
        down = self.param("down", init, (self.d_ff, h.shape[-1]))
        gate, up = jnp.split(h @ gate_up, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ down


Stacked = dict[str, Array]
"""`gate_up [U, d, 2f]` and `down [U, f, d]`: parameters of U experts."""


def apply_all(params: Stacked, h: Float[Array, "n d"]) -> Float[Array, "U n d"]:
    """Outputs of U experts on the same rows."""
    module = UnitedExpert(params["down"].shape[1])
    return cast(Array, jax.vmap(lambda p: module.apply({"params": p}, h))(params))


def membership(groups: Int[np.ndarray, " m"]) -> Float[np.ndarray, "U m"]:
    """Averaging matrix: row j holds 1/|group j| at its members."""
    one_hot = (groups[None] == np.arange(groups.max() + 1)[:, None]).astype(np.float32)
    return one_hot / one_hot.sum(axis=1, keepdims=True)


@jax.jit
def _targets(
    members: Stacked, average: Float[Array, "U m"], h: Float[Array, "c n d"]
) -> Float[Array, "U N d"]:
    """Mean member outputs over all rows; rows come in chunks to bound memory."""

    def chunk(rows: Array) -> Array:
        return jnp.einsum("um,mnd->und", average, apply_all(members, rows))

    out = jax.lax.map(chunk, h)
    return out.swapaxes(0, 1).reshape(average.shape[0], -1, h.shape[-1])


def equation_4(
    params: Stacked, h: Float[Array, "n d"], target: Float[Array, "U n d"]
) -> Float[Array, " U"]:
    """Each group's loss up to its constant: mean over rows of `||H_u - mean_i H_o,i||^2`."""
    return jnp.mean(jnp.sum((apply_all(params, h) - target) ** 2, axis=-1), axis=-1)


@partial(jax.jit, static_argnames="config")
def fit_groups(
    params: Stacked, h: Float[Array, "N d"], target: Float[Array, "U N d"], config: DistillConfig
) -> tuple[Stacked, Float[Array, ""], Float[Array, ""]]:
    """Train all united experts of a layer; they share each step's random rows.

    Returns the parameters and the relative error (see `LayerResult`) before and after.
    """
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps, 0.01)
    optimizer = optax.adam(schedule)
    energy = jnp.mean(jnp.sum(target**2, axis=-1), axis=-1)

    def loss(params: Stacked, rows: Array) -> Array:
        # Divided by the target's energy: groups of small outputs learn as fast as the others.
        return jnp.sum(equation_4(params, h[rows], target[:, rows]) / energy)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        rows = jax.random.randint(key, (config.batch,), 0, h.shape[0])
        updates, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
        return (optax.apply_updates(params, updates), state), None

    def error(params: Stacked) -> Array:
        probe = jnp.arange(min(4096, h.shape[0]))
        return jnp.mean(equation_4(params, h[probe], target[:, probe]) / energy)

    keys = jax.random.split(jax.random.key(config.seed), config.steps)
    (trained, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return trained, error(params), error(trained)


def distill_layer(
    members: Stacked, h: Float[Array, "N d"], groups: Int[np.ndarray, " m"], config: DistillConfig
) -> tuple[Stacked, float, float]:
    """United experts of one layer, float32, and their relative error before and after.

    Args:
        members: the layer's experts, `gate_up [m, d, 2f]` and `down [m, f, d]`, float32.
        h: the layer's captured inputs.
        groups: united expert of each member, counted from 0 without gaps.
        config: steps, batch, learning rate, seed.
    """
    average = jnp.asarray(membership(groups))
    start = {key: jnp.einsum("um,mab->uab", average, leaf) for key, leaf in members.items()}
    chunk = min(512, h.shape[0])
    h = h[: h.shape[0] // chunk * chunk]
    target = _targets(members, average, h.reshape(-1, chunk, h.shape[-1]))
    trained, before, after = fit_groups(start, h, target, config)
    return trained, float(before), float(after)


def distill(
    model_dir: Path,
    ways: Sequence[int],
    data: Path,
    out: Path,
    config: DistillConfig | None = None,
    progress: Progress | None = None,
) -> list[LayerResult]:
    """Distil united experts of every way and write `out/united.safetensors` (bfloat16).

    Args:
        model_dir: model directory, as `jmoe.load` takes it.
        ways: experts a group, one set of united experts each.
        data: JSON lines of tasks, or plain text; its rows are what the experts are imitated on.
        out: directory, made if absent; may be `model_dir`.
        config: settings; None for the defaults.
        progress: called with ("capture", rows, rows) and ("distill", layers, layers).

    Raises ValueError for a way that is not between 2 and the number of experts, repeated or absent
    ways, and unreadable data; and what `jmoe.load` raises.
    """
    config = config or DistillConfig()
    if not ways or len(set(ways)) != len(ways):
        raise ValueError(f"ways are {list(ways)}; give at least one, each once")
    model = load(model_dir, "float32", ways=())
    groups = {way: groups_by_index(model.config.num_experts, way) for way in ways}
    inputs = capture(model, data, config.rows, progress=progress)
    tensors: dict[str, Array] = {}
    results = []
    for way in ways:
        for layer, h in enumerate(inputs):
            united, before, after = distill_layer(
                _members(model, layer), jnp.asarray(h), groups[way], config
            )
            at = f"way{way}.layers.{layer}."
            tensors |= {at + key: leaf.astype(jnp.bfloat16) for key, leaf in united.items()}
            tensors[at + "groups"] = jnp.asarray(groups[way], jnp.int32)
            results.append(LayerResult(way, layer, before, after))
            if progress is not None:
                progress("distill", len(results), len(ways) * len(inputs))
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / UNITED_FILE)
    (out / UNITED_FILE).chmod(0o644)  # written as private by the library
    return results


def _members(model: Model, layer: int) -> Stacked:
    slots = model.table.slots[layer, : model.config.num_experts]
    return {"gate_up": model.pool.gate_up[slots], "down": model.pool.down[slots]}
