"""XLA reference of the grouped GEMM: a loop over the blocks that have rows.

Its cost follows the number of active blocks, so brownout pays on a CPU too;
`lax.ragged_dot` expands densely there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import trip_count


def moe_mlp(x, gate_up, down, plan):
    """See `op.moe_mlp`."""
    num_rows, num_blocks = plan.row_token.shape[0], plan.block_slot.shape[0]
    block_m = num_rows // num_blocks
    d_ff = down.shape[1]
    rows = jnp.take(x, plan.row_token, axis=0, mode="fill", fill_value=0)

    def one_block(block, out):
        start = block * block_m
        slot = plan.block_slot[block]
        h = lax.dynamic_slice_in_dim(rows, start, block_m)
        h = jnp.dot(h, gate_up[slot], preferred_element_type=jnp.float32)
        h = (jax.nn.silu(h[:, :d_ff]) * h[:, d_ff:]).astype(x.dtype)
        h = jnp.dot(h, down[slot], preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, h, start, 0)

    out = jnp.zeros((num_rows, x.shape[1]), jnp.float32)
    out = lax.fori_loop(0, trip_count(plan.num_blocks, num_blocks), one_block, out)
    visits = jnp.take(out, plan.visit_row, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("tk,tkd->td", plan.visit_weight, visits)
