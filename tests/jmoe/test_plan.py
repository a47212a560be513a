"""The brownout plan: against a brute-force oracle, the paper's example, its bound, bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plan_oracle
import pytest

from jmoe import brownout
from pallas_kernels import routing

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES_PER_STRATEGY = 5_000
BATCH = 500  # of one shape: every test runs the same compiled programs
# Rows, picks, experts: one pick to eight, a short last group for most ways, one row to many.
SHAPES = [(1, 3, 4), (7, 1, 5), (16, 2, 8), (12, 3, 13), (9, 6, 11), (6, 8, 16), (20, 4, 60)]
BUCKETS = (0, 10, 25, 40, 60, 75, 100)
_many = jax.jit(jax.vmap(routing.brownout_plan))


def generate(rng, num_rows, top_k, m, *, exempt=True):
    """Draws a batch of one shape: skewed and flat choices, many ties, padding, groups of every
    kind.
    """
    n = BATCH
    skew = rng.choice([0.0, 0.5, 2.0], (n, 1, 1)) * rng.normal(size=(n, 1, m))
    score = skew + rng.gumbel(size=(n, num_rows, m))
    ids = np.argsort(-score, axis=-1)[..., :top_k]
    repeated = rng.integers(0, m, (n, num_rows, top_k))  # a router never does, the plan may see it
    ids = np.where(rng.random((n, 1, 1)) < 0.1, repeated, ids)
    way = rng.integers(2, m + 1, (n, 1))
    by_index = np.arange(m)[None] // way
    custom = rng.integers(0, 1 + rng.integers(0, m, (n, 1)), (n, m))
    groups = np.where(rng.random((n, 1)) < 0.6, by_index, custom)
    groups = np.where(rng.random((n, m)) < rng.choice([0, 0, 0, 0.3, 1.0], (n, 1)), -1, groups)
    few, half = rng.choice([0.0, 0.2, 0.9], (n, 1)), rng.choice([0.0, 0.0, 0.3], (n, 1))
    return {
        "ids": ids.astype(np.int32),
        # Whole 2^-6, so that sums tie, and a half of 2^-15, which is rounded up.
        "weights": rng.choice([1 / 64, 3 / 64, 0.5 - 2**-16, 0.25], ids.shape).astype(np.float32),
        "groups": groups.astype(np.int32),
        "threshold_percent": rng.integers(0, 101, n, np.int32),
        "strategy": np.zeros(n, np.int32),
        "valid": rng.random((n, num_rows)) >= few,
        "exempt": (rng.random((n, num_rows)) < half) & exempt,
    }


def run(cases):
    return jax.tree.map(np.asarray, _many(**jax.tree.map(jnp.asarray, cases)))


def without_groups_missing(cases):
    """Completes the groups: the bounds hold where every expert has a united one."""
    return {**cases, "groups": np.maximum(cases["groups"], 0)}


@pytest.mark.sized(deep=("zero-weight", "full-weight", "partial-visits"))
@pytest.mark.parametrize("keep", ["visits", "weight"])
@pytest.mark.parametrize("strategy", ["zero", "full", "partial"])
def test_plan_equals_brute_force(strategy, keep):
    rng = np.random.default_rng(len(strategy))
    for shape in SHAPES * -(-CASES_PER_STRATEGY // (BATCH * len(SHAPES))):
        cases = generate(rng, *shape)
        cases["strategy"][:] = brownout.strategy_code(strategy, keep)
        got = run(cases)
        keys = ("ids", "groups", "threshold_percent", "valid", "exempt", "weights")
        for i, (ids, groups, threshold, valid, exempt, weights) in enumerate(
            zip(*(cases[key].tolist() for key in keys), strict=True)
        ):
            by = weights if keep == "weight" else None
            want = plan_oracle.plan(ids, groups, threshold, strategy, valid, exempt, by)
            have = (
                got.expert_ids[i].tolist(),
                got.degraded[i].tolist(),
                set(np.flatnonzero(got.s1[i]).tolist()),
            )
            assert have == want, {key: cases[key][i] for key in keys}


@pytest.mark.parametrize("keep", ["visits", "weight"])
@pytest.mark.parametrize("strategy", ["zero", "full", "partial"])
def test_public_plan_equals_brute_force(strategy, keep):
    rng = np.random.default_rng(1)
    cases = generate(rng, 12, 3, 13)
    for i in range(60):
        case = {key: value[i] for key, value in cases.items()}
        threshold, way = int(case["threshold_percent"]), 2 + i % 12
        given = {"way": way} if i % 2 else {"groups": case["groups"].tolist()}
        ids = np.where(case["valid"][:, None], case["ids"], 99)  # what a padding row holds is junk
        got = brownout.plan(
            ids,
            num_experts=13,
            threshold_percent=threshold,
            strategy=strategy,
            keep=keep,
            weights=case["weights"],
            valid=case["valid"],
            exempt=case["exempt"],
            **given,
        )
        groups = [e // way for e in range(13)] if i % 2 else case["groups"].tolist()
        rows = case["valid"].tolist(), case["exempt"].tolist()
        by = case["weights"].tolist() if keep == "weight" else None
        want, degraded, s1 = plan_oracle.plan(ids.tolist(), groups, threshold, strategy, *rows, by)
        assert got.expert_ids.tolist() == want
        assert got.degraded.tolist() == degraded
        assert set(np.flatnonzero(got.s1).tolist()) == s1


# The example of the paper's figure 5: eight experts, 20 visits, 60 percent.
COUNTS = (2, 4, 1, 5, 2, 1, 2, 3)
EXAMPLE = np.repeat(np.arange(8), COUNTS).reshape(-1, 2)


def planned(**kwargs):
    """Returns what serves each expert's visits in the paper's example at 60 percent."""
    plan = brownout.plan(EXAMPLE, num_experts=8, threshold_percent=60, **kwargs)
    pairs = set(zip(EXAMPLE.ravel().tolist(), np.ravel(plan.expert_ids).tolist(), strict=True))
    assert len(pairs) == 8
    return dict(sorted(pairs)), np.flatnonzero(plan.s1).tolist()


def test_papers_example_four_way():
    served, s1 = planned(way=4)
    assert s1 == [1, 3, 7]
    ue0, ue1 = 8, 9
    assert served == {0: ue0, 1: 1, 2: ue0, 3: 3, 4: ue1, 5: ue1, 6: ue1, 7: 7}


def test_papers_example_three_way_keeps_a_lone_expert():
    served, s1 = planned(way=3)  # {0, 1, 2}, {3, 4, 5}, {6, 7}
    assert s1 == [1, 3, 7]
    assert served == {0: 8, 1: 1, 2: 8, 3: 3, 4: 9, 5: 9, 6: 6, 7: 7}


def test_papers_example_full():
    served, _ = planned(strategy="full")
    assert served == {0: -1, 1: 1, 2: -1, 3: 3, 4: -1, 5: -1, 6: -1, 7: 7}


def test_papers_example_with_an_exempt_row():
    """The exempt row visits E2 (and E3): both are loaded anyway and count as covered."""
    exempt = (EXAMPLE == 2).any(axis=1)
    assert EXAMPLE[exempt].tolist() == [[2, 3]]
    plan = brownout.plan(EXAMPLE, num_experts=8, threshold_percent=60, way=4, exempt=exempt)
    # 18 degradable visits, of which E3 (4), E1 (4) and E7 (3) cover 61 percent; E0 is alone in S2.
    assert np.flatnonzero(plan.s1).tolist() == [1, 2, 3, 7]
    assert plan.expert_ids[exempt].tolist() == [[2, 3]]
    assert sorted(set(np.ravel(plan.expert_ids).tolist())) == [0, 1, 2, 3, 7, 9]


def test_nothing_changes_at_100_percent_nor_under_zero():
    rng = np.random.default_rng(2)
    for shape in SHAPES:
        cases = generate(rng, *shape)
        cases["strategy"] = rng.integers(0, 3, BATCH, np.int32)
        cases["threshold_percent"][cases["strategy"] != routing.ZERO] = 100
        got = run(cases)
        assert not got.degraded.any()
        want = np.where(cases["valid"][:, :, None], cases["ids"], -1)
        np.testing.assert_array_equal(got.expert_ids, want)


def test_exempt_rows_are_never_degraded_and_their_experts_stay():
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        cases = generate(rng, *shape)
        cases["strategy"] = rng.integers(1, 3, BATCH, np.int32)
        got = run(cases)
        exempt = cases["exempt"] & cases["valid"]
        assert not got.degraded[exempt].any()
        np.testing.assert_array_equal(got.expert_ids[exempt], cases["ids"][exempt])
        case, _ = np.nonzero(exempt)
        assert got.s1[case[:, None], cases["ids"][exempt]].all()


def test_a_higher_threshold_degrades_a_subset_of_the_visits():
    """S1 is a prefix of one order, so it only grows with t, and the groups' S2 only shrink."""
    rng = np.random.default_rng(4)
    for shape in SHAPES:
        cases = generate(rng, *shape)
        cases["strategy"] = rng.integers(1, 3, BATCH, np.int32)
        before = None
        for threshold in (0, 7, 20, 33, 50, 51, 80, 99, 100):
            cases["threshold_percent"][:] = threshold
            now = run(cases)
            if before is not None:
                assert not (now.degraded & ~before.degraded).any()
                assert not (before.s1 & ~now.s1).any()
            before = now


