"""RoPE against the plain formula, in float64. The scaled kinds are judged by the golden models."""

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import RopeConfig
from jmoe.rope import inverse_frequencies, rotation
from pallas_kernels.kv_write import turn

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def rotate(x, positions, rope):
    found = rotation(positions, rope, x.shape[-1])
    assert found.query_scale is None
    return turn(x, found.cos, found.sin)


def by_hand(x, positions, theta):
    """Rotates pairs (i, i + half) by position * theta ** (-2 i / head_dim), as complex numbers."""
    head_dim = x.shape[-1]
    half = head_dim // 2
    turn = positions[:, None] * theta ** (-2.0 * np.arange(half) / head_dim)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)[:, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("theta", [500.0, 1e4, 1e6])
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_default(theta, head_dim):
    x = np.random.default_rng(0).normal(size=(6, 3, head_dim)).astype(np.float32)
    positions = np.array([0, 1, 2, 17, 400, 3000], np.int32)
    got = rotate(jnp.asarray(x), jnp.asarray(positions), RopeConfig(theta=theta))
    # float32 angles: an error of 3000 * 2**-24 radians is all the phase there is to lose.
    want = by_hand(x.astype(np.float64), positions, theta)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3)
    np.testing.assert_allclose(got[:4], want[:4], rtol=0, atol=1e-5)


def test_position_zero_turns_nothing_and_lengths_stay():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2, 8)).astype(np.float32))
    rope = RopeConfig()
    np.testing.assert_array_equal(rotate(x, jnp.zeros(5, jnp.int32), rope), x)
    turned = rotate(x, jnp.arange(5, dtype=jnp.int32), rope)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6
    )


def test_scores_depend_on_the_distance_alone():
    q, k = np.random.default_rng(2).normal(size=(2, 1, 1, 16)).astype(np.float32)

    def score(at, distance):
        a = rotate(jnp.asarray(q), jnp.asarray([at + distance]), RopeConfig())
        b = rotate(jnp.asarray(k), jnp.asarray([at]), RopeConfig())
        return float(jnp.sum(a * b))

    for distance in (0, 1, 9):
        assert score(0, distance) == pytest.approx(score(300, distance), abs=1e-4)


def test_bfloat16_rows_are_turned_in_float32():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 1, 8)), jnp.bfloat16)
    positions = jnp.asarray([0, 5, 300, 3000])
    got = rotate(x, positions, RopeConfig())
    assert got.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), positions, RopeConfig())
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_linear_scaling_is_a_slower_clock():
    plain = inverse_frequencies(RopeConfig(), 16)
    slow = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16)
    np.testing.assert_allclose(slow * 4, plain, rtol=1e-6)


def test_queries_grow_each_time_the_trained_positions_are_over():
    rope = RopeConfig(kind="yarn", factor=8.0, original_max_position=8192, query_scaling=0.1)
    positions = np.array([0, 8191, 8192, 16383, 16384, 1048575], np.int32)
    scale = rotation(jnp.asarray(positions), rope, 64).query_scale
    assert scale is not None
    assert scale.dtype == jnp.float32
    np.testing.assert_allclose(
        scale, [1 + 0.1 * np.log(n) for n in (1, 1, 2, 2, 3, 128)], rtol=1e-6
    )
