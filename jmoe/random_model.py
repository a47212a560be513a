"""Models with random weights of any geometry, made on the device: for benchmarks and tests."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.api import Model
from jmoe.checkpoint import empty_pool
from jmoe.config import ModelConfig
from jmoe.experts import UnitedExperts, groups_by_index, make_table, united_places, write_slots


def random_model(
    cfg: ModelConfig, seed: int = 0, dtype: str = "float32", ways: Sequence[int] = ()
) -> Model:
    """A model whose projections are normal with variance 1 / fan-in and whose norms are one.

    United experts of `ways` are the means of their members. Its routing is nearly uniform, which is
    the hardest case for brownout.
    """
    kind = jnp.dtype(dtype)
    params_key, experts_key = jax.random.split(jax.random.key(seed))
    params = random_params(cfg, params_key, kind)
    keys = iter(jax.random.split(experts_key, 2))
    dense = partial(_dense, keys, kind)
    layers, m, d, f = cfg.num_moe_layers, cfg.num_experts, cfg.d_model, cfg.d_ff_expert
    gate_up, down = dense(layers, m, d, 2 * f), dense(layers, m, f, d)
    united = {way: _means(gate_up, down, way) for way in ways}
    table = make_table(layers, m, united_places(united))
    slots = np.asarray(table.slots)
    pool = empty_pool(cfg, slots.size, kind)
    for layer in range(layers):
        pool = write_slots(pool, jnp.asarray(slots[layer, :m]), gate_up[layer], down[layer])
    return Model(f"random-{cfg.architecture}", Path(), cfg, kind, params, pool, table, united)


def random_params(cfg: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> dict[str, Any]:
    """Everything but routed experts. `jax.eval_shape` of it gives a model's abstract weights."""
    dense = partial(_dense, iter(jax.random.split(key, 2 + 8 * len(cfg.segments()))), dtype)
    params: dict[str, Any] = {
        "embed": dense(cfg.vocab_size, cfg.d_model),
        "final_norm": jnp.ones(cfg.d_model, dtype),
        "segments": tuple(_segment(cfg, moe, n, dense, dtype) for moe, _, n in cfg.segments()),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = dense(cfg.d_model, cfg.vocab_size)
    return params


def _dense(keys: Iterator[jax.Array], dtype: jnp.dtype, *shape: int) -> jax.Array:
    return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(dtype)


def _segment(cfg: ModelConfig, is_moe: bool, n: int, dense: Any, kind: Any) -> dict[str, jax.Array]:
    d, heads, kv_heads, size = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    out = {
        "attn_norm": jnp.ones((n, d), kind),
        "mlp_norm": jnp.ones((n, d), kind),
        "wqkv": dense(n, d, (heads + 2 * kv_heads) * size),
        "wo": dense(n, heads * size, d),
    }
    if cfg.qkv_bias:
        out["bqkv"] = jnp.zeros((n, (heads + 2 * kv_heads) * size), kind)
    if cfg.qk_norm:
        out |= {"q_norm": jnp.ones((n, size), kind), "k_norm": jnp.ones((n, size), kind)}
    if not is_moe:
        return out | {
            "gate_up": dense(n, d, 2 * cfg.d_ff_dense),
            "down": dense(n, cfg.d_ff_dense, d),
        }
    out["router"] = dense(n, d, cfg.num_experts)
    if cfg.d_ff_shared:
        out["shared_gate_up"] = dense(n, d, 2 * cfg.d_ff_shared)
        out["shared_down"] = dense(n, cfg.d_ff_shared, d)
        out["shared_gate"] = dense(n, d)
    return out


def _means(gate_up: jax.Array, down: jax.Array, way: int) -> UnitedExperts:
    layers, m = gate_up.shape[:2]
    groups = groups_by_index(m, way)

    def mean(weights: jax.Array) -> np.ndarray:
        host = np.asarray(weights)
        return np.stack([host[:, groups == g].mean(1) for g in range(groups.max() + 1)], axis=1)

    return UnitedExperts(way, mean(gate_up), mean(down), np.tile(groups, (layers, 1)))
