"""The MLP half of a layer: router, brownout plan, routed and shared experts; or a dense MLP.

Letters: T rows, d model width, m routed experts, E logical ones, K picks a row, D devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ABSENT, ExpertPool, ExpertTable
from jmoe.parallel.experts import routed_experts
from jmoe.parallel.probe import Probe
from jmoe.parallel.replicas import (
    Ahead,
    Balance,
    Replicas,
    Replication,
    replicated_experts,
)
from jmoe.weights import Params
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.norm import rms_norm
from pallas_kernels.routing import TableRow


class RoutedRows(NamedTuple):
    """What the stages need to know about a step's rows."""

    positions: Int[Array, "T"]
    valid: Bool[Array, "T"]  # False: padding
    exempt: Bool[Array, "T"]  # True: not degraded in this step
    exact: Bool[Array, "T"] | None = None
    """Of those, the rows that no substitute may serve; None: not asked for."""


class Picks(NamedTuple):
    """What one MoE layer's router chose, before the brownout plan."""

    ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]  # gate weights, float32


class LayerStats(NamedTuple):
    """Counts of one MoE layer's step; serving asks for no more.

    `jmoe.model.run_layers` stacks them over MoE layers, and adds `hidden` itself.
    """

    degraded: Int[Array, "T"]  # degraded visits of each row
    expert_rows: Int[Array, "E"]  # rows that each logical expert computed
    picks: Picks | None = None
    hidden: Float[Array, "N T d"] | None = None  # rows before each layer, dense too, and after all
    balance: Balance | None = None  # where experts are copied while the step runs
    needed: Int[Array, "m"] | None = None
    """Visits of exact rows to experts that are not on the device for good, where there are any."""


class Wanted(NamedTuple):
    """What a program returns beyond counts (static: another choice is another program)."""

    picks: bool = False
    hidden: bool = False


COUNTS = Wanted()


