"""Paged caches for the attention suites, and attention in float64 to judge them by."""

import jax
import numpy as np

LAYER, NUM_LAYERS = 1, 3


def scatter(rng, keys, values, page_size, max_pages, *, unused=0.0, dtype=np.float32):
    """Lays sequences [len, G, D] into shuffled pages of one layer.

    Everything else (other layers, free pages, the rest of last pages, page 0, which stands in
    where a block table has no page) holds `unused`. Returns k_pages, v_pages, block_table.
    """
    _, kv_heads, head_dim = keys[0].shape
    num_pages = 2 + sum(-(-len(k) // page_size) for k in keys)
    shape = (NUM_LAYERS, num_pages, kv_heads, page_size, head_dim)
    k_pages, v_pages = np.full(shape, unused), np.full(shape, -unused)
    table = np.zeros((len(keys), max_pages), np.int32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        for p in range(len(k)):
            if p % page_size == 0:
                table[n, p // page_size] = free.pop()
            at = LAYER, table[n, p // page_size], slice(None), p % page_size
            k_pages[at], v_pages[at] = k[p], v[p]
    # Not by jnp.asarray, which compiles a program for each shape.
    return jax.device_put((k_pages.astype(dtype), v_pages.astype(dtype), table))


def slid(table, begins, page_size):
    """Returns a block table without the pages that lie before where sequences begin to be read."""
    block = np.arange(table.shape[1])[None, :]
    left = np.where(block < np.asarray(begins)[:, None] // page_size, 0, np.asarray(table))
    return jax.device_put(left)


def make(rng, lengths, shape, dtype=np.float32):
    """Draws keys and values of each sequence, rounded as `dtype` rounds them."""
    sizes = [(n, shape.kv_heads, shape.head_dim) for n in lengths]
    draw = [[rng.normal(size=size).astype(dtype) for size in sizes] for _ in range(2)]
    return draw[0], draw[1]


def attend(q, k, v, scale, sinks=None):
    """Attends with one query row [H, D] to keys and values [len, G, D], in float64; zeros without a
    key. A head's sink is a score without a value.
    """
    heads = len(q)
    if len(k) == 0:
        return np.zeros((heads, v.shape[2]))
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = []
    for h in range(heads):
        g = h // (heads // k.shape[1])
        s = (k[:, g] @ q[h]) * scale
        scores = s if sinks is None else [*s, np.float64(sinks[h])]
        p = np.exp(scores - np.max(scores))
        out.append(p[: len(s)] @ v[:, g] / p.sum())
    return np.stack(out)
