"""No threshold passes the bound on expected loss, and answers say what theirs let expect."""

import asyncio
import math
import shutil
from dataclasses import replace

import pytest
from counting import LIMITS, collect
from families import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

import jmoe
from jmoe import beside, expected_loss
from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from jmoe.family import Family
from jmoe.packed_rows import EXEMPT
from jmoe.sharing import Sharing, read_sharing, write_sharing
from serving.bench.simulated_time import SimulatedLoop
from serving.config import AuditConfig, BrownoutConfig, EngineConfig, SalcConfig
from serving.control.controller import Decision
from serving.control.experts_loader import ExpertsLoader
from serving.control.losses import Losses
from serving.engine import Engine
from serving.errors import InvalidRequest, SettingsError
from serving.plan import Phase
from serving.request import BrownoutChange, Priority
from serving.settings.reading import load
from serving.startup.loading import expected_losses
from tests.jmoe.conftest import add_united
from tests.serving.fake_runner import FakeRunner
from tests.variants import variant

BE = Priority.BEST_EFFORT
FULL = Kind(0, "weight")
CURVE = tuple((100 - at) / 100 for at in range(101))  # at threshold t, 1 - t/100 nats
FIXED = {"salc": False, "strategy": "full"}


class Recording(FakeRunner):
    """A runner that records the threshold of each row that may be degraded, and of each token."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.thresholds = []
        self.of_tokens = {}  # by the number of a request's prompt

    def computed(self, plan, control, row, model, new, adopted):
        token, _ = super().computed(plan, control, row, model, new, adopted)
        percent = 100 if row[EXEMPT] else control.threshold_percent
        self.thresholds.append(percent)
        if plan.is_last:
            self.of_tokens.setdefault(token // 1000, []).append((token, percent))
        return token, len(new) if percent < 100 and plan.is_last else 0


def start(brownout=None, curve=CURVE, kinds=(FULL,), salc=None, share=0.0, **options):
    runner = Recording(LIMITS, vocab_size=100_000, **options)
    config = EngineConfig(
        max_model_len=200,
        watchdog_s=0,
        brownout=BrownoutConfig(**(FIXED | (brownout or {}))),
        salc=SalcConfig(**(salc or {})),
        audit=AuditConfig(share=share),
    )
    clock = asyncio.get_running_loop().time
    losses = [dict.fromkeys(kinds, curve)] if curve else ()
    engine = Engine(config, runner, None, (), clock, losses)
    engine.run()
    return engine


async def play(asked, fixed, most, **options):
    """Serves requests of (prompt length, new tokens, best effort) under fixed thresholds; returns
    every row's threshold.
    """
    prefill, decode = fixed
    thresholds = {"prefill_threshold_percent": prefill, "decode_threshold_percent": decode}
    engine = start(thresholds | {"max_expected_loss": most}, **options)
    calls = [
        collect(
            engine,
            [1000 * number + at for at in range(length)],
            new,
            priority=BE if best_effort else Priority.LATENCY_SENSITIVE,
        )
        for number, (length, new, best_effort) in enumerate(asked)
    ]
    await asyncio.gather(*calls)
    await engine.stop()
    return engine.executor.thresholds


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=8
    ),
    st.tuples(st.integers(0, 100), st.integers(0, 100)),
    st.floats(0.001, 1.5),
    st.sampled_from((0, 1)),
)
def test_no_row_passes_the_bound(asked, fixed, most, part_layers):
    with asyncio.Runner(loop_factory=SimulatedLoop) as loop:
        seen = loop.run(play(asked, fixed, most, step_s=0.01, part_layers=part_layers))
    assert seen
    assert all(CURVE[percent] <= most for percent in seen)


@pytest.mark.simulated_time
async def test_the_bound_is_used():
    seen = await play([(3, 30, False)] * 3, (0, 0), 0.35, step_s=0.01)
    assert set(seen) == {65}
    assert set(await play([(3, 30, False)], (0, 0), 0.0, step_s=0.01)) == {0}


@pytest.mark.simulated_time
async def test_controllers_keep_to_it_and_say_so():
    engine = start({"salc": True, "max_expected_loss": 0.25}, step_s=0.01)
    engine.slo.ls.controller.decide = lambda seen: Decision(0.0, 0.0)
    engine.slo._released = lambda *_: {}
    await collect(engine, [1, 2, 3], 150)
    await asyncio.sleep(10)
    engine.executor.thresholds.clear()
    await collect(engine, [1000, 1001], 20)
    assert set(engine.executor.thresholds) == {75}
    state = engine.get_brownout()
    assert (state.prefill_threshold_percent, state.decode_threshold_percent) == (75, 75)
    assert (state.max_expected_loss, state.least_threshold_percent) == (0.25, 75)
    assert "exhausted" not in state.objective_state
    await engine.stop()


@pytest.mark.simulated_time
async def test_controllers_see_what_is_expected_of_what_is_served():
    engine, seen = start({"salc": True}, step_s=0.01), []
    engine.slo.ls.controller.decide = lambda now: seen.append(now) or Decision(80.0, 80.0)
    await collect(engine, [1, 2, 3], 20)
    assert [seen[-1].loss(phase)[40] for phase in Phase] == [0.6, 0.6]
    await engine.set_brownout(BrownoutChange(keep="visits"))  # which has no table
    await asyncio.sleep(3)
    await collect(engine, [1000, 1001], 20)
    assert seen[-1].loss is None
    await engine.stop()


@pytest.mark.simulated_time
async def test_it_is_set_while_serving_and_taken_back():
    engine = start({"decode_threshold_percent": 20}, step_s=0.01)
    assert engine.get_brownout().decode_threshold_percent == 20
    state = await engine.set_brownout(BrownoutChange(max_expected_loss=0.5))
    assert (state.decode_threshold_percent, state.least_threshold_percent) == (50, 50)
    state = await engine.set_brownout(BrownoutChange(decode_threshold_percent=10))
    assert (state.decode_threshold_percent, state.max_expected_loss) == (50, 0.5)
    state = await engine.set_brownout(BrownoutChange(max_expected_loss=0.0))
    assert (state.decode_threshold_percent, state.least_threshold_percent) == (10, 0)
    await engine.stop()


@pytest.mark.simulated_time
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_expected_loss": -0.1}, "max_expected_loss is -0.1; it must be 0"),
        ({"max_expected_loss": math.nan}, "max_expected_loss is nan; it must be 0"),
        ({"max_expected_loss": math.inf}, "max_expected_loss is inf; it must be 0"),
        (
            {"max_expected_loss": 0.2, "keep": "visits"},
            "is 0.2, and the model has no expected loss of full brownout by visits; `jmoe eval",
        ),
    ],
)
async def test_a_bound_that_cannot_be_kept_is_named(change, words):
    engine = start()
    with pytest.raises(InvalidRequest, match=words):
        await engine.set_brownout(BrownoutChange(**change))
    assert engine.get_brownout().max_expected_loss == 0
    await engine.set_brownout(BrownoutChange(max_expected_loss=0.3))
    with pytest.raises(InvalidRequest, match=r"max_expected_loss is 0.3, and the model has no"):
        await engine.set_brownout(BrownoutChange(keep="visits"))  # which has no table
    await engine.stop()
    engine = start(curve=None)
    with pytest.raises(InvalidRequest, match=r"is 0.2, and the model has no expected loss of full"):
        await engine.set_brownout(BrownoutChange(max_expected_loss=0.2))
    await engine.stop()


TWO, FOUR = Kind(2, "weight"), Kind(4, "weight")


def changing(known, **brownout):
    """Returns an engine of ways 2 and 4, of which only `known` have a table, and the task that
    changes way 2 to way 4, along with `brownout`; nothing is loaded before it is let.
    """
    engine = start(kinds=known)
    engine.slo.strategy, engine.slo.way = "partial", 2
    engine.loader = ExpertsLoader(engine.executor, None, (2, 4), engine.slo)
    engine.loader.advance, go_on = lambda *_: None, engine.loader.advance

    def let():
        engine.loader.advance = go_on

    change = BrownoutChange(way=4, **brownout)
    return engine, asyncio.create_task(engine.set_brownout(change)), let


@pytest.mark.simulated_time
@pytest.mark.parametrize(
    ("known", "earlier", "change", "refused"),
    [
        (TWO, {}, {"max_expected_loss": 0.5}, "way 4 by weight"),
        (FOUR, {}, {"max_expected_loss": 0.5}, ""),
        (TWO, {"strategy": "zero"}, {"max_expected_loss": 0.5}, ""),
        (FOUR, {"keep": "visits"}, {"max_expected_loss": 0.5}, "way 4 by visits"),
        (FOUR, {"max_expected_loss": 0.5}, {"keep": "visits"}, "way 4 by visits"),
        (FOUR, {"max_expected_loss": 0.5}, {"way": 2}, "way 2 by weight"),
        (TWO, {}, {"max_expected_loss": 0.5, "way": 2}, ""),
    ],
)
async def test_a_bound_is_checked_against_the_way_that_is_to_come(known, earlier, change, refused):
    """And against what else is set with it. What a change would do is told of the same."""
    engine, earlier, let = changing((known,), **earlier)
    await asyncio.sleep(0)
    change = BrownoutChange(**change)
    if refused:
        words = f"max_expected_loss is 0.5, and the model has no expected loss of {refused}"
        with pytest.raises(InvalidRequest, match=words):
            engine.what_if(change)
        with pytest.raises(InvalidRequest, match=words):
            await engine.set_brownout(change)
    else:
        engine.what_if(change)
        made = asyncio.create_task(engine.set_brownout(change))
        await asyncio.sleep(0)
    let()
    await earlier
    if not refused:
        await made
        assert engine.get_brownout().least_threshold_percent in (0, 50)
    assert engine.get_brownout().way == (2 if change.way == 2 and not refused else 4)
    await engine.stop()


@pytest.mark.simulated_time
async def test_a_change_that_went_without_its_caller_counts_no_more():
    """What it would have set besides is dropped, so that a later one is checked without it."""
    engine, earlier, let = changing((FOUR, Kind(2, "visits")), keep="visits")
    await asyncio.sleep(0)
    later = engine.set_brownout(BrownoutChange(way=2, max_expected_loss=0.5))
    later = asyncio.create_task(later)
    await asyncio.sleep(0)
    earlier.cancel()
    let()
    words = r"is 0.5, and the model has no expected loss of way .*; the way is 2 now, all else"
    with pytest.raises(InvalidRequest, match=words):
        await later
    state = engine.get_brownout()
    assert (state.way, state.keep, state.max_expected_loss) == (2, "weight", 0.0)
    await engine.stop()


@pytest.mark.simulated_time
async def test_an_answer_says_what_its_thresholds_let_expect():
    thresholds = {"prefill_threshold_percent": 40, "decode_threshold_percent": 90}
    engine = start(thresholds, step_s=0.01)
    outs = await asyncio.gather(
        collect(engine, [1, 2, 3], 5),
        collect(engine, [1001, 1002], 5, allow_brownout=False),
        collect(engine, [2001, 2002], 5, priority=BE),  # degraded first, and so to more
        collect(engine, [3001], 30, max_degraded_percent=50),
    )
    for number, found in enumerate(outs):
        costs = [CURVE[percent] for _, percent in engine.executor.of_tokens[number]]
        for count, out in enumerate(found, 1):
            assert out.usage.expected_loss == pytest.approx(sum(costs[:count]) / count)
    assert [found[-1].usage.expected_loss > 0 for found in outs] == [True, False, True, True]
    stats = engine.stats()
    assert stats.priced_tokens == sum(map(len, outs)) == 45
    total = sum(found[-1].usage.expected_loss * len(found) for found in outs)
    assert stats.expected_loss_nats == pytest.approx(total)
    await engine.stop()


@pytest.mark.simulated_time
async def test_without_a_table_it_is_not_known_but_of_exact_answers():
    engine = start({"decode_threshold_percent": 90}, curve=None, step_s=0.01)
    [*_, degraded] = await collect(engine, [1, 2, 3], 5)
    [*_, exact] = await collect(engine, [1, 2, 3], 5, allow_brownout=False)
    assert math.isnan(degraded.usage.expected_loss)
    assert exact.usage.expected_loss == 0
    assert engine.stats().priced_tokens == 6  # one is of the prompt, which was exact
    await engine.stop()


@pytest.mark.simulated_time
async def test_the_audit_tells_what_was_expected_of_the_answers_that_it_scored():
    thresholds = {"prefill_threshold_percent": 40, "decode_threshold_percent": 90}
    engine = start(thresholds, share=1.0, step_s=0.01)
    assert math.isnan(engine.stats().audits[0].expected_nats)
    [*_, one] = await collect(engine, [1, 2, 3], 5)
    [*_, other] = await collect(engine, [1, 2, 3], 9)
    while (audit := engine.stats().audits[0]).num_scored < 2:
        await asyncio.sleep(1)
    total = 5 * one.usage.expected_loss + 9 * other.usage.expected_loss
    assert total == pytest.approx(2 * 0.6 + 12 * 0.1)
    assert audit.expected_nats == pytest.approx(total / 14)
    await engine.stop()


def test_the_bound_holds_for_every_model_and_while_ways_change():
    two, eight = Kind(2, "weight"), Kind(8, "weight")
    dear = tuple(2 * loss for loss in CURVE)
    losses = Losses(("base", "law"), [{two: CURVE, eight: dear}] * 2, levels=False)
    code = 6  # partial by weight
    assert losses.least_percent(code, 2, 0.5) == 50
    assert losses.least_percent(code, 8, 0.5) == 75
    assert losses.least_percent(code, -1, 0.5) == 75
    assert losses.least_percent(code, 4, 0.5) == 100
    one = Losses(("base", "law"), [{two: CURVE}, {two: dear}], levels=False)
    assert one.least_percent(code, 2, 0.5) == 75
    assert one.highest(code, 2) == dear
    assert losses.highest(code, 2) == CURVE
    assert losses.highest(code, 4) is losses.highest(code, -1) is None
    assert losses.curves(0, 4) == ((0.0,) * 101,) * 2
    assert "model 'law' has no expected loss of way 2" in (
        Losses(("base", "law"), [{two: CURVE}, {}], levels=False).missing("partial", 2, "weight")
    )
    assert "strategy 'a:B'" in losses.missing("a:B", 2, "visits")


# ---- at the start -------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """Makes a model with expected loss of way 2 alone."""
    made = shutil.copytree(GOLDEN, tmp_path / "model")
    add_united(made)
    write(made, beside.digest_of(made))
    return made


def write(directory, digest):
    table = ExpectedLoss(Kind(2, "weight"), (Point(0, 0.5, 0.4, 0.6),))
    expected_loss.write(directory / expected_loss.FILE, [table], digest)


def test_what_is_wrong_with_a_bound_is_named_at_the_start(directory, caplog):
    family = Family.of(jmoe.load(directory, "float32"))
    bound = EngineConfig(brownout=BrownoutConfig(max_expected_loss=0.1))
    free = EngineConfig()

    def refused(words, way=2, **brownout):
        given = replace(bound.brownout, **brownout)
        with pytest.raises(
            SettingsError, match=f"engine.brownout.max_expected_loss is 0.1, and {words}"
        ):
            expected_losses(replace(bound, brownout=given), family, (way,))

    expected_losses(bound, family, (2,))
    [curves] = expected_losses(free, family, (2,))
    assert curves[Kind(2, "weight")][50] == pytest.approx(0.25)
    refused("model 'model' has no expected loss of way 3 by weight; `jmoe evaluate --keep", way=3)
    refused("model 'model' has no expected loss of way 2 by visits", keep="visits")
    refused("model 'model' has no expected loss of way 2 by weight in levels", levels=True)
    refused("what the strategy 'a:B' costs is not known", strategy="a:B")
    write(directory, "of another")
    refused(".*expected_loss.json is of the model 'of another', and this one is")
    assert expected_losses(free, family, (2,)) == [{}]
    assert "expected loss is not known: " in caplog.text
    (directory / expected_loss.FILE).unlink()
    refused(".*model has no expected_loss.json; `jmoe evaluate` measures and writes it")
    caplog.clear()
    assert expected_losses(free, family, (2,)) == [{}]
    assert not caplog.text
    expected_losses(free, family, (2,))


@pytest.mark.deep
def test_a_family_has_a_table_for_each_model_beside_its_map(directory, tmp_path):
    (directory / expected_loss.FILE).unlink()
    law = variant(directory, tmp_path / "law", seed=1)
    add_united(law, seed=1)
    paths, path = {"base": directory, "law": law}, tmp_path / "maps" / "family.json"
    cfg, kind = read_config(directory), Kind(2, "weight")
    own = Sharing.none(tuple(paths), cfg.num_moe_layers, cfg.num_experts)
    sharing = replace(own, fingerprints=tuple(map(weights_digest, paths.values())))
    path.parent.mkdir()
    write_sharing(path, sharing)

    def dearest(*order, most=0.0, named=paths, **absent):
        named = {name: named[name] for name in order}
        family = jmoe.load_family(named, path, "float32", **absent)
        brownout = BrownoutConfig(max_expected_loss=most)
        found = expected_losses(EngineConfig(family=str(path), brownout=brownout), family, (2,))
        return [curves[kind][0] if curves else None for curves in found]

    for number, (name, excess) in enumerate((("base", 0.5), ("law", 0.25))):
        words = rf"maps has no expected_loss\.{name}\.json; `jmoe evaluate --family` measures"
        with pytest.raises(SettingsError, match=words):
            dearest("base", "law", most=0.1)
        digest = beside.digest_in_family(
            read_sharing(path, paths, own.owners.shape[1:]), number, paths[name]
        )
        table = ExpectedLoss(kind, (Point(0, excess, 0, 1),))
        expected_loss.write(path.parent / f"expected_loss.{name}.json", [table], digest)
    assert dearest("base", "law", most=0.1) == [0.5, 0.25]
    assert dearest("law", "base") == [0.25, 0.5]  # known by its weights, in any order
    others = {"law": paths["base"], "a/b": paths["law"]}  # served under other names
    (path.parent / "expected_loss.a.json").write_text("[", encoding="utf-8")
    assert dearest("law", "a/b", named=others, most=0.1) == [0.5, 0.25]
    away = (path.parent / "expected_loss.law.json").rename(tmp_path / "away")
    with pytest.raises(SettingsError, match=r"maps has no expected_loss\.a-b\.json; `jmoe eval"):
        dearest("law", "a/b", named=others, most=0.1)
    away.rename(path.parent / "expected_loss.law.json")
    given = jmoe.load_family(paths, path, "float32")  # to an engine, without the setting
    assert [curves[kind][0] for curves in expected_losses(EngineConfig(), given, (2,))] == [
        0.5,
        0.25,
    ]

    owners = own.owners.copy()
    owners[1, 0, 0] = 0  # an expert of the other one
    for other in (replace(sharing, owners=owners),
                  replace(sharing, united=(0, 0), united_ways=(2,))):  # fmt: skip
        write_sharing(path, other)
        assert dearest("base", "law") == [0.5, None]
        with pytest.raises(SettingsError, match=r"expected_loss\.law\.json is of the model '"):
            dearest("base", "law", most=0.1)
    write_sharing(path, sharing)
    resident = own.owners[0].size
    assert dearest("base", "law", resident_experts=resident) == []
    with pytest.raises(SettingsError, match="that experts stand in for absent ones is not known"):
        dearest("base", "law", most=0.1, resident_experts=resident)
    add_united(directory, seed=2)
    assert dearest("base", "law") == [None, 0.25]


def test_settings_that_no_table_can_be_of_are_named():
    key = "engine.brownout.max_expected_loss"
    with pytest.raises(SettingsError, match=f"{key} is -1"):
        load(None, {key: -1.0})
    absent = {"engine.resident_experts": 9, "engine.spare_experts": 8}
    with pytest.raises(SettingsError, match=f"{key} is 0.1.* 0 with engine.resident_exp"):
        load(None, {key: 0.1, "engine.models": "a=b,c=d", **absent})
