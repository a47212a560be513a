"""The kernel of the KV page write compiled for an H200, and what it does not take."""

from functools import partial

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest

from benchmarks.kernels.shapes import (
    GLM_45_AIR,
    MODELS,
    OLMOE_1B_7B,
    QWEN3_30B_A3B,
    QWEN15_MOE_A27B,
    Shape,
)
from pallas_kernels.backend import references_only
from pallas_kernels.fp8_pages import Fp8Pages
from pallas_kernels.kv_write import Projection, split_heads, write_kv
from pallas_kernels.kv_write import mosaic as kernel
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_launches

pytestmark = pytest.mark.deep

BF16, F32 = jnp.bfloat16, jnp.float32
LAYERS = 48


def sds(*size, dtype=BF16):
    return jax.ShapeDtypeStruct(size, dtype)


def shape(heads, kv_heads, head_dim):
    return Shape(f"{heads}:{kv_heads} of {head_dim}", 1, 1, 1, 1, heads, kv_heads, head_dim)


def abstract(
    of, num_rows, *, bias=False, norms=False, whole=False, wide=False, half=None, num_pages=6000
):
    """Returns the shapes of pages of more than 2**31 elements, and of a projection. `whole`: norms
    are of all heads, `wide`: in float32; `half`: of what turns.
    """
    heads, half = of.heads + 2 * of.kv_heads, half or of.head_dim // 2
    pages = sds(LAYERS, num_pages, of.kv_heads, 64, of.head_dim)
    arrays = {
        "rows": sds(num_rows, heads, of.head_dim),
        "cos": sds(num_rows, half, dtype=F32),
        "sin": sds(num_rows, half, dtype=F32),
    }
    if bias:
        arrays["bias"] = sds(heads, of.head_dim)
    if norms:
        each = (of.heads, of.kv_heads) if whole else (1, 1)
        sizes = (sds(n * of.head_dim, dtype=F32 if wide else BF16) for n in each)
        arrays |= dict(zip(("q_norm", "k_norm"), sizes, strict=True))
    ints = [sds(num_rows, dtype=jnp.int32)] * 2
    return arrays, pages, pages, sds(dtype=jnp.int32), *ints


def once(of, arrays, k_pages, v_pages, layer, page, offset, **given):
    projection = Projection(**arrays, kv_heads=of.kv_heads, eps=1e-6, **given)
    return write_kv(projection, k_pages, v_pages, layer=layer, page=page, offset=offset)


def over_layers(of, arrays, k_pages, v_pages, first, page, offset):
    def one(pages, layer):
        queries, *pages = once(of, arrays, *pages, layer, page, offset)
        return tuple(pages), jnp.sum(queries.astype(F32))

    layers = first + jnp.arange(LAYERS, dtype=jnp.int32)
    return jax.lax.scan(one, (k_pages, v_pages), layers)


@pytest.mark.parametrize("num_rows", [64, 16384])
@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.name)
def test_compiles_without_spills_and_copies_no_page(capfd, monkeypatch, of, num_rows):
    is_qwen3 = of is QWEN3_30B_A3B
    args = abstract(of, num_rows, bias=of is QWEN15_MOE_A27B, norms=is_qwen3)
    compiled, kernels = mosaic.compile_kernels(
        capfd, monkeypatch, partial(over_layers, of), *args, donate_argnums=(1, 2)
    )
    assert [k.spill_bytes for k in kernels] == [0]
    assert kernels[0].registers <= 48  # so that ten blocks live on a multiprocessor
    memory = compiled.memory_analysis()
    queries = 2 * num_rows * of.heads * of.head_dim
    assert memory.temp_size_in_bytes < 2**20 + 2 * queries
    # The pages that come back are those that went in: a copy would be an output of its own.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**20


@pytest.mark.parametrize("of", [shape(14, 2, 64), shape(16, 2, 256), shape(71, 1, 64)], ids=str)
def test_other_shapes_compile_without_spills(capfd, monkeypatch, of):
    args = abstract(of, 8, bias=True, norms=True)
    compiled, kernels = mosaic.compile_kernels(
        capfd, monkeypatch, partial(once, of), *args, donate_argnums=(1, 2)
    )
    assert [k.spill_bytes for k in kernels] == [0]
    assert "mosaic_gpu" in compiled.as_text()


IN_PART = {"bias": True, "half": 32}
TOGETHER = {"norms": True, "whole": True}
FIRST = {"norms": True}
WIDE = {"norms": True, "wide": True, "half": 32}


