"""Contract of the grouped GEMM: SwiGLU experts of planned visits, against float64 loops."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest

from benchmarks.kernels.shapes import TINY, Shape
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.activation import SILU, ClampedSwiglu, Relu2, up_matrices
from pallas_kernels.backend import batched_only
from pallas_kernels.grouped_gemm import mosaic
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


class Implementation(NamedTuple):
    """An implementation, and what it is to be tried on."""

    moe_mlp: Callable
    shapes: tuple[Shape, ...]
    grouped: Shape  # 11 experts, 3 picks
    block_ms: tuple[int, ...]
    dtype: Any
    atol: float  # inputs are exact: it is the rounding of the rows between the products


WIDE = Shape("wide", 128, 192, 5, 2, 1, 1, 64)
GROUPED = Shape("grouped", 64, 128, 11, 3, 1, 1, 64)
# As narrow as they come: an expert has several tiles, a block several turns of the pipeline.
TILE = Tile(
    widths=(8, 24),
    cluster=1,
    group=2,
    gate_up=GemmTile(block_k=64, parts=2, consumers=1, stages=3),
    down=GemmTile(block_k=64, parts=1, consumers=1, stages=3),
    visit_dtype=jnp.dtype(jnp.float32),
)
HALF = 8 * float(jnp.finfo(jnp.bfloat16).eps)


@partial(jax.jit, static_argnums=4)
def batched(*args):
    """Runs the batched form, as on a GPU without the kernels: sums at block heights up to 8,
    products above.
    """
    with batched_only():
        return grouped_gemm.moe_mlp(*args)


def kernels(run):
    """Returns the kernels as `run` runs them."""

    def moe_mlp(x, gate_up, down, plan, activation=SILU, biases=None):
        def tiled(*arrays):
            *given, biases = arrays
            return mosaic.moe_mlp(*given, activation, biases, tile=TILE, num_blocks=2)

        return run(tiled, x, gate_up, down, plan, biases)

    return moe_mlp


IMPLEMENTATIONS = {
    "public": Implementation(
        jax.jit(grouped_gemm.moe_mlp, static_argnums=4),
        TINY,
        TINY[2],
        (1, 8, 16, 32),
        np.float32,
        2e-5,
    ),
    "batched": Implementation(batched, TINY, TINY[2], (1, 8, 16, 32), np.float32, 2e-5),
    "mosaic": Implementation(
        kernels(interpreter.run),
        (WIDE,),
        GROUPED,
        (16,),
        jnp.bfloat16,
        HALF,
    ),
}
IMPLEMENTATIONS["sm90"] = IMPLEMENTATIONS["mosaic"]._replace(moe_mlp=kernels(interpreter.emulate))
implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
dispatch = jax.jit(routing.dispatch, static_argnames=("block_m", "max_active"))


def cases(field):
    """Returns every implementation with each of its own values of `field`."""
    return [
        pytest.param(impl, value, id=f"{name}-{getattr(value, 'name', value)}")
        for name, impl in IMPLEMENTATIONS.items()
        for value in getattr(impl, field)
    ]


def make(rng, impl, shape, num_rows):
    """Draws rows, and a pool with more slots than experts: the slot of expert e is slots[e]."""
    num_slots = 2 * shape.num_experts
    d, f = shape.d_model, shape.d_ff
    x = rng.normal(size=(num_rows, d))
    gate_up = rng.normal(size=(num_slots, d, 2 * f)) * d**-0.5
    down = rng.normal(size=(num_slots, f, d)) * f**-0.5
    slots = rng.permutation(num_slots)[: shape.num_experts].astype(np.int32)
    return *(jnp.asarray(a.astype(impl.dtype)) for a in (x, gate_up, down)), slots


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def clamped(gate, up):
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def relu2(up):
    return np.maximum(up, 0) ** 2


def by_hand(x, gate_up, down, slots, ids, weights, act=silu, biases=None):
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    of_up, of_down = biases or (np.zeros(gate_up.shape[::2]), np.zeros(down.shape[::2]))
    out = np.zeros_like(x)
    for (t, k), e in np.ndenumerate(ids):
        if e >= 0:
            first = x[t] @ gate_up[slots[e]] + of_up[slots[e]]
            own = act(*np.split(first, len(first) // down.shape[1])) @ down[slots[e]]
            own += of_down[slots[e]]
            out[t] += weights[t, k] * own
    return out


def plan_of(ids, weights, slots, block_m=8, max_active=None):
    arrays = map(jnp.asarray, (ids, weights, slots))
    return dispatch(*arrays, block_m=block_m, max_active=max_active or len(slots))


def check(impl, shape, ids, *, block_m=8, max_active=None, seed=0):
    rng = np.random.default_rng(seed)
    x, gate_up, down, slots = make(rng, impl, shape, len(ids))
    weights = rng.random(ids.shape).astype(np.float32)
    work = plan_of(ids, weights, slots, block_m, max_active)
    got = impl.moe_mlp(x, gate_up, down, work)
    assert got.dtype == jnp.float32
    want = by_hand(x, gate_up, down, slots, ids, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=impl.atol)
    return np.asarray(got)


def choose(rng, shape, num_rows):
    scores = rng.random((num_rows, shape.num_experts))
    return np.argsort(scores, -1)[:, : shape.top_k].astype(np.int32)


@pytest.mark.parametrize("num_rows", [1, 50])
@pytest.mark.parametrize(("impl", "shape"), cases("shapes"))
def test_equals_dense_float64(impl, shape, num_rows):
    ids = choose(np.random.default_rng(num_rows), shape, num_rows)
    check(impl, shape, ids)


@pytest.mark.parametrize(("impl", "block_m"), cases("block_ms"))
def test_block_height_changes_nothing(impl, block_m):
    ids = choose(np.random.default_rng(3), impl.grouped, 50)
    check(impl, impl.grouped, ids, block_m=block_m)


@implementations
def test_one_expert_holds_all_rows(impl):
    ids = np.full((40, 1), 6, np.int32)
    check(impl, impl.grouped, ids, max_active=1)


@implementations
def test_rows_whose_visits_were_dropped_are_zero(impl):
    ids = choose(np.random.default_rng(5), impl.grouped, 23)
    ids[np.random.default_rng(6).random(ids.shape) < 0.5] = -1
    ids[[0, 7, 22]] = -1
    got = check(impl, impl.grouped, ids)
    assert not got[[0, 7, 22]].any()


@implementations
def test_no_visits_at_all(impl):
    assert not check(impl, impl.grouped, np.full((5, 3), -1, np.int32)).any()


@implementations
def test_picks_that_meet_in_one_expert_are_summed(impl):
    ids = np.array([[4, 4, 4], [4, 2, 4], [1, 4, 1]], np.int32)
    check(impl, impl.grouped, ids)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_weights(dtype):
    """Inputs are exact in both; what is lost is the rounding of the rows between the products."""
    impl = IMPLEMENTATIONS["public"]
    ids = choose(np.random.default_rng(8), impl.grouped, 33)
    eps = float(jnp.finfo(dtype).eps)
    check(impl._replace(dtype=dtype, atol=8 * eps), impl.grouped, ids)


@implementations
def test_slots_that_nobody_visits_are_not_read(impl):
    """What lies in a slot that is being written, or was never, must not reach a result."""
    rng = np.random.default_rng(9)
    x, gate_up, down, slots = make(rng, impl, impl.grouped, 12)
    ids = np.full((12, 2), 3, np.int32)
    ids[:, 1] = 5
    weights = rng.random(ids.shape).astype(np.float32)
    unused = np.setdiff1d(np.arange(len(gate_up)), slots[[3, 5]])
    work = plan_of(ids, weights, slots)
    got = impl.moe_mlp(x, gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan), work)
    want = by_hand(x, gate_up, down, slots, ids, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=impl.atol)


@pytest.mark.sized(deep=("public-silu", "batched-silu"))
@pytest.mark.parametrize(
    ("activation", "act"),
    [(SILU, silu), (ClampedSwiglu(limit=1.5), clamped), (Relu2(), relu2)],
    ids=["silu", "clamped", "relu2"],
)
@implementations
def test_biases_are_added_before_the_activation_and_to_the_result(impl, activation, act):
    """Of an expert's slot, once a visit; not to a row whose visits were dropped."""
    rng = np.random.default_rng(12)
    x, gate_up, down, slots = make(rng, impl, impl.grouped, 23)
    gate_up = gate_up[:, :, : up_matrices(activation) * down.shape[1]]
    biases = [rng.normal(size=w.shape[::2]).astype(impl.dtype) for w in (gate_up, down)]
    ids = choose(rng, impl.grouped, 23)
    ids[[0, 7]] = -1
    weights = rng.random(ids.shape).astype(np.float32)
    work = plan_of(ids, weights, slots)
    got = impl.moe_mlp(x, gate_up, down, work, activation, tuple(map(jnp.asarray, biases)))
    exact = [np.asarray(bias, np.float64) for bias in biases]
    want = by_hand(x, gate_up, down, slots, ids, weights, act, exact)
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * impl.atol)


