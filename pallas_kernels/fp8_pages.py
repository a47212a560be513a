"""KV pages in eight bits: e4m3 numbers, and a float32 scale for each position and head.

A head's row is quantized by itself when it is written, and is not touched again: its bits depend on
nothing else, neither on the step that wrote it nor on its neighbours in the page.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which the largest of a row becomes."""
LEAST = LARGEST * float(np.finfo(np.float32).tiny)
"""A row without larger numbers becomes zeros: its scale would be no normal number."""


class Fp8Pages(NamedTuple):
    """Keys, or values, of L layers. Element d of a row is that of `bits` times the row's scale."""

    bits: UInt8[Array, "L P G S D"]
    """Numbers in e4m3, as integers: to scatter into an array of eight-bit floats, XLA makes a wider
    one of all of it on a CPU.
    """
    scales: Float32[Array, "L P G S"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, P, G, S, D), as pages of other dtypes have it."""
        return self.bits.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The numbers' dtype."""
        return jnp.dtype(E4M3)


AnyPages = Float[Array, "L P G S D"] | Fp8Pages


def zeros(shape: tuple[int, ...]) -> Fp8Pages:
    """Returns empty pages [L, P, G, S, D]."""
    return Fp8Pages(jnp.zeros(shape, jnp.uint8), jnp.zeros(shape[:-1], jnp.float32))


def quantize(
    rows: Float[Array, "*rows D"],
) -> tuple[UInt8[Array, "*rows D"], Float32[Array, "*rows"]]:
    """Returns rows in e4m3, as integers, and their scales: the largest magnitude over 448.

    A row that has a NaN or an infinity gets the scale NaN, and so is read as NaN.
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    # XLA's maximum passes over NaN on a CPU.
    largest = jnp.where(jnp.all(jnp.isfinite(wide), axis=-1), largest, jnp.nan)
    scales, inverse = scales_of(largest)
    numbers = (wide * inverse[..., None]).astype(E4M3)
    return lax.bitcast_convert_type(numbers, jnp.uint8), scales


def scales_of(
    largest: Float32[Array, "*rows"],
) -> tuple[Float32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns the scales of rows by their largest magnitude, and what the rows are multiplied by.
    Kernels call it, too.
    """
    scales = jnp.where(largest < LEAST, 0.0, largest * np.float32(1 / LARGEST))
    scales = jnp.where(largest < jnp.inf, scales, jnp.nan)
    # Products alone: XLA may turn a quotient into one, and bits are not to depend on it.
    return scales, jnp.where(scales == 0.0, 0.0, 1.0 / scales)


def dequantize(
    bits: UInt8[Array, "*rows D"], scales: Float32[Array, "*rows"], dtype: Any
) -> Float[Array, "*rows D"]:
    """Returns rows as `dtype`."""
    numbers = lax.bitcast_convert_type(bits, E4M3).astype(jnp.float32)
    return (numbers * scales[..., None]).astype(dtype)


def rounded(rows: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Returns rows as they are read of pages in eight bits."""
    return dequantize(*quantize(rows), rows.dtype)


def read(pages: AnyPages, at: tuple, dtype: Any) -> Float[Array, "..."]:
    """Returns `pages[at]`, of pages in eight bits as `dtype`; `at` indexes axes before D."""
    if not isinstance(pages, Fp8Pages):
        return pages[at]
    return dequantize(pages.bits[at], pages.scales[at], dtype)


def write(pages: AnyPages, at: tuple, rows: Float[Array, "T G D"]) -> AnyPages:
    """Returns pages with `rows` at `at`, which is in range (XLA is promised so)."""

    def put(array, new):
        return array.at[at].set(new, mode="promise_in_bounds")

    if not isinstance(pages, Fp8Pages):
        return put(pages, rows.astype(pages.dtype))
    bits, scales = quantize(rows)
    return Fp8Pages(put(pages.bits, bits), put(pages.scales, scales))
