"""Layouts of a warpgroup's registers, vectors along them, and products, for kernels under Lane
semantics.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64
"""Rows that a warpgroup holds at once: wgmma's M."""

I32 = jnp.int32
WGMMA = plgpu.Layout.WGMMA
# As WGMMA, but of columns one by one: there need be a multiple of four only.
SINGLE_COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 4), (16, 4), (8, 4), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
BY_ROW = SINGLE_COLUMNS.reduce(1)  # which is also WGMMA's
BY_SINGLE_COLUMN = SINGLE_COLUMNS.reduce(0)
BY_COLUMN = WGMMA.reduce(0)


def iota(shape, axis, layout):
    """Returns an array of indices along an axis."""
    return plgpu.broadcasted_iota(I32, shape, axis, layout=layout)


def across(vector, shape, layout: Any = SINGLE_COLUMNS):
    """Returns a value for each row, in all columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (0,)), layout)


def down(vector, shape, layout: Any = SINGLE_COLUMNS):
    """Returns a value for each column, in all rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (1,)), layout)


def of_rows(rows, shape):
    """Returns a row's value in all of its columns, under Warpgroup semantics."""
    return lax.broadcast_in_dim(rows, shape, (0,))


def by_row(ref):
    """Returns a vector that has a value for each row."""
    return plgpu.load(ref, layout=BY_ROW, optimized=False)


def by_column(ref):
    """Returns a vector that has a value for each column, for use with `WGMMA`."""
    return plgpu.load(ref, layout=BY_COLUMN, optimized=False)


def product(a, b):
    """Computes `a @ b` in float32, of bfloat16 in shared memory."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return accumulate(multiply, (a.shape[0], b.shape[1]))


def accumulate(run, shape, kept=None):
    """Calls `run` with an accumulator of zeros: in registers, or in `kept` where it is interpreted,
    which multiplies into new accumulators alone.
    """
    if kept is None:
        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    kept[...] = jnp.zeros(shape, jnp.float32)
    return run(kept)
