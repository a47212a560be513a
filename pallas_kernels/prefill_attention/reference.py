"""XLA reference of prefill attention: chunks in turn, a tile of query rows at a time."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.backend import backend, trip_count
from pallas_kernels.fp8_pages import read

TILE = 32
"""Query rows an iteration."""
TOKENS_PER_STEP = 128
"""KV rows gathered an iteration."""


def prefill_attention(
    q, k_pages, v_pages, *, layer, block_table, q_start, kv_len, scale, window, sinks, latent
):
    """See `op.prefill_attention`."""
    num_rows, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    num_chunks, max_pages = block_table.shape
    pages = min(max_pages, max(1, TOKENS_PER_STEP // page_size))
    step = pages * page_size
    num_steps = -(-max_pages // pages)
    table = jnp.pad(block_table, ((0, 0), (0, num_steps * pages - max_pages)))
    padded = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))
    group, width = heads // kv_heads, latent or head_dim
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, group, 1)

    def attend(qt, n, seen):
        """Attends with a tile of rows [G, group, TILE, D] of chunk n; row t sees positions [0,
        seen[t]), or the last `window` of them.
        """
        begin = 0  # nobody sees what is before
        if window:
            least = jnp.min(jnp.where(seen > 0, seen, jnp.max(seen)))
            begin = jnp.maximum(least - window, 0)

        def one_step(i, state):
            ids = lax.dynamic_slice(table, (n, i * pages), (1, pages))[0]

            def rows(pages):
                found = read(pages, (layer, ids), q.dtype).swapaxes(0, 1)
                return found.reshape(kv_heads, step, head_dim)

            k = rows(k_pages)
            v = k[..., :latent] if latent else rows(v_pages)
            s = jnp.einsum("ghtd,gcd->ghtc", qt, k, preferred_element_type=jnp.float32) * scale
            position = i * step + jnp.arange(step, dtype=jnp.int32)
            live, written = position[None, :] < seen[:, None], position < jnp.max(seen)
            if window:
                live &= position[None, :] >= seen[:, None] - window
                written &= position >= begin
            live = live[None, None]
            # A weight of zero would not do: what another sequence left there may be infinite.
            v = jnp.where(written[None, :, None], v, 0)

            def weigh(p):
                return jnp.einsum(
                    "ghtc,gcd->ghtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
                )

            return online_softmax.update(state, jnp.where(live, s, -jnp.inf), weigh)

        steps = trip_count(-(-jnp.max(seen) // step), num_steps)
        state = online_softmax.start((kv_heads, group, TILE), width, sinks)
        first = begin // step if backend() == "cpu" else 0
        return online_softmax.finish(lax.fori_loop(first, steps, one_step, state))

    def one_chunk(n, out):
        first, last = q_start[n], q_start[n + 1]
        offset = kv_len[n] - last  # row r sits at position r + offset

        def one_tile(j, out):
            start = first + j * TILE
            row = start + jnp.arange(TILE, dtype=jnp.int32)
            mine = row < last
            qt = lax.dynamic_slice_in_dim(padded, start, TILE)
            qt = qt.reshape(TILE, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
            new = attend(qt, n, jnp.where(mine, row + offset + 1, 0))
            new = new.transpose(2, 0, 1, 3).reshape(TILE, heads, width).astype(q.dtype)
            old = lax.dynamic_slice_in_dim(out, start, TILE)
            # The tile's tail belongs to the next chunk: leave it as it was.
            new = jnp.where(mine[:, None, None], new, old)
            return lax.dynamic_update_slice_in_dim(out, new, start, 0)

        tiles = trip_count(-(-(last - first) // TILE), -(-num_rows // TILE))
        return lax.fori_loop(0, tiles, one_tile, out)

    out = jnp.zeros((*padded.shape[:2], width), q.dtype)
    return lax.fori_loop(0, num_chunks, one_chunk, out)[:num_rows]
