"""A strategy of a user's own: what it plans is served, and what is wrong with it is said."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe import brownout
from jmoe.brownout import Brownout, LowestGate, Own

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

TOKENS = np.random.default_rng(0).integers(1, 60, (3, 9))
M, K, WAY = 7, 2, 3
FAILS = "returned experts out of range"


class Rows:
    """Plans what it is made with for every row and pick, whatever those are."""

    def __init__(self, plans):
        self.plans = plans

    def __call__(self, ids, weights, groups, threshold_percent, valid, exempt):
        return self.plans(ids, groups)


def to_united(ids, groups):
    return len(groups) + groups[ids]


def exact(ids, groups):
    return ids


def nowhere(ids, groups):
    return jnp.full_like(ids, 10**6)


def raises(ids, groups):
    raise SystemExit("that is all")


def floats(ids, groups):
    return ids.astype(jnp.float32)


def cases(seed, num_rows=12):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_rows, M)), axis=1)[:, :4]
    return {
        "ids": ids,
        "weights": rng.choice([0.1, 0.2, 0.4], ids.shape).astype(np.float32),  # with ties
        "valid": rng.random(num_rows) < 0.8,
        "exempt": rng.random(num_rows) < 0.3,
    }


def plan(strategy, threshold, case, **given):
    given.setdefault("way", WAY)
    return brownout.plan(
        num_experts=M, threshold_percent=threshold, strategy=strategy, **case, **given
    )


@pytest.mark.parametrize("threshold", [0, 25, 60, 75, 99, 100])
def test_the_lowest_gate_is_what_plain_loops_say(threshold):
    for seed in range(3):
        case = cases(seed)
        got = plan(LowestGate(), threshold, case)
        for row, ids in enumerate(case["ids"].tolist()):
            order = sorted(range(4), key=lambda pick: -case["weights"][row, pick])
            kept = {p for n, p in enumerate(order) if n == 0 or 100 * n < threshold * 4}
            if case["exempt"][row]:
                kept = set(range(4))
            want = [expert if p in kept else -1 for p, expert in enumerate(ids)]
            want = want if case["valid"][row] else [-1] * 4
            assert got.expert_ids[row].tolist() == want
            moved = case["valid"][row] & (np.array(want) != ids)
            assert got.degraded[row].tolist() == moved.tolist()


@pytest.mark.parametrize("plans", [nowhere, to_united])
def test_padding_is_nobodys_and_exempt_rows_have_their_own_whatever_it_says(plans):
    case = cases(1)
    every = np.ones(len(case["ids"]), bool)
    for kept in ({"exempt": every}, {"valid": ~every}):
        got = plan(Rows(plans), 0, case | kept)
        want = np.where(case["valid"][:, None] & ("valid" not in kept), case["ids"], -1)
        assert got.expert_ids.tolist() == want.tolist()
    got = plan(Rows(to_united), 0, case)
    served = np.where(case["exempt"][:, None], case["ids"], M + case["ids"] // WAY)
    assert got.expert_ids.tolist() == np.where(case["valid"][:, None], served, -1).tolist()
    assert plan(Rows(plans), 100, case).degraded.sum() == 0


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        (nowhere, f"test_own_strategy:Rows {FAILS}"),
        (lambda ids, groups: ids - 8, FAILS),
        (raises, "Rows failed with SystemExit: that is all"),
        (floats, r"it returned float32 \[12, 4\], not integers \[12, 4\]"),
        (lambda ids, groups: ids[:, :1], r"not integers \[12, 4\]"),
    ],
)
def test_what_is_wrong_with_it_is_named(plans, said):
    with pytest.raises(ValueError, match=said):
        plan(Rows(plans), 50, cases(2))


def test_a_united_expert_that_no_group_names_is_out_of_range():
    groups = [0, 0, 0, -1, -1, -1, -1]
    case = cases(3) | {"ids": np.zeros((12, 4), int)}
    assert (plan(Rows(to_united), 0, case, groups=groups, way=None).expert_ids <= M).all()
    with pytest.raises(ValueError, match=FAILS):
        plan(Rows(lambda ids, groups: ids + M + 1), 0, case, groups=groups, way=None)


def test_bad_settings_are_named(without_type_checks):
    with pytest.raises(ValueError, match=r"give the object itself: import the class"):
        Brownout("module:Class", 40)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Rows decides by itself what to keep"):
        Brownout(Rows(exact), 40, keep="weight")
    with pytest.raises(ValueError, match=r"must be zero, partial, full, or a hashable object"):
        Brownout(3, 40)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LowestGate goes by the gate weights: give weights"):
        brownout.plan([[0, 1]], num_experts=M, threshold_percent=0, strategy=LowestGate())


@pytest.mark.parametrize("plans", [nowhere, raises])
def test_in_a_server_the_papers_plan_goes_on_and_one_line_says_so(plans, caplog):
    case = cases(4)
    own, groups = Own(Rows(plans), guarded=True), jnp.arange(M, dtype=jnp.int32) // WAY
    arrays = [jnp.asarray(case[key]) for key in ("ids", "weights", "valid", "exempt")]
    ids, weights, *rows = arrays[0].astype(jnp.int32), *arrays[1:]
    control = brownout.Control.of(Brownout(own.strategy, 40))
    brownout._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jmoe.brownout"):
        for _ in range(2):
            (got, _, _), wrong = brownout._plan(own, ids, weights, groups, *rows, control)
            own.check(wrong)
            own.probe(M, 4)
    assert got.tolist() == plan("partial", 40, case).expert_ids.tolist()
    assert len(caplog.records) == 1
    assert "visits (the paper's plan)" in caplog.text


def test_more_experts_than_it_says_are_none_of_its_own():
    case = {key: jnp.asarray(value) for key, value in cases(5).items()}
    given = case["ids"].astype(jnp.int32), case["weights"], jnp.arange(M, dtype=jnp.int32) // WAY
    rows = case["valid"], ~case["valid"]
    control = brownout.Control.of(Brownout(LowestGate(), 40))
    papers = brownout.routing.Plan(*plan("full", 0, cases(5)))
    own = Own(Rows(exact), guarded=True)
    visited = len(np.unique(np.asarray(given[0])[np.asarray(case["valid"])]))
    for room, wrong in ((visited, 0), (visited - 2, 2)):
        found, count = own.instead(papers, *given, *rows, control, room)
        assert count == wrong
        kept = np.where(case["valid"][:, None], case["ids"], -1)
        assert found.expert_ids.tolist() == (papers.expert_ids if wrong else kept).tolist()


def test_a_bound_is_asked_of_it_and_none_means_all():
    class Bounded(LowestGate):
        def max_active(self, threshold_percent, num_experts, num_united):
            return threshold_percent * num_experts // 100 + num_united

    assert Own(Bounded()).most_active(50, 60, 8) == 38
    assert Own(Bounded()).most_active(100, 60, 8) == 68
    assert Own(LowestGate()).most_active(50, 60, 8) == 68


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("generate",))
@pytest.mark.parametrize("name", ["forward", "generate"])
def test_models_serve_what_it_plans(name, united_models):
    model = united_models("qwen2_moe")
    model.use_way(3)  # groups are not by index
    prompts = TOKENS.tolist()

    def run(setting):
        if name == "generate":
            out = jmoe.generate(model, prompts, 3, setting)
            return [out.logprobs, out.degraded_visits]
        logits, stats = jmoe.forward(model, TOKENS, setting, return_stats=True)
        return [np.asarray(logits).tolist(), np.asarray(stats.degraded_visits).tolist()]

    assert run(Brownout(Rows(exact), 0)) == run(None)
    assert run(Brownout(Rows(to_united), 100)) == run(None)
    dropped = run(Brownout(Rows(lambda ids, groups: ids * 0 - 1), 0))
    assert dropped == run(Brownout("full", 0))
    assert dropped != run(None)
    with pytest.raises(ValueError, match=FAILS):
        run(Brownout(Rows(nowhere), 50))


@pytest.mark.deep
def test_a_strategy_gets_the_united_experts_that_partial_brownout_would():
    """Of a model that was just loaded no way is in its slots yet."""
    model = jmoe.load("bundled", dtype="float32", ways=[4, 8])
    united = Brownout(Rows(to_united), 0)
    _, stats = jmoe.forward(model, TOKENS, united, return_stats=True)
    assert model.way == 8
    assert stats.degraded_share == 1.0
