"""What training adds to jmoe's layer functions: initial weights, packed rows, routers' losses.

Master weights are float32 and products in `dtype` (bfloat16 runs several times faster where the CPU
has matrix units). Norms, routing, residuals and the loss stay float32. Experts are one batched
product (`training.dispatch`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jmoe import layout
from jmoe.attention import Attention, AttentionKind
from jmoe.config import ModelConfig
from jmoe.model import attend, embed, head
from jmoe.moe import dense_mlp, gate, router, with_residual
from jmoe.recurrent import Recurrent
from jmoe.rope import Rotation, rotation
from pallas_kernels.kv_write import Heads, Projection, split_heads
from pallas_kernels.matmul import matmul
from pallas_kernels.online_softmax import softmax
from training.dispatch import expert_layer

Params = dict[str, Any]
"""The pytree of docs/architecture.md, plus `experts`: `gate_up [L, m, d, 2f]`, `down [L, m, f, d]`,
and their biases if any.
"""


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
            "gate_up": normal(n, cfg.num_experts, d, cfg.up_matrices * f, fan_in=d),
            "down": normal(n, cfg.num_experts, f, d, fan_in=f, scale=routed_scale),
            **{
                key: jnp.zeros((n, cfg.num_experts, *shape))
                for key, shape in layout.expert_shapes(cfg).items()
                if len(shape) == 1
            },
        },
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedAttention:
    """Causal attention inside each packed item, over a window where there is one. An `Attention`
    without a cache.
    """

    mask: Float[Array, "B 1 S S"]  # 0 where a row may attend, -1e9 elsewhere

    @classmethod
    def of(cls, items: Int[Array, "B S"], window: int = 0) -> "PackedAttention":
        """Makes it of the number of each token's item in its row; `window` is as of `Paged`."""
        causal = jnp.tril(jnp.ones((1, items.shape[1], items.shape[1]), bool))
        if window:
            causal = jnp.triu(causal, 1 - window)
        seen = (items[:, :, None] == items[:, None, :]) & causal
        return cls(jnp.where(seen, 0.0, -1e9)[:, None])

    def __call__(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H D"], Any]:
        """See Attention."""
        q, k, v = split_heads(projection)
        batch, length = self.mask.shape[0], self.mask.shape[-1]
        group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        q, k, v = (a.reshape(batch, length, *a.shape[1:]) for a in (q * scale, k, v))
        k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
        q, k, v = jax.lax.optimization_barrier(
            (q.swapaxes(1, 2), k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))
        )
        scores: Array = matmul(q, k)
        sinks = projection.sinks
        if sinks is not None:
            sinks = sinks[None, :, None]
        out: Array = matmul(softmax(scores + self.mask.astype(q.dtype), sinks), v)
        out = out.swapaxes(1, 2)
        return out.reshape(batch * length, *out.shape[2:]), cache


def of_kind(
    cfg: ModelConfig, kind: AttentionKind, positions: Int[Array, "B S"], items: Int[Array, "B S"]
) -> tuple[Rotation, Attention]:
    """Returns what layers of a kind of attention need beside their rows, which `items` number."""
    turn = rotation(positions.reshape(-1), cfg.rope_of(kind), cfg.head_dim)
    if isinstance(kind, Recurrent):
        batch, length = items.shape
        starts = jnp.pad(items[:, 1:] != items[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        rows = jnp.arange(batch + 1, dtype=jnp.int32) * length
        return turn, kind.packed(rows, batch * length, starts.reshape(-1))
    return turn, PackedAttention.of(items, getattr(kind, "window", 0))


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


def layer_forward(
    cfg: ModelConfig,
    layer: Params,
    x: Float[Array, "T d"],
    turn: Rotation,
    attention: Attention,
    routed: Routed,
    *,
    dtype: Any,
) -> tuple[Float[Array, "T d"], Routing | None]:
    """Runs one layer by jmoe's functions, products in `dtype` and all else in float32, as `x`
    is; `routed` computes its routed experts. Routing is None for a dense one.
    """
    layer = lowered(cfg, layer, dtype)
    x, _ = attend(cfg, layer, x, turn, attention, jnp.int32(0), None)
    if "router" not in layer:
        return dense_mlp(cfg, layer, x), None
    h, logits = router(cfg, layer, x)
    weights, ids = gate(cfg, logits, layer)
    out, aux = routed(h.astype(dtype), weights, ids)
    return with_residual(cfg, layer, x, h, out.astype(x.dtype)), Routing(logits, ids, aux)


def lowered(cfg: ModelConfig, layer: Params, dtype: Any) -> Params:
    """Returns a layer's parameters with matrices in `dtype`, and all else in float32."""
    kinds = {
        key: own.kind
        for is_moe, first, _ in cfg.segments()
        for key, own in layout.layer(cfg, first, is_moe).items()
    }
    return {
        key: leaf.astype(dtype if kinds.get(key) == "matrix" else jnp.float32)
        for key, leaf in layer.items()
    }


def logits_of(
    cfg: ModelConfig, params: Params, x: Float[Array, "T d"], dtype: Any
) -> Float[Array, "T V"]:
    """Returns `jmoe.model.head` of float32 rows, its product in `dtype`."""
    key = "embed" if cfg.tie_embeddings else "lm_head"
    others = [one for one in layout.top(cfg) if one not in ("embed", "lm_head")]
    own = {one: params[one].astype(jnp.float32) for one in others}
    return head(cfg, {key: params[key].astype(dtype), **own}, x)


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
        cfg: the architecture; all layers MoE.
        params: as `init_params` makes them.
        tokens: packed rows.
        positions: of each token in its item.
        items: number of each token's item in its row; 0 is padding. Items do not see each other.
        capacity: visits an expert takes a batch; see `training.dispatch`.
        dtype: of the products.
    """
    valid = (items > 0).reshape(-1).astype(jnp.float32)
    x, stats = embed(cfg, params, tokens.reshape(-1)), []
    for i in range(cfg.num_layers):
        layer, experts = jax.tree.map(
            lambda leaf, i=i: leaf[i], (params["segments"][0], params["experts"])
        )
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), experts)

        def routed(h: Array, weights: Array, ids: Array, low: Params = low) -> tuple[Array, Array]:
            return expert_layer(h, weights, ids, low, capacity, cfg.activation)

        own = of_kind(cfg, cfg.layer_attention[i], positions, items)
        x, out = layer_forward(cfg, layer, x, *own, routed, dtype=dtype)
        assert out is not None
        stats.append({**routing_losses(out.logits, out.ids, valid), "dropped": out.aux})
    logits = logits_of(cfg, params, x, dtype).reshape(*tokens.shape, -1)
    return logits, jax.tree.map(lambda *parts: jnp.stack(parts), *stats)
