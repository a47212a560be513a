"""The functional model: one pure function a stage, and the run over layers that joins them.

Letters: T rows, d model width, H query heads, G kv heads, D head size, m experts, K picks a row.
Every stage works alone on flat rows `x [T, d]`; what attention reads is the caller's (`mix`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ExpertPool, ExpertTable
from jmoe.rope import rotation
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.backend import backend
from pallas_kernels.kv_write import Projection, rms_norm, split_heads

Params = Mapping[str, Any]
"""`embed`, `final_norm`, `lm_head` (untied) and `segments`; docs/architecture.md has the table.

A segment is a dict of stacked arrays or, `unstack`ed, a tuple of a dict a layer.
"""

Mix = Callable[[Projection, Int[Array, ""], Any], tuple[Array, Any]]
"""`(projection, layer, carry) -> (out [T, H, D], carry)`."""

Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]
"""Cosines and sines of a step's rows, by `rope.rotation`."""


class Rows(NamedTuple):
    """What the stages have to know of a step's rows."""

    positions: Int[Array, "T"]
    valid: Bool[Array, "T"]  # False: padding
    exempt: Bool[Array, "T"]  # True: refuses brownout


class Picks(NamedTuple):
    """What one MoE layer's router chose, before the brownout plan."""

    ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]  # gate weights, float32


class LayerStats(NamedTuple):
    """Counts of one MoE layer's step; serving asks for no more.

    `run_layers` stacks them over MoE layers, and adds `hidden` itself.
    """

    degraded: Int[Array, "T"]  # degraded visits of each row
    expert_rows: Int[Array, "E"]  # rows that each logical expert computed
    picks: Picks | None = None
    hidden: Float[Array, "N T d"] | None = None  # rows before each layer, dense too, and after all


class Wanted(NamedTuple):
    """What a program returns beyond counts (static: another choice is another program)."""

    picks: bool = False
    hidden: bool = False


COUNTS = Wanted()


def embed(params: Params, tokens: Int[Array, "T"]) -> Float[Array, "T d"]:
    """Rows of the embedding matrix."""
    return params["embed"][tokens]