@pytest.mark.parametrize(
    ("of", "form"),
    [
        pytest.param(GLM_45_AIR, IN_PART, id="GLM-4.5-Air"),
        pytest.param(GLM_45_AIR, IN_PART | {"norms": True}, id="GLM-4.5"),
        pytest.param(OLMOE_1B_7B, TOGETHER, id="OLMoE"),
        pytest.param(shape(32, 8, 128), FIRST, id="Hunyuan-A13B"),
        pytest.param(shape(16, 2, 256), WIDE, id="Qwen3-Next"),
        pytest.param(shape(48, 8, 128), TOGETHER | IN_PART, id="all at once"),
        pytest.param(shape(16, 16, 64), IN_PART | {"norms": True, "half": 16}, id="32 of 64"),
        pytest.param(shape(16, 16, 256), TOGETHER | IN_PART | {"half": 16}, id="32 of 256"),
    ],
)
def test_heads_that_turn_in_part_or_are_normed_together_take_one_launch(
    capfd, monkeypatch, of, form
):
    given = {"clip": 8.0 * ("whole" in form), "turned_first": form is FIRST}
    args = abstract(of, 64, num_pages=600, **form)
    compiled, kernels = mosaic.compile_kernels(
        capfd, monkeypatch, partial(once, of, **given), *args, donate_argnums=(1, 2)
    )
    assert [k.spill_bytes for k in kernels] == [0]
    assert kernels[0].registers <= (48 if of.head_dim < 256 else 80)
    assert sum(count_launches(compiled.as_text()).values()) == 1


@pytest.mark.parametrize(("of", "least"), [(QWEN15_MOE_A27B, 3), (QWEN3_30B_A3B, 4)])
def test_one_launch_in_place_of_several(of, least):
    pytest.importorskip("jax_plugins.xla_cuda13")
    norms = of is QWEN3_30B_A3B

    def launches():
        args = abstract(of, 64, bias=not norms, norms=norms)
        exe = compile_for(h200_mesh(), partial(once, of), *args, donate_argnums=(1, 2))
        return sum(count_launches(exe.as_text()).values())

    assert launches() == 1
    with references_only():
        assert launches() >= least


def taken(of, num_rows=2, pages_dtype=BF16, turned_first=False, **changes):
    """Returns whether the kernel takes a projection with some of its arrays replaced."""
    arrays, pages, *_ = abstract(of, num_rows)
    found = []

    def ask(arrays, k_pages, v_pages):
        projection = Projection(**arrays, kv_heads=of.kv_heads, turned_first=turned_first)
        found.append(kernel.supports(projection, k_pages, v_pages))

    jax.eval_shape(ask, arrays | changes, pages, sds(*pages.shape, dtype=pages_dtype))
    return found[0]


def test_what_the_kernel_does_not_take():
    of = QWEN3_30B_A3B
    assert taken(of)
    assert not taken(of, num_rows=0)
    assert not taken(of, cos=sds(2, 64))
    turned = {half: [sds(2, half, dtype=F32)] * 2 for half in (64, 48, 32, 8)}
    turned = {half: taken(of, cos=cos, sin=sin) for half, (cos, sin) in turned.items()}
    assert turned == {64: True, 48: False, 32: True, 8: False}
    for heads in (8, 6):  # all together in units of four
        norms = {"q_norm": sds(heads * 128), "k_norm": sds(4 * 128)}
        assert taken(shape(heads, 4, 128), **norms) == (heads == 8)
        assert not taken(shape(heads, 4, 128), turned_first=True, **norms)
    assert taken(of, turned_first=True, q_norm=sds(128), k_norm=sds(128))
    assert not taken(of, rows=sds(2, 40, 128, dtype=F32))
    assert not taken(of, bias=sds(40, 128, dtype=F32))
    assert not taken(of, pages_dtype=jnp.float16)
    assert not taken(shape(4, 2, 96))  # a head of 96
    assert not taken(shape(512, 2, 64))  # more heads than a TMA box is high
    assert not taken(shape(256, 128, 256))  # more than fits shared memory


