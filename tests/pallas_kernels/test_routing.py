"""Contract of the routing ops: gate, dispatch of visits to blocks of one expert each, and route.

The brownout plan, the third of what route does at once, is judged in tests/jmoe/test_plan.py.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_contract import CONTEXTS, MORE, ONE, Static, check_route, draw

from benchmarks.kernels.shapes import MODELS, TINY
from pallas_kernels import routing

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GATES = {"public": routing.gate}
DISPATCHES = {"public": jax.jit(routing.dispatch, static_argnames=("block_m", "max_active"))}
gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
dispatches = pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)


def gate_by_hand(logits, top_k, normalize, scoring):
    x = np.asarray(logits, np.float64)
    if scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-x))
    else:
        scores = np.exp(x - x.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
    ids = np.argsort(-x, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, ids, -1)
    return chosen / chosen.sum(-1, keepdims=True) if normalize else chosen, ids


@gates
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [*TINY, *MODELS], ids=lambda shape: shape.name)
def test_gate_equals_scores_then_sort(gate, shape, normalize, scoring):
    m, k = shape.num_experts, shape.top_k
    logits = np.random.default_rng(m).normal(size=(9, m)).astype(np.float32) * 3
    weights, ids = gate(jnp.asarray(logits), top_k=k, normalize=normalize, scoring=scoring)
    want_weights, want_ids = gate_by_hand(logits, k, normalize, scoring)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)
    assert (weights.dtype, ids.dtype) == (jnp.float32, jnp.int32)


@gates
def test_gate_chooses_by_logits_where_scores_are_equal(gate):
    """In float32 the sigmoids of 30 and 40 are both one, and softmax gives all but 40 nothing."""
    logits = jnp.asarray([[30.0, -200.0, 40.0, -190.0]])
    for scoring in ("softmax", "sigmoid"):
        _, ids = gate(logits, top_k=4, normalize=False, scoring=scoring)
        assert ids.tolist() == [[2, 0, 3, 1]]


@gates
def test_gate_takes_nan_and_infinity_for_the_lowest(gate):
    inf, nan = np.inf, np.nan
    logits = jnp.asarray([[nan, 1.0, -inf, 2.0], [-inf, -inf, -inf, 0.0], [nan, nan, nan, nan]])
    _, ids = gate(logits, top_k=3, normalize=True)
    assert ids.tolist() == [[3, 1, 0], [3, 0, 1], [0, 1, 2]]


@gates
def test_gate_of_sigmoids_that_underflow_is_finite(gate):
    weights, _ = gate(jnp.full((1, 4), -200.0), top_k=2, normalize=True, scoring="sigmoid")
    assert np.isfinite(weights).all()


@gates
def test_gate_gives_ties_to_the_lower_id(gate):
    logits = jnp.asarray([[1.0, 2.0, 2.0, 1.0, 2.0], [-0.0, 0.0, -0.0, 0.0, 0.0]])
    _, ids = gate(logits, top_k=4, normalize=False)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@gates
def test_gate_computes_in_float32_and_survives_large_logits(gate):
    logits = jnp.asarray([[300.0, 299.0, -300.0]], jnp.bfloat16)
    weights, ids = gate(logits, top_k=2, normalize=True)
    assert ids.tolist() == [[0, 1]]
    gap = float(logits[0, 0]) - float(logits[0, 1])  # as bfloat16 rounded it
    np.testing.assert_allclose(weights[0, 1] / weights[0, 0], np.exp(-gap), rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gate_has_the_gradient_of_its_scores(normalize, scoring):
    """Logits of zero among them, as a router has that starts from zeros."""

    def weights(logits):
        return routing.gate(logits, top_k=2, normalize=normalize, scoring=scoring)[0][0, 1]

    def by_hand(x):
        scores = jax.nn.softmax(x) if scoring == "softmax" else jax.nn.sigmoid(x)
        return scores[0, 1] / (scores[0, 1] + scores[0, 2]) if normalize else scores[0, 1]

    logits = jnp.asarray([[-1.0, 0.0, 0.5, -0.25]])
    got, want = (jax.jit(jax.grad(of))(logits) for of in (weights, by_hand))
    np.testing.assert_allclose(got, want, atol=1e-7)


def test_sparsemixer_weighs_a_pick_against_what_is_near_it_and_left():
    """By hand. Near 2.0 are 1.9 and, of the larger of both, 1.5; near 1.9 is 1.5, no longer 2.0."""
    gate = partial(routing.gate, top_k=2, normalize=False, scoring="sparsemixer")
    logits = jnp.asarray([[1.5, 2.0, 1.9, -3.0], [jnp.nan] * 4, [-1.0, -jnp.inf, -1.5, -1.0]])
    weights, ids = gate(logits, jitter=0.125)
    assert ids.tolist() == [[1, 2], [0, 1], [0, 3]]
    first = 1 / (1 + np.exp(-0.1) + np.exp(-0.5))
    np.testing.assert_allclose(weights[0], [first, 1 / (1 + np.exp(-0.4))], rtol=1e-6)
    np.testing.assert_allclose(weights[1], [1 / 4, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(weights[2], [1 / 2, 1], rtol=1e-6)  # 0.5 of 1.5 is more than 0.25
    for more in ({"bias": jnp.zeros(4)}, {"grouping": routing.Grouping(2, 1, 1)}):
        with pytest.raises(ValueError, match="sparsemixer has no bias"):
            gate(logits, **more)


def test_sparsemixer_has_the_gradient_of_its_softmax():
    def weight(logits):
        options = {"top_k": 2, "normalize": False, "scoring": "sparsemixer", "jitter": 0.3}
        return routing.gate(logits, **options)[0][0, 1]

    logits = jnp.asarray([[2.0, 0.0, 1.9, 1.5, 0.1]])
    want = jax.grad(lambda x: jax.nn.softmax(x[0, 2:4])[0])(logits)
    np.testing.assert_allclose(jax.jit(jax.grad(weight))(logits), want, atol=1e-7)


def test_gate_gives_ties_of_scores_and_of_groups_to_the_lower_id():
    """A bias outweighs scores without being one; a NaN is the lowest there is in its group, too."""
    gate = partial(routing.gate, top_k=2, normalize=False, scoring="sigmoid")
    logits, bias = jnp.asarray([[1.0, 0.0, -1.0, 0.0, 1.0, 2.0]]), jnp.asarray([0.0, 1, 0, 1, 0, 0])
    weights, ids = gate(logits, bias=bias, scale=2.0)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[1, 1]])
    _, ids = gate(logits, bias=bias, grouping=routing.Grouping(3, 1, 1))
    assert ids.tolist() == [[1, 0]]
    _, ids = gate(jnp.zeros((1, 6)), grouping=routing.Grouping(3, 1, 2))
    assert ids.tolist() == [[0, 1]]
    logits = jnp.asarray([[jnp.nan, 1.5, 1.0, 1.0, 0.0, 0.0]])
    for best, want in ((1, [1, 0]), (2, [2, 3])):
        _, ids = gate(logits, grouping=routing.Grouping(3, 1, best))
        assert ids.tolist() == [want]


T, K, E = 10, 3, 7  # one shape for all generated cases: one compilation a block height


@st.composite
def visits(draw):
    ids = draw(
        st.lists(st.lists(st.integers(-1, E - 1), min_size=K, max_size=K), min_size=T, max_size=T)
    )
    slots = draw(st.permutations(range(2 * E)))[:E]
    return np.array(ids, np.int32), np.array(slots, np.int32)


@pytest.mark.parametrize("block_m", [1, 4, 8])
@dispatches
def test_dispatch(dispatch, block_m):
    weights = np.random.default_rng(0).random((T, K)).astype(np.float32)

    @settings(max_examples=150, database=None, derandomize=True)
    @given(visits())
    def every_case(case):
        ids, slots = case
        got = dispatch(ids, weights, slots, block_m=block_m, max_active=E)
        check_dispatch(got, ids, weights, slots, block_m)

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
    got = dispatch(ids, weights, slots, block_m=4, max_active=5)
    check_dispatch(got, ids, weights, slots, 4)
    assert got.num_blocks == 8 == routing.max_blocks(17, 5, 4)


@dispatches
def test_dispatch_without_any_visit(dispatch):
    ids = np.full((T, K), -1, np.int32)
    weights, slots = np.ones((T, K), np.float32), np.arange(E, dtype=np.int32)
    got = dispatch(ids, weights, slots, block_m=8, max_active=E)
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


STATICS = (
    Static(tiles=ONE),
    Static(normalize=False, top_k=1, united=0, block_m=16, tiles=routing.RowTiles(16, 1)),
    Static(scoring="sigmoid", rows=64, experts=8, top_k=2, united=5, block_m=4, tiles=MORE),
    Static(scoring="sigmoid", normalize=False, rows=3, top_k=8, tiles=MORE),
    Static(normalize=False, rows=5, padding=4),
)


@pytest.mark.sized(deep=("mosaic-zero-softmax-20_0", "mosaic-zero-softmax-20_1"))
@pytest.mark.parametrize("static", STATICS, ids=lambda static: f"{static.scoring}-{static.rows}")
@pytest.mark.parametrize("strategy", routing.STRATEGIES.values(), ids=routing.STRATEGIES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_route_is_its_parts(name, strategy, static):
    seeds = {
        "public": range(40),
        "batched": range(40),
        "mosaic": range(strategy, 8, 4),
        "sm90": [strategy + 8],
    }
    check_route(name, static, [draw(seed, static, strategy) for seed in seeds[name]])


@pytest.mark.parametrize("static", STATICS, ids=lambda static: f"{static.scoring}-{static.rows}")
@pytest.mark.parametrize("name", ["public", "batched"])
def test_route_that_keeps_by_weight_is_its_parts(name, static):
    codes = [code + routing.BY_WEIGHT for code in (routing.FULL, routing.PARTIAL)]
    check_route(name, static, [draw(seed, static, codes[seed % 2]) for seed in range(24)])


SCORED = {
    "glm": Static(scoring="sigmoid", bias=True, scale=2.5, padding=4, tiles=ONE),
    "v2": Static(normalize=False, grouping=routing.Grouping(3, 2, 1), scale=16.0, block_m=4),
    "v3": Static(scoring="sigmoid", bias=True, grouping=routing.Grouping(3, 2, 2), tiles=MORE),
    "softmax": Static(normalize=False, bias=True, grouping=routing.Grouping(3, 1, 1)),
    "unbiased": Static(grouping=routing.Grouping(3, 2, 2), top_k=3),
    "phi": Static(
        normalize=False, scoring="sparsemixer", top_k=2, jitter=0.3, padding=4, tiles=ONE
    ),
}


@pytest.mark.parametrize("static", SCORED.values(), ids=SCORED)
@pytest.mark.parametrize("name", CONTEXTS)
def test_route_of_biased_and_grouped_scores_is_its_parts(name, static):
    seeds = {"public": range(9), "batched": range(18), "mosaic": range(6), "sm90": [3, 7]}
    check_route(name, static, [draw(seed, static, seed % 3) for seed in seeds[name]])