def project(cfg: ModelConfig, layer: Params, h: Float[Array, "T d"], turns: Rotation) -> Projection:
    """Query, key and value heads of the normed rows, but for bias, QK norm and RoPE."""
    shape = (-1, cfg.num_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
    return Projection(
        (h @ layer["wqkv"]).reshape(shape),
        cfg.num_kv_heads,
        *turns,
        bias=layer["bqkv"].reshape(shape[1:]) if cfg.qkv_bias else None,
        q_norm=layer["q_norm"] if cfg.qk_norm else None,
        k_norm=layer["k_norm"] if cfg.qk_norm else None,
        eps=cfg.rms_norm_eps,
    )


def attend(
    cfg: ModelConfig,
    layer: Params,
    x: Float[Array, "T d"],
    turns: Rotation,
    mix: Callable[[Projection], tuple[Array, Any]],
) -> tuple[Float[Array, "T d"], Any]:
    """Attention with its residual. `mix(projection)` returns what the heads read, and its carry."""
    h = rms_norm(x, layer["attn_norm"], cfg.rms_norm_eps)
    out, carry = mix(project(cfg, layer, h, turns))
    x = x + out.reshape(x.shape[0], -1) @ layer["wo"]
    return (x + layer["bo"][None] if cfg.o_bias else x), carry


def route(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T K"], Int[Array, "T K"]]:
    """Normed rows, their gate weights (float32) and the experts their router chose (int32)."""
    h, logits = router(cfg, layer, x)
    weights, ids = routing.gate(logits, top_k=cfg.experts_per_token, normalize=cfg.norm_topk_prob)
    return h, weights, ids


def router(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T m"]]:
    """Normed rows and their router's logits (float32)."""
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
    return h, jnp.dot(h, layer["router"], preferred_element_type=jnp.float32)


def swiglu(h: Float[Array, "T d"], gate_up: Array, down: Array) -> Float[Array, "T d"]:
    """`(silu(h Wg) * (h Wu)) Wd` with the two first matrices side by side."""
    gate, up = jnp.split(h @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def shared_expert(layer: Params, h: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """The expert every row visits, behind its sigmoid gate (Qwen2-MoE)."""
    opening = jax.nn.sigmoid((h @ layer["shared_gate"][:, None]).astype(jnp.float32))
    return opening.astype(h.dtype) * swiglu(h, layer["shared_gate_up"], layer["shared_down"])


def experts(
    pool: ExpertPool,
    h: Float[Array, "T d"],
    weights: Float[Array, "T K"],
    expert_ids: Int[Array, "T K"],
    slots: Int[Array, "E"],
    *,
    max_active: int,
) -> tuple[Float[Array, "T d"], Int[Array, "E"]]:
    """Routed experts of planned visits, through one layer's table row; and each expert's rows."""
    work = routing.dispatch(
        expert_ids, weights, slots, block_m=grouped_gemm.BLOCK_M, max_active=max_active
    )
    out = grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work)
    return out.astype(h.dtype), work.expert_rows


def moe(
    cfg: ModelConfig,
    layer: Params,
    pool: ExpertPool,
    slots: Int[Array, "E"],
    groups: Int[Array, "m"],
    x: Float[Array, "T d"],
    rows: Rows,
    control: Control,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
) -> tuple[Float[Array, "T d"], LayerStats]:
    """Router, brownout plan, routed and shared experts, with the residual (the paper's eq. 5)."""
    h, logits = router(cfg, layer, x)
    ids, plan, work = routing.route(
        logits,
        top_k=cfg.experts_per_token,
        normalize=cfg.norm_topk_prob,
        groups=groups,
        slots=slots,
        threshold_percent=control.threshold_percent,
        strategy=control.strategy,
        valid=rows.valid,
        exempt=rows.exempt,
        block_m=grouped_gemm.BLOCK_M,
        max_active=max_active,
    )
    out = grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work).astype(h.dtype)
    if cfg.d_ff_shared:
        out = out + shared_expert(layer, h)
    x = x + out
    stats = LayerStats(jnp.sum(plan.degraded, axis=-1, dtype=jnp.int32), work.expert_rows)
    if wanted.picks:
        logits = logits[:, : cfg.num_experts]  # without the columns of `_with_wide_router`
        weights, _ = routing.gate(logits, top_k=cfg.experts_per_token, normalize=cfg.norm_topk_prob)
        stats = stats._replace(picks=Picks(ids, weights))
    return x, stats


def head(cfg: ModelConfig, params: Params, x: Float[Array, "T d"]) -> Float[Array, "T V"]:
    """Final norm and output projection; float32 logits."""
    h = rms_norm(x, params["final_norm"], cfg.rms_norm_eps)
    if cfg.tie_embeddings:
        return jnp.einsum("td,vd->tv", h, params["embed"], preferred_element_type=jnp.float32)
    return jnp.dot(h, params["lm_head"], preferred_element_type=jnp.float32)


def run_layers(
    cfg: ModelConfig,
    params: Params,
    pool: ExpertPool,
    table: ExpertTable,
    x: Float[Array, "T d"],
    rows: Rows,
    control: Control,
    mix: Mix,
    carry: Any,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
) -> tuple[Float[Array, "T d"], Any, LayerStats]:
    """All layers: one scan for each run of layers of one kind, or one after another (`unstack`).

    The carry of `mix` (the KV pages) travels in the scan's carry: as scanned inputs and outputs XLA
    would copy the whole cache. So does the layer's number: of a scanned one every layer would copy
    its four bytes. Returns rows, carry, and stats stacked over MoE layers; what is not `wanted` is
    not computed.
    """
    turns = rotation(rows.positions, cfg.rope, cfg.head_dim)
    experts_of = partial(moe, cfg, max_active=max_active, wanted=wanted)
    stats, hidden = [], []
    moe_start = 0
    for (is_moe, start, count), segment in zip(cfg.segments(), params["segments"], strict=True):
        stacked = not isinstance(segment, tuple)
        if is_moe:
            segment = _with_wide_router(segment) if stacked else segment
            own = slice(moe_start, moe_start + count)
            moe_start += count
            xs = (segment, table.slots[own], table.groups[own])
        else:
            xs = (segment, None, None)

        def body(state: Any, xs: Any, is_moe: bool = is_moe) -> Any:
            x, carry, index = state
            layer, slots, groups = xs
            before = x if wanted.hidden else None
            x, carry = attend(cfg, layer, x, turns, lambda heads: mix(heads, index, carry))
            if is_moe:
                x, out = experts_of(layer, pool, slots, groups, x, rows, control)
            else:
                h = rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
                x, out = x + swiglu(h, layer["gate_up"], layer["down"]), None
            return (x, carry, index + 1), (out, before)

        run = lax.scan if stacked else _in_turn
        (x, carry, _), (out, before) = run(body, (x, carry, jnp.int32(start)), xs)
        if is_moe:
            stats.append(out)
        hidden.append(before)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)
    if wanted.hidden:
        joined = joined._replace(hidden=jnp.concatenate([*hidden, x[None]]))
    return x, carry, joined


def unstack(params: Params) -> Params:
    """The same weights, each layer's in arrays of its own: what `run_layers` does not scan over.

    A step over them is one CUDA graph. XLA puts no product into a graph whose weights it has to
    slice out of a stack, so that a scan's body is launched kernel by kernel, with copies of the
    small weights on streams of their own.

    Both kinds of arrays are there until the caller drops `params`.
    """
    segments = []
    for segment in params["segments"]:
        if "router" in segment:
            segment = _with_wide_router(segment)
        count = len(jax.tree.leaves(segment)[0])
        segments.append(tuple(jax.tree.map(itemgetter(i), segment) for i in range(count)))
    return {**params, "segments": segments}


def _in_turn(body: Callable, state: Any, xs: Any) -> Any:
    """What `lax.scan` returns, layer by layer in the program itself."""
    one = jax.jit(body)  # traced and lowered once, not once a layer
    outs = []
    for index, layer in enumerate(xs[0]):
        state, out = one(state, (layer, *jax.tree.map(itemgetter(index), xs[1:])))
        outs.append(out)
    return state, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)


def _with_wide_router(segment: Params) -> Params:
    """The same layers, their router's columns a multiple of eight: `routing.route` drops the rest.

    cuBLAS takes no other number of columns. XLA would pad the weights and cut the logits, to the
    same bits, in every layer of every step; so they are padded once a step, or once in `unstack`.
    """
    router = segment["router"]
    missing = -router.shape[-1] % 8
    if not missing or backend() == "cpu":
        return segment
    return {**segment, "router": jnp.pad(router, ((0, 0), (0, 0), (0, missing)))}


def causal_mix(batch: int, length: int, scale: float) -> Mix:
    """Attention without a cache: `batch` rows of `length` tokens, each its own sequence."""

    def mix(projection: Projection, layer: Array, carry: Any) -> tuple[Array, Any]:
        q, k, v = split_heads(projection)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        qg = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
        kb, vb = (a.reshape(batch, length, kv_heads, head_dim) for a in (k, v))
        s = jnp.einsum("bqghd,bkgd->bghqk", qg, kb, preferred_element_type=jnp.float32) * scale
        seen = jnp.tril(jnp.ones((length, length), bool))
        p = jax.nn.softmax(jnp.where(seen[None, None, None], s, -jnp.inf), axis=-1)
        out = jnp.einsum("bghqk,bkgd->bqghd", p.astype(v.dtype), vb)
        return out.reshape(q.shape), carry

    return mix
