"""Paged decode attention in three launches of XLA's, for GPUs without the Mosaic kernel.

Scores and weighted values are sums over pages where they lie; where query heads share a key, XLA
copies keys and values first, once a layer. What is read follows the lengths, since a place past a
sequence's end reads its first page again; what is computed follows the table's width. Rows run in
pieces whose scores, weights and copies take `PIECE_BYTES` at most, but where one row takes more.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp8_pages
from pallas_kernels.online_softmax import softmax

PIECE_BYTES = 2**31
DEAD = -1e30
"""Score of a place past a sequence's end: finite, so that a row of nothing else has weights."""


def paged_attention(
    q, k_pages, v_pages, *, layer, block_table, kv_len, scale, window, sinks, latent
):
    """See `op.paged_attention`."""
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    copied = 4 * kv_heads * head_dim if heads > kv_heads else 0
    row_bytes = block_table.shape[1] * page_size * 2 * (4 * heads + copied)
    pieces = -(-batch // max(1, PIECE_BYTES // row_bytes))
    step, outs = -(-batch // pieces), []
    for start in range(0, batch, step):
        if outs:  # one piece after another, or they would all be in memory at once
            q, outs[-1] = lax.optimization_barrier((q, outs[-1]))
        rows = slice(start, start + step)
        given = {"layer": layer, "block_table": block_table[rows], "kv_len": kv_len[rows]}
        own = sinks[rows] if sinks is not None and sinks.ndim == 2 else sinks
        given |= {"scale": scale, "window": window, "sinks": own, "latent": latent}
        outs.append(_attend(q[rows], k_pages, v_pages, **given))
    return outs[0] if pieces == 1 else jnp.concatenate(outs)


def _attend(q, k_pages, v_pages, *, layer, block_table, kv_len, scale, window, sinks, latent):
    """Computes one piece's rows."""
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    group, keys = heads // kv_heads, block_table.shape[1] * page_size
    position = jnp.arange(keys, dtype=jnp.int32)
    live = position[None, :] < kv_len[:, None]
    if window:
        live &= position[None, :] >= kv_len[:, None] - window
    place = jnp.where(live, position[None, :], 0)
    page = jnp.take_along_axis(block_table, place // page_size, axis=1, mode="clip")
    head = jnp.arange(kv_heads, dtype=jnp.int32)

    def read(pages):  # [B, G, 1, M S, D]; not page by page, which would order scores so
        at = layer, page[:, None, :], head[None, :, None], (place % page_size)[:, None, :]
        return fp8_pages.read(pages, at, jnp.float32)[:, :, None].astype(jnp.float32)

    live = live[:, None, None, :]
    qg = q.reshape(batch, kv_heads, group, 1, head_dim).astype(jnp.float32) * scale
    scores = jnp.sum(qg * read(k_pages), axis=-1)
    # Each computed before what reads it: XLA would do it anew for every element of a value.
    scores = jnp.where(live, lax.optimization_barrier(scores), DEAD)
    if sinks is not None:
        sinks = sinks.reshape(-1, kv_heads, group)
    weights = lax.optimization_barrier(softmax(scores, sinks))
    # A weight of zero would not do: what another sequence left there may be infinite.
    values = read(k_pages)[..., :latent] if latent else read(v_pages)
    values = jnp.where(live[..., None], values, 0)
    out = jnp.sum(weights[..., None] * values, axis=3)
    return out.reshape(batch, heads, -1).astype(q.dtype)