def test_interpreted_bits_are_those_of_the_reference():
    """But for norms, whose sums have another order. XLA for a GPU may contract products and sums:
    there the two may be an ulp apart."""
    rng = np.random.default_rng(0)
    arrays = {
        "rows": jnp.asarray(rng.normal(size=(3, 12, 128)), BF16),
        "bias": jnp.asarray(rng.normal(size=(12, 128)), BF16),
        "cos": jnp.asarray(np.cos(rng.normal(size=(3, 64))), F32),
        "sin": jnp.asarray(np.sin(rng.normal(size=(3, 64))), F32),
    }
    pages = jnp.zeros((1, 4, 2, 16, 128), BF16)
    place = jnp.arange(3, dtype=jnp.int32)

    def run(op, arrays):
        projection = Projection(**arrays, kv_heads=2)
        return op(projection, pages, pages, layer=jnp.int32(0), page=place, offset=place)

    got = mosaic.run(partial(run, kernel.write_kv), arrays)
    want = jax.jit(partial(run, write_kv))(arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    queries, *_ = split_heads(Projection(**arrays, kv_heads=2))
    np.testing.assert_array_equal(got[0], queries)


# ---- pages in eight bits -------------------------------------------------------------------------


def eight(pages):
    """Returns the shapes of pages in eight bits."""
    return Fp8Pages(sds(*pages.shape, dtype=jnp.uint8), sds(*pages.shape[:-1], dtype=F32))


@pytest.mark.parametrize(
    "of", [*MODELS, shape(17, 1, 64), shape(16, 2, 256)], ids=lambda of: of.name
)
def test_pages_in_eight_bits_take_one_launch_without_spills(capfd, monkeypatch, of):
    form = {"bias": of is QWEN15_MOE_A27B, "norms": of is QWEN3_30B_A3B}
    arrays, pages, _, *at = abstract(of, 64, num_pages=600, **form)
    args = arrays, eight(pages), eight(pages), *at
    compiled, kernels = mosaic.compile_kernels(
        capfd, monkeypatch, partial(once, of), *args, donate_argnums=(1, 2)
    )
    assert [k.spill_bytes for k in kernels] == [0]
    assert kernels[0].registers <= (64 if of.head_dim < 256 else 96)
    assert sum(count_launches(compiled.as_text()).values()) == 1
    memory = compiled.memory_analysis()
    queries = 2 * 64 * of.heads * of.head_dim
    assert memory.temp_size_in_bytes < 2**20
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**20 + queries


@pytest.mark.parametrize("context", [mosaic.interpreted, mosaic.emulated])
@pytest.mark.parametrize(
    "of",  # 18 key heads: more than are in registers at once
    [shape(6, 2, 64), shape(17, 3, 128), shape(6, 3, 256), shape(18, 18, 128)],
    ids=lambda of: of.name,
)
def test_pages_in_eight_bits_get_the_bits_of_the_reference(context, of):
    """A head of zeros, one that is not finite, and one so small that it becomes zeros among them;
    nothing else changes, and nobody's page may hold anything.
    """
    rng, half = np.random.default_rng(of.heads), of.head_dim // 2
    rows = rng.normal(size=(4, of.heads + 2 * of.kv_heads, of.head_dim))
    rows *= 10.0 ** rng.integers(-6, 6, size=rows.shape[:2])[..., None]
    rows[0, of.heads], rows[1, -1], rows[2, -1] = 0, 1e-37, np.nan
    angle = rng.normal(size=(4, half))
    arrays = {"rows": jnp.asarray(rows, BF16)}
    arrays |= {"cos": jnp.asarray(np.cos(angle), F32), "sin": jnp.asarray(np.sin(angle), F32)}
    size = (2, 5, of.kv_heads, 16, of.head_dim)
    old = Fp8Pages(
        jnp.asarray(rng.integers(0, 256, size), jnp.uint8), jnp.full(size[:-1], jnp.nan, F32)
    )
    page, offset = jnp.asarray([2, 0, 2, 4], jnp.int32), jnp.asarray([15, 0, 7, 3], jnp.int32)

    def run(op, arrays):
        projection = Projection(**arrays, kv_heads=of.kv_heads)
        return op(projection, old, old, layer=jnp.int32(1), page=page, offset=offset)

    with context():
        got = jax.block_until_ready(jax.jit(partial(run, kernel.write_kv))(arrays))
    want = jax.jit(partial(run, write_kv))(arrays)
    np.testing.assert_array_equal(got[0], want[0])
    for ours, reference in zip(got[1:], want[1:], strict=True):
        at = 1, np.asarray(page)[:3], slice(None), np.asarray(offset)[:3]
        scales = np.asarray(reference.scales)
        finite = ~np.isnan(scales)  # numbers of a row that is not finite may be any
        np.testing.assert_array_equal(np.asarray(ours.scales)[:, :4], scales[:, :4])
        same = np.asarray(ours.bits == reference.bits)[:, :4]
        assert same[finite[:, :4]].all()
        untouched = np.ones(size[:-1], bool)
        untouched[at] = False
        assert same[untouched[:, :4]].all()
        assert finite[at].sum() >= 3 * of.kv_heads - 1
