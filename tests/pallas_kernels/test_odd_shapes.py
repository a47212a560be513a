"""What `supports` accepts compiles for an H200, of geometries that no published model has.

They are drawn with a fixed seed, well into what the kernels refuse. Of what is accepted no register
is spilled, no product made to wait for the one before, and shared memory suffices; what is refused
runs the reference.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mosaic
import pytest
from jax.experimental.mosaic.gpu import core

from benchmarks.kernels.shapes import GLM_45_AIR
from pallas_kernels import grouped_gemm, kv_write, paged_attention, prefill_attention, routing
from pallas_kernels.backend import references_only, traced_for
from pallas_kernels.grouped_gemm import mosaic as gemm_kernel
from pallas_kernels.grouped_gemm.quantized import BLOCK, QuantizedWeights
from pallas_kernels.kv_write import mosaic as kv_kernel
from pallas_kernels.paged_attention import mosaic as paged_kernel
from pallas_kernels.prefill_attention import mosaic as prefill_kernel
from pallas_kernels.routing import mosaic as routing_kernel
from pallas_kernels.routing.values import Gating

pytestmark = pytest.mark.deep

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
MOST_SHARED_BYTES = 227 * 1024


class Geometry(NamedTuple):
    """One call of an op."""

    name: str
    call: Callable[..., Any]
    supports: Callable[..., bool]  # of the same arguments
    args: tuple[Any, ...]


def sds(*size, dtype=BF16):
    return jax.ShapeDtypeStruct(size, dtype)


def experts(d, f, num_experts, top_k, num_rows, *, is_quantized=False) -> Geometry:
    """Returns a layer's grouped GEMM with its dispatch."""

    def plan(ids, weights, slots):
        with references_only():
            return routing.dispatch(
                ids, weights, slots, block_m=grouped_gemm.BLOCK_M, max_active=num_experts
            )

    def weights(k, columns):
        if not is_quantized:
            return sds(num_experts + 1, k, columns)
        values = sds(num_experts + 1, columns, k, dtype=jnp.float8_e4m3fn)
        return QuantizedWeights(
            values, sds(num_experts + 1, -(-columns // BLOCK), -(-k // BLOCK), dtype=F32)
        )

    def call(x, gate_up, down, *picks):
        return grouped_gemm.moe_mlp(x, gate_up, down, plan(*picks))

    def supports(x, gate_up, down, *picks):
        return gemm_kernel.supports(x, gate_up, down, plan(*picks))

    visits = (num_rows, top_k)
    picks = sds(*visits, dtype=I32), sds(*visits, dtype=F32), sds(num_experts, dtype=I32)
    name = f"grouped_gemm d{d} f{f} m{num_experts} k{top_k} t{num_rows}" + " fp8" * is_quantized
    return Geometry(
        name, call, supports, (sds(num_rows, d), weights(d, 2 * f), weights(f, d), *picks)
    )


def decode(kv_heads, group, head_dim, page_size, batch, *, window=0) -> Geometry:
    def call(q, k_pages, v_pages, layer, table, kv_len):
        rest = {"layer": layer, "block_table": table, "kv_len": kv_len, "scale": 0.1}
        rest |= {"window": window}
        return paged_attention.paged_attention(q, k_pages, v_pages, **rest)

    pages = sds(2, 999, kv_heads, page_size, head_dim)
    ints = sds(dtype=I32), sds(batch, 7, dtype=I32), sds(batch, dtype=I32)
    return Geometry(
        f"paged_attention g{kv_heads}x{group} D{head_dim} S{page_size} b{batch}"
        + f" w{window}" * (window > 0),
        call,
        lambda q, k_pages, v_pages, *_: paged_kernel.supports(q, k_pages, v_pages),
        (sds(batch, kv_heads * group, head_dim), pages, pages, *ints),
    )


def prefill(kv_heads, group, head_dim, page_size, num_rows, *, window=0) -> Geometry:
    def call(q, k_pages, v_pages, layer, table, q_start, kv_len):
        rest = {"layer": layer, "block_table": table, "scale": 0.1}
        rest |= {"q_start": q_start, "kv_len": kv_len, "window": window}
        return prefill_attention.prefill_attention(q, k_pages, v_pages, **rest)

    pages = sds(2, 999, kv_heads, page_size, head_dim)
    ints = sds(dtype=I32), sds(3, 7, dtype=I32), sds(4, dtype=I32), sds(3, dtype=I32)
    return Geometry(
        f"prefill_attention g{kv_heads}x{group} D{head_dim} S{page_size} t{num_rows}"
        + f" w{window}" * (window > 0),
        call,
        lambda q, k_pages, v_pages, *_: prefill_kernel.supports(q, k_pages, v_pages, 0.1),
        (sds(num_rows, kv_heads * group, head_dim), pages, pages, *ints),
    )


def route(num_experts, united, top_k, num_rows, *, scoring="softmax", normalize=True) -> Geometry:
    def call(logits, groups, slots, threshold_percent, strategy, valid, exempt):
        return routing.route(
            logits,
            top_k=top_k,
            normalize=normalize,
            scoring=scoring,
            groups=groups,
            slots=slots,
            threshold_percent=threshold_percent,
            strategy=strategy,
            valid=valid,
            exempt=exempt,
            block_m=grouped_gemm.BLOCK_M,
            max_active=num_experts,
        )

    def supports(logits, groups, slots, *_):
        gating = Gating(top_k, normalize, scoring)
        return routing_kernel.supports(logits, groups, slots, gating, grouped_gemm.BLOCK_M)

    rows = sds(num_rows, dtype=jnp.bool_)
    vectors = sds(num_experts, dtype=I32), sds(num_experts + united, dtype=I32)
    scalars = sds(dtype=I32), sds(dtype=I32)
    columns = num_experts + -num_experts % 8  # as a router's are padded
    return Geometry(
        f"routing m{num_experts}+{united} k{top_k} t{num_rows} {scoring}"
        + " raw" * (not normalize),
        call,
        supports,
        (sds(num_rows, columns, dtype=F32), *vectors, *scalars, rows, rows),
    )


def write(kv_heads, group, head_dim, num_rows, *, bias=False, norms=False) -> Geometry:
    heads, half = kv_heads * group, head_dim // 2

    def projected(arrays):
        return kv_write.Projection(**arrays, kv_heads=kv_heads, eps=1e-6)

    def call(arrays, k_pages, v_pages, layer, page, offset):
        places = {"layer": layer, "page": page, "offset": offset}
        return kv_write.write_kv(projected(arrays), k_pages, v_pages, **places)

    of_all = heads + 2 * kv_heads, head_dim
    arrays = {"rows": sds(num_rows, *of_all)}
    arrays |= {name: sds(num_rows, half, dtype=F32) for name in ("cos", "sin")}
    if bias:
        arrays["bias"] = sds(*of_all)
    if norms:
        arrays |= {"q_norm": sds(head_dim), "k_norm": sds(head_dim)}
    pages, ints = sds(2, 99, kv_heads, 64, head_dim), sds(num_rows, dtype=I32)
    name = f"kv_write g{kv_heads}x{group} D{head_dim} t{num_rows}"
    return Geometry(
        name + " bias" * bias + " norms" * norms,
        call,
        lambda arrays, k_pages, v_pages, *_: kv_kernel.supports(
            projected(arrays), k_pages, v_pages
        ),
        (arrays, pages, pages, sds(dtype=I32), ints, ints),
    )


def drawn() -> Iterator[Geometry]:
    """Yields each op's odd geometries; about every fourth has a size that no kernel takes."""
    rng = random.Random(2026)
    one = rng.choice
    for width, is_quantized in ((2880, 0), (1408, 0), (2888, 0), (896, 1)):
        sizes = [width, one((384, 640, 1408) if is_quantized else (192, 320, 960, 1408))]
        rng.shuffle(sizes)
        of = *sizes, one((5, 13, 29, 41, 97, 160)), rng.randint(1, 5), one((1, 3, 7, 19))
        yield experts(*of, is_quantized=bool(is_quantized))
    yield experts(704, 192, 5, 3, 300)  # as many rows an expert as in prefill
    for head_dim, groups in (
        (64, (9, 16)),
        (96, (1, 16)),
        (128, (1, 8)),
        (128, (9, 16)),
        (256, (1, 16)),
    ):
        of = one((1, 2, 3, 5, 8)), rng.randint(*groups), head_dim
        yield decode(*of, one((16, 32, 64, 128)), rng.randint(1, 512))
    yield decode(2, 7, 128, 48, 512)
    for head_dim in (64, 80, 256):
        of = one((1, 2, 3, 7)), rng.randint(1, 16), head_dim
        yield prefill(*of, one((16, 32, 64, 128)), rng.randint(1, 3000))
    for num_experts in (
        4 * rng.randint(2, 20) + 2,
        4 * rng.randint(2, 15),
        4 * rng.randint(16, 30),
    ):
        united, scoring = one((0, 1, 7, num_experts // 3)), one(("softmax", "sigmoid"))
        form = {"scoring": scoring, "normalize": one((True, False))}
        yield route(num_experts, united, rng.randint(1, 8), rng.randint(65, 512), **form)
    yield route(12, 5, 9, 33)  # refused: too many picks
    for head_dim in (64, 96, 128, 256):
        of = one((1, 2, 3, 5, 8)), rng.randint(1, 16), head_dim
        with_more = {"bias": one((True, False)), "norms": one((True, False))}
        yield write(*of, rng.randint(1, 300), **with_more)
    for head_dim, attention in ((64, decode), (128, prefill), (64, prefill), (128, decode)):
        of = one((1, 2, 3, 5, 8)), rng.randint(1, 16), head_dim, one((16, 32, 64, 128))
        yield attention(*of, rng.randint(1, 300), window=rng.randint(1, 700))
    yield decode(3, 5, 256, 96, 40, window=77)  # refused: pages of no power of two


def of_models() -> Iterator[Geometry]:
    """Yields a published geometry that jmoe has no preset of: twelve query heads a kv head."""
    of = GLM_45_AIR.kv_heads, GLM_45_AIR.heads // GLM_45_AIR.kv_heads, GLM_45_AIR.head_dim
    yield from (decode(*of, 64, 77), write(*of, 77))


DRAWN, OF_MODELS = list(drawn()), list(of_models())
LARGEST = [
    route(256, 0, 8, 512, normalize=False),
    route(128, 64, 16, 512),
    *(decode(2, group, 64, 16, 7) for group in (40, 64)),
    decode(2, 40, 128, 64, 7),
]
"""Many experts, weights not normalized; the most query heads a kv head, and more."""


def accepts(geometry: Geometry) -> bool:
    found = []
    with traced_for("cuda"):
        jax.eval_shape(lambda *args: found.append(geometry.supports(*args)), *geometry.args)
    return found[0]


def test_most_of_what_is_drawn_is_accepted_and_some_is_not():
    assert len({geometry.name for geometry in DRAWN}) == len(DRAWN) >= 20
    accepted = [geometry.name.split()[0] for geometry in DRAWN if accepts(geometry)]
    assert len(DRAWN) / 2 <= len(accepted) < len(DRAWN)
    assert len(set(accepted)) == 5
    assert all(accepts(geometry) for geometry in OF_MODELS)


@pytest.mark.parametrize("geometry", [*DRAWN, *OF_MODELS], ids=lambda geometry: geometry.name)
def test_what_is_accepted_compiles(capfd, monkeypatch, geometry):
    if accepts(geometry):
        check_compiled(capfd, monkeypatch, geometry)
        return
    with traced_for("cuda"):
        # A function of its own: a trace for another platform is not to be found again.
        traced = jax.jit(partial(geometry.call)).trace(*geometry.args)
    assert "mosaic_gpu" not in str(traced.jaxpr)


def check_compiled(capfd, monkeypatch, geometry):
    sizes = []
    measure = core._smem_tree_size

    def measured(tree):
        sizes.append(measure(tree))
        return sizes[-1]

    monkeypatch.setattr(core, "_smem_tree_size", measured)
    compiled, kernels = mosaic.compile_kernels(capfd, monkeypatch, geometry.call, *geometry.args)
    assert "mosaic_gpu" in compiled.as_text()
    assert kernels
    assert {kernel.name: kernel.spill_bytes for kernel in kernels if kernel.spill_bytes} == {}
    assert 0 < max(sizes) <= MOST_SHARED_BYTES


@pytest.mark.parametrize("geometry", LARGEST, ids=lambda geometry: geometry.name)
def test_the_largest_sizes_compile_or_are_refused(capfd, monkeypatch, geometry):
    if accepts(geometry):
        check_compiled(capfd, monkeypatch, geometry)
