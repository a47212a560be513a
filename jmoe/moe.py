"""The MLP half of a layer: router, brownout plan, routed and shared experts; or a dense MLP.

`moe` is the one MoE block. Where rows and experts meet is an `Exchange`: `alone` on one device,
`jmoe.parallel.delivery.over_mesh` over a mesh, `jmoe.parallel.replicas.Copying` with copies of
experts that travel meanwhile; `jmoe.stages` cuts the block in two, between workers. All of them are
made of `router`, `gate`, `planned` and `compute`.

Letters: T rows, d model width, m routed experts, E logical ones, K picks a row, D devices.
"""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ABSENT, ExpertTable, Pool
from jmoe.router import ScoredTopK, fused
from jmoe.weights import Params
from pallas_kernels import routing
from pallas_kernels.activation import Activation, gated
from pallas_kernels.matmul import LayerOf, linear
from pallas_kernels.norm import layer_norm, rms_norm


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


class Balance(NamedTuple):
    """Counts of one layer whose experts are copied over a mesh; all devices know them."""

    right: Int[Array, ""]  # visits by device and expert that were expected and made
    copied: Int[Array, ""]  # experts that were sent for it


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
    wrong: Int[Array, ""] | None = None
    """What was wrong with the plan of a user's own strategy (`jmoe.brownout.Own.instead`)."""


class Wanted(NamedTuple):
    """What a program returns beyond counts (static: another choice is another program)."""

    picks: bool = False
    hidden: bool = False


COUNTS = Wanted()


class Asked(NamedTuple):
    """What an MoE layer asks of experts."""

    layer: Params
    x: Float[Array, "T d"]  # rows as they enter the layer's MLP half
    h: Float[Array, "T d"]  # normed
    logits: Float[Array, "T columns"]  # of the router, float32; what is past its experts is padding
    rows: RoutedRows
    control: Control


class Answered(NamedTuple):
    """What experts made of it."""

    out: Float[Array, "T d"]  # the sum of its experts for each row
    ids: Int[Array, "T K"]  # what the router chose
    stats: LayerStats
    replicas: Any = None  # copies of the next MoE layer's experts, of an exchange that sends some


@runtime_checkable
class Exchange(Protocol):
    """Brings rows and their experts together: from the router's logits to the sum of experts."""

    def __call__(
        self, cfg: ModelConfig, pool: Pool, table: ExpertTable, asked: Asked, max_active: int
    ) -> Answered:
        """Makes one brownout plan of all rows that meet, and runs the experts of its visits.

        `table` is one layer's row. `max_active` (static) is the experts that the dispatch has room
        for; the caller guarantees it.
        """
        ...


def route(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T K"], Int[Array, "T K"]]:
    """Returns normed rows, their gate weights (float32) and the experts their router chose
    (int32).
    """
    h, logits = router(cfg, layer, x)
    return h, *gate(cfg, logits, layer)


def router(
    cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]
) -> tuple[Float[Array, "T d"], Float[Array, "T m"]]:
    """Returns normed rows and their router's logits (float32)."""
    h = normed(cfg, layer, "mlp_norm", x)
    logits = linear(h, layer["router"], jnp.float32)
    if cfg.logits_bias:
        logits = logits + layer["logits_bias"].astype(jnp.float32)[None]
    return h, logits


def normed(cfg: ModelConfig, params: Params, key: str, x: Float[Array, "T d"]) -> Array:
    """Returns the norm of rows by the parameters of that key."""
    if cfg.layer_norm:
        return layer_norm(x, params[key], params[f"{key}_bias"], cfg.rms_norm_eps)
    return rms_norm(x, params[key], cfg.rms_norm_eps)


