"""KV pages in eight bits: what is written, bit for bit, and attention over it, against NumPy, whose
e4m3 is ml_dtypes'.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import mosaic
import numpy as np
import paged
import pytest

from benchmarks.kernels.shapes import Shape
from pallas_kernels import fp8_pages, native
from pallas_kernels.backend import batched_only, noting, references_only, traced_for
from pallas_kernels.fp8_pages import Fp8Pages
from pallas_kernels.kv_write import Projection, split_heads, write_kv
from pallas_kernels.paged_attention import mosaic as kernel
from pallas_kernels.paged_attention import paged_attention, tiles
from pallas_kernels.paged_attention import plan as plan_decode
from pallas_kernels.prefill_attention import mosaic as prefill_kernel
from pallas_kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def by_hand(rows):
    """Returns rows in e4m3 and their scales, in NumPy."""
    rows = np.asarray(rows).astype(F32)
    with np.errstate(all="ignore"):
        largest = np.abs(rows).max(axis=-1)
        scales = np.where(largest < 448 * np.finfo(F32).tiny, F32(0), largest * F32(1 / 448))
        scales = np.where(np.isfinite(largest), scales, F32(np.nan))
        inverse = np.where(scales == 0, F32(0), F32(1) / scales)
        return (rows * inverse[..., None]).astype(E4M3), scales


def same(pages, numbers, scales):
    """Checks bits; of NaN, that it is one."""
    broken = np.isnan(np.asarray(scales))
    assert (np.isnan(np.asarray(pages[1])) == broken).all()
    np.testing.assert_array_equal(np.asarray(pages[1])[~broken], np.asarray(scales)[~broken])
    np.testing.assert_array_equal(
        np.asarray(pages[0])[~broken], numbers.view(np.uint8)[~broken], strict=True
    )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_rows_are_rounded_as_ml_dtypes_rounds(dtype):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 3, 24)) * np.exp(rng.uniform(-5, 5, (500, 3, 1)))
    rows = jnp.asarray(rows * np.exp(rng.uniform(-8, 0, rows.shape)), dtype)
    got = jax.jit(fp8_pages.quantize)(rows)
    same(got, *by_hand(rows))
    want = np.asarray(rows, np.float64)
    found = np.asarray(fp8_pages.dequantize(*got, jnp.float32), np.float64)
    step = np.maximum(np.abs(want) / 16, np.abs(want).max(axis=-1, keepdims=True) / 448 * 2**-10)
    assert (np.abs(found - want) <= step * (1 + 1e-5)).all()
    assert np.abs(found - want).max() > 0


def test_rows_that_no_scale_fits():
    """Zeros and less than normal numbers are read as zeros, what is not finite as NaN; the largest
    numbers keep their sizes.
    """
    tiny, largest = np.finfo(F32).tiny, np.finfo(F32).max
    rows = np.zeros((9, 4), F32)
    rows[1], rows[2, 1], rows[3, 1] = -0.0, tiny, 447 * tiny
    rows[4], rows[5] = [449 * tiny, 0, -449 * tiny, 0], [largest, -largest, 0, largest / 448]
    rows[6, 2], rows[7, 0], rows[8] = np.nan, -np.inf, [np.inf, np.nan, 0, 1]
    got = jax.jit(fp8_pages.quantize)(jnp.asarray(rows))
    same(got, *by_hand(rows))
    read = np.asarray(jax.jit(fp8_pages.dequantize, static_argnums=2)(*got, jnp.float32))
    assert not read[:4].any()
    np.testing.assert_allclose(read[4:6], rows[4:6], rtol=1e-6)
    assert np.isnan(read[6:]).all()


@pytest.mark.parametrize("at", [0, 77, 127, slice(None)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_of_many_that_is_not_finite_is_read_as_nan(bad, at):
    """XLA's maximum of many rows passes over NaN on a CPU."""
    rows = np.random.default_rng(0).normal(size=(7, 32, 128)).astype(F32)
    rows[6, 31, at] = bad
    _, scales = jax.jit(fp8_pages.quantize)(jnp.asarray(rows))
    assert np.argwhere(np.isnan(scales)).tolist() == [[6, 31]]


