"""Prefill attention over latents: the decode kernel's, with each row of a chunk as a sequence.

Of DeepSeek-V3 (128 heads, keys of 576 elements, values the first 512) a row and position take
278,528 operations in this, the absorbed form, and 81,920 with keys of 192 and values of 128, to
which a chunk's latents would have to be expanded first (`expanded`), 33.6 million operations a
position. So this form has fewer up to 170 rows a chunk, and takes no memory for what is expanded.
Of a byte of pages come 242 operations, whatever the chunk: no row waits for memory on an H200,
whether L2 has what the row before has read or not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.schedule import Schedule


class Rows(NamedTuple):
    """A step's rows as sequences that end with them."""

    chunk: Int[Array, "T"]
    kv_len: Int[Array, "T"]  # 0: of no chunk
    schedule: Schedule


def plan(
    num_rows: int,
    heads: int,
    pages: Any,
    *,
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    window: int,
    latent: int,
) -> Rows:
    """Returns what `prefill_attention` takes as `todo`; see `op.plan`."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    chunk = jnp.sum(q_start[None, 1:] <= row[:, None], axis=1, dtype=jnp.int32)
    own = jnp.minimum(chunk, kv_len.shape[0] - 1)
    seen = row + (kv_len - q_start[1:])[own] + 1
    seen = jnp.where((row >= q_start[0]) & (chunk < kv_len.shape[0]), seen, 0)
    q = jax.ShapeDtypeStruct((num_rows, heads, pages.shape[4]), pages.dtype)
    return Rows(own, seen, mosaic.plan(q, pages, seen, window, latent))


def prefill_attention(
    q, pages, *, layer, block_table, q_start, kv_len, scale, window, sinks, latent, todo, **options
):
    """See `op.prefill_attention`, and `paged_attention.mosaic` for what it takes."""
    if todo is None:
        rows = {"q_start": q_start, "kv_len": kv_len, "window": window, "latent": latent}
        todo = plan(q.shape[0], q.shape[1], pages, **rows)
    return mosaic.paged_attention(
        q,
        pages,
        None,
        layer=layer,
        block_table=block_table,
        sequence=todo.chunk,
        kv_len=todo.kv_len,
        scale=scale,
        window=window,
        sinks=sinks,
        latent=latent,
        todo=todo.schedule,
        **options,
    )
