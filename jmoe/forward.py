"""Logits of whole sequences, without a cache: what notebooks ask of a model."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jmoe import display
from jmoe.api import Model
from jmoe.attention import causal_attention
from jmoe.brownout import Brownout, Control
from jmoe.config import ModelConfig
from jmoe.model import StepData, embed, head, run_layers
from jmoe.moe import LayerStats, RoutedRows, Wanted
from jmoe.parallel.experts import AXIS
from jmoe.parallel.home import SPLIT, WEIGHTS, WHOLE
from jmoe.parallel.steps import Specs, spread
from jmoe.weights import Weights


class ForwardStats(NamedTuple):
    """What `forward(..., return_stats=True)` returns about its one step.

    L are the MoE layers in order (dense ones are left out), K the picks of a token, E the logical
    experts: the m routed ones, then the united ones. Router choices and gate weights
    are the router's own, before brownout: `jmoe.brownout.plan` of a layer's choices says what
    became of them.
    """

    router_choices: Int[Array, "L batch length K"]  # int32: routed experts, by falling weight
    gate_weights: Float[Array, "L batch length K"]  # float32: of these choices
    degraded_visits: Int[Array, "L batch length"]  # int32: visits of a token that were degraded
    expert_rows: Int[Array, "L E"]  # int32: tokens that each logical expert computed
    hidden_states: Float[Array, "N batch length d"] | None = None
    """In the model's dtype, N = num_layers + 1: rows before each layer (dense ones too), and after
    the last one, before the final norm. None unless `return_hidden`."""

    def __repr__(self) -> str:
        return display.arrays(self)

    @property
    def degraded_share(self) -> float:
        """Degraded expert visits over all of them, 0 to 1."""
        return int(np.sum(self.degraded_visits)) / self.router_choices.size


Tokens = ArrayLike | Sequence[Sequence[int]]


@overload
def forward(
    model: Model,
    tokens: Tokens,
    brownout: Brownout | None = ...,
    *,
    exempt: ArrayLike | Sequence[bool] | None = ...,
    return_stats: Literal[False] = ...,
    return_hidden: bool = ...,
) -> Float[Array, "batch length vocab"]: ...


@overload
def forward(
    model: Model,
    tokens: Tokens,
    brownout: Brownout | None = ...,
    *,
    exempt: ArrayLike | Sequence[bool] | None = ...,
    return_stats: Literal[True],
    return_hidden: bool = ...,
) -> tuple[Float[Array, "batch length vocab"], ForwardStats]: ...


def forward(
    model: Model,
    tokens: Tokens,
    brownout: Brownout | None = None,
    *,
    exempt: ArrayLike | Sequence[bool] | None = None,
    return_stats: bool = False,
    return_hidden: bool = False,
) -> Float[Array, "batch length vocab"] | tuple[Float[Array, "batch length vocab"], ForwardStats]:
    """Logits of whole sequences, without a cache.

    Args:
        model: as `load` returns it.
        tokens: int [batch, length]; all rows are one step, as a served batch is.
        brownout: what may be degraded; None is nothing.
        exempt: bool [batch]; sequences that refuse brownout.
        return_stats: return (logits, ForwardStats): the routers' choices and what was degraded.
        return_hidden: put hidden states by layer into the stats; needs `return_stats`.

    Returns float32 [batch, length, vocab], or that and the stats. Raises ValueError for tokens that
    are no such array, outside the vocabulary, or more than the model has positions, and for a
    user's own strategy that fails.
    """
    if return_hidden and not return_stats:
        raise ValueError("return_hidden is True; it needs return_stats=True")
    array = _sequences(model, tokens)
    refuses = np.zeros(array.shape[0], bool) if exempt is None else np.asarray(exempt, bool)
    if refuses.shape != array.shape[:1]:
        raise ValueError(f"exempt must be bool [{array.shape[0]}]; got {refuses.shape}")
    length = array.shape[1]
    wanted, control = Wanted(picks=return_stats, hidden=return_hidden), model.prepare(brownout)
    valid, mesh = np.ones(len(array), bool), None if model.home is None else model.home.mesh
    if mesh is not None:  # as many sequences on each device
        missing = [(0, -len(array) % mesh.size)]
        array, refuses, valid = (
            np.pad(a, missing + [(0, 0)] * (a.ndim - 1)) for a in (array, refuses, valid)
        )
    cfg = model.config_under(brownout)
    logits, stats = _forward(
        cfg,
        wanted,
        mesh,
        model.weights,
        jnp.asarray(array, jnp.int32),
        jnp.asarray(refuses),
        jnp.asarray(valid),
        control,
    )
    if cfg.strategy is not None:
        cfg.strategy.check(stats.wrong)
    if not return_stats:
        return logits[: valid.sum()]
    return logits[: valid.sum()], _by_token(stats, int(valid.sum()), length)


def _sequences(model: Model, tokens: Tokens) -> np.ndarray:
    """Returns tokens as an array. Raises ValueError as `forward` does."""
    try:
        array = np.asarray(tokens)
    except ValueError:  # NumPy's word for it is inhomogeneous
        raise ValueError("tokens must be [batch, length]; these rows differ in length") from None
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        raise ValueError(
            f"tokens must be integers [batch, length]; got {array.dtype} {array.shape}"
        )
    check_tokens(array, model.config.vocab_size)
    if array.shape[1] > (most := model.config.max_position):
        raise ValueError(
            f"rows have {array.shape[1]} positions; {model.name} has {most} "
            "(max_position_embeddings)"
        )
    return array


def _by_token(stats: LayerStats, batch: int, length: int) -> ForwardStats:
    def split(rows: Array) -> Array:  # [L, T, ...] -> [L, batch, length, ...]
        return rows[:, : batch * length].reshape(rows.shape[0], batch, length, *rows.shape[2:])

    assert stats.picks is not None
    return ForwardStats(
        split(stats.picks.ids),
        split(stats.picks.weights),
        split(stats.degraded),
        stats.expert_rows,
        None if stats.hidden is None else split(stats.hidden),
    )


def check_tokens(tokens: ArrayLike | Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for a token outside the vocabulary."""
    array = np.asarray(tokens)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)].flat[0]
        raise ValueError(f"token {bad} is outside the vocabulary of {vocab_size}")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(
    cfg: ModelConfig, wanted: Wanted, mesh: Mesh | None, weights: Weights, *step: Any
) -> tuple[Array, LayerStats]:
    """Runs the model; over a mesh each device has some of the sequences."""
    if mesh is None:
        return _forward_rows(cfg, wanted, weights, *step)

    def one_device(weights: Weights, *step: Any) -> tuple[Array, LayerStats]:
        logits, stats = _forward_rows(cfg, wanted, weights, *step)
        return logits, stats._replace(expert_rows=lax.psum(stats.expert_rows, AXIS))

    by_row = P(None, AXIS)
    stats_are = LayerStats._make([by_row] * len(LayerStats._fields))._replace(expert_rows=WHOLE)
    results = SPLIT, stats_are
    lies = Specs((WEIGHTS, SPLIT, SPLIT, SPLIT, WHOLE), results, results)
    return spread(mesh, one_device, lies)(weights, *step)


def _forward_rows(
    cfg: ModelConfig,
    wanted: Wanted,
    weights: Weights,
    tokens: Int[Array, "batch length"],
    exempt: Bool[Array, "batch"],
    valid: Bool[Array, "batch"],
    control: Control,
) -> tuple[Array, LayerStats]:
    batch, length = tokens.shape
    rows = RoutedRows(
        jnp.tile(jnp.arange(length, dtype=jnp.int32), batch),
        jnp.repeat(valid, length),
        jnp.repeat(exempt, length),
    )
    x = embed(cfg, weights.params, tokens.reshape(-1))
    step = StepData(rows, causal_attention(cfg, batch, length), control)
    x, _, stats = run_layers(cfg, weights, x, None, step, max_active=cfg.num_experts, wanted=wanted)
    assert stats is not None
    return head(cfg, weights.params, x).reshape(batch, length, cfg.vocab_size), stats
