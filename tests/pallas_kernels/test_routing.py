"""Contract of the routing ops: gate, and the dispatch of visits to blocks of one expert each.

The brownout plan, the third of them, is judged in tests/jmoe/test_plan.py.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import routing
from pallas_kernels.shapes import MODELS, TINY

GATES = {"public": routing.gate}
DISPATCHES = {"public": routing.dispatch}
gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
dispatches = pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)


@gates
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [*TINY, *MODELS], ids=lambda shape: shape.name)
def test_gate_equals_softmax_then_sort(gate, shape, normalize):
    m, k = shape.num_experts, shape.top_k
    logits = np.random.default_rng(m).normal(size=(9, m)).astype(np.float32) * 3
    weights, ids = gate(jnp.asarray(logits), top_k=k, normalize=normalize)
    exp = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    probs = exp / exp.sum(-1, keepdims=True)
    want = np.argsort(-probs, axis=-1, kind="stable")[:, :k]
    chosen = np.take_along_axis(probs, want, -1)
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(weights, chosen, rtol=2e-6)
    assert (weights.dtype, ids.dtype) == (jnp.float32, jnp.int32)


@gates
def test_gate_gives_ties_to_the_lower_id(gate):
    logits = jnp.asarray([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    _, ids = gate(logits, top_k=4, normalize=False)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@gates
def test_gate_computes_in_float32_and_survives_large_logits(gate):
    logits = jnp.asarray([[300.0, 299.0, -300.0]], jnp.bfloat16)
    weights, ids = gate(logits, top_k=2, normalize=True)
    assert ids.tolist() == [[0, 1]]
    gap = float(logits[0, 0]) - float(logits[0, 1])  # as bfloat16 rounded it
    np.testing.assert_allclose(weights[0, 1] / weights[0, 0], np.exp(-gap), rtol=1e-5)


T, K, E = 10, 3, 7  # one shape for all generated cases: one compilation a block height


@st.composite
def visits(draw):
    ids = draw(
        st.lists(st.lists(st.integers(-1, E - 1), min_size=K, max_size=K), min_size=T, max_size=T)
    )
    slots = draw(st.permutations(range(2 * E)))[:E]
    return np.array(ids, np.int32), np.array(slots, np.int32)


@pytest.fixture(scope="module", params=DISPATCHES, name="jitted")
def _jitted(request):
    static = ("block_m", "max_active")
    return jax.jit(DISPATCHES[request.param], static_argnames=static)


@pytest.mark.parametrize("block_m", [1, 4, 8])
def test_dispatch(jitted, block_m):
    weights = np.random.default_rng(0).random((T, K)).astype(np.float32)

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(visits())
    def every_case(case):
        ids, slots = case
        run = partial(jitted, block_m=block_m, max_active=E)
        check_dispatch(run(*map(jnp.asarray, (ids, weights, slots))), ids, weights, slots, block_m)

    every_case()


def check_dispatch(got, ids, weights, slots, block_m):
    got = jax.tree.map(np.asarray, got)
    num_rows, num_blocks = len(got.row_token), int(got.num_blocks)
    assert num_rows == block_m * len(got.block_slot)
    # What has to be computed: each row and expert once, with the sum of its weights.
    work = {}
    for (t, k), e in np.ndenumerate(ids):
        if e >= 0:
            work[t, int(e)] = work.get((t, int(e)), 0.0) + weights[t, k]
    # Every piece of work has exactly one sorted row, in a block of its expert's slot.
    placed = {}
    for (t, k), row in np.ndenumerate(got.visit_row):
        if got.visit_weight[t, k] == 0:
            continue
        assert row < block_m * num_blocks
        assert got.row_token[row] == t
        e = int(ids[t, k])
        assert got.block_slot[row // block_m] == slots[e]
        assert (t, e) not in placed
        placed[t, e] = row
        np.testing.assert_allclose(got.visit_weight[t, k], work[t, e], rtol=1e-6)
    assert placed.keys() == work.keys()
    assert len(set(placed.values())) == len(placed)
    # A visit without a row of its own points past the end, where a gather fills in zeros.
    assert (got.visit_row[got.visit_weight == 0] >= num_rows).all()
    # All other rows are gaps, and say so.
    gaps = np.setdiff1d(np.arange(num_rows), list(placed.values()))
    assert (got.row_token[gaps] == len(ids)).all()
    # Blocks: just enough of them, those of one expert together, rows packed to the front.
    count = np.bincount([e for _, e in work], minlength=len(slots))
    assert num_blocks == (-(-count // block_m)).sum()
    np.testing.assert_array_equal(got.expert_rows, count)
    live = got.block_slot[:num_blocks].tolist()
    assert len(set(live)) == 1 + sum(a != b for a, b in pairwise(live)) if live else True
    for block in got.row_token[: num_blocks * block_m].reshape(-1, block_m):
        filled = block < len(ids)
        assert filled[0]
        assert not (filled[1:] & ~filled[:-1]).any()
    if live:  # blocks past the last one read no weights of their own
        assert set(got.block_slot[num_blocks:].tolist()) <= {live[-1]}


@dispatches
def test_dispatch_fits_where_max_active_and_blocks_are_tight(dispatch):
    """One visit to each of 4 experts, and 13 to a fifth: every block there is room for is used."""
    ids = np.array([[0], [1], [2], [3]] + [[4]] * 13, np.int32)
    weights = np.ones(ids.shape, np.float32)
    slots = np.arange(6, dtype=np.int32)
    got = dispatch(*map(jnp.asarray, (ids, weights, slots)), block_m=4, max_active=5)
    check_dispatch(got, ids, weights, slots, 4)
    assert got.num_blocks == 8 == routing.max_blocks(17, 5, 4)


@dispatches
def test_dispatch_without_any_visit(dispatch):
    ids = np.full((T, K), -1, np.int32)
    weights, slots = np.ones((T, K), np.float32), np.arange(E, dtype=np.int32)
    got = dispatch(*map(jnp.asarray, (ids, weights, slots)), block_m=8, max_active=E)
    check_dispatch(got, ids, weights, slots, 8)
    assert got.num_blocks == 0


def test_max_blocks_is_enough_and_attained():
    """Over all ways to share n visits among at most a experts: brute force."""

    def counts(n, a):
        if a == 1:
            yield (n,)
            return
        for first in range(n + 1):
            for rest in counts(n - first, a - 1):
                yield (first, *rest)

    for n in range(1, 12):
        for a in range(1, 5):
            for block_m in (1, 2, 4, 8):
                most = max(sum(-(-c // block_m) for c in share) for share in counts(n, a))
                assert routing.max_blocks(n, a, block_m) == most, (n, a, block_m)
