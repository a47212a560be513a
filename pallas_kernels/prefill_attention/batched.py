"""Prefill attention as batched products, for GPUs without the Mosaic kernel.

Chunks are cut into tiles of query rows. A tile's keys and values are copied from their pages, its
scores are a product, softmax is float32. Tiles run in pieces whose copies, scores and weights take
`PIECE_BYTES` at most, but where one tile takes more. A piece computes over the table's whole width.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp8_pages
from pallas_kernels.online_softmax import softmax

PIECE_BYTES = 2**31
DEAD = -1e30
"""Score of a key that a row does not see: finite, so that a row that sees none has weights."""
LEAST_TILE, LARGEST_TILE = 64, 256
"""Query rows of a tile. Keys are copied once a tile, and a chunk's last one may be nearly empty."""


def prefill_attention(
    q, k_pages, v_pages, *, layer, block_table, q_start, kv_len, scale, window, sinks, latent
):
    """See `op.prefill_attention`."""
    num_rows, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    num_chunks, num_pages = block_table.shape
    group, keys, width = heads // kv_heads, num_pages * page_size, latent or head_dim
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, group, 1)
    tile = LEAST_TILE
    while tile < LARGEST_TILE and tile * num_chunks < num_rows:
        tile *= 2
    num_tiles = -(-num_rows // tile) + num_chunks

    # Tiles of each chunk in turn; rows of each tile.
    count = -(-(q_start[1:] - q_start[:-1]) // tile)
    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    earlier = chunks[None, :] < chunks[:, None]
    first = jnp.sum(jnp.where(earlier, count[None, :], 0), axis=1, dtype=jnp.int32)
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    chunk = jnp.sum(first[None, 1:] <= tiles[:, None], axis=1, dtype=jnp.int32)
    row = q_start[chunk] + (tiles - first[chunk]) * tile
    # Where each row is computed.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    owner = jnp.sum(q_start[None, 1:] <= index[:, None], axis=1, dtype=jnp.int32)
    valid, owner = owner < num_chunks, jnp.minimum(owner, num_chunks - 1)
    ahead = index - q_start[owner]
    at_tile, at_row = first[owner] + ahead // tile, ahead % tile

    size = q.dtype.itemsize
    tile_bytes = heads * tile * keys * (4 + size) + 2 * kv_heads * keys * head_dim * size
    pieces = -(-num_tiles // max(1, PIECE_BYTES // tile_bytes))
    step = -(-num_tiles // pieces)
    position = jnp.arange(keys, dtype=jnp.int32)
    out = jnp.zeros((num_rows, kv_heads, group, width), jnp.float32)
    for start in range(0, num_tiles, step):
        # One piece after another, or they would all be in memory at once.
        out, chunk = lax.optimization_barrier((out, chunk))
        own, begin = chunk[start : start + step], row[start : start + step]
        n = own.shape[0]
        rows = begin[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
        mine = rows < q_start[own + 1][:, None]
        seen = jnp.where(mine, rows + (kv_len[own] - q_start[own + 1])[:, None] + 1, 0)
        qt = jnp.take(q, rows, axis=0, mode="clip")
        qt = qt.reshape(n, tile, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        qt = qt.reshape(n, kv_heads, group * tile, head_dim)

        def read(pages, own=own, n=n):
            found = fp8_pages.read(pages, (layer, block_table[own]), q.dtype).swapaxes(1, 2)
            return found.reshape(n, kv_heads, keys, head_dim)

        k = read(k_pages)
        s = jnp.einsum("ngtd,ngcd->ngtc", qt, k, preferred_element_type=jnp.float32)
        s = s.reshape(n, kv_heads, group, tile, keys) * scale
        live = position[None, None, :] < seen[:, :, None]
        if window:
            live &= position[None, None, :] >= seen[:, :, None] - window
        s = jnp.where(live[:, None, None], s, DEAD)
        weights = softmax(s, sinks).astype(q.dtype).reshape(n, kv_heads, group * tile, keys)
        # A weight of zero would not do: what another sequence left there may be infinite.
        written = position[None, :] < kv_len[own][:, None]
        if window:  # nobody sees what is before the first row's
            begin = kv_len[own] - (q_start[own + 1] - q_start[own]) + 1 - window
            written &= position[None, :] >= begin[:, None]
        v = k[..., :latent] if latent else read(v_pages)
        v = jnp.where(written[:, None, :, None], v, 0)
        read_by = jnp.einsum("ngtc,ngcd->ngtd", weights, v, preferred_element_type=jnp.float32)
        read_by = read_by.reshape(n, kv_heads, group, tile, width)
        here = valid & (at_tile >= start) & (at_tile < start + n)
        place = jnp.clip(at_tile - start, 0, n - 1)
        new = read_by[place, :, :, at_row]
        out = jnp.where(here[:, None, None, None], new, out)
    return out.reshape(num_rows, heads, width).astype(q.dtype)