@pytest.mark.parametrize("strategy", ["full", "partial"])
def test_active_experts_stay_within_the_bucket(strategy):
    rng = np.random.default_rng(5)
    for num_rows, top_k, m in SHAPES:
        cases = without_groups_missing(generate(rng, num_rows, top_k, m, exempt=False))
        cases["strategy"][:] = routing.STRATEGIES[strategy]
        plans = run(cases).expert_ids
        active = [len(set(ids[ids >= 0].tolist())) for ids in plans]
        united = [len(set(row)) for row in cases["groups"].tolist()]
        for n, u, t in zip(active, united, cases["threshold_percent"].tolist(), strict=True):
            u = u if strategy == "partial" else 0
            for bucket in {t, *(b for b in BUCKETS if b >= t)}:
                assert n <= routing.max_active_experts(bucket, m, u, num_rows * top_k)


@pytest.mark.parametrize("threshold", [0, 1, 20, 33, 40, 50, 75, 99])
@pytest.mark.parametrize(("m", "way"), [(8, 2), (8, 4), (13, 3), (16, 5), (60, 2), (60, 4)])
def test_the_bound_of_partial_is_attained(m, way, threshold):
    """S1 as large as can be, and an S2 expert with visits left in as many groups as can be."""
    united = -(-m // way)
    bound = routing.max_active_experts(threshold, m, united, 10**6)
    groups = np.arange(m) % united
    s1 = range(m - -(-threshold * m // 100), m)  # the last ones: every group's first stay in S2
    ids = np.zeros((101 * 60, 1), int)  # padded to one length: a program for each m
    visits = np.repeat(np.arange(m), [101 if e in s1 else 100 for e in range(m)])
    ids[: len(visits), 0] = visits
    plan = brownout.plan(
        ids,
        num_experts=m,
        threshold_percent=threshold,
        groups=groups,
        valid=np.arange(len(ids)) < len(visits),
    )
    assert np.flatnonzero(plan.s1).tolist() == list(s1)
    assert len(set(np.ravel(plan.expert_ids).tolist()) - {-1}) == bound


@pytest.mark.parametrize("threshold", [1, 20, 33, 75, 100])
def test_the_bound_of_full_is_attained(threshold):
    ids = np.arange(60).reshape(15, 4)
    plan = brownout.plan(ids, num_experts=60, threshold_percent=threshold, strategy="full")
    bound = routing.max_active_experts(threshold, 60, 0, ids.size)
    assert len(set(np.ravel(plan.expert_ids).tolist()) - {-1}) == bound


def test_the_bound_of_visits_is_attained():
    plan = brownout.plan([[5, 9]], num_experts=60, threshold_percent=50, way=2)
    assert len(set(np.ravel(plan.expert_ids).tolist())) == 2
    assert routing.max_active_experts(50, 60, 30, 2) == 2


GOOD = {"ids": [[0, 1], [2, 3]], "num_experts": 4, "threshold_percent": 50, "way": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": np.array([0, 1])}, r"ids must be integers \[T, K\]; got int64 \(2,\)"),
        ({"ids": [[0.5, 1.0]]}, "ids must be integers .* got float64"),
        ({"ids": [[0, 4]]}, "ids span 0 to 4; experts are 0 to 3"),
        ({"ids": [[-1, 2]]}, "ids span -1 to 2; experts are 0 to 3"),
        ({"threshold_percent": 101}, "threshold is 101 %; it must be between 0 and 100"),
        ({"threshold_percent": -1}, "threshold is -1 %; it must be between 0 and 100"),
        ({"threshold_percent": 0.6}, "threshold_percent is 0.6; it must be an integer"),
        ({"threshold_percent": float("nan")}, "threshold_percent is nan; it must be an integer"),
        ({"threshold_percent": True}, "threshold_percent is True; it must be an integer"),
        ({"threshold_percent": np.True_}, r"threshold_percent is np.True_; it must be an integer"),
        ({"way": 2.5}, "way is 2.5; it must be an integer"),
        ({"way": "2"}, "way is '2'; it must be an integer"),
        ({"way": True, "strategy": "zero"}, "way is True; it must be an integer"),
        ({"num_experts": 4.0}, "num_experts is 4.0; it must be an integer"),
        ({"strategy": "half"}, "strategy is 'half'; it must be one of zero, partial, full"),
        ({"way": 1}, "way is 1; it must be between 2 and the 4 experts"),
        ({"way": 5}, "way is 5; it must be between 2 and the 4 experts"),
        ({"way": None}, "partial brownout needs way or groups"),
        ({"groups": [0, 0, 1, 1]}, "either way or groups, not both"),
        ({"way": None, "groups": [0, 0, 1]}, r"groups must be 4 integers; got int64 \(3,\)"),
        ({"way": None, "groups": [0, 0, 1, 4]}, "groups span 0 to 4; expected -1 to 3"),
        ({"way": None, "groups": [0, 0, -2, 1]}, "groups span -2 to 1; expected -1 to 3"),
        ({"valid": [True]}, r"valid must be bool \[2\]; got bool \(1,\)"),
        ({"exempt": [0, 1]}, r"exempt must be bool \[2\]; got int64 \(2,\)"),
    ],
)
def test_bad_input_names_the_value_and_what_is_expected(change, words, without_type_checks):
    plan = partial(brownout.plan, **{**GOOD, **change})
    with pytest.raises(ValueError, match=words):
        plan()


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.array, jnp.int32])
def test_integers_of_any_library_are_taken(kind, without_type_checks):
    numbers = {name: kind(GOOD[name]) for name in ("num_experts", "threshold_percent", "way")}
    found, wanted = brownout.plan(GOOD["ids"], **numbers), brownout.plan(**GOOD)
    assert found.expert_ids.tolist() == wanted.expert_ids.tolist()
    setting = brownout.Brownout("partial", kind(50), kind(2))
    assert setting == brownout.Brownout("partial", 50, 2)
    assert repr(setting).endswith("threshold_percent=50, way=2, keep='visits', levels=False)")


def test_no_rows_and_only_padding():
    empty = brownout.plan(np.zeros((0, 2), int), num_experts=4, threshold_percent=50, way=2)
    assert empty.expert_ids.shape == (0, 2)
    padding = brownout.plan([[7, 7]], num_experts=4, threshold_percent=0, way=2, valid=[False])
    assert padding.expert_ids.tolist() == [[-1, -1]]
    assert not padding.degraded.any()


def test_weights_that_no_router_gives_are_refused_or_hold():
    """Beyond what an int32 sum of units holds, too: the heaviest of 40 rows is still kept."""
    ids = np.tile([[0, 1]], (40, 1))
    given = {"num_experts": 4, "threshold_percent": 50, "way": 2, "keep": "weight"}
    heavy = np.tile([[1.0, 1e9]], (40, 1))
    assert np.flatnonzero(brownout.plan(ids, weights=heavy, **given).s1).tolist() == [1]
    for wrong in (np.nan, np.inf, -0.5):
        with pytest.raises(ValueError, match=r"weights have .*; they must be finite"):
            brownout.plan(ids, weights=np.full((40, 2), wrong), **given)
    with pytest.raises(ValueError, match="give weights"):
        brownout.plan(ids, **given)