def gate(
    cfg: ModelConfig, logits: Float[Array, "T columns"], layer: Params, num_columns: int = 0
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Returns each row's gate weights (float32) and experts (int32), by a router's logits, of which
    the first `num_columns` count, 0: as many as a model has experts.
    """
    logits = logits[:, : num_columns or cfg.num_experts]  # others pad (`jmoe.model.unstack`)
    if cfg.router is not None:
        return cfg.router(cfg, layer, logits)
    return routing.gate(logits, top_k=cfg.experts_per_token, normalize=cfg.norm_topk_prob)


def planned(
    cfg: ModelConfig,
    ids: Int[Array, "N K"],
    weights: Float[Array, "N K"] | None,
    groups: Int[Array, "m"],
    valid: Bool[Array, "N"],
    exempt: Bool[Array, "N"],
    control: Control,
) -> routing.Plan:
    """Returns the brownout plan of rows whose routers chose `ids`, by these gate weights (None: by
    visits, whatever the strategy says).
    """
    return routing.brownout_plan(
        ids,
        weights,
        scale=cfg.router.scale if isinstance(cfg.router, ScoredTopK) else 1.0,
        groups=groups,
        threshold_percent=control.threshold_percent,
        strategy=control.strategy,
        valid=valid,
        exempt=exempt,
    )


def compute(
    pool: Pool,
    h: Float[Array, "N d"],
    weights: Float[Array, "N K"],
    expert_ids: Int[Array, "N K"],
    slots: Int[Array, "E"],
    *,
    max_active: int,
    activation: Activation,
    max_visits: int | None = None,
) -> tuple[Float[Array, "N d"], Int[Array, "E"]]:
    """Runs the experts of planned visits (-1: none), through one layer's table row: dispatch,
    grouped GEMM, and each row's sum by gate weight. Returns each expert's rows, too. `max_visits`
    is as of `routing.dispatch`.
    """
    block_m = pool.block_rows(max_visits or expert_ids.size, max_active)
    sizes: dict[str, Any] = {"max_active": max_active, "max_visits": max_visits}
    work = routing.dispatch(expert_ids, weights, slots, block_m=block_m, **sizes)
    return pool.mlp(h, work, activation).astype(h.dtype), work.expert_rows


def gated_mlp(
    h: Float[Array, "*n T d"],
    gate_up: Float[Array, "*n d f2"] | LayerOf,
    down: Float[Array, "*n f d"] | LayerOf,
    activation: Activation,
    biases: tuple[Float[Array, "*n f2"], Float[Array, "*n d"]] | None = None,
) -> Float[Array, "*n T d"]:
    """Computes `act(h Wg, h Wu) Wd` with the two first matrices side by side, or without Wg, of one
    network or, each on its own rows, several; in the weights' dtype. `biases` are of the two
    products.
    """

    def product(rows: Array, weights: Array | LayerOf, at: int) -> Array:
        out = linear(rows, weights)
        return out if biases is None else out + biases[at].astype(out.dtype)[..., None, :]

    return product(gated(product(h, gate_up, 0), activation), down, 1).astype(h.dtype)


def shared_expert(cfg: ModelConfig, layer: Params, h: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """Runs the experts every row visits as one, behind its sigmoid gate where there is one."""
    out = gated_mlp(h, layer["shared_gate_up"], layer["shared_down"], cfg.activation)
    if not cfg.shared_gate:
        return out
    opening = jax.nn.sigmoid((h @ layer["shared_gate"][:, None]).astype(jnp.float32))
    return opening.astype(h.dtype) * out


def moe(
    cfg: ModelConfig,
    layer: Params,
    pool: Pool,
    table: ExpertTable,
    x: Float[Array, "T d"],
    rows: RoutedRows,
    control: Control,
    exchange: Exchange | None = None,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
) -> tuple[Float[Array, "T d"], LayerStats, Any]:
    """Runs router, brownout plan, routed and shared experts, with the residual (the paper's eq. 5).

    `table` is this layer's row; `exchange` None: `alone`. Returns the next MoE layer's copies of
    experts, too, where the exchange sends some.
    """
    h, logits = router(cfg, layer, x)
    asked = Asked(layer, x, h, logits, rows, control)
    out, ids, stats, replicas = (exchange or alone)(cfg, pool, table, asked, max_active)
    if wanted.picks:
        weights, _ = gate(cfg, logits, layer)
        stats = stats._replace(picks=Picks(ids, weights))
    return with_residual(cfg, layer, x, h, out), stats, replicas


def alone(
    cfg: ModelConfig, pool: Pool, table: ExpertTable, asked: Asked, max_active: int
) -> Answered:
    """Serves rows by this device's experts. An Exchange. Gate, plan and dispatch are one op, unless
    that does not know the config's router, or its strategy. Where the table has levels, its
    threshold is the layer's.

    Where experts are offloaded (see ExpertTable), a visit that a substitute serves counts as
    degraded.
    """
    layer, _, h, logits, rows, control = asked
    wrong = None
    threshold = control.threshold_percent if table.levels is None else table.levels
    if cfg.strategy is None and (options := fused(cfg, layer)) is not None:
        top_k = cfg.experts_per_token
        num_experts = routing.row_length(table.slots)
        ids, plan, work = routing.route(
            logits,
            threshold_percent=threshold,
            strategy=control.strategy,
            block_m=pool.block_rows(logits.shape[0] * top_k, max_active),
            max_active=max_active,
            groups=table.groups,
            slots=table.slots,
            valid=rows.valid,
            exempt=rows.exempt,
            tiles=pool.row_tiles(logits.shape[0], top_k, num_experts),
            **options,
        )
        out, expert_rows = pool.mlp(h, work, cfg.activation).astype(h.dtype), work.expert_rows
    else:
        weights, ids = gate(cfg, logits, layer)
        groups, slots = routing.row_of(table.groups), routing.row_of(table.slots)
        control = control._replace(threshold_percent=routing.threshold_of(threshold))
        flags = rows.valid, rows.exempt
        plan = planned(cfg, ids, weights, groups, *flags, control)
        if (own := cfg.strategy) is not None:
            # It may send visits of one expert both there and to the united one.
            max_active = len(slots) if max_active >= len(groups) else max_active
            given = ids, weights, groups, *flags, control, max_active
            plan, wrong = own.instead(plan, *given)
        sizes: dict[str, Any] = {"max_active": max_active, "activation": cfg.activation}
        out, expert_rows = compute(pool, h, weights, plan.expert_ids, slots, **sizes)
    degraded, needed = plan.degraded, None
    if (offloaded := table.offloaded) is not None:
        substituted = (offloaded[ids] == ABSENT) & (plan.expert_ids == ids)
        degraded, needed = degraded | substituted, _needed(ids, offloaded, rows)
    by_row = jnp.sum(degraded, axis=-1, dtype=jnp.int32)
    return Answered(out, ids, LayerStats(by_row, expert_rows, needed=needed, wrong=wrong))


def _needed(
    ids: Int[Array, "T K"], offloaded: Int[Array, "m"], rows: RoutedRows
) -> Int[Array, "m"] | None:
    """Returns the visits of exact rows to experts that are not on the device for good."""
    if rows.exact is None:
        return None
    asked = ids[:, :, None] == jnp.arange(offloaded.shape[0], dtype=jnp.int32)[None, None, :]
    asked &= (rows.valid & rows.exact)[:, None, None] & (offloaded > 0)[None, None, :]
    return jnp.sum(asked, axis=(0, 1), dtype=jnp.int32)


def with_residual(cfg: ModelConfig, layer: Params, x: Array, h: Array, out: Array) -> Array:
    """Returns routed and shared experts with the residual."""
    out = out + shared_expert(cfg, layer, h) if cfg.d_ff_shared else out
    return residual(cfg, layer, "mlp", x, out)


def residual(
    cfg: ModelConfig, layer: Params, half: Literal["attn", "mlp"], x: Array, out: Array
) -> Array:
    """Adds to the rows what half a layer has made of them, normed where the layer has a norm for
    that.
    """
    if cfg.post_norms:
        out = rms_norm(out, layer[f"{half}_post_norm"], cfg.rms_norm_eps)
    return x + (out if cfg.residual_multiplier == 1 else out * cfg.residual_multiplier)


def dense_mlp(cfg: ModelConfig, layer: Params, x: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """Runs the MLP of a layer without experts, with the residual; some layers have none."""
    if "down" not in layer:
        return x
    h = normed(cfg, layer, "mlp_norm", x)
    out = gated_mlp(h, layer["gate_up"], layer["down"], cfg.activation)
    return residual(cfg, layer, "mlp", x, out)
