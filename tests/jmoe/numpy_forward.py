"""Logits of a loaded model in NumPy: what its ModelConfig says, with nothing to compile.

A program a configuration takes seconds to compile; here hundreds are compared. The parameters, the
pool and the RoPE frequencies are jmoe's. test_golden.py holds `jmoe.forward` to transformers.
"""

import math
from dataclasses import asdict, replace

import jax
import numpy as np

from jmoe.attention import Latent
from jmoe.recurrent import GatedDelta, Mamba, ShortConv
from jmoe.rope import inverse_frequencies
from jmoe.router import SparseMixer
from pallas_kernels.activation import ClampedSwiglu, Relu2
from tests.jmoe.router_oracle import scored, sparsemixer


def forward(model, tokens, served=None):
    """Returns float64 [B, V]: logits after the last of `tokens` [B, L].

    `served(moe_layer, position, expert)` is the logical expert that a visit goes to, -1: it goes
    nowhere; None: all go to their own.
    """
    cfg = model.config
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), dict(model.params))
    pool = {key: np.asarray(leaf, np.float64) for key, leaf in model.pool.arrays.items()}
    slots, out = np.asarray(model.table.slots), []
    for row in np.asarray(tokens):
        x, moe_layer = params["embed"][row] * cfg.embedding_multiplier, 0
        for (is_moe, start, count), segment in zip(cfg.segments(), params["segments"], strict=True):
            for i in range(count):
                layer = {key: leaf[i] for key, leaf in segment.items()}
                kind, h = cfg.layer_attention[start + i], _layer_norm(cfg, layer, "attn_norm", x)
                if isinstance(kind, GatedDelta):
                    made = delta_net(cfg, layer, h, kind)
                elif isinstance(kind, Mamba):
                    made = _mamba(cfg, layer, h, kind)
                elif isinstance(kind, ShortConv):
                    made = _short_conv(layer, h, kind)
                elif isinstance(kind, Latent):
                    made = _latent(cfg, layer, h, kind)
                else:
                    made = _attention(cfg, layer, h, kind)
                x = x + _added(cfg, layer, "attn", made)
                if not cfg.has_mlp(start + i):
                    continue
                h = _layer_norm(cfg, layer, "mlp_norm", x)
                if is_moe:
                    made = _moe(cfg, layer, pool, slots[moe_layer], h, moe_layer, served)
                    moe_layer += 1
                else:
                    made = _swiglu(cfg, h, layer["gate_up"], layer["down"])
                x = x + _added(cfg, layer, "mlp", made)
        last = _layer_norm(cfg, params, "final_norm", x[-1])
        logits = last @ (params["embed"].T if cfg.tie_embeddings else params["lm_head"])
        out.append(logits / cfg.logits_scaling + (params["head_bias"] if cfg.head_bias else 0.0))
    return np.stack(out)


def _norm(cfg, x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_norm_eps) * weight


def _layer_norm(cfg, params, key, x):
    if not cfg.layer_norm:
        return _norm(cfg, x, params[key])
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(x.var(-1, keepdims=True) + cfg.rms_norm_eps)
    return x * params[key] + params[f"{key}_bias"]


def _added(cfg, layer, half, made):
    if cfg.post_norms:
        made = _norm(cfg, made, layer[f"{half}_post_norm"])
    return cfg.residual_multiplier * made


def _silu(x):
    return x / (1 + np.exp(-x))


