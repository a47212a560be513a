"""Grouped GEMM as a few large launches of XLA's, for GPUs without the Mosaic kernels.

Small blocks are sums of products, one kernel a matrix, which read weights from the pool itself:
once a row, but rows of one expert follow each other and find its weights in L2. Larger blocks are
batched products of weights that are copied out of the pool before, a piece at a time, at most
`PIECE_BYTES` of weights and rows together.

`lax.ragged_dot` is no use: for sm_80, sm_89, sm_90 and sm_100 jax 0.11.2 expands it densely, over
all slots of the pool, its flags for fused and grouped products notwithstanding.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.activation import SILU, Activation, gated
from pallas_kernels.grouped_gemm.quantized import Weights, slot_weights, weight_sizes
from pallas_kernels.grouped_gemm.tiles import BLOCK_M

PIECE_BYTES = 2**31
"""Most that a piece's weights and rows take, but where one block takes more."""
SUMMED = 9
"""Visits an expert, up to which sums are expected to be faster than copies and products: reading a
weight from L2 once a visit against reading, writing and reading it again once a block."""
COPY_ROWS = 375
"""Rows whose product takes as long as copying and reading an expert's weights: on an A100,
6 bytes a weight at 2 TB/s against 2 operations a weight and row at 250 TFLOP/s."""
MAX_BLOCK_M = 1024


def block_rows(num_visits: int, num_experts: int) -> int:
    """Returns the rows of a block, for the dispatch: 1 where sums are faster, or about the number,
    a power of two, at which copies and padded rows of `num_experts` blocks together cost least.
    """
    if num_visits <= SUMMED * num_experts:
        return 1
    best = (COPY_ROWS * num_visits / num_experts) ** 0.5
    rows = 2 * BLOCK_M
    while rows < MAX_BLOCK_M and rows * 2**0.5 < best:
        rows *= 2
    return rows


def moe_mlp(x, gate_up, down, plan, activation: Activation = SILU, biases=None):
    """See `op.moe_mlp`."""
    num_blocks = plan.block_slot.shape[0]
    block_m = plan.row_token.shape[0] // num_blocks
    row_token = plan.row_token.reshape(num_blocks, block_m)
    if block_m <= BLOCK_M:
        weights = gate_up, down, biases or (None, None)
        return _combine(_summed(x, weights, row_token, plan.block_slot, activation), plan, 0)
    pieces = -(-num_blocks // max(1, PIECE_BYTES // _block_bytes(x, down, block_m)))
    step = -(-num_blocks // pieces)
    out, slots = jnp.zeros(x.shape, jnp.float32), plan.block_slot
    for start in range(0, num_blocks, step):
        # One piece after another, or they would all be in memory at once.
        out, slots = lax.optimization_barrier((out, slots))
        piece = slice(start, start + step)
        weights = gate_up, down, biases or (None, None)
        y = _multiplied(x, weights, row_token[piece], slots[piece], activation)
        out += _combine(y, plan, start * block_m)
    return out


def _block_bytes(x: Array, down: Weights, block_m: int) -> int:
    """Returns the bytes of a block's copied weights and of its rows between products."""
    f, d = weight_sizes(down)
    size = x.dtype.itemsize
    return 3 * d * f * size + block_m * (2 * f * 4 + f * size + d * 4 + d * size)


def _weights(weights: Weights, slots: Int[Array, "N"], dtype) -> Float[Array, "N k columns"]:
    if isinstance(weights, jax.Array):
        return weights[slots]
    return jax.vmap(lambda slot: slot_weights(weights, slot, dtype))(slots)


def _biased(h: Float[Array, "N m columns"], bias, slots) -> Float[Array, "N m columns"]:
    return h if bias is None else h + bias[slots].astype(jnp.float32)[:, None]


def _multiplied(x, weights, row_token, slots, activation) -> Float[Array, "rows d"]:
    """Returns the rows of blocks after both products, as batched products."""
    gate_up, down, (up_bias, down_bias) = weights
    h = jnp.take(x, row_token, axis=0, mode="clip")  # what becomes of a gap row goes nowhere
    w = _weights(gate_up, slots, x.dtype)
    h = jnp.einsum("nmd,ndf->nmf", h, w, preferred_element_type=jnp.float32)
    h = gated(_biased(h, up_bias, slots), activation).astype(x.dtype)
    w = _weights(down, slots, x.dtype)
    y = jnp.einsum("nmf,nfd->nmd", h, w, preferred_element_type=jnp.float32)
    y = _biased(y, down_bias, slots)
    return y.reshape(-1, y.shape[-1])


def _summed(x, weights, row_token, slots, activation) -> Float[Array, "rows d"]:
    """Returns what `_multiplied` does, as sums instead of batched products."""
    gate_up, down, (up_bias, down_bias) = weights
    h = _sums(jnp.take(x, row_token, axis=0, mode="clip"), gate_up, slots)
    # Computed before the sums: XLA would do it anew for every column of `down`.
    h = gated(_biased(h, up_bias, slots), activation)
    h = lax.optimization_barrier(h.astype(x.dtype))
    y = _biased(lax.optimization_barrier(_sums(h, down, slots)), down_bias, slots)
    return y.reshape(-1, y.shape[-1])


def _sums(rows: Float[Array, "N m k"], weights: Weights, slots) -> Float[Array, "N m columns"]:
    found = _weights(weights, slots, rows.dtype).astype(jnp.float32)
    return jnp.sum(rows.astype(jnp.float32)[..., None] * found[:, None], axis=2)


def _combine(y: Float[Array, "rows d"], plan, start: int) -> Float[Array, "T d"]:
    """Returns the weighted sum of the visits that rows from `start` on have computed, in order."""
    place = plan.visit_row - start
    # A row of no expert may hold anything: a dropped visit must not even multiply one by 0.
    here = (place >= 0) & (place < y.shape[0]) & (plan.visit_row < plan.row_token.shape[0])
    out = jnp.zeros((place.shape[0], y.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        visit = jnp.take(y, place[:, k], axis=0, mode="clip")
        out += jnp.where(here[:, k, None], plan.visit_weight[:, k, None] * visit, 0.0)
    return out
