"""XLA reference of the grouped GEMM: a loop over the blocks that have rows.

On a CPU it goes expert by expert and reads the weights of an active expert once, so its cost
follows the number of active experts and brownout pays there too; `lax.ragged_dot` expands densely.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import SILU, Activation, gated
from pallas_kernels.backend import backend
from pallas_kernels.grouped_gemm.quantized import slot_weights


def moe_mlp(x, gate_up, down, plan, activation: Activation = SILU, biases=None):
    """See `op.moe_mlp`."""
    num_rows, num_blocks = plan.row_token.shape[0], plan.block_slot.shape[0]
    block_m = num_rows // num_blocks
    rows = jnp.take(x, plan.row_token, axis=0, mode="fill", fill_value=0)

    def expert(slot):
        weights = (slot_weights(w, slot, x.dtype) for w in (gate_up, down))
        return *weights, *((None, None) if biases is None else (bias[slot] for bias in biases))

    def product(h, weights, bias):
        h = jnp.dot(h, weights, preferred_element_type=jnp.float32)
        return h if bias is None else h + bias.astype(jnp.float32)[None]

    def one_block(block, out, up_weights, down_weights, up_bias, down_bias):
        start = block * block_m
        h = lax.dynamic_slice_in_dim(rows, start, block_m)
        h = gated(product(h, up_weights, up_bias), activation).astype(x.dtype)
        h = product(h, down_weights, down_bias)
        return lax.dynamic_update_slice_in_dim(out, h, start, 0)

    def one_expert(state):
        block, out = state
        slot = plan.block_slot[block]
        own = expert(slot)

        def same_expert(state):
            block, _ = state
            here = plan.block_slot[jnp.minimum(block, num_blocks - 1)]
            return (block < plan.num_blocks) & (here == slot)

        def step(state):
            block, out = state
            return block + 1, one_block(block, out, *own)

        return lax.while_loop(same_expert, step, (block, out))

    out = jnp.zeros((num_rows, x.shape[1]), jnp.float32)
    if backend() == "cpu":
        start = (jnp.int32(0), out)
        _, out = lax.while_loop(lambda state: state[0] < plan.num_blocks, one_expert, start)
    else:  # a traced trip count would make the host wait for a GPU in every iteration

        def any_block(block, out):
            return one_block(block, out, *expert(plan.block_slot[block]))

        out = lax.fori_loop(0, num_blocks, any_block, out)
    visits = jnp.take(out, plan.visit_row, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("tk,tkd->td", plan.visit_weight, visits)
