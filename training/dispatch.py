"""The trainer's differentiable expert computation: sort by expert, one batched GEMM, gather back.

Rows are copied into a buffer `[m, capacity, d]`, all experts run as two batched products, and each
row gathers its K results. Both copies are gathers in both directions (`jax.custom_vjp`): a scatter
is several times slower on a CPU. Visits past an expert's capacity are dropped and counted.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jmoe.moe import gated_mlp
from pallas_kernels.activation import SILU, Activation


def biases_of(experts: Mapping[str, Array]) -> tuple[Array, Array] | None:
    """Returns experts' biases, where their arrays have any."""
    if "down_bias" not in experts:
        return None
    return experts["gate_up_bias"], experts["down_bias"]


class BufferPlan(NamedTuple):
    """Where each visit goes: `source[m, C]` row of a buffer cell, `cell[T, K]` cell of a visit.

    An empty buffer cell has source T and a dropped visit has cell m * C; both index a zero row.
    """

    source: Int[Array, "m C"]
    cell: Int[Array, "T K"]
    dropped: Int[Array, ""]


def plan_dispatch(ids: Int[Array, "T K"], num_experts: int, capacity: int) -> BufferPlan:
    """Gives every visit a cell in its expert's buffer, in row order; visits past capacity are
    dropped.

    An id of -1 is no visit; it gets no cell and does not count as dropped.
    """
    num_rows, k = ids.shape
    flat = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    at = jnp.arange(capacity, dtype=jnp.int32)[None]
    visit = order.at[starts[:, None] + at].get(mode="clip")
    source = jnp.where(at < counts[:, None], visit // k, num_rows)
    place = jnp.arange(num_rows * k, dtype=jnp.int32)
    start = starts.at[flat].get(mode="fill", fill_value=0)
    rank = jnp.zeros_like(flat).at[order].set(place, unique_indices=True) - start
    visits = flat < num_experts
    cell = jnp.where(visits & (rank < capacity), flat * capacity + rank, num_experts * capacity)
    dropped = jnp.sum(visits & (rank >= capacity), dtype=jnp.int32)
    return BufferPlan(
        source.astype(jnp.int32), cell.reshape(num_rows, k).astype(jnp.int32), dropped
    )


def _with_zero_row(x: Float[Array, "n d"]) -> Float[Array, "n+1 d"]:
    return jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])


def _of_visits(cells: Float[Array, "m C d"], plan: BufferPlan) -> list[Float[Array, "T d"]]:
    """Returns what the cell of each row's k-th visit holds, for every k; zero without a cell."""
    flat = _with_zero_row(cells.reshape(-1, cells.shape[-1]))
    return [flat[plan.cell[:, k]] for k in range(plan.cell.shape[1])]


@jax.custom_vjp
def scatter_rows(x: Float[Array, "T d"], plan: BufferPlan) -> Float[Array, "m C d"]:
    """Copies rows into their experts' buffers; empty cells are zero."""
    return _with_zero_row(x)[plan.source]


def _scatter_fwd(x, plan):
    return scatter_rows(x, plan), plan


def _scatter_bwd(plan, grad):
    return functools.reduce(jnp.add, _of_visits(grad, plan)), None


scatter_rows.defvjp(_scatter_fwd, _scatter_bwd)


@jax.custom_vjp
def combine_rows(
    outputs: Float[Array, "m C d"], weights: Float[Array, "T K"], plan: BufferPlan
) -> Float[Array, "T d"]:
    """Sums each row's K expert outputs by gate weight, in the outputs' dtype."""
    weights = weights.astype(outputs.dtype)
    parts = [weights[:, k, None] * own for k, own in enumerate(_of_visits(outputs, plan))]
    return functools.reduce(jnp.add, parts)


def _combine_fwd(outputs, weights, plan):
    return combine_rows(outputs, weights, plan), (outputs, weights, plan)


def _combine_bwd(saved, grad):
    outputs, weights, plan = saved
    along = [
        jnp.sum((grad * own).astype(jnp.float32), axis=-1) for own in _of_visits(outputs, plan)
    ]
    d_weights = jnp.stack(along, axis=1)
    cell_weight = jnp.zeros(plan.source.size + 1, grad.dtype).at[plan.cell.reshape(-1)]
    cell_weight = cell_weight.set(weights.reshape(-1).astype(grad.dtype))[:-1]
    cell_weight = cell_weight.reshape(plan.source.shape)
    d_outputs = _with_zero_row(grad)[plan.source] * cell_weight[..., None]
    return d_outputs.astype(outputs.dtype), d_weights.astype(weights.dtype), None


combine_rows.defvjp(_combine_fwd, _combine_bwd)


def expert_layer(
    h: Float[Array, "T d"],
    weights: Float[Array, "T K"],
    ids: Int[Array, "T K"],
    experts: Mapping[str, Array],
    capacity: int,
    activation: Activation = SILU,
) -> tuple[Float[Array, "T d"], Int[Array, ""]]:
    """Computes the routed experts of one layer, `sum_k weights[t, k] * E_ids[t, k](h[t])`, and the
    visits dropped.

    Args:
        h: normed rows.
        weights: gate weights.
        ids: expert of each visit.
        experts: `gate_up [m, d, 2f]`, columns `[:f]` gate, and `down [m, f, d]`; `gate_up_bias
            [m, 2f]` and `down_bias [m, d]` where they have biases.
        capacity: buffer rows per expert; visits past it contribute nothing.
        activation: the experts'.
    """
    gate_up, down = experts["gate_up"], experts["down"]
    plan = plan_dispatch(ids, gate_up.shape[0], capacity)
    outputs = gated_mlp(scatter_rows(h, plan), gate_up, down, activation, biases_of(experts))
    return combine_rows(outputs, weights, plan), plan.dropped
