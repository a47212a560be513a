"""Grouped GEMM over a pool in four bits: the formats, the reference, and the kernels."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest

from benchmarks.kernels.shapes import MIXTRAL_8X7B
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.activation import SILU, ClampedSwiglu
from pallas_kernels.grouped_gemm import mosaic, tiles
from pallas_kernels.grouped_gemm.four_bits import (
    PackedWeights,
    dequantize,
    packed_codes,
    quantize,
)
from pallas_kernels.grouped_gemm.quantized import slot_weights
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile
from tests.pallas_kernels.registers import weights_in_registers

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

__all__ = ["weights_in_registers"]

BF16 = jnp.dtype(jnp.bfloat16)
D, F, SLOTS = 192, 128, 5
SLOT_OF = np.array([4, 0, 2, 2], np.int32)  # of expert e; slots 1 and 3 are nobody's
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
TILE = Tile(
    widths=(8, 24),
    cluster=1,
    group=2,
    gate_up=GemmTile(block_k=64, parts=2, consumers=2, stages=3),
    down=GemmTile(block_k=64, parts=1, consumers=2, stages=2),
    visit_dtype=BF16,
)
FORMATS = {  # group, dtype of scales, whether there are zero points
    "mxfp4": (32, np.uint8, False),
    "int4 of 32": (32, np.float16, True),
    "int4 of 64": (64, jnp.bfloat16, False),
    "int4 whole": (192, np.float32, True),
}


def drawn(rng, fmt, k, columns, slots=SLOTS):
    """Draws weights element by element: those packed, and [slots, k, columns] in float32."""
    group, kind, has_zeros = FORMATS[fmt]
    group = min(group, k)
    groups = -(-k // group)
    codes = rng.integers(0, 16, (slots, k, columns), np.uint8)
    zeros = rng.integers(0, 16, (slots, groups, columns), np.uint8)
    if kind == np.uint8:
        scales = rng.integers(120, 124, zeros.shape, np.uint8)
        of_group = 2.0 ** (scales.astype(np.float32) - 127)
        floats = np.array(E2M1, np.float32)[codes]
    else:
        scales = rng.uniform(0.001, 0.02, zeros.shape).astype(kind)
        of_group = scales.astype(np.float32)
        middle = zeros if has_zeros else np.full_like(zeros, 8)
        floats = codes.astype(np.float32) - middle[:, np.arange(k) // group]
    values = np.zeros((slots, columns, -(-k // 64) * 32), np.uint8)
    for at in range(k):
        byte, upper = at // 64 * 32 + at % 32, at % 64 // 32
        values[:, :, byte] |= codes[:, at] << (4 * upper)
    arrays = values, scales, zeros if has_zeros else None
    packed = PackedWeights(*(None if a is None else jnp.asarray(a) for a in arrays), k, group)
    return packed, floats * of_group[:, np.arange(k) // group]


def case(fmt, rows_of, seed=0):
    """Makes inputs in which expert e has `rows_of[e]` rows, and the result in float64."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), rows_of))[:, None]
    weights = rng.random(ids.shape).astype(np.float32)
    arrays = map(jnp.asarray, (ids, weights, SLOT_OF))
    plan = routing.dispatch(*arrays, block_m=8, max_active=4)
    x = jnp.asarray(rng.normal(size=(len(ids), D)), BF16)
    (gate_up, up_weights), (down, down_weights) = drawn(rng, fmt, D, 2 * F), drawn(rng, fmt, F, D)
    rounded = [np.asarray(jnp.asarray(w, BF16), np.float64) for w in (up_weights, down_weights)]
    want = np.zeros((len(ids), D))
    for t, (e,) in enumerate(ids):
        row = np.asarray(x[t], np.float64)
        gate, up = np.split(row @ rounded[0][SLOT_OF[e]], 2)
        want[t] = weights[t, 0] * ((gate / (1 + np.exp(-gate)) * up) @ rounded[1][SLOT_OF[e]])
    return (x, gate_up, down, plan), want


def check(got, want):
    """Checks results; rows are rounded to bfloat16 between the products and after them."""
    np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.sized(deep=("mxfp4",))
@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_are_what_their_codes_say(fmt):
    for k in (64, 200):  # 200: bytes are filled up, and the last group is ragged
        packed, floats = drawn(np.random.default_rng(1), fmt, k, 5)
        np.testing.assert_array_equal(dequantize(packed, jnp.float32), floats)
        got = slot_weights(packed, jnp.int32(3), jnp.float32)
        np.testing.assert_array_equal(got, floats[3])


def test_the_reference_equals_float64():
    for fmt in FORMATS:
        args, want = case(fmt, (5, 0, 17, 3))
        check(jax.jit(grouped_gemm.moe_mlp)(*args), want)


