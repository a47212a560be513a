"""Contract of prefill attention on ragged chunks with cached prefixes, against dense float64."""

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest

from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.shapes import TINY

IMPLEMENTATIONS = {"public": prefill_attention}
implementations = pytest.mark.parametrize("op", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
GROUPED = TINY[3]  # 6 query heads over 2


def check(op, chunks, shape=GROUPED, page_size=4, *, padding=3, unused=0.0, dtype=np.float32):
    """`chunks`: (cached positions, new rows) of each sequence. Returns the padding rows."""
    rng = np.random.default_rng(page_size)
    lengths = [cached + new for cached, new in chunks]
    keys, values = paged.make(rng, lengths, shape, dtype)
    max_pages = 1 + -(-max(lengths) // page_size)
    k_pages, v_pages, table = paged.scatter(
        rng, keys, values, page_size, max_pages, unused=unused, dtype=dtype
    )
    q_start = np.concatenate([[0], np.cumsum([new for _, new in chunks])]).astype(np.int32)
    num_rows = int(q_start[-1])
    q = rng.normal(size=(num_rows + padding, shape.heads, shape.head_dim)).astype(dtype)
    scale = shape.head_dim**-0.5

    @jax.jit
    def run(q, k_pages, v_pages, layer, table, q_start, kv_len):
        return op(
            q,
            k_pages,
            v_pages,
            layer=layer,
            block_table=table,
            q_start=q_start,
            kv_len=kv_len,
            scale=scale,
        )

    layer, kv_len = jnp.int32(paged.LAYER), jnp.asarray(lengths, jnp.int32)
    got = run(jnp.asarray(q), k_pages, v_pages, layer, table, jnp.asarray(q_start), kv_len)
    assert got.dtype == q.dtype
    want = [np.zeros((0, shape.heads, shape.head_dim))]
    for n, (cached, new) in enumerate(chunks):
        for i in range(new):
            seen = cached + i + 1
            row = paged.attend(q[q_start[n] + i], keys[n][:seen], values[n][:seen], scale)
            want.append(row[None])
    atol = 1e-5 if dtype == np.float32 else 0.03
    want = np.concatenate(want)
    np.testing.assert_allclose(got[:num_rows].astype(jnp.float32), want, rtol=0, atol=atol)
    assert not np.asarray(got[num_rows:]).any()


@implementations
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_query_heads_share_kv_heads(op, shape):
    check(op, [(0, 5), (3, 2), (0, 1)], shape)


@implementations
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_ragged_chunks_with_cached_prefixes(op, page_size):
    check(
        op, [(0, page_size), (page_size, 3), (2 * page_size - 1, 2), (130, 1)], page_size=page_size
    )


@implementations
@pytest.mark.parametrize("new", [31, 32, 33, 64, 70])
def test_chunks_longer_than_a_tile_of_rows(op, new):
    """The last tile of a chunk reaches into the next chunk's rows and must leave them alone."""
    check(op, [(0, new), (5, new), (0, 3)])


@implementations
def test_empty_chunks(op):
    check(op, [(0, 0), (0, 4), (9, 0), (0, 0), (2, 3), (0, 0)])


@implementations
def test_no_rows_but_padding(op):
    check(op, [(0, 0), (4, 0)], padding=8)


@implementations
def test_no_padding(op):
    check(op, [(0, 33), (1, 30)], padding=0)


@implementations
@pytest.mark.parametrize("unused", [1e30, np.inf, np.nan])
def test_what_unused_rows_hold_does_not_matter(op, unused):
    """They hold what another sequence left there, and that one may have overflowed."""
    check(op, [(0, 5), (6, 0), (60, 4), (63, 2)], page_size=8, unused=unused)


@implementations
def test_bfloat16_cache(op):
    check(op, [(0, 33), (17, 5)], page_size=16, dtype=jnp.bfloat16)


@implementations
def test_chunked_equals_whole(op):
    """Rows of a prompt fed in one piece, and those of the same prompt fed in three."""
    check(op, [(0, 40), (0, 40), (0, 40)], padding=0)
    check(op, [(0, 13), (13, 14), (27, 13)], padding=0)