def route(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T K"], Int[Array, "T K"]]:
    """Returns normed rows, their gate weights (float32) and the experts their router chose
    (int32).
    """
    h, logits = router(cfg, layer, x)
    weights, ids = routing.gate(logits, top_k=cfg.experts_per_token, normalize=cfg.norm_topk_prob)
    return h, weights, ids


def router(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T m"]]:
    """Returns normed rows and their router's logits (float32)."""
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
    return h, jnp.dot(h, layer["router"], preferred_element_type=jnp.float32)


def swiglu(h: Float[Array, "T d"], gate_up: Array, down: Array) -> Float[Array, "T d"]:
    """Computes `(silu(h Wg) * (h Wu)) Wd` with the two first matrices side by side."""
    gate, up = jnp.split(h @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def shared_expert(layer: Params, h: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """Runs the expert every row visits, behind its sigmoid gate (Qwen2-MoE)."""
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
    """Runs the routed experts of planned visits, through one layer's table row; returns each
    expert's rows, too.
    """
    block_m = grouped_gemm.block_rows(expert_ids.size, max_active)
    work = routing.dispatch(expert_ids, weights, slots, block_m=block_m, max_active=max_active)
    out = grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work)
    return out.astype(h.dtype), work.expert_rows


def moe(
    cfg: ModelConfig,
    layer: Params,
    pool: ExpertPool,
    slots: Int[Array, "E"] | TableRow,
    groups: Int[Array, "m"] | TableRow,
    x: Float[Array, "T d"],
    rows: RoutedRows,
    control: Control,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
    offloaded: Int[Array, "m"] | None = None,
) -> tuple[Float[Array, "T d"], LayerStats]:
    """Runs router, brownout plan, routed and shared experts, with the residual (the paper's eq. 5).

    With `offloaded` (see ExpertTable), a visit that a substitute serves counts as degraded.
    """
    h, logits = router(cfg, layer, x)
    out, ids, stats = routed(
        cfg,
        pool,
        slots,
        groups,
        h,
        logits,
        rows,
        control,
        max_active=max_active,
        offloaded=offloaded,
    )
    if wanted.picks:
        stats = stats._replace(picks=_picks(cfg, logits, ids))
    return with_residual(cfg, layer, x, h, out), stats


def routed(
    cfg: ModelConfig,
    pool: ExpertPool,
    slots: Int[Array, "E"] | TableRow,
    groups: Int[Array, "m"] | TableRow,
    h: Float[Array, "T d"],
    logits: Float[Array, "T columns"],
    rows: RoutedRows,
    control: Control,
    *,
    max_active: int,
    offloaded: Int[Array, "m"] | None = None,
) -> tuple[Float[Array, "T d"], Int[Array, "T K"], LayerStats]:
    """Runs the routed experts of normed rows whose router said `logits`: brownout plan, dispatch
    and the experts themselves. Returns their sum, the router's choices, and counts.
    """
    top_k = cfg.experts_per_token
    num_experts = routing.row_length(slots)
    ids, plan, work = routing.route(
        logits,
        threshold_percent=control.threshold_percent,
        strategy=control.strategy,
        block_m=grouped_gemm.block_rows(logits.shape[0] * top_k, max_active),
        max_active=max_active,
        top_k=top_k,
        normalize=cfg.norm_topk_prob,
        groups=groups,
        slots=slots,
        valid=rows.valid,
        exempt=rows.exempt,
        tiles=grouped_gemm.row_tiles(logits.shape[0], top_k, num_experts, pool.down),
    )
    out = grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work).astype(h.dtype)
    degraded, needed = plan.degraded, None
    if offloaded is not None:
        substituted = (offloaded[ids] == ABSENT) & (plan.expert_ids == ids)
        degraded, needed = degraded | substituted, _needed(ids, offloaded, rows)
    by_row = jnp.sum(degraded, axis=-1, dtype=jnp.int32)
    return out, ids, LayerStats(by_row, work.expert_rows, needed=needed)


def _needed(
    ids: Int[Array, "T K"], offloaded: Int[Array, "m"], rows: RoutedRows
) -> Int[Array, "m"] | None:
    """Returns the visits of exact rows to experts that are not on the device for good."""
    if rows.exact is None:
        return None
    asked = ids[:, :, None] == jnp.arange(offloaded.shape[0], dtype=jnp.int32)[None, None, :]
    asked &= (rows.valid & rows.exact)[:, None, None] & (offloaded > 0)[None, None, :]
    return jnp.sum(asked, axis=(0, 1), dtype=jnp.int32)


class LayerReplication(NamedTuple):
    """What an MoE layer over a mesh needs beside its own weights."""

    replication: Replication | None = None  # None: experts stay where they are
    next_layer: tuple[Params | Probe, ExpertTable] | None = None
    """What guesses the next MoE layer's routing, its router or a probe; and its table row."""
    replicas: Replicas | None = None  # this layer's copies


def moe_over_mesh(
    cfg: ModelConfig,
    layer: Params,
    pool: ExpertPool,
    table: ExpertTable,
    x: Float[Array, "T d"],
    rows: RoutedRows,
    control: Control,
    copying: LayerReplication,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
) -> tuple[Float[Array, "T d"], LayerStats, Replicas | None]:
    """Runs `moe` where experts are spread over the devices of a mesh (`jmoe.parallel`).

    `table` is this layer's row, with hosts. Returns the next MoE layer's copies of experts, too.
    """
    h, logits = router(cfg, layer, x)
    given: dict[str, Any] = {
        "top_k": cfg.experts_per_token,
        "normalize": cfg.norm_topk_prob,
        "valid": rows.valid,
        "exempt": rows.exempt,
        "control": control,
        "max_active": min(max_active, pool.down.shape[0] // cfg.num_moe_layers),
    }
    replicas, balance = None, None
    if copying.replication is None:
        slots, groups, hosts, _ = table
        assert hosts is not None
        out, ids, degraded, expert_rows = routed_experts(
            pool, h, logits, slots=slots, groups=groups, hosts=hosts, **given
        )
    else:
        ahead = None
        if copying.next_layer is not None:
            next_layer, next_table = copying.next_layer
            probed = isinstance(next_layer, Probe)
            logits_ahead = next_layer.logits(x) if probed else router(cfg, next_layer, x)[1]
            ahead = Ahead(logits_ahead, next_table)
        out, ids, degraded, expert_rows, replicas, balance = replicated_experts(
            pool,
            h,
            logits,
            table=table,
            replicas=copying.replicas,
            ahead=ahead,
            replication=copying.replication,
            **given,
        )
    stats = LayerStats(jnp.sum(degraded, axis=-1, dtype=jnp.int32), expert_rows, balance=balance)
    if wanted.picks:
        stats = stats._replace(picks=_picks(cfg, logits, ids))
    return with_residual(cfg, layer, x, h, out), stats, replicas


def with_residual(cfg: ModelConfig, layer: Params, x: Array, h: Array, out: Array) -> Array:
    """Returns routed and shared experts with the residual."""
    return x + (out + shared_expert(layer, h) if cfg.d_ff_shared else out)


def _picks(cfg: ModelConfig, logits: Array, ids: Array) -> Picks:
    logits = logits[:, : cfg.num_experts]  # the rest is padding (`jmoe.model.unstack`)
    weights, _ = routing.gate(logits, top_k=cfg.experts_per_token, normalize=cfg.norm_topk_prob)
    return Picks(ids, weights)


def dense_mlp(cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """Runs the MLP of a layer without experts, with the residual."""
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
    return x + swiglu(h, layer["gate_up"], layer["down"])
