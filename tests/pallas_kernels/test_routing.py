"""Contract of the routing ops: gate, dispatch of visits to blocks of one expert each, and route.

The brownout plan, the third of what route does at once, is judged in tests/jmoe/test_plan.py.
"""

from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import routing
from pallas_kernels.backend import batched_only, references_only
from pallas_kernels.routing.tile_map import COUNT, TileMap
from pallas_kernels.shapes import MODELS, TINY

GATES = {"public": routing.gate}
DISPATCHES = {"public": routing.dispatch}
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
    np.testing.assert_allclose(jax.grad(weights)(logits), jax.grad(by_hand)(logits), atol=1e-7)


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


class Case(NamedTuple):
    """Arguments of `route` that are arrays."""

    logits: np.ndarray
    groups: np.ndarray
    slots: np.ndarray
    threshold_percent: np.ndarray
    strategy: np.ndarray
    valid: np.ndarray
    exempt: np.ndarray


class Static(NamedTuple):
    """Arguments of `route` that are not; `united` experts beside those in the logits."""

    rows: int = 20
    experts: int = 12
    united: int = 6
    top_k: int = 4
    normalize: bool = True
    scoring: str = "softmax"
    block_m: int = 8
    padding: int = 0  # columns of logits that are no experts
    tiles: routing.RowTiles | None = None

    def options(self):
        keys = ("top_k", "normalize", "scoring", "block_m", "tiles")
        return {key: getattr(self, key) for key in keys} | {"max_active": self.experts}


def draw(seed, static, strategy):
    """Flat and skewed logits, ties of every kind, padding, exempt rows, groups with and without."""
    rng = np.random.default_rng(seed)
    m, rows = static.experts, static.rows
    logits = rng.normal(size=(rows, m)) + rng.choice([0, 1, 4]) * rng.normal(size=m)
    if seed % 3 == 0:
        logits = np.round(logits * rng.choice([0.0, 0.5, 2.0]))  # -0.0 among them
    if seed % 4 == 3:
        logits[rng.random(logits.shape) < 0.1] = rng.choice([np.nan, -np.inf])
        logits[rng.integers(rows)] = np.nan
    more = np.where(rng.random((rows, static.padding)) < 0.5, np.inf, np.nan)
    logits = np.concatenate([logits, more], axis=1)
    groups = rng.integers(0, max(static.united, 1), m)
    groups = np.where(rng.random(m) < rng.choice([0, 0, 0.3, 1]), -1, groups)
    groups = groups if static.united else np.full(m, -1)
    return Case(
        logits.astype(np.float32),
        groups.astype(np.int32),
        rng.permutation(2 * (m + static.united))[: m + static.united].astype(np.int32),
        np.int32(rng.choice([0, 100, rng.integers(0, 101)])),
        np.int32(strategy),
        rng.random(rows) >= rng.choice([0, 0, 0.2, 0.9, 1], p=[0.3, 0.3, 0.2, 0.15, 0.05]),
        rng.random(rows) < rng.choice([0, 0, 0.3]),
    )


@cache
def compiled(name, static):
    """The route of one shape, public or batched or of the kernel, interpreted or emulated."""
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), draw(0, static, 0))

    op = kernel_of(static, name) if name in ("mosaic", "sm90") else routing.route
    return jax.jit(partial(routed, op, static)).lower(arrays).compile()


def routed(op, static, case):
    """`op` of a case."""
    logits, *rest = case
    return op(logits, **dict(zip(Case._fields[1:], rest, strict=True)), **static.options())


def kernel_of(static, name="mosaic"):
    """The kernel as `route`, whatever the backend; `mosaic` to be interpreted."""
    from pallas_kernels.routing import mosaic

    interpreted = name == "mosaic" and not interpreter.ON_SM90
    blocks = routing.max_blocks(static.rows * static.top_k, static.experts, static.block_m)

    def op(logits, *, max_active, groups, slots, **rest):
        assert mosaic.supports(logits, groups, slots, static.top_k, static.block_m)
        more = {"groups": groups, "slots": slots, "num_blocks": blocks, "interpreted": interpreted}
        return mosaic.route(logits, **more, **rest)

    return op


def route_by_parts(case, static):
    """What the three public ops make of it."""
    with references_only():
        weights, ids = routing.gate(
            case.logits[:, : static.experts],
            top_k=static.top_k,
            normalize=static.normalize,
            scoring=static.scoring,
        )
        plan = routing.brownout_plan(
            ids,
            groups=case.groups,
            threshold_percent=case.threshold_percent,
            strategy=case.strategy,
            valid=case.valid,
            exempt=case.exempt,
        )
        work = routing.dispatch(
            plan.expert_ids,
            weights,
            case.slots,
            block_m=static.block_m,
            max_active=static.experts,
        )
        if static.tiles is not None:
            table = routing.map_tiles(work, static.tiles)
            work = work._replace(tile_map=TileMap(table, static.tiles))
    return ids, plan, work


by_parts = jax.jit(route_by_parts, static_argnums=1)


def check_route(name, static, cases):
    """Bit for bit what the parts make of it, and a dispatch of each piece of work once."""
    for case in cases:
        want = jax.tree.map(np.asarray, by_parts(jax.tree.map(jnp.asarray, case), static))
        with CONTEXTS[name]():
            got = compiled(name, static)(jax.tree.map(jnp.asarray, case))
            got = jax.tree.map(np.asarray, jax.block_until_ready(got))
        weights = [out[2].visit_weight for out in (got, want)]
        np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-12)
        work = check_tiles(got[2], want[2])._replace(visit_weight=weights[1])
        got = (*got[:2], work)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        types = [[leaf.dtype for leaf in jax.tree.leaves(out)] for out in (got, want)]
        assert types[0] == types[1]


def check_tiles(got, want):
    """Equal where there are tiles, and in their number. Returns `got` with the map wanted."""
    if want.tile_map is None:
        assert got.tile_map is None
        return got
    assert got.tile_map.tiles == want.tile_map.tiles
    a, b = got.tile_map.table, want.tile_map.table
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    count = b[0, COUNT]
    assert count == (-(-want.expert_rows // want.tile_map.tiles.rows)).sum()
    assert a[0, COUNT] == count
    np.testing.assert_array_equal(a[:count, :COUNT], b[:count, :COUNT])
    return got._replace(tile_map=want.tile_map)


CONTEXTS = {
    "public": nullcontext,
    "batched": batched_only,
    "mosaic": interpreter.interpreted,
    "sm90": interpreter.emulated,
}
ONE, MORE = routing.RowTiles(64, 16), routing.RowTiles(8, 2)  # tiles an expert
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
