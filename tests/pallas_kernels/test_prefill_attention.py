"""Contract of prefill attention on ragged chunks with cached prefixes, against dense float64."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import paged
import pytest

from pallas_kernels.backend import batched_only
from pallas_kernels.prefill_attention import mosaic, prefill_attention
from pallas_kernels.shapes import TINY, Shape

# The references are held to float64; a kernel's PTX is the same, however XLA is told to compile.
pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


class Implementation(NamedTuple):
    """An implementation, and what it is to be tried on."""

    op: Callable
    run: Callable  # of a function and its arguments
    shapes: tuple[Shape, ...]
    grouped: Shape
    page_sizes: tuple[int, ...]
    lengths: tuple[int, ...]  # of chunks, around those of a tile
    unused: tuple[float, ...]
    dtype: Any


def compiled(fn, *args):
    return jax.jit(fn)(*args)


def batched(fn, *args):
    with batched_only():
        return jax.jit(lambda *args: fn(*args))(*args)


def wide(heads, kv_heads, head_dim=64):
    """A shape of the kernel's."""
    return Shape(f"{heads}:{kv_heads}", 0, 0, 0, 0, heads, kv_heads, head_dim)


IMPLEMENTATIONS = {
    "public": Implementation(
        prefill_attention,
        compiled,
        TINY,
        TINY[3],  # 6 query heads over 2
        (1, 3, 16, 64),
        (31, 32, 33, 64, 70),
        (1e30, np.inf, np.nan),
        np.float32,
    ),
    "mosaic": Implementation(
        partial(mosaic.prefill_attention, num_blocks=2, interpreted=not interpreter.ON_SM90),
        interpreter.run,
        (wide(3, 1), wide(2, 2)),
        wide(4, 2),
        (16, 64),
        (70,),
        (np.nan,),
        jnp.bfloat16,
    ),
}
IMPLEMENTATIONS["batched"] = IMPLEMENTATIONS["public"]._replace(run=batched, lengths=(31, 64, 70))
IMPLEMENTATIONS["sm90"] = IMPLEMENTATIONS["mosaic"]._replace(
    op=partial(mosaic.prefill_attention, num_blocks=2), run=interpreter.emulate
)
implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
in_jax = pytest.mark.parametrize(  # what concerns the order of chunks, not of instructions
    "impl",
    [IMPLEMENTATIONS[name] for name in ("public", "batched", "mosaic")],
    ids=["public", "batched", "mosaic"],
)


def cases(field):
    """Every implementation with each of its own values of `field`."""
    return [
        pytest.param(impl, value, id=f"{name}-{getattr(value, 'name', value)}")
        for name, impl in IMPLEMENTATIONS.items()
        for value in getattr(impl, field)
    ]


def check(impl, chunks, shape=None, page_size=None, *, padding=3, unused=0.0, dtype=None):
    """`chunks`: (cached positions, new rows) of each sequence."""
    shape, page_size = shape or impl.grouped, page_size or impl.page_sizes[-2]
    dtype = dtype or impl.dtype
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

    def run(q, k_pages, v_pages, layer, table, q_start, kv_len):
        return impl.op(
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
    args = jnp.asarray(q), k_pages, v_pages, layer, table, jnp.asarray(q_start), kv_len
    got = impl.run(run, *args)
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


@pytest.mark.parametrize(("impl", "shape"), cases("shapes"))
def test_query_heads_share_kv_heads(impl, shape):
    check(impl, [(0, 5), (3, 2), (0, 1)], shape)


@pytest.mark.parametrize(("impl", "page_size"), cases("page_sizes"))
def test_ragged_chunks_with_cached_prefixes(impl, page_size):
    chunks = [(0, page_size), (page_size, 3), (2 * page_size - 1, 2), (130, 1)]
    check(impl, chunks, page_size=page_size)


@pytest.mark.parametrize(("impl", "new"), cases("lengths"))
def test_chunks_longer_than_a_tile_of_rows(impl, new):
    """The last tile of a chunk reaches into the next chunk's rows and must leave them alone."""
    check(impl, [(0, new), (5, new), (0, 3)])


@implementations
def test_empty_chunks(impl):
    check(impl, [(0, 0), (0, 4), (9, 0), (0, 0), (2, 3), (0, 0)])


@implementations
def test_no_rows_but_padding(impl):
    check(impl, [(0, 0), (4, 0)], padding=8)


@pytest.mark.parametrize(("page_size", "taken"), [(16, True), (32, False), (64, True)])
def test_a_page_size_at_which_the_kernel_would_spill_registers_is_not_taken(page_size, taken):
    q, pages = (jnp.zeros(s, jnp.bfloat16) for s in ((8, 2, 256), (1, 4, 1, page_size, 256)))
    assert mosaic.supports(q, pages, pages, 1.0) == taken


@in_jax
def test_no_padding(impl):
    check(impl, [(0, 33), (1, 30)], padding=0)


@pytest.mark.parametrize(("impl", "unused"), cases("unused"))
def test_what_unused_rows_hold_does_not_matter(impl, unused):
    """They hold what another sequence left there, and that one may have overflowed."""
    check(impl, [(0, 5), (6, 0), (60, 4), (63, 2)], unused=unused)


@in_jax
def test_bfloat16_cache(impl):
    check(impl, [(0, 33), (17, 5)], page_size=16, dtype=jnp.bfloat16)


@in_jax
def test_chunked_equals_whole(impl):
    """Rows of a prompt fed in one piece, and those of the same prompt fed in three."""
    check(impl, [(0, 40), (0, 40), (0, 40)], padding=0)
    check(impl, [(0, 13), (13, 14), (27, 13)], padding=0)
