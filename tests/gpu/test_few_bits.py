"""Kernels over fewer bits, and rows of hybrid steps, on the GPU against float32."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_gemm, routing
from pallas_kernels.activation import SILU, ClampedSwiglu
from pallas_kernels.backend import KERNEL, noting, references_only
from pallas_kernels.fp8_pages import Fp8Pages, dequantize, quantize
from pallas_kernels.grouped_gemm.four_bits import PackedWeights
from pallas_kernels.kv_write import Projection, write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention

BF16, F32 = jnp.bfloat16, jnp.float32
PAGE = 64
LENGTHS = np.array([1, 63, 64, 65, 700, 3000, 0], np.int32)
HEADS = {"Qwen3-30B-A3B": (32, 4, 128), "gpt-oss": (64, 8, 64), "256 elements": (16, 4, 256)}
FORMATS = {  # group, scales, whether there are zero points; what AWQ has, GPTQ, and gpt-oss
    "int4 of 128 with zeros": (128, BF16, True),
    "int4 of 64": (64, BF16, False),
    "int4 of 32 with zeros": (32, BF16, True),
    "mxfp4": (32, jnp.uint8, False),
}


def normal(rng, shape, dtype=BF16):
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def check(call, args, wide, op, *, tolerance=0.01):
    """Compares what a kernel makes of `args` with what references make of `wide`, in float32."""
    with noting() as noted:
        out = jax.jit(lambda *args: call(*args))(*args)
    assert noted[op] == KERNEL
    with references_only(), jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *args: call(*args))(*wide)
    out, want = (np.asarray(a, np.float32) for a in (out, want))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - want) < tolerance * np.linalg.norm(want)


def in_pages(rng, groups, size):
    """Returns keys and values in eight bits, the same in float32, and the table of `LENGTHS`."""
    per = -(-int(LENGTHS.max()) // PAGE)
    table = rng.permutation(len(LENGTHS) * per).reshape(len(LENGTHS), per).astype(np.int32)
    drawn = [normal(rng, (2, table.size + 1, groups, PAGE, size), F32) for _ in range(2)]
    pages = [Fp8Pages(*quantize(one)) for one in drawn]
    return pages, [dequantize(*one, F32) for one in pages], jnp.asarray(table)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", HEADS)
def test_attention_over_pages_in_eight_bits_equals_float32(model, phase):
    heads, groups, size = HEADS[model]
    rng = np.random.default_rng(secrets.randbits(31))
    pages, wide, table = in_pages(rng, groups, size)
    kv_len, rows, op, more = jnp.asarray(LENGTHS), len(LENGTHS), paged_attention, {}
    if phase == "prefill":
        starts = np.concatenate([[0], np.cumsum(np.minimum(LENGTHS, 150))]).astype(np.int32)
        rows, op, more = int(starts[-1]), prefill_attention, {"q_start": jnp.asarray(starts)}
    q = normal(rng, (rows, heads, size))

    def attend(q, keys, values):
        about = {"layer": jnp.int32(1), "block_table": table, "kv_len": kv_len, **more}
        return op(q, keys, values, scale=size**-0.5, **about)

    check(attend, (q, *pages), (q.astype(F32), *wide), "attention")


@pytest.mark.parametrize("model", HEADS)
def test_pages_in_eight_bits_are_written_as_the_reference_writes_them(model):
    heads, groups, size = HEADS[model]
    rng = np.random.default_rng(secrets.randbits(31))
    pages, _, _ = in_pages(rng, groups, size)
    rows, angles = normal(rng, (64, heads + 2 * groups, size)), rng.normal(size=(64, size // 2))
    cos, sin = (jnp.asarray(of(angles), F32) for of in (np.cos, np.sin))
    page = jnp.asarray(rng.permutation(len(pages[0].bits[0]) - 1)[:64], jnp.int32)
    offset = jnp.asarray(rng.integers(PAGE, size=64), jnp.int32)

    def write(rows, cos, sin, keys, values):
        of = Projection(rows, groups, cos, sin)
        return write_kv(of, keys, values, layer=jnp.int32(1), page=page, offset=offset)

    with noting() as noted:
        q, *new = jax.jit(lambda *args: write(*args))(rows, cos, sin, *pages)
    assert noted["KV write"] == KERNEL
    with references_only():
        want_q, *want = jax.jit(lambda *args: write(*args))(rows, cos, sin, *pages)
    np.testing.assert_allclose(q.astype(F32), want_q.astype(F32), rtol=0.01, atol=0.01)
    for ours, theirs, before in zip(new, want, pages, strict=True):
        at = 1, page, slice(None), offset
        untouched = [np.asarray(one.at[at].set(0)) for one in (ours.bits, before.bits)]
        np.testing.assert_array_equal(*untouched)
        a, b = (np.asarray(dequantize(one.bits[at], one.scales[at], F32)) for one in (ours, theirs))
        # XLA may contract products and sums: then a number is the next one of three bits.
        assert (np.abs(a - b) <= np.abs(b) / 7 + 1e-3).all()
        assert np.mean(a != b) < 0.02


@pytest.mark.parametrize("rows", [8, 64, 2048])
@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_in_four_bits_equal_float32(fmt, rows):
    """2,048 rows go through clusters, whose blocks share weights."""
    group, kind, has_zeros = FORMATS[fmt]
    experts, top_k, d, f = 8, 2, 2880 if fmt == "mxfp4" else 2048, 2880
    d, f = (d, f) if group == 32 else (2048, 1536)
    rng = np.random.default_rng(secrets.randbits(31))

    def packed(k, columns):
        size = experts, k // group, columns
        scales = rng.uniform(0.2, 1, size) * k**-0.5 / 4
        if kind == jnp.uint8:
            scales = np.round(np.log2(scales)) + 127
        zeros = rng.integers(5, 11, size).astype(np.uint8) if has_zeros else None
        codes = rng.integers(0, 256, (experts, columns, k // 2)).astype(np.uint8)
        arrays = (codes, jnp.asarray(scales, kind), zeros)
        return PackedWeights(*(None if a is None else jnp.asarray(a) for a in arrays), k, group)

    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
    visits = jnp.asarray(ids), jnp.asarray(rng.dirichlet(np.ones(top_k), rows), F32)
    slots = jnp.arange(experts, dtype=jnp.int32)
    with references_only():
        work = routing.dispatch(*visits, slots, block_m=8, max_active=experts)
    activation = ClampedSwiglu(1.702, 7.0) if fmt == "mxfp4" else SILU
    x, weights = normal(rng, (rows, d)), (packed(d, 2 * f), packed(f, d))

    def mlp(x, gate_up, down):
        return grouped_gemm.moe_mlp(x, gate_up, down, work, activation)

    check(mlp, (x, *weights), (x.astype(F32), *weights), "grouped GEMM")


def test_prompts_behind_many_rows_that_decode_attend_to_latents():
    """Of a hybrid step of DeepSeek-V2-Lite: 200 rows that decode, then short prompts."""
    before, chunks = 200, [(0, 5), (0, 40), (700, 11)]
    rng = np.random.default_rng(secrets.randbits(31))
    kv_len = np.array([cached + new for cached, new in chunks], np.int32)
    q_start = np.cumsum([before, *(new for _, new in chunks)]).astype(np.int32)
    latents = normal(rng, (1, 64, 1, PAGE, 576))
    table = rng.permutation(60)[:36].reshape(3, 12).astype(np.int32)
    q = normal(rng, (256 + 8, 16, 576))

    def attend(q, latents):
        about = {"block_table": jnp.asarray(table), "kv_len": jnp.asarray(kv_len)}
        about |= {"q_start": jnp.asarray(q_start), "layer": jnp.int32(0), "latent": 512}
        return prefill_attention(q, latents, None, scale=576**-0.5, **about)[before:]

    check(attend, (q, latents), (q.astype(F32), latents.astype(F32)), "attention")