@implementations
def test_a_row_that_overflowed_stays_alone(impl):
    rng = np.random.default_rng(10)
    x, gate_up, down, slots = make(rng, impl, impl.grouped, 12)
    ids = choose(rng, impl.grouped, 12)
    weights = rng.random(ids.shape).astype(np.float32)
    work = plan_of(ids, weights, slots)
    got = np.asarray(impl.moe_mlp(x.at[4].set(jnp.nan), gate_up, down, work))
    assert np.isnan(got[4]).all()
    want = by_hand(x, gate_up, down, slots, ids, weights)
    others = np.arange(12) != 4
    np.testing.assert_allclose(got[others], want[others], rtol=0, atol=impl.atol)


@implementations
def test_two_experts_may_share_a_slot(impl):
    """As models that share an expert do, and united experts that are not loaded yet."""
    rng = np.random.default_rng(11)
    x, gate_up, down, slots = make(rng, impl, impl.grouped, 21)
    slots[[1, 2, 7]] = slots[2]
    ids = choose(rng, impl.grouped, 21)
    weights = rng.random(ids.shape).astype(np.float32)
    got = impl.moe_mlp(x, gate_up, down, plan_of(ids, weights, slots))
    want = by_hand(x, gate_up, down, slots, ids, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=impl.atol)
