"""Bytes that mixed steps read, against sums by hand."""

import math

import pytest

from benchmarks.mixed_bytes import ceiling
from jmoe.api import resolve
from jmoe.config import read_config
from serving.cli.info import load_model_config


def test_a_saturated_step_reads_every_distinct_expert_and_each_models_own():
    cfg = load_model_config("mixtral-8x7b")
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    attention = 4096 * (32 + 16) * 128 + 32 * 128 * 4096 + 2 * 4096
    own = 2 * (32 * (attention + 4096 * 8) + 32000 * 4096 + 4096)
    found = ceiling(cfg, math.inf, 0.75)
    assert found.single == own + experts
    assert found.mixed == 2 * own + 1.25 * experts
    assert found.alternating == 2 * (own + experts)
    assert found.of_single == pytest.approx(0.79, abs=0.005)


@pytest.mark.parametrize("rows", [2, 8, 100])
def test_what_sharing_cannot_change(rows):
    cfg = read_config(resolve("bundled"))
    unshared, one = ceiling(cfg, rows, 0.0), ceiling(cfg, rows, 1.0, num_models=1)
    assert unshared.mixed == pytest.approx(unshared.alternating)  # nothing is read once for two
    assert one.mixed == one.single == one.alternating
    assert ceiling(cfg, rows, 1.0).mixed < ceiling(cfg, rows, 0.5).mixed < unshared.mixed
