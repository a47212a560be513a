"""wgmma: matrix descriptors, and which lane has which element."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from sm90.memory import swizzled

M, K = 64, 16  # rows of A, and the depth of one product of bfloat16
_LANE = np.arange(128)  # of a warpgroup
_ROW = _LANE // 32 * 16 + _LANE % 32 // 4  # of 16 a warp, the first of a lane's two
_COLUMN = 2 * (_LANE % 4)  # of eight, the first of two neighbours


class Descriptor(NamedTuple):
    """A matrix in shared memory; bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int


def descriptor(bits: int) -> Descriptor:
    """Decodes the fields of 64 bits."""
    if bits >> 49 & 7:
        raise NotImplementedError("a matrix that starts inside a swizzled atom")
    start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return Descriptor(start, leading, stride, (16, 128, 64, 32)[bits >> 62])


def addresses(matrix: Descriptor, size: int, is_transposed: bool) -> np.ndarray:
    """Returns the addresses of elements [size, K]. Transposed, neighbours along `size` are
    neighbours in memory.
    """
    outer, k = np.arange(size)[:, None], np.arange(K)[None, :]
    start, leading, stride, span = matrix
    if is_transposed:
        if span == 16:
            raise NotImplementedError("a transposed matrix without a swizzle")
        chunk, inner = outer // (span // 2), outer % (span // 2)
        at = chunk * leading + k // 8 * stride + k % 8 * span + inner * 2
    elif span == 16:
        at = outer // 8 * stride + k // 8 * leading + outer % 8 * 16 + k % 8 * 2
    else:
        at = outer // 8 * stride + outer % 8 * span + k * 2
    return swizzled(start + at, span)


def accumulator(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and columns in [M, N] that the lanes have in an accumulator's register."""
    return _ROW + 8 * (index // 2 % 2), index // 4 * 8 + _COLUMN + index % 2


def left(registers: np.ndarray) -> np.ndarray:
    """Returns [M, K] from A's four registers [4, 128], which hold two bfloat16 each."""
    pairs = widen(np.ascontiguousarray(registers).view(np.uint8).reshape(4, 128, 2, 2))
    a = np.empty((M, K), np.float32)
    for register, pair in enumerate(pairs):
        row, column = _ROW + 8 * (register % 2), _COLUMN + 8 * (register // 2)
        a[row[:, None], column[:, None] + np.arange(2)] = pair
    return a


def widen(halves: np.ndarray) -> np.ndarray:
    """Returns bytes [..., 2] of bfloat16 as float32."""
    return np.ascontiguousarray(halves).view(ml_dtypes.bfloat16)[..., 0].astype(np.float32)
