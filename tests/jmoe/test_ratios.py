"""Intervals of ratios are those of the bootstrap."""

import math

import numpy as np
import pytest

from jmoe.ratios import ratio


def test_an_answer_is_what_is_drawn():
    rng = np.random.default_rng(0)
    wholes = rng.integers(1, 40, 400).astype(float)
    parts = wholes * rng.normal(0.2, 0.3, 400)  # tokens of an answer have much in common
    mean, margin = ratio(parts, wholes)
    drawn = rng.integers(0, 400, (4000, 400))
    low, high = np.percentile(parts[drawn].sum(1) / wholes[drawn].sum(1), (2.5, 97.5))
    assert mean == pytest.approx(parts.sum() / wholes.sum())
    assert margin == pytest.approx((high - low) / 2, rel=0.1)
    assert math.isnan(ratio(np.zeros(0), np.zeros(0))[0])
    assert ratio(np.ones(1), np.ones(1)) == (1.0, math.inf)
