"""Logits of a loaded model in NumPy: what its ModelConfig says, with nothing to compile.

A program a configuration takes seconds to compile; here hundreds are compared. The parameters, the
pool and the RoPE frequencies are jmoe's. test_golden.py holds `jmoe.forward` to transformers.
"""

from dataclasses import asdict

import jax
import numpy as np
from router_oracle import scored, sparsemixer

from jmoe.rope import inverse_frequencies
from jmoe.router import SparseMixer


def forward(model, tokens, served=None):
    """Returns float64 [B, V]: logits after the last of `tokens` [B, L].

    `served(moe_layer, position, expert)` is the logical expert that a visit goes to, -1: it goes
    nowhere; None: all go to their own.
    """
    cfg = model.config
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), dict(model.params))
    pool = [np.asarray(leaf, np.float64) for leaf in model.pool]
    slots, out = np.asarray(model.table.slots), []
    for row in np.asarray(tokens):
        x, moe_layer, scale = params["embed"][row], 0, cfg.residual_multiplier
        x = x * cfg.embedding_multiplier
        for (is_moe, start, count), segment in zip(cfg.segments(), params["segments"], strict=True):
            for i in range(count):
                layer = {key: leaf[i] for key, leaf in segment.items()}
                window = cfg.layer_attention[start + i].window or len(row)
                h = _layer_norm(cfg, layer, "attn_norm", x)
                x = x + scale * _attention(cfg, layer, h, window)
                h = _layer_norm(cfg, layer, "mlp_norm", x)
                if is_moe:
                    x = x + scale * _moe(cfg, layer, pool, slots[moe_layer], h, moe_layer, served)
                    moe_layer += 1
                else:
                    x = x + scale * _swiglu(h, layer["gate_up"], layer["down"])
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


def _silu(x):
    return x / (1 + np.exp(-x))


def _swiglu(h, gate_up, down):
    gate, up = np.split(h @ gate_up, 2, axis=-1)
    return (_silu(gate) * up) @ down


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _attention(cfg, layer, h, window):
    length, size, groups = len(h), cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    qkv = h @ layer["wqkv"] + (layer["bqkv"] if cfg.qkv_bias else 0.0)
    heads = qkv.reshape(length, -1, size)
    q, k, v = np.split(heads, [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads], axis=1)
    if cfg.qk_norm:
        q, k = _heads_norm(cfg, q, layer["q_norm"]), _heads_norm(cfg, k, layer["k_norm"])
    if cfg.clip_qkv:
        q, k, v = (np.clip(x, -cfg.clip_qkv, cfg.clip_qkv) for x in (q, k, v))
    q, k = _rotate(cfg, q), _rotate(cfg, k)
    k, v = (np.repeat(a, groups, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * size**-0.5
    back = np.arange(length)[:, None] - np.arange(length)[None, :]
    scores = np.where((back >= 0) & (back < window), scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(length, -1)
    return out @ layer["wo"] + (layer["bo"] if cfg.o_bias else 0.0)


def _heads_norm(cfg, x, weight):
    if not cfg.normed_whole:
        return _norm(cfg, x, weight)
    return _norm(cfg, x.reshape(len(x), -1), weight).reshape(x.shape)


def _rotate(cfg, x):
    angle = np.arange(len(x))[:, None, None] * inverse_frequencies(cfg.rope, cfg.head_dim)
    cos, sin = (f(angle) * cfg.rope.attention_factor for f in (np.cos, np.sin))
    half = angle.shape[-1]
    a, b, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _moe(cfg, layer, pool, slots, h, moe_layer, served):
    out = np.zeros_like(h)
    for row, logits in enumerate(h @ layer["router"]):  # by position
        for expert, weight in zip(*_chosen(cfg, layer, logits), strict=True):
            to = expert if served is None else served(moe_layer, row, expert)
            if to < 0:
                continue
            gate_up, down = (weights[slots[to]] for weights in pool)
            out[row] += weight * _swiglu(h[row], gate_up, down)
    if cfg.d_ff_shared:
        opening = 1 / (1 + np.exp(-(h @ layer["shared_gate"]))) if cfg.shared_gate else np.ones(1)
        out += opening[:, None] * _swiglu(h, layer["shared_gate_up"], layer["shared_down"])
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
