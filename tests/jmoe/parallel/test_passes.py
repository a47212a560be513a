"""Visits in passes of bounded size: what each pass gets, and bits against those of one pass."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.experts import ExpertPool
from jmoe.moe import compute
from jmoe.parallel.experts import in_passes
from pallas_kernels import routing
from pallas_kernels.activation import SILU

ROWS, PICKS, EXPERTS = 13, 3, 5


@cache
def told(per_pass):
    """Passes that count visits by expert, then themselves, then the visits over their bound; a
    row's sum is that of its experts' numbers from 1 on.
    """

    def run(ids, most):
        made = ids >= 0
        hit = ids[:, :, None] == jnp.arange(EXPERTS, dtype=jnp.int32)[None, None]
        by_expert = jnp.sum(hit, axis=(0, 1), dtype=jnp.int32)
        over = jnp.maximum(jnp.sum(made, dtype=jnp.int32) - (most or ids.size), 0)
        beside = jnp.stack([jnp.int32(1), over])
        out = jnp.sum(jnp.where(made, ids + 1, 0), axis=1, keepdims=True).astype(jnp.float32)
        return out, jnp.concatenate([by_expert, beside])

    return jax.jit(lambda ids: in_passes(run, ids, per_pass))


visits = st.lists(
    st.lists(st.integers(-1, EXPERTS - 1), min_size=PICKS, max_size=PICKS),
    min_size=ROWS,
    max_size=ROWS,
)


@pytest.mark.deep
@given(visits, st.sampled_from([1, 2, 4, 7, 50, None]))
@settings(max_examples=100)
def test_each_row_is_run_once_and_no_pass_is_over_its_bound(ids, per_pass):
    out, counts = jax.device_get(told(per_pass)(np.array(ids, np.int32)))
    *by_expert, passes, over = counts.tolist()
    made = [[each for each in row if each >= 0] for row in ids]
    assert out[:, 0].tolist() == [sum(row) + len(row) for row in made]
    flat = [each for row in made for each in row]
    assert by_expert == [flat.count(expert) for expert in range(EXPERTS)]
    assert over == 0
    most = len(flat) or 1
    assert passes <= (1 if per_pass is None else max(1, -(-most // per_pass)))


@pytest.mark.sized(deep=("bfloat16",))
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.deep), jnp.bfloat16])
def test_bits_are_those_of_one_pass(dtype):
    rng = np.random.default_rng(0)
    rows, picks, experts, d, f = 24, 4, 6, 32, 16
    pool = ExpertPool(
        jnp.asarray(rng.normal(size=(experts, d, 2 * f)), dtype),
        jnp.asarray(rng.normal(size=(experts, f, d)), dtype),
    )
    h = jnp.asarray(rng.normal(size=(rows, d)), dtype)
    weights = jnp.asarray(rng.random((rows, picks)), jnp.float32)
    ids = rng.integers(-1, experts, (rows, picks)).astype(np.int32)
    ids[5:9] = -1
    ids[9:12] = 2  # picks that met in one expert
    slots = jnp.asarray(rng.permutation(experts), jnp.int32)

    def run(ids, most):
        sizes = {"max_active": experts, "activation": SILU, "max_visits": most}
        return compute(pool, h, weights, ids, slots, **sizes)

    want, *others = (
        jax.jit(partial(in_passes, run, per_pass=per_pass))(jnp.asarray(ids))
        for per_pass in (None, 1, 7, 30)
    )
    assert want[0].any()
    for got in others:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_sorted_rows_of_eight_devices_are_a_third_at_most():
    """Of 32 rows on each, with four visits of 60 experts."""
    ids = jax.ShapeDtypeStruct((256, 4), jnp.int32)
    weights = jax.ShapeDtypeStruct((256, 4), jnp.float32)
    slots = jax.ShapeDtypeStruct((60,), jnp.int32)

    def rows(max_visits):
        sizes = {"block_m": 8, "max_active": 8, "max_visits": max_visits}
        return len(jax.eval_shape(partial(routing.dispatch, **sizes), ids, weights, slots)[0])

    assert rows(2 * 32 * 4 + 3) <= rows(None) / 3
