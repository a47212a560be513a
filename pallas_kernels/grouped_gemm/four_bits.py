"""Weights of an expert pool in four bits: int4 with a scale and perhaps a zero point a group, and
MXFP4 (OCP Microscaling Formats 1.0).

Two codes share a byte: of each 64 along k, byte i has the i-th in its lower bits and the 32 + i-th
in its upper ones. So shifts of a tile of bytes give two tiles whose k are neighbours, and no two
elements of a register have to change places.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

HALF = 32
"""Neighbours along k in the lower, then the upper bits of as many bytes."""
MIDDLE = 8
"""The zero point where none is stored."""
GROUP = 32
"""Elements along k that share a scale in MXFP4, and where jmoe quantizes to int4."""

_LARGEST = 6.0  # of E2M1
_EXPONENT_BIAS = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeights:
    """A pool's `gate_up` or `down`: `weight[k, column] = (code - zero) * scale` of its group, or,
    where scales are exponents, `e2m1(code) * 2**(scale - 127)`.
    """

    values: Any  # uint8 [slots, columns, k / 2], k a multiple of 64, with zeros behind
    scales: Any  # [slots, groups, columns], floating point; of MXFP4 uint8
    zeros: Any = None  # uint8 [slots, groups, columns]; None: `MIDDLE`
    k: int = field(default=0, metadata={"static": True})
    group: int = field(default=GROUP, metadata={"static": True})  # the last may be ragged

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes are E2M1 and scales exponents."""
        return self.scales.dtype == np.uint8

    def of(self, weights: Float[Array, "slots k columns"]) -> "PackedWeights":
        """Quantizes weights as these are kept."""
        return quantize(weights, self.group, self.scales.dtype, has_zeros=self.zeros is not None)


def packed_codes(codes: UInt8[Any, "*n columns k"]) -> UInt8[Any, "*n columns half"]:
    """Packs numbers of 0 to 15 in pairs; they stay NumPy's where they are."""
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    padding = -codes.shape[-1] % (2 * HALF)
    codes = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    pairs = codes.reshape(*codes.shape[:-1], -1, 2, HALF)
    return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*codes.shape[:-1], -1)


def quantize(
    weights: Float[Array, "slots k columns"],
    group: int = GROUP,
    scales: Any = jnp.bfloat16,
    *,
    has_zeros: bool = True,
) -> PackedWeights:
    """Quantizes weights by groups along k (0: one group), to MXFP4 where `scales`, a dtype, is
    uint8. The last group is filled up with zeros where k is no multiple.
    """
    slots, k, columns = weights.shape
    group = group or k
    padded = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, -k % group), (0, 0)))
    groups = padded.reshape(slots, -1, group, columns)
    if scales == jnp.uint8:
        codes, *of_groups = _to_mxfp4(groups)
    else:
        codes, *of_groups = _to_int4(groups, scales, has_zeros=has_zeros)
    codes = codes.reshape(slots, -1, columns)[:, :k].swapaxes(1, 2).astype(jnp.uint8)
    return PackedWeights(packed_codes(codes), *of_groups, k=k, group=group)


def _to_int4(
    groups: Float[Array, "slots n g columns"], dtype: Any, *, has_zeros: bool
) -> tuple[Array, Array, Array | None]:
    """Spreads 16 steps from a group's least to its largest element and 0; without zero points, 15
    of them evenly about 0.
    """
    if has_zeros:
        low, high = jnp.minimum(groups.min(2), 0), jnp.maximum(groups.max(2), 0)
    else:
        low, high = jnp.zeros_like(groups[:, :, 0]), 15 / 7 * jnp.abs(groups).max(2)
    scales = jnp.where(high > low, (high - low) / 15, 1).astype(dtype)
    wide = scales.astype(jnp.float32)
    zeros = jnp.clip(jnp.round(-low / wide), 0, 15) if has_zeros else jnp.full_like(wide, MIDDLE)
    codes = jnp.clip(jnp.round(groups / wide[:, :, None]) + zeros[:, :, None], 0, 15)
    return codes, scales, zeros.astype(jnp.uint8) if has_zeros else None


def _to_mxfp4(groups: Float[Array, "slots n g columns"]) -> tuple[Array, Array, None]:
    """Rounds to the nearest of E2M1, of two as near to the even one; the largest element of a group
    has the exponent 2, as the specification says.
    """
    _, exponents = jnp.frexp(jnp.abs(groups).max(2))
    exponents = jnp.clip(exponents - 3, -_EXPONENT_BIAS, _EXPONENT_BIAS)
    size = jnp.minimum(jnp.ldexp(jnp.abs(groups), -exponents[:, :, None]), _LARGEST)
    # Steps of a half up to 2, of 1 up to 4, then of 2.
    codes = jnp.where(
        size < 2,
        jnp.round(2 * size),
        jnp.where(size < 4, 2 + jnp.round(size), 4 + jnp.round(size / 2)),
    )
    codes += jnp.where(groups < 0, 8, 0)
    return codes, (exponents + _EXPONENT_BIAS).astype(jnp.uint8), None


def _numbers(codes: Array, scales: Array, zeros: Array | None, *, is_mxfp4: bool) -> Array:
    """Returns the float32 that int32 codes stand for; scales and zero points are as stored."""
    if not is_mxfp4:
        middle = MIDDLE if zeros is None else zeros.astype(jnp.int32)
        return (codes - middle).astype(jnp.float32) * scales.astype(jnp.float32)
    size = codes & 7
    # Twice the magnitude of E2M1: 0 1 2 3 4 6 8 12.
    twice = size + jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
    signed = jnp.where(codes > 7, -twice, twice).astype(jnp.float32)
    # 2**(scale - 127) by its bits; the least of them, below float32's range, is 0.
    scale = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    return signed * (scale * 0.5)


def dequantize(weights: PackedWeights, dtype: Any) -> Float[Array, "*slots k columns"]:
    """Returns weights in `dtype`, rounded from float32; of one slot, or of any number."""
    *slots, columns, half = weights.values.shape
    pairs = weights.values.reshape(*slots, columns, half // HALF, HALF).astype(jnp.int32)
    codes = jnp.stack([pairs & 15, pairs >> 4], axis=-2)
    k, groups = weights.k, weights.scales.shape[-2]
    codes = codes.reshape(*slots, columns, 2 * half)[..., :k].swapaxes(-1, -2)
    padding = groups * weights.group - k
    codes = jnp.pad(codes, [(0, 0)] * len(slots) + [(0, padding), (0, 0)])
    codes = codes.reshape(*slots, groups, weights.group, columns)
    zeros = None if weights.zeros is None else weights.zeros[..., None, :]
    whole = _numbers(codes, weights.scales[..., None, :], zeros, is_mxfp4=weights.is_mxfp4)
    return whole.reshape(*slots, groups * weights.group, columns)[..., :k, :].astype(dtype)
