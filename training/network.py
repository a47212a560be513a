"""The trained forward pass: jmoe's architecture on packed rows, differentiable, fast on a CPU.

Same parameters and same maths as `jmoe.model` (a test holds their logits together), written apart
for speed: products with fast gradients (`training.matmul`), experts in one batched product, master
weights in float32 and products in `dtype` (bfloat16 runs several times faster where the CPU has
matrix units). Norms, routing, residuals and the loss stay float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jmoe import layout
from jmoe.config import ModelConfig
from jmoe.moe import gate
from jmoe.rope import rotate
from pallas_kernels.norm import rms_norm
from training.dispatch import expert_layer, swiglu
from training.matmul import linear, matmul

Params = dict[str, Any]
"""`docs/architecture.md`'s pytree, plus `experts`: `gate_up [L, m, d, 2f]`, `down [L, m, f, d]`."""


def init_params(cfg: ModelConfig, seed: int) -> Params:
    """Returns the random float32 parameters of a model whose layers are all MoE, with tied
    embeddings.
    """
    n, d, f = cfg.num_layers, cfg.d_model, cfg.d_ff_expert
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def normal(*shape: int, fan_in: int, scale: float = 1.0) -> Array:
        return jax.random.normal(next(keys), shape) * (scale * fan_in**-0.5)

    out_scale = (2 * n) ** -0.5
    scales = {"wo": out_scale, "shared_down": out_scale, "router": 0.5}
    segment: Params = {}
    for key, parameter in layout.layer(cfg, 0, is_moe=True).items():
        shape = parameter.shape
        if parameter.kind in ("matrix", "router"):
            segment[key] = normal(n, *shape, fan_in=shape[0], scale=scales.get(key, 1.0))
        else:
            segment[key] = (jnp.ones if parameter.kind == "norm" else jnp.zeros)((n, *shape))
    # Unnormalised top-4 weights of 60 sum to about 0.1 at first, so routed outputs start larger.
    routed_scale = out_scale if cfg.norm_topk_prob else 3.0 * out_scale
    return {
        "embed": normal(cfg.vocab_size, d, fan_in=d),
        "final_norm": jnp.ones(d),
        "segments": (segment,),
        "experts": {
            "gate_up": normal(n, cfg.num_experts, d, 2 * f, fan_in=d),
            "down": normal(n, cfg.num_experts, f, d, fan_in=f, scale=routed_scale),
        },
    }