def test_int4_is_off_by_half_a_step_of_its_group():
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(2, 80, 6)).astype(np.float32) * [[[1e-6, 1, 1, 30, 1, 1]]]
    weights[0, :32, 1] = 0
    weights[0, :32, 2] = np.abs(weights[0, :32, 2])
    got = quantize(jnp.asarray(weights, jnp.float32))
    assert got.values.shape == (2, 6, 64)
    assert got.scales.shape == got.zeros.shape == (2, 3, 6)
    back = np.asarray(dequantize(got, jnp.float32))
    steps = np.asarray(got.scales, np.float32)[:, np.arange(80) // 32]
    # Scales are bfloat16: the ends of a group may lie 15 * 2**-9 steps behind the codes' ends.
    assert (np.abs(back - weights) <= 0.54 * steps).all()
    assert not back[0, :32, 1].any()


def test_mxfp4_is_the_nearest_of_its_group():
    """Against every number that the group's exponent allows."""
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(2, 64, 7)).astype(np.float32) * [[[1e-6, 1, 1, 30, 1, 1, 1]]]
    weights[0, :32, 1] = 0
    weights[1, 0] = 2.5  # as far from 2 as from 3: to the even one
    got = quantize(jnp.asarray(weights, jnp.float32), scales=jnp.uint8)
    back = np.asarray(dequantize(got, jnp.float32))
    for slot, group, column in np.ndindex(2, 2, 7):
        own = slice(32 * group, 32 * group + 32)
        mine = weights[slot, own, column]
        largest = np.abs(mine).max()
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2) if largest else 1.0
        errors = np.abs(mine[:, None] - np.array(E2M1, np.float32) * scale)
        np.testing.assert_allclose(
            np.abs(back[slot, own, column] - mine), errors.min(1), rtol=1e-6, atol=1e-12
        )


def test_codes_are_packed_alike_on_the_host():
    codes = np.random.default_rng(4).integers(0, 16, (3, 2, 70), np.uint8)
    got = packed_codes(codes)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(packed_codes(jnp.asarray(codes)), got)


@pytest.mark.deep
@pytest.mark.parametrize("fmt", FORMATS)
def test_kernel_equals_float64(weights_in_registers, fmt):
    args, want = case(fmt, (16, 0, 33, 1))
    tile = replace(TILE, cluster=2 if fmt == "int4 of 64" else 1)
    check(interpreter.run(partial(mosaic.moe_mlp, tile=tile, num_blocks=4), *args), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cluster_shares_what_tma_can_write_in_halves(fmt):
    """Half of 128 zero points would begin off the multiples of 128 bytes that TMA writes to, which
    the interpreter lets pass.
    """
    args, want = case(fmt, (16, 0, 150, 1))
    run = partial(mosaic.moe_mlp, tile=tiles.packed(128, cluster=2), num_blocks=4)
    check(interpreter.emulate(run, *args), want)


def test_what_is_not_supported():
    (x, gate_up, down, plan), _ = case("int4 of 32", (1, 2, 3, 4))
    assert mosaic.supports(x, gate_up, down, plan)
    assert not mosaic.supports(x.astype(jnp.float32), gate_up, down, plan)
    assert not mosaic.supports(x, gate_up, jnp.zeros((SLOTS, F, D), BF16), plan)
    assert not mosaic.supports(x, replace(gate_up, group=96), down, plan)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_rows", "fmt"),
    [
        (4096, "mxfp4"),
        (4096, "int4 of 32"),
        *(
            pytest.param(num_rows, fmt, marks=pytest.mark.exhaustive)
            for num_rows in (64, 4096)
            for fmt in FORMATS
            if num_rows == 64 or fmt not in ("mxfp4", "int4 of 32")
        ),
    ],
)
def test_compiles_for_an_h200_without_spills(capfd, monkeypatch, fmt, num_rows):
    """Steps of decode, and of prefill, which has every width, and clusters: of gpt-oss-20b, or
    Mixtral in its formats.
    """
    shape, (group, kind, has_zeros) = MIXTRAL_8X7B, FORMATS[fmt]
    d, f, m, top_k = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    activation, biases = SILU, None
    if fmt == "mxfp4":
        d, f, m, top_k = 2880, 2880, 32, 4
        activation = ClampedSwiglu(1.702, 7.0)
        biases = [jax.ShapeDtypeStruct((m, size), BF16) for size in (2 * f, d)]

    def layer(x, gate_up, down, ids, weights, slots, biases):
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=m)
        biases = None if biases is None else tuple(biases)
        return grouped_gemm.moe_mlp(x, gate_up, down, work, activation, biases)

    def weights(k, columns):
        own = k if group == 192 else group
        groups = m, k // own, columns
        return PackedWeights(
            jax.ShapeDtypeStruct((m, columns, k // 2), jnp.uint8),
            jax.ShapeDtypeStruct(groups, kind),
            jax.ShapeDtypeStruct(groups, jnp.uint8) if has_zeros else None,
            k,
            own,
        )

    visits = [jax.ShapeDtypeStruct((num_rows, top_k), t) for t in (jnp.int32, jnp.float32)]
    slots = jax.ShapeDtypeStruct((m,), jnp.int32)
    x = jax.ShapeDtypeStruct((num_rows, d), BF16)
    args = x, weights(d, 2 * f), weights(f, d), *visits, slots, biases
    compiled, kernels = interpreter.compile_kernels(capfd, monkeypatch, layer, *args)
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]
    padded = num_rows * top_k + 8 * m + 512
    row_bytes = 2 * d + 2 * f + 4 * d
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * padded * row_bytes + 2**20
