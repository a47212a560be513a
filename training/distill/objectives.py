"""What a united expert is trained to do, as (error, scale) sums over a batch of rows.

`equation4` is the paper's: the mean of the members' outputs, on every row of the layer. The other
two look at what brownout does: rows are taken in batches as large as a decode step, brownout picks
S1 and S2 among them at a random threshold (Algorithm 1, exact), and only visits that a united
expert serves count. `routed` asks for each such visit's own output, weighted by its gate weight;
`combined` for their weighted sum, which is all that the layer's output sees of them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import routing
from pallas_kernels.activation import SILU, Activation
from training.dispatch import BufferPlan, combine_rows, plan_dispatch, scatter_rows
from training.distill.expert import Experts, Stacked
from training.distill.stream import LayerRows

THRESHOLDS = (0, 0, 10, 20, 30, 40, 50, 60, 70, 80, 90)
"""Thresholds in percent that are drawn from; 0, where nothing is left exact, twice as often."""

_CAPACITY = 2.0  # rows of a united expert's buffer over the even share; visits past it do not count


def degraded_to(
    ids: Int[Array, "R K"], groups: Int[Array, "m"], key: Array, decode_batch: int
) -> Int[Array, "R K"]:
    """Returns the united expert that serves each visit under partial brownout; -1: the original.

    Rows come in blocks of `decode_batch`; each block is a step of its own with a threshold drawn
    from THRESHOLDS.
    """
    num_experts = groups.shape[0]
    blocks = ids.reshape(-1, decode_batch, ids.shape[1])
    thresholds = jax.random.choice(key, jnp.array(THRESHOLDS, jnp.int32), (blocks.shape[0],))
    everyone = jnp.ones(decode_batch, bool)

    def plan(block: Array, threshold: Array) -> Array:
        return routing.brownout_plan(
            block,
            groups=groups,
            threshold_percent=threshold,
            strategy=jnp.int32(routing.PARTIAL),
            valid=everyone,
            exempt=~everyone,
        ).expert_ids

    expert_ids = jax.vmap(plan)(blocks, thresholds).reshape(ids.shape)
    return jnp.where(expert_ids >= num_experts, expert_ids - num_experts, -1)


def united_dispatch(united_ids: Int[Array, "R K"], num_united: int) -> BufferPlan:
    """Returns the cells of the degraded visits in the united experts' buffers."""
    num_visits = united_ids.size
    capacity = min(united_ids.shape[0], max(8, int(_CAPACITY * num_visits / num_united) // 8 * 8))
    return plan_dispatch(united_ids, num_united, capacity)


def brownout_error(
    united: Experts, rows: LayerRows, united_ids: Int[Array, "R K"], *, objective: str
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the squared error and the target's squared norm, over the visits that united experts
    serve; `united_ids` as `degraded_to` returns them.
    """
    plan = united_dispatch(united_ids, united.down.shape[0])
    cells = plan.source.size
    # A visit without a cell counts on neither side.
    weights = jnp.where(plan.cell < cells, rows.weights, 0.0)
    out = united(scatter_rows(rows.h, plan))
    if objective == "combined":
        got = combine_rows(out, weights, plan).astype(jnp.float32)[:, None]
        wanted = jnp.einsum("rk,rkd->rd", weights, rows.outputs.astype(jnp.float32))[:, None]
    else:
        flat = jnp.concatenate([out.reshape(cells, -1), jnp.zeros((1, out.shape[-1]), out.dtype)])
        got = flat[plan.cell].astype(jnp.float32) * weights[..., None]
        wanted = rows.outputs.astype(jnp.float32) * weights[..., None]
    return jnp.sum((got - wanted) ** 2), jnp.sum(wanted**2)


@partial(jax.jit, static_argnames=("dtype", "activation"))
def mean_answers(
    members: Stacked,
    average: Float[Array, "U m"],
    h: Float[Array, "R d"],
    dtype: str,
    activation: Activation = SILU,
) -> Float[Array, "U R d"]:
    """Returns the mean output of each group's members on all rows, float32: equation 4's target."""
    answers = Experts(members, activation).on_all(h.astype(dtype))
    return jnp.einsum("um,mrd->urd", average, answers.astype(jnp.float32))


def equation_4_error(
    united: Experts, h: Float[Array, "R d"], target: Float[Array, "U R d"]
) -> tuple[Float[Array, " U"], Float[Array, " U"]]:
    """Returns equation 4 for each group, `sum ||H_u - mean_i H_o,i||^2`, and the sum of the
    target's squares.

    The printed `1/k sum_i ||H_u - H_o,i||^2` is this plus a constant.
    """
    error = (united.on_all(h).astype(jnp.float32) - target) ** 2
    return jnp.sum(error, axis=(1, 2)), jnp.sum(target**2, axis=(1, 2))
