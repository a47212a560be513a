"""Models with random weights of any geometry, made on the device: for benchmarks and tests."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe import layout
from jmoe.api import Model
from jmoe.checkpoint import empty_pool
from jmoe.config import ModelConfig
from jmoe.experts import (
    ExpertPool,
    ExpertTable,
    UnitedExperts,
    groups_by_index,
    make_table,
    write_slots,
)
from jmoe.family import Family
from jmoe.parameter import Parameter
from jmoe.sharing import Sharing
from jmoe.weights import PoolHolder, ResidentWeights, Weights

NEVER_PICKED = 1e-4  # the least popular expert is never less likely than this


def random_model(
    cfg: ModelConfig,
    seed: int = 0,
    dtype: str = "float32",
    ways: Sequence[int] = (),
    skew: float = 0.0,
) -> Model:
    """Returns a model whose projections are normal with variance 1 / fan-in and whose norms are
    one.

    Drawn layer by layer, so that a device holds one copy of the experts and one layer more. United
    experts of `ways` are the means of their members, in host memory.

    Args:
        cfg: the geometry.
        seed: the same seed, geometry and dtype give the same weights on the same backend.
        dtype: of all weights.
        ways: united experts to make; the pool has slots for the largest.
        skew: of the router, see `popularity`; 0 is nearly uniform, the hardest case for brownout.

    Raises ValueError for a skew or a way that cannot be had.
    """
    kind = jnp.dtype(dtype)
    key = jax.random.key(seed, impl="rbg")  # a model is billions of draws; threefry is slower
    params_key, experts_key = jax.random.split(key)
    params = jax.jit(partial(random_params, cfg, dtype=kind, skew=skew))(params_key)
    layers, m = cfg.num_moe_layers, cfg.num_experts
    groups = {way: groups_by_index(m, way) for way in ways}
    united = {way: _host_arrays(cfg, int(groups[way].max()) + 1, kind) for way in ways}
    num_united = max((host["down"].shape[1] for host in united.values()), default=0)
    table = make_table(layers, m, num_united)
    slots = np.asarray(table.slots)
    pool = empty_pool(cfg, slots.size, kind)
    for layer, layer_key in enumerate(jax.random.split(experts_key, layers)):
        experts = _layer_experts(cfg, layer_key, kind)
        pool = write_slots(pool, jnp.asarray(slots[layer, :m]), experts)
        for way, host in united.items():
            for key, weights in experts.arrays.items():
                means = _means(weights, jnp.asarray(groups[way]), host[key].shape[1])
                host[key][layer] = np.asarray(means)
    ways_made = {
        way: UnitedExperts(way, groups=np.tile(groups[way], (layers, 1)), **host)
        for way, host in united.items()
    }
    name = f"random-{cfg.architecture}"
    resident = ResidentWeights(Weights(params, pool, table), ways_made, name)
    return Model(name, Path(), cfg, kind, resident)


def random_family(
    cfg: ModelConfig, sharing: Sharing, seed: int = 0, dtype: str = "float32", skew: float = 0.0
) -> Family:
    """Returns the models of one geometry over one pool, drawn as `random_model` draws one, without
    united ones.

    Only experts that some model uses are drawn to stay. In every model an expert has the same rank
    of popularity in its layer, as fine-tuned ones share their base's. Raises ValueError for a skew
    that cannot be had.
    """
    kind = jnp.dtype(dtype)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2 * len(sharing.names))
    make = jax.jit(partial(random_params, cfg, dtype=kind, skew=skew))
    slots, held = sharing.slots()
    pool = PoolHolder(empty_pool(cfg, len(held), kind))
    for owner, layer in sorted(set(map(tuple, held[:, :2].tolist()))):
        at = np.flatnonzero((held[:, 0] == owner) & (held[:, 1] == layer))
        numbers = jnp.asarray(held[at, 2])
        experts = _layer_experts(cfg, jax.random.fold_in(keys[2 * owner], layer), kind)
        pool.pool = write_slots(pool.pool, jnp.asarray(at), experts.read(numbers))
    groups = jnp.full(slots.shape[1:], -1, jnp.int32)
    models = []
    for number, name in enumerate(sharing.names):
        table = ExpertTable(jnp.asarray(slots[number]), groups)
        weights = Weights(make(keys[2 * number + 1]), pool.pool, table)
        resident = ResidentWeights(weights, {}, name, held=pool)
        models.append(Model(name, Path(), cfg, kind, resident))
    return Family(tuple(models), sharing)


def random_params(
    cfg: ModelConfig, key: jax.Array, dtype: jnp.dtype, skew: float = 0.0
) -> dict[str, Any]:
    """Returns everything but routed experts. `jax.eval_shape` of it gives a model's abstract
    weights.
    """
    dense = partial(_dense, iter(jax.random.split(key, 2 + 8 * len(cfg.segments()))), dtype)
    top = layout.top(cfg)
    return {
        "embed": _drawn(top.pop("embed"), dense, dtype),
        "segments": tuple(
            _segment(cfg, first, moe, n, dense, dtype, skew) for moe, first, n in cfg.segments()
        ),
        **{name: _drawn(parameter, dense, dtype) for name, parameter in top.items()},
    }


def popularity(num_experts: int, picks: int, skew: float) -> np.ndarray:
    """Returns float64 [m]: the probability that a row picks the expert of each rank; the sum is
    `picks`.

    It falls as exp(-skew rank / m): the most popular expert is picked exp(skew) times as often as
    the least. Raises ValueError for a skew at which the first would be picked by half the rows:
    the logits of random rows are symmetric around 0, which no expert can do without a bias.
    """
    share = np.exp(-skew * np.arange(num_experts) / num_experts)
    likely = np.maximum(picks * share / share.sum(), NEVER_PICKED)
    if skew < 0 or (skew > 0 and likely[0] >= 0.5):
        raise ValueError(
            f"skew is {skew:g}; it must be 0 or more, and with {picks} of {num_experts} experts "
            f"so small that none is picked by half of the rows (now {likely[0]:.2f})"
        )
    return likely


def logit_scales(num_experts: int, picks: int, skew: float) -> np.ndarray:
    """Returns float64 [m]: standard deviation of each rank's router logits that gives `popularity`.

    An expert is among the picks of a row where its logit passes the row's k-th largest. With many
    experts that is nearly the same for every row, here 1: P(scale z > 1) = popularity.
    """
    if skew == 0:
        return np.ones(num_experts)
    normal = NormalDist()
    return np.array([-1 / normal.inv_cdf(p) for p in popularity(num_experts, picks, skew)])


def _dense(keys: Iterator[jax.Array], dtype: jnp.dtype, *shape: int) -> jax.Array:
    return (jax.random.normal(next(keys), shape, dtype) * shape[-2] ** -0.5).astype(dtype)


def _router(cfg: ModelConfig, n: int, dense: Any, skew: float) -> jax.Array:
    """Returns [n, d, m]; which expert has which rank is drawn for every layer."""
    weights = dense(n, cfg.d_model, cfg.num_experts)
    scales = jnp.asarray(logit_scales(cfg.num_experts, cfg.experts_per_token, skew), weights.dtype)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(cfg.num_experts), (n, 1)), axis=1)
    return weights * scales[jnp.asarray(order)][:, None, :]


def _segment(
    cfg: ModelConfig, first: int, is_moe: bool, n: int, dense: Any, kind: Any, skew: float
) -> dict[str, jax.Array]:
    """Draws `n` layers of one kind from layer `first` on."""
    return {
        key: _router(cfg, n, dense, skew)
        if parameter.kind == "router"
        else _drawn(parameter, dense, kind, n)
        for key, parameter in layout.layer(cfg, first, is_moe).items()
    }


def _drawn(parameter: Parameter, dense: Any, kind: Any, *lead: int) -> jax.Array:
    """Returns a parameter with these axes before its own: ones of a norm, zeros of a bias."""
    shape = *lead, *parameter.shape
    if parameter.kind not in ("norm", "bias"):
        return dense(*shape)
    filled = jnp.ones if parameter.kind == "norm" else jnp.zeros
    return filled(shape, jnp.float32 if parameter.float32 else kind)


@partial(jax.jit, static_argnums=(0, 2))
def _layer_experts(cfg: ModelConfig, key: jax.Array, kind: Any) -> ExpertPool:
    dense, found = partial(_dense, iter(jax.random.split(key, 2)), kind), {}
    for name, shape in layout.expert_shapes(cfg).items():
        shape = cfg.num_experts, *shape
        found[name] = jnp.zeros(shape, kind) if len(shape) == 2 else dense(*shape)
    return ExpertPool(**found)


@partial(jax.jit, static_argnums=2)
def _means(
    weights: Float[Array, "m *s"], groups: Int[Array, "m"], count: int
) -> Float[Array, "count *s"]:
    share = jax.nn.one_hot(groups, count, axis=0, dtype=jnp.float32)
    share = share / jnp.sum(share, axis=1, keepdims=True)
    return jnp.einsum("gm,m...->g...", share.astype(weights.dtype), weights)


def _host_arrays(cfg: ModelConfig, count: int, kind: Any) -> dict[str, np.ndarray]:
    lead = cfg.num_moe_layers, count
    return {k: np.empty((*lead, *shape), kind) for k, shape in layout.expert_shapes(cfg).items()}


def weight_bytes(cfg: ModelConfig, dtype: Any) -> tuple[int, int]:
    """Returns the bytes of one routed expert, and of all that a decode step reads beside experts
    and KV.

    The latter is every layer's attention, router, norms and shared expert, the last norm and the
    output projection; of the embedding a step reads a few rows.
    """
    size = jnp.dtype(dtype).itemsize
    shapes = jax.eval_shape(lambda: random_params(cfg, jax.random.key(0), jnp.dtype(dtype)))
    read = dict(shapes) if cfg.tie_embeddings else {k: v for k, v in shapes.items() if k != "embed"}
    others = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(read)) * size
    return layout.expert_parameters(cfg) * size, others
