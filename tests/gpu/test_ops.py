"""Every op's kernel on the GPU against float32, at sizes of published models.

The benchmark's problems and judges: fresh inputs, poisoned results, the same bits twice.
"""

import functools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import judge, problems
from benchmarks.kernels.cases import OPS, Case, Sizes, with_one_router
from benchmarks.kernels.inputs import Pools
from benchmarks.kernels.shapes import LATENT_MODELS, MODELS
from benchmarks.kernels.timing import JaxProgram
from pallas_kernels.backend import KERNEL, noting, references_only
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention

SIZES = Sizes(
    quantized_models=MODELS[:1],
    decode_tokens=(1, 64),
    prefill_tokens=(1024,),
    contexts=(1024,),
    rotated_bytes=0,
    kv_bytes=1 << 30,
)
CASES = with_one_router(SIZES)
# Chunks after prefixes: latents are expanded in turns, or few rows take the absorbed form.
CASES += [
    Case("prefill_attention", shape, "prefill", rows, 8192)
    for shape in LATENT_MODELS
    for rows in (1024, 64)
]


@pytest.fixture(scope="module")
def pools():
    """Yields the pools; a model's weights are drawn once, since its cases follow each other."""
    return Pools()


def test_every_op_is_tried():
    assert {case.op for case in CASES} == set(OPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_op_equals_its_reference(case, pools):
    problem = problems.build(case, SIZES, secrets.randbits(31), pools)
    program = JaxProgram(problem.call, problem.sets, problem.carry)
    # Routing of more rows, experts or picks than its kernel takes is XLA's.
    assert program.has_mosaic or (case.op == "routing" and case.tokens > 512)
    seen = judge.check(program, problem.error, problem.tolerance)
    assert seen.passed, seen


WINDOWED = {  # query and kv heads, head size, window, sinks
    "gpt-oss": (64, 8, 64, 128, True),
    "Mixtral-8x7B": (32, 8, 128, 4096, False),
    "Gemma-like": (16, 8, 256, 1024, False),
}
LENGTHS = (1, 127, 128, 129, 700, 1024, 4500, 0)  # of sequences; the last is padding


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", WINDOWED)
def test_attention_over_a_window_equals_float32(model, phase):
    """Pages wholly before a window are NaN: they have been freed and are another's."""
    heads, groups, size, window, with_sinks = WINDOWED[model]
    page, lengths = 64, np.array(LENGTHS, np.int32)
    chunks = np.minimum(lengths, 1 if phase == "decode" else 200)
    rng = np.random.default_rng(secrets.randbits(31))
    per = int(-(-lengths.max() // page))
    table = rng.permutation(len(lengths) * per).reshape(len(lengths), per).astype(np.int32)
    keys, values = rng.standard_normal((2, 1, table.size, groups, page, size), np.float32)
    first = np.maximum(lengths - chunks - window + 1, 0) // page
    for row, num in zip(table, first, strict=True):
        keys[:, row[:num]] = values[:, row[:num]] = np.nan
    rows = int(chunks.sum()) if phase == "prefill" else len(lengths)
    q = rng.standard_normal((rows + 7 * (phase == "prefill"), heads, size), np.float32)
    sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32) if with_sinks else None
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    more = {"q_start": jnp.asarray(starts)} if phase == "prefill" else {}
    op = prefill_attention if phase == "prefill" else paged_attention
    about = {
        "layer": jnp.int32(0),
        "block_table": jnp.asarray(table),
        "kv_len": jnp.asarray(lengths),
        "sinks": sinks,
        **more,
    }
    attend = functools.partial(op, scale=size**-0.5, window=window)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (q, keys, values)]
    with noting() as noted:
        out = jax.jit(attend)(*arrays, **about)
    assert noted["attention"] == KERNEL
    with references_only(), jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *a, **k: attend(*a, **k))(
            *(a.astype("float32") for a in arrays), **about
        )
    out, want = (np.asarray(a, np.float32) for a in (out, want))
    assert np.isfinite(out).all()
    assert np.abs(out - want).max() < 0.02 * np.abs(want).max()
