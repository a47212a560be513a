"""Grouped GEMM over a pool in eight bits: the format, the reference, and the kernels."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest

from benchmarks.kernels.shapes import MIXTRAL_8X7B
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.grouped_gemm import QuantizedWeights, mosaic, quantize, tiles
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile
from tests.pallas_kernels.registers import weights_in_registers

__all__ = ["weights_in_registers"]

BF16 = jnp.dtype(jnp.bfloat16)
D, F, SLOTS = 256, 128, 5
SLOT_OF = np.array([4, 0, 2, 2], np.int32)  # of expert e; slots 1 and 3 are nobody's
TILE = Tile(
    widths=(8, 24),
    cluster=1,
    group=2,
    gate_up=GemmTile(block_k=128, parts=2, consumers=2, stages=3),
    down=GemmTile(block_k=128, parts=1, consumers=2, stages=2),
    visit_dtype=BF16,
)


def pool(rng, k, columns):
    """Draws weights whose blocks differ in magnitude, one of them zero."""
    size = 2.0 ** rng.integers(-6, 3, size=(SLOTS, k // 128, 1, columns // 128, 1))
    size[0, 0, 0, 0] = 0
    blocks = rng.normal(size=(SLOTS, k // 128, 128, columns // 128, 128)) * size
    return jnp.asarray(blocks.reshape(SLOTS, k, columns) * k**-0.5, jnp.float32)


def dequantized(weights):
    """Returns [slots, k, columns] in float64, rounded to bfloat16 as the kernels multiply them."""
    values, scales = np.asarray(weights.values, np.float32), np.asarray(weights.scales)
    wide = scales.repeat(128, axis=1).repeat(128, axis=2)
    return np.asarray(jnp.asarray(values * wide, BF16), np.float64).swapaxes(1, 2)


def case(rows_of, seed=0):
    """Makes inputs in which expert e has `rows_of[e]` rows, and the result in float64."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), rows_of))[:, None]
    weights = rng.random(ids.shape).astype(np.float32)
    arrays = map(jnp.asarray, (ids, weights, SLOT_OF))
    plan = routing.dispatch(*arrays, block_m=8, max_active=4)
    x = jnp.asarray(rng.normal(size=(len(ids), D)), BF16)
    gate_up, down = quantize(pool(rng, D, 2 * F)), quantize(pool(rng, F, D))
    up_weights, down_weights = dequantized(gate_up), dequantized(down)
    want = np.zeros((len(ids), D))
    for t, (e,) in enumerate(ids):
        row = np.asarray(x[t], np.float64)
        gate, up = np.split(row @ up_weights[SLOT_OF[e]], 2)
        want[t] = weights[t, 0] * ((gate / (1 + np.exp(-gate)) * up) @ down_weights[SLOT_OF[e]])
    return (x, gate_up, down, plan), want


def check(got, want):
    """Checks results; rows are rounded to bfloat16 between the products and after them."""
    np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


def test_quantizing_keeps_four_significant_bits_of_each_block():
    weights = pool(np.random.default_rng(1), 384, 256)
    got = quantize(weights)
    assert got.values.shape == (SLOTS, 256, 384)
    assert got.values.dtype == jnp.float8_e4m3fn
    assert got.scales.shape == (SLOTS, 2, 3)
    wide = np.asarray(got.scales).repeat(128, axis=1).repeat(128, axis=2)
    back = (np.asarray(got.values, np.float32) * wide).swapaxes(1, 2)
    largest = 448 * wide.swapaxes(1, 2)  # of the block; below 2**-6 steps no longer shrink
    allowed = np.maximum(np.abs(weights) / 16, largest / 448 * 2.0**-10)
    assert (np.abs(back - weights) <= allowed * 1.001).all()
    assert not back[0, :128, :128].any()  # the block of zeros


def test_quantizing_needs_whole_blocks():
    with pytest.raises(ValueError, match="whole blocks"):
        quantize(jnp.zeros((2, 128, 192)))


@pytest.mark.deep
def test_reference_equals_float64():
    args, want = case((5, 0, 17, 3))
    check(jax.jit(grouped_gemm.moe_mlp)(*args), want)


@pytest.mark.deep
def test_kernel_equals_float64(weights_in_registers):
    args, want = case((16, 0, 33, 1))
    run = partial(mosaic.moe_mlp, tile=replace(TILE, cluster=2), num_blocks=4)
    check(interpreter.run(run, *args), want)


@pytest.mark.deep
@pytest.mark.parametrize(("width", "cluster"), [(8, 1), (128, 2)])
def test_chosen_tiles_emulated_equal_float64(width, cluster):
    args, want = case((3, 0, 150, 1) if width > 8 else (3, 0, 8, 1))
    run = partial(mosaic.moe_mlp, tile=tiles.quantized(width, cluster), num_blocks=4)
    check(interpreter.emulate(run, *args), want)


@pytest.mark.deep
def test_slots_that_nobody_visits_are_not_read(weights_in_registers):
    (x, gate_up, down, plan), want = case((3, 0, 4, 0))
    unused = jnp.array([0, 1, 3])
    poisoned = [
        QuantizedWeights(w.values.at[unused].set(jnp.nan), w.scales.at[unused].set(jnp.nan))
        for w in (gate_up, down)
    ]
    check(jax.jit(grouped_gemm.moe_mlp)(x, *poisoned, plan), want)
    run = partial(mosaic.moe_mlp, tile=TILE, num_blocks=2)
    check(interpreter.run(run, x, *poisoned, plan), want)


def test_what_is_not_supported():
    (x, gate_up, down, plan), _ = case((1, 2, 3, 4))
    assert mosaic.supports(x, gate_up, down, plan)
    assert not mosaic.supports(x.astype(jnp.float32), gate_up, down, plan)
    assert not mosaic.supports(x, gate_up, jnp.zeros((SLOTS, F, D), BF16), plan)


@pytest.mark.deep
def test_compiles_for_an_h200_without_spills(capfd, monkeypatch):
    """A step that has every width, and clusters."""
    shape, num_rows = MIXTRAL_8X7B, 4096
    d, f, m, top_k = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k

    def layer(x, gate_up, down, ids, weights, slots):
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=m)
        return grouped_gemm.moe_mlp(x, gate_up, down, work)

    def weights(k, columns):
        return QuantizedWeights(
            jax.ShapeDtypeStruct((m, columns, k), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((m, columns // 128, k // 128), jnp.float32),
        )

    visits = [jax.ShapeDtypeStruct((num_rows, top_k), t) for t in (jnp.int32, jnp.float32)]
    slots = jax.ShapeDtypeStruct((m,), jnp.int32)
    x = jax.ShapeDtypeStruct((num_rows, d), BF16)
    args = x, weights(d, 2 * f), weights(f, d), *visits, slots
    compiled, kernels = interpreter.compile_kernels(capfd, monkeypatch, layer, *args)
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]
    padded = num_rows * top_k + 8 * m + 512
    row_bytes = 2 * d + 2 * f + 4 * d
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * padded * row_bytes + 2**20
