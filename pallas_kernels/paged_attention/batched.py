"""Paged decode attention in four launches of XLA's, for GPUs without the Mosaic kernel.

Scores, their softmax and the weighted values are sums over pages that lie where they are: none is
copied. What is read follows the lengths, since a place past a sequence's end reads its first page
again; what is computed follows the table's width. Scores and weights, float32 [B, H, M S], are all
it takes of memory.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.online_softmax import normalizer


def paged_attention(q, k_pages, v_pages, *, layer, block_table, kv_len, scale):
    """See `op.paged_attention`."""
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    num_pages = block_table.shape[1]
    first = jnp.arange(num_pages, dtype=jnp.int32) * page_size
    table = jnp.where(first[None, :] < kv_len[:, None], block_table, block_table[:, :1])
    position = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    live = (position[None, :] < kv_len[:, None]).reshape(batch, 1, 1, num_pages, page_size)

    def read(pages):  # [B, G, 1, M, S, D]
        return pages[layer, table].transpose(0, 2, 1, 3, 4)[:, :, None].astype(jnp.float32)

    qg = q.reshape(batch, kv_heads, heads // kv_heads, 1, 1, head_dim).astype(jnp.float32)
    scores = jnp.sum(qg * read(k_pages), axis=-1) * scale  # [B, G, H/G, M, S]
    scores = lax.optimization_barrier(jnp.where(live, scores, -jnp.inf))
    top, norm = normalizer(scores, (3, 4))
    # Computed before the sum, not anew for every element of a value.
    weights = lax.optimization_barrier(
        jnp.exp(scores - top[..., None, None]) / norm[..., None, None]
    )
    # A weight of zero would not do: what another sequence left there may be infinite.
    values = jnp.where(live[..., None], read(v_pages), 0)
    out = jnp.sum(weights[..., None] * values, axis=(3, 4))
    return out.reshape(batch, heads, head_dim).astype(q.dtype)
