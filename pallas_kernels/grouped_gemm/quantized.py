"""Weights of an expert pool in eight bits: float8_e4m3fn values and a float32 scale a block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import four_bits
from pallas_kernels.grouped_gemm.four_bits import PackedWeights

BLOCK = 128
"""Rows and columns of the blocks that share a scale."""

_LARGEST = 448.0  # of float8_e4m3fn


class QuantizedWeights(NamedTuple):
    """A pool's `gate_up` or `down`: `weight[k, column] = value[column, k] * scale of its block`.

    Values lie with the summed-over axis last, unlike a pool of bfloat16: tensor cores take
    eight-bit operands in no other order, and checkpoints store them so. Both axes are multiples of
    `BLOCK`.
    """

    values: Float[Array, "slots columns k"]  # float8_e4m3fn
    scales: Float[Array, "slots column_blocks k_blocks"]  # float32


Weights = Float[Array, "slots _ _"] | QuantizedWeights | PackedWeights
"""A pool's `gate_up` or `down`, [slots, k, columns], in any number format."""


def weight_sizes(weights: Weights) -> tuple[int, int]:
    """Returns (k, columns) of a pool's weights."""
    if isinstance(weights, QuantizedWeights):
        _, columns, k = weights.values.shape
    elif isinstance(weights, PackedWeights):
        k, columns = weights.k, weights.values.shape[1]
    else:
        _, k, columns = weights.shape
    return k, columns


def weight_bits(weights: Weights) -> int:
    """Returns the bits of one of a pool's weights, at most 16, without its scales."""
    if isinstance(weights, PackedWeights):
        return 4
    return 8 if isinstance(weights, QuantizedWeights) else 16


def quantize(weights: Float[Array, "slots k columns"]) -> QuantizedWeights:
    """Quantizes weights block by block, each scaled so that its largest element becomes 448.

    Raises ValueError where a size is no multiple of `BLOCK`.
    """
    slots, k, columns = weights.shape
    if k % BLOCK or columns % BLOCK:
        raise ValueError(f"[{k}, {columns}] is not whole blocks of {BLOCK} by {BLOCK}")
    blocks = weights.astype(jnp.float32).swapaxes(1, 2)
    blocks = blocks.reshape(slots, columns // BLOCK, BLOCK, k // BLOCK, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=(2, 4))
    scales = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    values = (blocks / scales[:, :, None, :, None]).astype(jnp.float8_e4m3fn)
    return QuantizedWeights(values.reshape(slots, columns, k), scales)


def slot_weights(weights: Weights, slot: Int[Array, ""], dtype: Any) -> Float[Array, "k columns"]:
    """Returns one slot's weights; quantized ones rounded to `dtype` from float32, as the kernels
    do.
    """
    own = jax.tree.map(lambda leaf: leaf[slot], weights)
    return dequantize(own, dtype) if isinstance(own, QuantizedWeights | PackedWeights) else own


def dequantize(
    weights: QuantizedWeights | PackedWeights, dtype: Any
) -> Float[Array, "*slots k columns"]:
    """Returns weights in `dtype`, rounded from float32; of one slot, or of any number."""
    if isinstance(weights, PackedWeights):
        return four_bits.dequantize(weights, dtype)
    *slots, columns, k = weights.values.shape
    shape = *slots, columns // BLOCK, BLOCK, k // BLOCK, BLOCK
    blocks = weights.values.astype(jnp.float32).reshape(shape)
    whole = blocks * weights.scales[..., :, None, :, None]
    return whole.reshape(*slots, columns, k).astype(dtype).swapaxes(-1, -2)
