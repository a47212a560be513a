"""Prefill attention over latents that the kernel expands, against float64: interpreted, emulated,
and compiled for an H200.
"""

from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import paged
import pytest

from benchmarks.kernels.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3, Shape
from pallas_kernels.backend import NUM_SMS
from pallas_kernels.prefill_attention import expanded
from pallas_kernels.prefill_attention.tiles import Expanded, choose_expanded

pytestmark = pytest.mark.deep

I32 = jnp.int32
KEY = expanded.SIZE + expanded.ROPE


def check(chunks, heads, rank, page_size, size, num_blocks=2, *, padding=3, run=interpreter.run):
    """Checks the kernel on chunks (cached positions, new rows); what no chunk owns is NaN."""
    rng = np.random.default_rng(page_size)
    lengths = [cached + new for cached, new in chunks]
    latents, _ = paged.make(rng, lengths, Shape("", 0, 0, 0, 0, heads, 1, rank + 64), jnp.bfloat16)
    max_pages = 1 + -(-max(lengths) // page_size)
    pages, _, table = paged.scatter(
        rng, latents, latents, page_size, max_pages, unused=np.nan, dtype=jnp.bfloat16
    )
    q_start = np.cumsum([0, *(new for _, new in chunks)]).astype(np.int32)
    q = rng.normal(size=(q_start[-1] + padding, heads, KEY)).astype(jnp.bfloat16)
    made = (rng.normal(size=(2, rank, heads * 128)) * rank**-0.5).astype(jnp.bfloat16)
    scale = 1.3 * KEY**-0.5  # as yarn has it

    def attend(q, weights, pages, layer, table, q_start, kv_len):
        return expanded.prefill_attention(
            q,
            weights,
            pages,
            layer=layer,
            block_table=table,
            q_start=q_start,
            kv_len=kv_len,
            scale=scale,
            size=size,
            num_blocks=num_blocks,
            interpreted=run is interpreter.run and not interpreter.ON_SM90,
        )

    args = q, tuple(made), pages, jnp.int32(paged.LAYER), table, q_start, np.int32(lengths)
    got = np.asarray(run(attend, *jax.tree.map(jnp.asarray, args)), np.float64)
    made = made.astype(np.float64).reshape(2, rank, heads, 128)
    for n, (cached, new) in enumerate(chunks):
        own = latents[n][:, 0].astype(np.float64)
        keys, values = np.einsum("cr,prhx->pchx", own[:, :rank], made)
        turned = np.repeat(own[:, None, rank:], heads, axis=1)
        keys = np.concatenate([keys, turned], axis=2)
        for i in range(new):
            row, seen = q_start[n] + i, cached + i + 1
            want = paged.attend(q[row], keys[:seen], values[:seen], scale)
            np.testing.assert_allclose(got[row], want, rtol=0, atol=0.03)
    assert not got[q_start[-1] :].any()


@pytest.mark.sized(exhaustive=("sets-and-pieces",))
@pytest.mark.parametrize(
    ("chunks", "heads", "page_size", "size"),
    [
        ([(0, 5), (6, 0), (130, 3)], 2, 16, Expanded(128, 128)),
        ([(100, 150), (0, 0), (0, 5), (130, 9)], 2, 64, Expanded(256, 128)),
        ([(250, 20), (0, 129)], 1, 128, Expanded(256, 256)),
    ],
    ids=["ragged", "sets-and-pieces", "pages-of-a-step"],
)
def test_chunks_over_pages(chunks, heads, page_size, size):
    """Rows of one set, and several; positions that are expanded at once, and in turns."""
    check(chunks, heads, 128, page_size, size)


def test_no_rows_but_padding():
    check([(0, 0), (4, 0)], 1, 128, 16, Expanded(128, 128), padding=8)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("chunks", "rank", "size"),
    [
        ([(100, 40), (0, 5)], 256, Expanded(128, 128)),
        ([(200, 150), (0, 5)], 128, Expanded(256, 256)),  # rows of two sets, in two turns
    ],
)
def test_emulated(chunks, rank, size):
    check(chunks, 1, rank, 64, size, run=interpreter.emulate)


def arguments(shape, num_tokens, page_size):
    sds = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = partial(jax.ShapeDtypeStruct, dtype=I32)
    return (
        sds((num_tokens, shape.heads, KEY)),
        (sds((shape.latent, shape.heads * 128)),) * 2,
        sds((2, 4096, 1, page_size, shape.head_dim)),
        ints(()),
        ints((8, 512)),
        ints((9,)),
        ints((8,)),
    )


@pytest.mark.parametrize(
    ("shape", "num_tokens", "page_size"),
    [(DEEPSEEK_V3, 512, 64), (DEEPSEEK_V2_LITE, 2048, 16), (DEEPSEEK_V3, 4096, 128)],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled_for_an_h200(capfd, monkeypatch, shape, num_tokens, page_size):
    def attend(q, weights, pages, layer, table, q_start, kv_len):
        assert expanded.supports(q, pages, weights)
        return expanded.prefill_attention(
            q,
            weights,
            pages,
            layer=layer,
            block_table=table,
            q_start=q_start,
            kv_len=kv_len,
            scale=0.1,
        )

    args = arguments(shape, num_tokens, page_size)
    compiled, kernels = interpreter.compile_kernels(capfd, monkeypatch, attend, *args)
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    # A block's expanded positions, and sums of its rows; nothing grows with a context.
    rows = choose_expanded(num_tokens, shape.heads, NUM_SMS).rows
    block = 2 * 512 * 128 * 2 + rows * (128 + 2) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < NUM_SMS * block + 2**20


def test_it_pays_where_many_rows_share_what_is_expanded():
    """By hand: 128 heads, 132 blocks; 256 rows are an item of each head."""
    assert [expanded.pays(rows, 128, 512) for rows in (64, 128, 256, 512, 4096)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not expanded.pays(256, 16, 512)  # 32 items for 132 blocks
    assert expanded.pays(1024, 16, 512)
    assert choose_expanded(512, 128, 132).rows == 512
    assert choose_expanded(512, 16, 132).rows == 128