def packed_attention(
    cfg: ModelConfig,
    layer: Params,
    h: Float[Array, "B S d"],
    positions: Int[Array, "B S"],
    mask: Float[Array, "B 1 S S"],
) -> Float[Array, "B S o"]:
    """Attends causally, by groups of query heads, inside each packed item; `mask` is added to the
    scores.
    """
    batch, length, _ = h.shape
    heads, kv_heads, head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    qkv = linear(h.reshape(batch * length, -1), layer["wqkv"].astype(h.dtype))
    if cfg.qkv_bias:
        qkv = qkv + layer["bqkv"].astype(h.dtype)[None]
    qkv = qkv.reshape(batch * length, -1, head_dim)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    if cfg.qk_norm:
        q = rms_norm(q, layer["q_norm"].astype(h.dtype), cfg.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"].astype(h.dtype), cfg.rms_norm_eps)
    rotated = rotate(jnp.concatenate([q, k], axis=1), positions.reshape(-1), cfg.rope)

    def per_head(x: Array) -> Array:
        return x.reshape(batch, length, -1, head_dim)

    q, k = per_head(rotated[:, :heads]), per_head(rotated[:, heads:])
    k = jnp.repeat(k, heads // kv_heads, axis=2)
    v = jnp.repeat(per_head(qkv[:, heads + kv_heads :]), heads // kv_heads, axis=2)
    q, k, v = jax.lax.optimization_barrier(
        ((q * head_dim**-0.5).swapaxes(1, 2), k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))
    )
    probs = jax.nn.softmax(matmul(q, k) + mask.astype(h.dtype), axis=-1)
    return matmul(probs, v).swapaxes(1, 2).reshape(batch, length, -1)


def routing_losses(
    logits: Float[Array, "T m"], ids: Int[Array, "T K"], valid: Float[Array, "T"]
) -> dict[str, Array]:
    """Returns load-balance loss (1 when even), router z-loss, and each expert's share of the
    visits.
    """
    num_experts, top_k = logits.shape[1], ids.shape[1]
    total = jnp.sum(valid)
    hits = jnp.sum(jax.nn.one_hot(ids, num_experts), axis=1) * valid[:, None]
    load = jnp.sum(hits, axis=0) / (total * top_k)
    mean_prob = jnp.sum(jax.nn.softmax(logits, axis=-1) * valid[:, None], axis=0) / total
    log_z = jax.scipy.special.logsumexp(logits, axis=-1)
    return {
        "balance": num_experts * jnp.sum(load * mean_prob),
        "z": jnp.sum(valid * log_z**2) / total,
        "load": load,
    }


class Routing(NamedTuple):
    """A layer's router outputs, and what its experts return besides their output."""

    logits: Float[Array, "T m"]
    ids: Int[Array, "T K"]
    aux: Any


Routed = Callable[[Array, Array, Array], tuple[Array, Any]]
"""`(rows [T, d] in the products' dtype, gate weights [T, K], ids [T, K]) -> (output, aux)`."""


def causal_mask(items: Int[Array, "B S"]) -> Float[Array, "B 1 S S"]:
    """Returns 0 where a row may attend, back within its own packed item, and -1e9 elsewhere."""
    causal = jnp.tril(jnp.ones((1, items.shape[1], items.shape[1]), bool))
    seen = (items[:, :, None] == items[:, None, :]) & causal
    return jnp.where(seen, 0.0, -1e9)[:, None]


def layer_forward(
    cfg: ModelConfig,
    layer: Params,
    x: Float[Array, "B S d"],
    positions: Int[Array, "B S"],
    mask: Float[Array, "B 1 S S"],
    routed: Routed,
    *,
    dtype: Any,
) -> tuple[Float[Array, "B S d"], Routing | None]:
    """Runs one layer of any architecture; `routed` computes its routed experts. Routing is None for
    a dense one.
    """
    h = rms_norm(x, layer["attn_norm"].astype(jnp.float32), cfg.rms_norm_eps).astype(dtype)
    mixed = packed_attention(cfg, layer, h, positions, mask)
    x = x + linear(mixed, layer["wo"].astype(dtype)).astype(jnp.float32)
    if cfg.o_bias:
        x = x + layer["bo"].astype(jnp.float32)[None, None]
    h = rms_norm(x, layer["mlp_norm"].astype(jnp.float32), cfg.rms_norm_eps)
    h = h.reshape(-1, cfg.d_model)
    low, routing_of = h.astype(dtype), None
    if "router" in layer:
        logits = matmul(h, layer["router"].astype(jnp.float32))
        weights, ids = gate(cfg, logits, layer)
        out, aux = routed(low, weights, ids)
        routing_of = Routing(logits, ids, aux)
        out = out.astype(jnp.float32)
        if cfg.d_ff_shared:
            opening = jax.nn.sigmoid(h @ layer["shared_gate"].astype(jnp.float32))[:, None]
            out = out + opening * _swiglu(low, layer, "shared_")
    else:
        out = _swiglu(low, layer, "")
    return x + out.reshape(x.shape), routing_of


def _swiglu(low: Float[Array, "T d"], layer: Params, key: str) -> Float[Array, "T d"]:
    gate_up, down = (layer[key + name].astype(low.dtype) for name in ("gate_up", "down"))
    return swiglu(low, gate_up, down).astype(jnp.float32)


def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    items: Int[Array, "B S"],
    *,
    capacity: int,
    dtype: Any = jnp.bfloat16,
) -> tuple[Float[Array, "B S V"], dict[str, Array]]:
    """Returns the float32 logits of packed rows, and `routing_losses` with dropped visits, stacked
    over layers.

    Args:
        cfg: the architecture; all layers MoE, tied embeddings.
        params: as `init_params` makes them.
        tokens: packed rows.
        positions: of each token in its item.
        items: number of each token's item in its row; 0 is padding. Items do not see each other.
        capacity: visits an expert takes a batch; see `training.dispatch`.
        dtype: of the products.
    """
    mask = causal_mask(items)
    valid = (items > 0).reshape(-1).astype(jnp.float32)
    x, stats = params["embed"][tokens], []
    for i in range(cfg.num_layers):
        layer, experts = jax.tree.map(
            lambda leaf, i=i: leaf[i], (params["segments"][0], params["experts"])
        )
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), experts)

        def routed(h: Array, weights: Array, ids: Array, low: Params = low) -> tuple[Array, Array]:
            return expert_layer(h, weights, ids, low["gate_up"], low["down"], capacity)

        x, out = layer_forward(cfg, layer, x, positions, mask, routed, dtype=dtype)
        assert out is not None
        stats.append({**routing_losses(out.logits, out.ids, valid), "dropped": out.aux})
    h = rms_norm(x, params["final_norm"], cfg.rms_norm_eps).astype(dtype)
    logits = linear(h, params["embed"].T.astype(dtype)).astype(jnp.float32)
    return logits, jax.tree.map(lambda *parts: jnp.stack(parts), *stats)
