"""Finite or not: every kind of weight, wherever the bad element is, on the host and on a device."""

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.finite import fault, is_finite, seem_finite, sums_are_finite

BAD = (np.nan, -np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32, np.float64])
def test_one_bad_element_is_found_on_the_host(dtype):
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    values[1, 1] = jnp.finfo(dtype).max
    values[1, 2] = jnp.finfo(dtype).min
    assert is_finite(values)
    for bad in BAD:
        for at in range(15):
            spoilt = values.copy()
            spoilt.flat[at] = bad
            assert not is_finite(spoilt)
            assert not is_finite(spoilt.T)
    assert is_finite(values[:0])


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_is_found_on_a_device(bad):
    leaves = [jnp.ones((3, 4), jnp.bfloat16), jnp.arange(5.0)]
    assert sums_are_finite(leaves)
    for i, leaf in enumerate(leaves):
        spoilt = list(leaves)
        spoilt[i] = leaf.at[-1].set(bad)
        assert not sums_are_finite(spoilt)
        assert not seem_finite(spoilt)


def test_integers_of_a_tree_are_left_out():
    assert seem_finite({"ids": jnp.arange(3), "x": (jnp.ones(2), None)})
    assert not seem_finite({"ids": jnp.arange(3), "x": (jnp.full(2, jnp.nan), None)})


def test_a_fault_says_whether_the_precision_is_to_blame():
    large = np.full(3, 1e5, np.float32)
    assert fault("w", large, jnp.bfloat16) is None
    assert fault("w", large, jnp.float16) == "w is not finite as float16"
    assert fault("w", np.array([np.nan], np.float32), jnp.float16) == "w holds NaN or infinity"