def _swiglu(cfg, h, gate_up, down, gate_up_bias=0.0, down_bias=0.0):
    if isinstance(cfg.activation, Relu2):
        return np.maximum(h @ gate_up, 0) ** 2 @ down
    gate, up = np.split(h @ gate_up + gate_up_bias, 2, axis=-1)
    if isinstance(cfg.activation, ClampedSwiglu):
        limit = cfg.activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        return (gate / (1 + np.exp(-cfg.activation.alpha * gate)) * up) @ down + down_bias
    return (_silu(gate) * up) @ down + down_bias


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _attention(cfg, layer, h, kind):
    length, size, groups = len(h), cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    window, rope = kind.window or length, cfg.rope_of(kind)
    qkv, gate = h @ layer["wqkv"], 1.0
    bias = layer["bqkv"] if cfg.qkv_bias else np.zeros(qkv.shape[1])
    if len(bias) < qkv.shape[1]:  # of a gate without one
        bias = np.insert(bias, [cfg.num_heads * size] * (cfg.num_heads * size), 0.0)
    qkv = qkv + bias
    if getattr(kind, "gated", False):
        q, gate, kv = np.split(qkv, np.cumsum([cfg.num_heads * size] * 2), axis=1)
        qkv, gate = np.concatenate([q, kv], axis=1), 1 / (1 + np.exp(-gate))
    heads = qkv.reshape(length, -1, size)
    q, k, v = np.split(heads, [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads], axis=1)
    if cfg.turned_first:
        q, k = _rotate(rope, q), _rotate(rope, k)
    if cfg.qk_norm:
        q, k = _heads_norm(cfg, q, layer["q_norm"]), _heads_norm(cfg, k, layer["k_norm"])
    if cfg.clip_qkv:
        q, k, v = (np.clip(x, -cfg.clip_qkv, cfg.clip_qkv) for x in (q, k, v))
    if not cfg.turned_first:
        q, k = _rotate(rope, q), _rotate(rope, k)
    k, v = (np.repeat(a, groups, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * size**-0.5
    back = np.arange(length)[:, None] - np.arange(length)[None, :]
    scores = np.where((back >= 0) & (back < window), scores, -np.inf)
    if "sinks" in layer:  # a key without a value
        sinks = np.broadcast_to(layer["sinks"][:, None, None], (cfg.num_heads, length, 1))
        scores = np.concatenate([scores, sinks], axis=2)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    out = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(length, -1)
    return (out * gate) @ layer["wo"] + (layer["bo"] if cfg.o_bias else 0.0)


def delta_net(cfg, layer, h, kind):
    """Runs Gated DeltaNet (arXiv 2412.06464, equation 10) row by row, one value head after another.

    A layer's parameters as float64 arrays, and the rows of one sequence after their norm.
    """
    keys, values = kind.key_heads * kind.key, kind.value_heads * kind.value
    sizes = (2 * keys + values, values, kind.value_heads, kind.value_heads)
    qkv, gate, beta, dt = np.split(h @ layer["w_in"], np.cumsum(sizes)[:-1], axis=1)
    taps = layer["conv"][:, 0]
    before = np.concatenate([np.zeros((kind.taps - 1, qkv.shape[1])), qkv])
    qkv = _silu(np.stack([(before[t : t + kind.taps] * taps.T).sum(0) for t in range(len(h))]))
    q, k, v = np.split(qkv, [keys, 2 * keys], axis=1)
    q, k = (x.reshape(len(h), kind.key_heads, kind.key) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v, out = v.reshape(len(h), kind.value_heads, kind.value), np.zeros((len(h), values))
    for head in range(kind.value_heads):
        state = np.zeros((kind.key, kind.value))
        of_key = head * kind.key_heads // kind.value_heads
        for t in range(len(h)):
            rate = np.log1p(np.exp(dt[t, head] + layer["dt_bias"][head]))
            key, query = k[t, of_key], q[t, of_key] * kind.key**-0.5
            state = state * np.exp(-np.exp(layer["a_log"][head]) * rate)
            error = (v[t, head] - state.T @ key) / (1 + np.exp(-beta[t, head]))
            state = state + np.outer(key, error)
            out[t, head * kind.value : (head + 1) * kind.value] = state.T @ query
    out = _norm(cfg, out.reshape(len(h), -1, kind.value), layer["gated_norm"])
    return (out.reshape(len(h), -1) * _silu(gate)) @ layer["wo"]


def _mamba(cfg, layer, h, kind):
    """Runs Mamba-2 (arXiv 2405.21060) row by row, one head after another."""
    wide, size = kind.heads * kind.value, kind.groups * kind.state
    product = h @ layer["w_in"] + layer.get("b_in", 0.0)
    gate, x, dt = np.split(product, [wide, 2 * wide + 2 * size], axis=1)
    before = np.concatenate([np.zeros((kind.taps - 1, x.shape[1])), x])
    taps = layer["conv"][:, 0].T
    x = np.stack([(before[t : t + kind.taps] * taps).sum(0) for t in range(len(h))])
    x, b, c = np.split(_silu(x + layer.get("b_conv", 0.0)), [wide, wide + size], axis=1)
    dt = np.clip(np.log1p(np.exp(dt + layer["dt_bias"])), kind.dt_least, kind.dt_most)
    out = np.zeros((len(h), kind.heads, kind.value))
    for head in range(kind.heads):
        state, group = np.zeros((kind.state, kind.value)), head * kind.groups // kind.heads
        at = slice(group * kind.state, (group + 1) * kind.state)
        for t in range(len(h)):
            own = x[t, head * kind.value : (head + 1) * kind.value]
            state = state * np.exp(-np.exp(layer["a_log"][head]) * dt[t, head])
            state = state + np.outer(b[t, at], dt[t, head] * own)
            out[t, head] = state.T @ c[t, at] + layer["skip"][head] * own
    out = (out.reshape(len(h), -1) * _silu(gate)).reshape(len(h), kind.groups, -1)
    out = _norm(cfg, out, 1.0).reshape(len(h), -1) * layer["gated_norm"]
    return out @ layer["wo"] + layer.get("bo", 0.0)


def _short_conv(layer, h, kind):
    """Runs a gated convolution over the newest rows, position by position."""
    before, gate, x = np.split(h @ layer["w_in"] + layer.get("b_in", 0.0), 3, axis=1)
    taps, inputs = layer["conv"][:, 0], before * x
    for t in range(len(h)):
        seen = (taps[:, -1 - back] * inputs[t - back] for back in range(min(kind.taps, t + 1)))
        gate[t] *= sum(seen) + layer.get("b_conv", 0.0)
    return gate @ layer["wo"] + layer.get("bo", 0.0)


def _heads_norm(cfg, x, weight):
    if not cfg.normed_whole:
        return _norm(cfg, x, weight)
    return _norm(cfg, x.reshape(len(x), -1), weight).reshape(x.shape)


def _latent(cfg, layer, h, kind):
    """Expands every position's latent into keys and values of all heads."""
    length, heads = len(h), cfg.num_heads
    q = h @ layer["wq_a"] if kind.q_rank else h
    if kind.q_rank:
        q = _norm(replace(cfg, rms_norm_eps=1e-6), q, layer["q_a_norm"])
    q = (q @ layer["wq"]).reshape(length, heads, -1)
    compressed = h @ layer["wkv_a"]
    latent, k_turned = compressed[:, : kind.kv_rank], compressed[:, None, kind.kv_rank :]
    latent = _norm(replace(cfg, rms_norm_eps=1e-6), latent, layer["kv_a_norm"])
    made = (latent @ layer["wkv_b"]).reshape(length, heads, -1)
    k, v = made[..., : kind.nope], made[..., kind.nope :]

    def turned(x):
        if kind.interleaved:
            x = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return _rotate(cfg.rope, x)

    q = np.concatenate([q[..., : kind.nope], turned(q[..., kind.nope :])], axis=-1)
    if beta := cfg.rope.query_scaling:
        grown = [
            1 + beta * math.log(1 + at // cfg.rope.original_max_position) for at in range(length)
        ]
        q = q * np.array(grown)[:, None, None]
    k = np.concatenate([k, np.repeat(turned(k_turned), heads, axis=1)], axis=-1)
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 * kind.score_scale
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(length, -1) @ layer["wo"]


def _rotate(rope, x):
    angle = np.arange(len(x))[:, None, None] * inverse_frequencies(rope, x.shape[-1])
    cos, sin = (f(angle) * rope.attention_factor for f in (np.cos, np.sin))
    half = angle.shape[-1]
    a, b, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _moe(cfg, layer, pool, slots, h, moe_layer, served):
    out = np.zeros_like(h)
    all_logits = h @ layer["router"] + (layer["logits_bias"] if cfg.logits_bias else 0.0)
    for row, logits in enumerate(all_logits):  # by position
        for expert, weight in zip(*_chosen(cfg, layer, logits), strict=True):
            to = expert if served is None else served(moe_layer, row, expert)
            if to < 0:
                continue
            own = {key: weights[slots[to]] for key, weights in pool.items()}
            out[row] += weight * _swiglu(cfg, h[row], **own)
    if cfg.d_ff_shared:
        opening = 1 / (1 + np.exp(-(h @ layer["shared_gate"]))) if cfg.shared_gate else np.ones(1)
        out += opening[:, None] * _swiglu(cfg, h, layer["shared_gate_up"], layer["shared_down"])
    return out


def _chosen(cfg, layer, logits):
    if isinstance(cfg.router, SparseMixer):
        return sparsemixer(logits, cfg.router.jitter)[:2]
    if cfg.router is not None:
        fields = asdict(cfg.router) | {"normalize": cfg.norm_topk_prob}
        fields["bias"] = layer["router_bias"] if cfg.router.bias else 0.0
        return scored(logits, top_k=cfg.experts_per_token, **fields)[:2]
    likely = _softmax(logits)
    chosen = np.argsort(-likely, kind="stable")[: cfg.experts_per_token]
    return chosen, likely[chosen] / (likely[chosen].sum() if cfg.norm_topk_prob else 1.0)
