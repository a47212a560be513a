"""The arithmetic model of the grouped GEMM, where the answer is known beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernels import gemm_model
from benchmarks.kernels.gemm_model import Gpu, predict
from pallas_kernels.grouped_gemm import tiles
from pallas_kernels.shapes import MIXTRAL_8X7B


def test_even_decode_is_one_read_of_the_weights():
    found = predict(MIXTRAL_8X7B, [8] * 8, tiles.decode(32, 1))
    weights = 8 * 2 * MIXTRAL_8X7B.expert_elements
    assert found.seconds == pytest.approx(weights / 4.3e12, rel=0.01)
    assert found.share_of_copy == pytest.approx(1, rel=0.01)


def test_full_prefill_is_bound_by_shared_memory():
    """96 bytes a clock are read for the products and 48 written, of 128."""
    found = predict(MIXTRAL_8X7B, [256 * 33], tiles.prefill())
    gpu = Gpu()
    peak = gpu.product * gpu.clock * gpu.blocks
    assert found.flop_s / peak == pytest.approx(128 / 144, rel=0.03)


def test_a_lead_hides_an_epilogue():
    tile = tiles.prefill()
    none = replace(tile, gate_up=replace(tile.gate_up, lead=0), down=replace(tile.down, lead=0))
    loads = [1024]
    assert predict(MIXTRAL_8X7B, loads, tile).seconds < predict(MIXTRAL_8X7B, loads, none).seconds


def test_bandwidth_is_shared_fairly():
    asked = np.array([1.0, 5.0, 5.0])
    np.testing.assert_allclose(gemm_model._fair(asked, 7.0), [1, 3, 3])
    np.testing.assert_allclose(gemm_model._fair(asked, 12.0), asked)


def test_the_switch_to_prefill_lies_where_the_model_has_it():
    """A skewed router gains more from it than an even one can lose."""
    both = tiles.prefill(), tiles.decode(128, 2)
    even, skewed = (
        gemm_model.ratio(MIXTRAL_8X7B, 224, skew, *both, Gpu())
        for skew in ("uniform", "exponential")
    )
    assert even < 1.03
    assert skewed < 0.95