def draw(rng, num_rows, heads=4, kv_heads=2, dim=16):
    angle = rng.random((num_rows, dim // 2)) * 6
    return Projection(
        jnp.asarray(rng.normal(size=(num_rows, heads + 2 * kv_heads, dim)), F32),
        kv_heads,
        jnp.asarray(np.cos(angle), F32),
        jnp.asarray(np.sin(angle), F32),
    )


def empty(rng, shape):
    """Returns pages that others have left anything in."""
    bits = jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)
    return Fp8Pages(bits, jnp.asarray(rng.choice([np.nan, np.inf, 0, -3], shape[:-1]), F32))


def test_a_row_is_written_where_the_table_says_and_nowhere_else():
    rng = np.random.default_rng(1)
    projection, shape = draw(rng, 5), (3, 6, 2, 8, 16)
    old = empty(rng, shape), empty(rng, shape)
    page, offset = np.array([2, 5, 0, 2, 5]), np.array([7, 0, 3, 0, 0])  # the last: nobody's
    at = {"layer": jnp.int32(1), "page": jnp.asarray(page), "offset": jnp.asarray(offset)}
    q, *new = jax.jit(lambda k, v: write_kv(projection, k, v, **at))(*old)
    want_q, *rows = jax.jit(lambda: split_heads(projection))()
    np.testing.assert_array_equal(q, want_q)
    own, place = page < 5, (1, page[page < 5], slice(None), offset[page < 5])
    for before, after, given in zip(old, new, rows, strict=True):
        same([np.asarray(leaf)[place] for leaf in after], *by_hand(np.asarray(given)[own]))
        for was, now in zip(before, after, strict=True):
            was, now = np.array(was), np.array(now)
            was[place] = now[place]
            was[1, 5] = now[1, 5]
            assert was.tobytes() == now.tobytes()


def test_a_row_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(size=(40, 2, 32)), F32)
    quantize = jax.jit(fp8_pages.quantize)
    whole = [np.asarray(part) for part in quantize(rows)]
    for cut in ([0, 40], [0, 1, 40], [0, 13, 27, 40]):
        parts = [quantize(rows[a:b]) for a, b in pairwise(cut)]
        for found, want in zip(zip(*parts, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(found), want)


# ---- attention -----------------------------------------------------------------------------------

FORMS = {"XLA": references_only, "batched XLA": batched_only, "C++": nullcontext}
forms = pytest.mark.parametrize("form", FORMS)


def cache(rng, lengths, shape, page_size, max_pages):
    """Returns pages of sequences, their table, and keys and values as they are read; all else holds
    what is not finite.
    """
    rows, pages = paged.make(rng, lengths, shape), []
    read = [[] for _ in rows]
    for each, sequences in zip(read, rows, strict=True):
        for one in sequences:
            numbers, scales = by_hand(one)
            each.append(numbers.astype(np.float64) * scales[..., None])
    seed = int(rng.integers(2**31))
    for part in (0, 1):  # keys and values lie in the same pages
        numbers, scales = zip(*(by_hand(one) for one in rows[part]), strict=True)
        wide = [one.view(np.uint8).astype(F32) for one in numbers]
        bits, _, table = paged.scatter(
            np.random.default_rng(seed), wide, wide, page_size, max_pages, unused=127
        )
        flat = [one[..., None] for one in scales]
        scaled, _, _ = paged.scatter(
            np.random.default_rng(seed), flat, flat, page_size, max_pages, unused=np.nan
        )
        pages.append(Fp8Pages(bits.astype(jnp.uint8), scaled[..., 0]))
    return *pages, table, *read


def shape_of(heads, kv_heads, dim):
    return Shape("", 1, 1, 1, 1, heads, kv_heads, dim)


CASES = [
    (shape_of(6, 2, 32), 16, 21),
    pytest.param(shape_of(6, 2, 32), 16, 0, marks=pytest.mark.deep),
    pytest.param(shape_of(1, 1, 16), 3, 7, marks=pytest.mark.deep),
    pytest.param(shape_of(8, 1, 80), 64, 33, marks=pytest.mark.deep),
]


def runs(form, fn):
    if form == "C++" and not native.LIBRARY.is_there:
        pytest.skip("no C++ compiler is found: c++, or what CXX names")
    with FORMS[form](), noting() as noted:
        out = np.asarray(jax.jit(fn)())
    assert set(noted.values()) == {form}
    return out


@forms
@pytest.mark.parametrize(("shape", "page_size", "window"), CASES)
def test_decode_attention(form, shape, page_size, window):
    rng, lengths = np.random.default_rng(3), [5, 0, 130, 1, 64]
    k, v, table, keys, values = cache(rng, lengths, shape, page_size, 130 // page_size + 2)
    q = jnp.asarray(rng.normal(size=(5, shape.heads, shape.head_dim)), F32)
    sinks = rng.normal(size=shape.heads).astype(F32)
    if window:
        table = paged.slid(table, [max(0, n - window) for n in lengths], page_size)
        keys, values = ([one[-window:] for one in each] for each in (keys, values))
    at = {"layer": jnp.int32(paged.LAYER), "block_table": table, "window": window, "scale": 0.2}
    at |= {"kv_len": jnp.asarray(lengths, jnp.int32), "sinks": jnp.asarray(sinks)}
    got = runs(form, lambda: paged_attention(q, k, v, **at))
    want = [paged.attend(*of, 0.2, sinks) for of in zip(q, keys, values, strict=True)]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@forms
@pytest.mark.parametrize(("shape", "page_size", "window"), CASES)
def test_prefill_attention(form, shape, page_size, window):
    rng, chunks = np.random.default_rng(4), [(0, 33), (6, 0), (120, 9), (63, 2)]
    lengths = [old + new for old, new in chunks]
    k, v, table, keys, values = cache(rng, lengths, shape, page_size, 130 // page_size + 2)
    start = np.cumsum([0, *(new for _, new in chunks)])
    q = jnp.asarray(rng.normal(size=(start[-1] + 2, shape.heads, shape.head_dim)), F32)
    at = {"layer": jnp.int32(paged.LAYER), "block_table": table, "window": window, "scale": 0.2}
    at |= {"kv_len": jnp.asarray(lengths, jnp.int32), "q_start": jnp.asarray(start, jnp.int32)}
    got = runs(form, lambda: prefill_attention(q, k, v, **at))
    for n, (old, new) in enumerate(chunks):
        for row in range(new):
            seen = slice(max(0, old + row + 1 - window) if window else 0, old + row + 1)
            want = paged.attend(q[start[n] + row], keys[n][seen], values[n][seen], 0.2)
            np.testing.assert_allclose(got[start[n] + row], want, rtol=0, atol=1e-5)
    assert not got[start[-1] :].any()


@pytest.mark.deep
def test_rows_in_bfloat16_read_them():
    """As on a GPU, whose kernel takes no pages of 16."""
    rng, shape = np.random.default_rng(5), shape_of(4, 2, 64)
    k, v, table, keys, values = cache(rng, [70, 3], shape, 16, 6)
    q = jnp.asarray(rng.normal(size=(2, 4, 64)), jnp.bfloat16)
    at = {"layer": jnp.int32(paged.LAYER), "block_table": table, "scale": 0.125}
    at["kv_len"] = jnp.asarray([70, 3], jnp.int32)
    for form in ("XLA", "batched XLA"):
        got = runs(form, lambda: paged_attention(q, k, v, **at))
        want = [paged.attend(*of, 0.125) for of in zip(q, keys, values, strict=True)]
        np.testing.assert_allclose(got.astype(F32), want, rtol=0, atol=0.015)
    with traced_for("cuda"), noting() as noted:
        assert plan_decode(4, k, kv_len=at["kv_len"]) is None
        jax.eval_shape(lambda: paged_attention(q, k, v, **at))
    assert noted == {"attention": "batched XLA"}


@pytest.mark.sized(deep=("shape0-64-0-run",))
@pytest.mark.parametrize("run", [mosaic.run, pytest.param(mosaic.emulate, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("shape", "page_size", "window"),
    [
        (shape_of(6, 2, 64), 64, 0),
        pytest.param(shape_of(7, 1, 128), 64, 33, marks=pytest.mark.deep),
        pytest.param(shape_of(3, 1, 256), 128, 0, marks=pytest.mark.deep),
    ],
)
def test_the_kernel_of_decode_attention(run, shape, page_size, window):
    """In three blocks, which cut sequences wherever they can."""
    rng, lengths = np.random.default_rng(7), [70, 3, 0, 193]
    k, v, table, keys, values = cache(rng, lengths, shape, page_size, 5)
    q = jnp.asarray(rng.normal(size=(4, shape.heads, shape.head_dim)), jnp.bfloat16)
    if window:
        table = paged.slid(table, [max(0, n - window) for n in lengths], page_size)
        keys, values = ([one[-window:] for one in each] for each in (keys, values))
    tile, sinks = tiles.choose(shape.head_dim, page_size, fp8=True), rng.normal(size=shape.heads)
    assert tile is not None
    assert kernel.supports(q, k, v)

    def attend(q, k, v, layer, table, kv_len):
        at = {"layer": layer, "block_table": table, "kv_len": kv_len, "window": window}
        at |= {"sinks": jnp.asarray(sinks, F32), "num_blocks": 3}
        small = replace(tile, min_tiles=1, merge_width=2)
        return kernel.paged_attention(q, k, v, scale=0.125, tile=small, **at)

    got = run(attend, q, k, v, jnp.int32(paged.LAYER), table, jnp.asarray(lengths, jnp.int32))
    want = [paged.attend(*of, 0.125, sinks) for of in zip(q, keys, values, strict=True)]
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.015)


@pytest.mark.deep
@pytest.mark.parametrize("run", [mosaic.run, mosaic.emulate])
@pytest.mark.parametrize("window", [0, 33])
def test_the_kernel_of_prefill_attention_gets_a_copy(run, window):
    rng, chunks, shape = np.random.default_rng(8), [(0, 5), (70, 9), (3, 0)], shape_of(4, 2, 64)
    lengths = [old + new for old, new in chunks]
    k, v, table, keys, values = cache(rng, lengths, shape, 16, 6)
    start = np.cumsum([0, *(new for _, new in chunks)])
    q = jnp.asarray(rng.normal(size=(16, 4, 64)), jnp.bfloat16)
    assert prefill_kernel.supports(q, k, v, 0.125)

    def attend(q, k, v, layer, table, kv_len, q_start):
        at = {"layer": layer, "block_table": table, "kv_len": kv_len, "q_start": q_start}
        at |= {"window": window, "num_blocks": 2}
        interpreted = run is mosaic.run and not mosaic.ON_SM90
        return prefill_kernel.prefill_attention(q, k, v, scale=0.125, interpreted=interpreted, **at)

    given = table, jnp.asarray(lengths, jnp.int32), jnp.asarray(start, jnp.int32)
    got = np.asarray(run(attend, q, k, v, jnp.int32(paged.LAYER), *given), F32)
    for n, (old, new) in enumerate(chunks):
        for row in range(new):
            seen = slice(max(0, old + row + 1 - window) if window else 0, old + row + 1)
            want = paged.attend(q[start[n] + row], keys[n][seen], values[n][seen], 0.125)
            np.testing.assert_allclose(got[start[n] + row], want, rtol=0, atol=0.03)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.deep), 9])
def test_in_cpp_chunks_are_the_same_bits_however_they_are_cut(window):
    rng, shape = np.random.default_rng(6), shape_of(4, 2, 32)
    k, v, table, _, _ = cache(rng, [90, 40], shape, 16, 7)
    q = jnp.asarray(rng.normal(size=(130, 4, 32)), F32)
    whole = None
    for cut in ([0, 90], [0, 1, 90], [0, 37, 64, 90]):
        outs = []
        for a, b in pairwise(cut):
            extra = 40 if whole is None else 0  # in company
            at = {"q_start": jnp.asarray([0, b - a, b - a + extra], jnp.int32), "window": window}
            at |= {"kv_len": jnp.asarray([b, 40], jnp.int32), "block_table": table}
            at |= {"layer": jnp.int32(paged.LAYER), "scale": 0.2}
            rows = jnp.concatenate([q[a:b], q[90 : 90 + extra]])
            out = runs("C++", lambda r=rows, at=at: prefill_attention(r, k, v, **at))
            outs.append(out[: b - a])
        whole = np.concatenate(outs) if whole is None else whole
        np.testing.assert_array_equal(np.concatenate(outs), whole)
