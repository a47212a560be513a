"""Contract of the grouped GEMM: SwiGLU experts of planned visits, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_gemm, routing
from pallas_kernels.shapes import TINY

IMPLEMENTATIONS = {"public": grouped_gemm.moe_mlp}
implementations = pytest.mark.parametrize("moe_mlp", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
dispatch = jax.jit(routing.dispatch, static_argnames=("block_m", "max_active"))
GROUPED = TINY[2]  # 11 experts, 3 picks, d 28, f 17


def make(rng, shape, num_rows, dtype=np.float32):
    """Rows, and a pool with more slots than experts: slot of expert e is slots[e]."""
    num_slots = 2 * shape.num_experts
    d, f = shape.d_model, shape.d_ff
    x = rng.normal(size=(num_rows, d))
    gate_up = rng.normal(size=(num_slots, d, 2 * f)) * d**-0.5
    down = rng.normal(size=(num_slots, f, d)) * f**-0.5
    slots = rng.permutation(num_slots)[: shape.num_experts].astype(np.int32)
    return *(jnp.asarray(a.astype(dtype)) for a in (x, gate_up, down)), slots


def by_hand(x, gate_up, down, slots, ids, weights):
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    out = np.zeros_like(x)
    for (t, k), e in np.ndenumerate(ids):
        if e >= 0:
            gate, up = np.split(x[t] @ gate_up[slots[e]], 2)
            out[t] += weights[t, k] * ((gate / (1 + np.exp(-gate)) * up) @ down[slots[e]])
    return out


def check(moe_mlp, shape, ids, *, block_m, dtype=np.float32, atol=2e-5, max_active=None, seed=0):
    rng = np.random.default_rng(seed)
    x, gate_up, down, slots = make(rng, shape, len(ids), dtype)
    weights = rng.random(ids.shape).astype(np.float32)
    work = dispatch(
        *map(jnp.asarray, (ids, weights, slots)),
        block_m=block_m,
        max_active=max_active or shape.num_experts,
    )
    got = jax.jit(moe_mlp)(x, gate_up, down, work)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
        got, by_hand(x, gate_up, down, slots, ids, weights), rtol=0, atol=atol
    )
    return np.asarray(got)


def choose(rng, shape, num_rows):
    scores = rng.random((num_rows, shape.num_experts))
    return np.argsort(scores, -1)[:, : shape.top_k].astype(np.int32)


@implementations
@pytest.mark.parametrize("num_rows", [1, 50])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_equals_dense_float64(moe_mlp, shape, num_rows):
    ids = choose(np.random.default_rng(num_rows), shape, num_rows)
    check(moe_mlp, shape, ids, block_m=8)


@implementations
@pytest.mark.parametrize("block_m", [1, 16, 32])
def test_block_height_changes_nothing(moe_mlp, block_m):
    ids = choose(np.random.default_rng(3), GROUPED, 50)
    check(moe_mlp, GROUPED, ids, block_m=block_m)


@implementations
def test_one_expert_holds_all_rows(moe_mlp):
    ids = np.full((40, 1), 6, np.int32)
    check(moe_mlp, GROUPED, ids, block_m=8, max_active=1)


@implementations
def test_rows_whose_visits_were_dropped_are_zero(moe_mlp):
    ids = choose(np.random.default_rng(5), GROUPED, 23)
    ids[np.random.default_rng(6).random(ids.shape) < 0.5] = -1
    ids[[0, 7, 22]] = -1
    got = check(moe_mlp, GROUPED, ids, block_m=8)
    assert not got[[0, 7, 22]].any()


@implementations
def test_no_visits_at_all(moe_mlp):
    assert not check(moe_mlp, GROUPED, np.full((5, 3), -1, np.int32), block_m=8).any()


@implementations
def test_picks_that_meet_in_one_expert_are_summed(moe_mlp):
    ids = np.array([[4, 4, 4], [4, 2, 4], [1, 4, 1]], np.int32)
    check(moe_mlp, GROUPED, ids, block_m=8)


@implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_weights(moe_mlp, dtype):
    """Inputs are exact in both; what is lost is the rounding of the rows between the products."""
    ids = choose(np.random.default_rng(8), GROUPED, 33)
    eps = float(jnp.finfo(dtype).eps)
    check(moe_mlp, GROUPED, ids, block_m=8, dtype=dtype, atol=8 * eps)


@implementations
def test_slots_that_nobody_visits_are_not_read(moe_mlp):
    """What lies in a slot that is being written, or was never, must not reach a result."""
    rng = np.random.default_rng(9)
    x, gate_up, down, slots = make(rng, GROUPED, 12)
    ids = np.full((12, 2), 3, np.int32)
    ids[:, 1] = 5
    weights = rng.random(ids.shape).astype(np.float32)
    unused = np.setdiff1d(np.arange(len(gate_up)), slots[[3, 5]])
    work = dispatch(
        *map(jnp.asarray, (ids, weights, slots)), block_m=8, max_active=GROUPED.num_experts
    )
    got = jax.jit(moe_mlp)(x, gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan), work)
    want = by_hand(x, gate_up, down, slots, ids, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@implementations
def test_a_row_that_overflowed_stays_alone(moe_mlp):
    rng = np.random.default_rng(10)
    x, gate_up, down, slots = make(rng, GROUPED, 12)
    ids = choose(rng, GROUPED, 12)
    weights = rng.random(ids.shape).astype(np.float32)
    work = dispatch(
        *map(jnp.asarray, (ids, weights, slots)), block_m=8, max_active=GROUPED.num_experts
    )
    got = np.asarray(jax.jit(moe_mlp)(x.at[4].set(jnp.nan), gate_up, down, work))
    assert np.isnan(got[4]).all()
    want = by_hand(x, gate_up, down, slots, ids, weights)
    others = np.arange(12) != 4
    np.testing.assert_allclose(got[others], want[others], rtol=0, atol=2e-5)


@implementations
def test_two_experts_may_share_a_slot(moe_mlp):
    """Models that share an expert do, and so do places that are not loaded yet."""
    rng = np.random.default_rng(11)
    x, gate_up, down, slots = make(rng, GROUPED, 21)
    slots[[1, 2, 7]] = slots[2]
    ids = choose(rng, GROUPED, 21)
    weights = rng.random(ids.shape).astype(np.float32)
    work = dispatch(
        *map(jnp.asarray, (ids, weights, slots)), block_m=8, max_active=GROUPED.num_experts
    )
    got = jax.jit(moe_mlp)(x, gate_up, down, work)
    want = by_hand(x, gate_up, down, slots, ids, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
