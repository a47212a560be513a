"""Contract of paged decode attention, against dense float64."""

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.shapes import TINY

IMPLEMENTATIONS = {"public": paged_attention}
implementations = pytest.mark.parametrize("op", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
GROUPED = TINY[3]  # 6 query heads over 2


def check(op, lengths, shape, page_size, *, dtype=np.float32, atol=1e-5, unused=0.0, extra_pages=2):
    rng = np.random.default_rng(page_size)
    keys, values = paged.make(rng, lengths, shape, dtype)
    max_pages = extra_pages + -(-max(lengths) // page_size)
    pages = paged.scatter(rng, keys, values, page_size, max_pages, unused=unused, dtype=dtype)
    q = jnp.asarray(rng.normal(size=(len(lengths), shape.heads, shape.head_dim)).astype(dtype))
    scale = shape.head_dim**-0.5
    k_pages, v_pages, table = pages

    @jax.jit
    def run(q, k_pages, v_pages, layer, table, kv_len):
        return op(q, k_pages, v_pages, layer=layer, block_table=table, kv_len=kv_len, scale=scale)

    kv_len = jnp.asarray(lengths, jnp.int32)
    got = run(q, k_pages, v_pages, jnp.int32(paged.LAYER), table, kv_len)
    assert got.dtype == q.dtype
    want = [paged.attend(*row, scale) for row in zip(q, keys, values, strict=True)]
    np.testing.assert_allclose(got.astype(jnp.float32), np.stack(want), rtol=0, atol=atol)
    return np.asarray(got)


@implementations
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_query_heads_share_kv_heads(op, shape):
    check(op, [5, 1, 17, 9], shape, 4)


@implementations
@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64])
def test_lengths_at_page_borders(op, page_size):
    lengths = [1, page_size, page_size + 1, max(2 * page_size - 1, 1), 2 * page_size, 130]
    check(op, lengths, GROUPED, page_size)


@implementations
def test_padding_rows_are_zero(op):
    got = check(op, [0, 6, 0, 0], GROUPED, 4)
    assert not got[[0, 2, 3]].any()


@implementations
def test_only_padding_rows(op):
    assert not check(op, [0, 0], GROUPED, 4).any()


@implementations
def test_a_table_no_longer_than_its_pages(op):
    check(op, [16, 3], GROUPED, 4, extra_pages=0)


@implementations
@pytest.mark.parametrize("unused", [1e30, np.inf, np.nan])
def test_what_unused_rows_hold_does_not_matter(op, unused):
    """They hold what another sequence left there, and that one may have overflowed."""
    check(op, [5, 0, 64, 67, 1], GROUPED, 8, unused=unused)


@implementations
def test_bfloat16_cache(op):
    check(op, [5, 33, 70], GROUPED, 16, dtype=jnp.bfloat16, atol=0.03)


@implementations
def test_scores_far_apart_keep_their_precision(op):
    """The running maximum moves by hundreds between one step over the keys and the next."""
    rng = np.random.default_rng(0)
    keys, values = paged.make(rng, [200], GROUPED)
    keys[0] *= np.linspace(1, 60, 200)[:, None, None].astype(np.float32)
    k_pages, v_pages, table = paged.scatter(rng, keys, values, 16, 13)
    q = rng.normal(size=(1, GROUPED.heads, GROUPED.head_dim)).astype(np.float32)
    got = op(
        jnp.asarray(q),
        k_pages,
        v_pages,
        layer=jnp.int32(paged.LAYER),
        block_table=table,
        kv_len=jnp.asarray([200]),
        scale=1.0,
    )
    want = paged.attend(q[0], keys[0], values[0], 1.0)
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-4)
