"""Half layers as stages of their own, which wait for their own rows (AMoE, section 3).

A layer's experts may lie on other devices than its attention, and its rows be others' neighbours
there. So what follows a router is cut in two: `attend_stage` ends where rows leave for their
experts, `expert_stage` computes visits of any rows, and `merge` adds up what came back before the
next `attend_stage`. Gate weights stay where attention is. Parts are added in the order of a row's
picks, whatever order they came in: bits do not depend on it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmoe.attention import ByKind
from jmoe.brownout import Control, strategy_code
from jmoe.config import ModelConfig
from jmoe.experts import Pool
from jmoe.model import StepData, attend
from jmoe.moe import (
    RoutedRows,
    compute,
    dense_mlp,
    gate,
    planned,
    residual,
    router,
    shared_expert,
)
from jmoe.rope import rotation
from jmoe.weights import Params
from pallas_kernels import routing
from pallas_kernels.activation import Activation

FULL, PARTIAL = strategy_code("full"), strategy_code("partial")


class WaitingRows(NamedTuple):
    """Rows whose experts compute; of a dense layer, nothing is waited for."""

    x: Float[Array, "T d"]  # with the layer's attention
    weights: Float[Array, "T K"]  # of each visit, float32; 0: none
    shared: Float[Array, "T d"] | None  # what the shared expert made of them, where there is one


class StageVisits(NamedTuple):
    """The visits that rows ask of experts."""

    h: Float[Array, "T d"]  # normed rows: these travel
    expert_ids: Int[Array, "T K"]  # logical expert of each visit; -1: none
    degraded: Int[Array, "T"]  # visits that went elsewhere than the router said
    unserved: Int[Array, "T"]  # visits whose expert nobody has, and that nothing may stand in for


def waiting(cfg: ModelConfig, x: Float[Array, "T d"]) -> WaitingRows:
    """Returns rows that wait for nothing."""
    weights = jnp.zeros((x.shape[0], cfg.experts_per_token), jnp.float32)
    return WaitingRows(x, weights, jnp.zeros_like(x) if cfg.d_ff_shared else None)


def merge_params(layer: Params) -> Params:
    """Returns the parameters of a layer that `merge` reads."""
    return {key: leaf for key, leaf in layer.items() if key == "mlp_post_norm"}


def merge(
    cfg: ModelConfig, layer: Params, waiting: WaitingRows, parts: Float[Array, "T K d"]
) -> Float[Array, "T d"]:
    """Returns rows after the experts of a layer; parts of visits that do not exist are ignored, and
    rows that wait for nothing stay as they are.
    """
    total = jnp.zeros(waiting.x.shape, jnp.float32)
    for k in range(waiting.weights.shape[1]):
        weight = waiting.weights[:, k, None]
        part = jnp.where(weight != 0, parts[:, k].astype(jnp.float32), 0.0)
        total = total + weight * part
    out = total.astype(waiting.x.dtype)
    out = out if waiting.shared is None else out + waiting.shared
    return residual(cfg, layer, "mlp", waiting.x, out)


def attend_stage(
    cfg: ModelConfig,
    layer: Params,
    groups: Int[Array, "m"] | None,
    index: Int[Array, ""],
    x: Float[Array, "T d"],
    pages: Any,
    step: StepData,
    reachable: Bool[Array, "E"] | None = None,
    kind: int | None = None,
) -> tuple[WaitingRows, StageVisits | None, Any]:
    """Runs a layer up to its experts.

    Args:
        cfg: the model's.
        layer: parameters of the layer alone, as an unstacked segment has them.
        groups: of this MoE layer, as in ExpertTable; None: the layer is dense.
        index: of the layer among those of its kind; traced, so that these are one program.
        x: rows as they enter the layer.
        pages: keys and values, written for these rows.
        step: of these rows, whichever those are: brownout's plan is made of what this batch visits.
        reachable: logical experts that somebody has, routed ones and then united; None: all.
        kind: number of the layer's kind of attention (static); None: all layers have one.

    Returns the rows, what they visit (None of a dense layer, whose MLP has run), and pages.
    """
    rope = cfg.rope_of(cfg.attention_kinds[kind or 0])
    cos_sin = rotation(step.rows.positions, rope, cfg.head_dim)
    if kind is None:
        x, pages = attend(cfg, layer, x, cos_sin, step.attention, index, pages)
    else:
        own, each = step.attention.each[kind], [*pages.each]
        x, each[kind] = attend(cfg, layer, x, cos_sin, own, index, each[kind])
        pages = ByKind(tuple(each))
    if groups is None:
        return waiting(cfg, dense_mlp(cfg, layer, x)), None, pages
    h, logits = router(cfg, layer, x)
    (rows, _, control), (weights, ids) = step, gate(cfg, logits, layer)
    plan = planned(cfg, ids, weights, groups, rows.valid, rows.exempt, control)
    expert_ids, unserved = plan.expert_ids, jnp.zeros_like(plan.degraded)
    if reachable is not None:
        expert_ids, unserved = _reached(ids, expert_ids, groups, reachable, rows, control)
    degraded = jnp.sum(rows.valid[:, None] & (expert_ids != ids), axis=-1, dtype=jnp.int32)
    weights, expert_ids = _once(weights, expert_ids)
    unserved = jnp.sum(unserved, axis=-1, dtype=jnp.int32)
    shared = shared_expert(cfg, layer, h) if cfg.d_ff_shared else None
    visits = StageVisits(h, expert_ids, degraded, unserved)
    return WaitingRows(x, weights, shared), visits, pages


def _reached(
    ids: Int[Array, "T K"],
    chosen: Int[Array, "T K"],
    groups: Int[Array, "m"],
    reachable: Bool[Array, "E"],
    rows: RoutedRows,
    control: Control,
) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
    """Returns a plan's visits without those to experts that nobody has; and which of them nothing
    serves.

    A visit goes to the expert that its router chose where only the united one is gone; to the
    united one, or nowhere, where the strategy in force allows that; and nobody else's may.
    """

    def there(expert: Int[Array, "T K"]) -> Bool[Array, "T K"]:
        return (expert >= 0) & reachable[jnp.maximum(expert, 0)]

    base = control.strategy & (routing.BY_WEIGHT - 1)
    gone = (chosen >= 0) & ~there(chosen)
    united = jnp.where(groups[ids] >= 0, groups.shape[0] + groups[ids], -1)
    may = jnp.ones_like(gone) if rows.exact is None else ~rows.exact[:, None]
    back = gone & there(ids)
    stands_in = gone & ~back & may & (base == PARTIAL) & there(united)
    dropped = gone & ~back & may & (base == FULL)
    unserved = gone & ~back & ~stands_in & ~dropped
    found = jnp.where(back, ids, jnp.where(stands_in, united, chosen))
    return jnp.where(dropped | unserved, -1, found), unserved


def _once(
    weights: Float[Array, "T K"], ids: Int[Array, "T K"]
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Merges visits of a row that meet in one expert into the first one, with the sum of their
    weights.
    """
    same: Bool[Array, "T K K"] = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    first = jnp.argmax(same, axis=-1) == jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    first &= ids >= 0
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    return jnp.where(first, total, 0.0), jnp.where(first, ids, -1)


def expert_stage(
    pool: Pool,
    h: Float[Array, "V d"],
    expert_ids: Int[Array, "V"],
    slots: Int[Array, "E"],
    *,
    max_active: int,
    activation: Activation,
) -> Float[Array, "V d"]:
    """Computes visits to one layer's experts, one a row, all of a device's in one grouped GEMM.

    `expert_ids` are logical ones, -1 for padding; `slots` is the layer's row of this device's
    table. `max_active` (static) is the experts that there is room for; the caller guarantees it.
    Rows come back in the pool's dtype, without their gate weights.
    """
    ones = jnp.ones((len(expert_ids), 1), jnp.float32)
    given: dict[str, Any] = {"max_active": max_active, "activation": activation}
    return compute(pool, h, ones, expert_ids[:, None], slots, **given)[0]
