"""XLA reference of paged decode attention: online softmax over a few pages at a time."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.backend import backend, trip_count
from pallas_kernels.fp8_pages import read

TOKENS_PER_STEP = 64
"""KV rows gathered an iteration: enough to amortise the loop, few enough to skip empty pages."""


def paged_attention(
    q, k_pages, v_pages, *, layer, block_table, kv_len, scale, window, sinks, latent
):
    """See `op.paged_attention`."""
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2:4]
    max_pages = block_table.shape[1]
    pages = min(max_pages, max(1, TOKENS_PER_STEP // page_size))
    chunk = pages * page_size
    num_chunks = -(-max_pages // pages)
    table = jnp.pad(block_table, ((0, 0), (0, num_chunks * pages - max_pages)))
    qg = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)

    def one_chunk(i, state):
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages, 1)

        def rows(pages):
            found = read(pages, (layer, ids), q.dtype).swapaxes(1, 2)
            return found.reshape(batch, kv_heads, chunk, head_dim)

        k = rows(k_pages)
        v = k[..., :latent] if latent else rows(v_pages)
        s = jnp.einsum("bghd,bgcd->bghc", qg, k, preferred_element_type=jnp.float32) * scale
        position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        live = position[None, :] < kv_len[:, None]
        if window:
            live &= position[None, :] >= kv_len[:, None] - window
        # A weight of zero would not do: what another sequence left there may be infinite.
        v = jnp.where(live[:, None, :, None], v, 0)
        live = live[:, None, None, :]

        def weigh(p):
            return jnp.einsum(
                "bghc,bgcd->bghd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
            )

        return online_softmax.update(state, jnp.where(live, s, -jnp.inf), weigh)

    if sinks is not None:
        sinks = sinks.reshape(-1, kv_heads, heads // kv_heads)
    state = online_softmax.start((batch, kv_heads, heads // kv_heads), latent or head_dim, sinks)
    longest, first = -(-jnp.max(kv_len) // chunk), 0
    if window and backend() == "cpu":
        least = jnp.min(jnp.where(kv_len > 0, kv_len, jnp.max(kv_len)))
        first = jnp.maximum(least - window, 0) // chunk
    state = lax.fori_loop(first, trip_count(longest, num_chunks), one_chunk, state)
    return online_softmax.finish(state).reshape(batch, heads, -1).astype(q.dtype)
