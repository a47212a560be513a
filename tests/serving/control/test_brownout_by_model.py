"""What a model has of its own: objectives, and bounds of its thresholds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from counting import collect, counting_engine, family_of
from scheduled import LIMITS, LS, sequence_of

from jmoe.packed_rows import EXEMPT, REFUSES, SPARED
from serving.config import BrownoutConfig, EngineConfig, SalcConfig, ServerConfig
from serving.control.slo import SloAnalyser
from serving.errors import InvalidRequest, NotFound, SettingsError
from serving.plan import Phase
from serving.request import BrownoutChange, ModelBrownout, Priority
from serving.scheduling.policy import Fcfs
from serving.scheduling.prefixes import Brownout
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.waiting import QueuedClass
from serving.settings.reading import brownout_of_models, check
from serving.telemetry.latencies import Latencies

BE = Priority.BEST_EFFORT
BASE, LAW, CODE = 0, 1, 2


def analyser(*own, seconds=(1.0, 0.1), **brownout):
    """Returns the analyser of a family of three, of which some have something of their own."""
    given = {one.name: one for one in own}
    models = [given.get(name, ModelBrownout(name)) for name in ("base", "law", "code")]
    config = BrownoutConfig(ttft_slo_s=seconds[0], itl_slo_s=seconds[1], **brownout)
    salc = SalcConfig("algorithm2", interval_s=1.0, min_samples=5)
    return SloAnalyser(config, salc, way=8, models=models)


def fixed(*own, percent=40, **brownout):
    """Returns one whose thresholds are all `percent`."""
    thresholds = {f"{phase}_threshold_percent": percent for phase in Phase}
    return analyser(*own, salc=False, **thresholds, **brownout)


def steps(*rows):
    """Returns the prefill step of each model and a decode step of all, for rows of (model, class,
    whether it allows brownout).
    """
    scheduler = Scheduler(LIMITS, Fcfs(), mixes=lambda counts: True)
    for at, (model, priority, allows) in enumerate(rows):
        one = sequence_of([1], name=str(at), priority=priority, allow_brownout=allows, model=model)
        scheduler.add(one)
    found = [scheduler.next_step()]
    while found[-1].phase is Phase.PREFILL or len(found[-1].rows) < len(rows):
        found.append(scheduler.next_step())
    return found


def control(slo, step):
    return slo.control(step, since_s=0.0, num_decoding=len(step.rows), now=0.0)


@pytest.mark.parametrize(
    ("floor", "ceiling", "percent", "found"),
    [(0, 100, 40, 40), (60, 100, 40, 60), (60, 100, 80, 80), (0, 30, 40, 30), (100, 100, 0, 100)],
)
def test_a_models_steps_keep_to_its_bounds(floor, ceiling, percent, found):
    own = ModelBrownout("law", floor_percent=floor, ceiling_percent=ceiling)
    slo = fixed(own, percent=percent)
    for step in steps((LAW, LS, True))[:2]:
        assert control(slo, step).threshold_percent == found
        assert not step.exempt.any()
    for step in steps((BASE, LS, True)):
        assert control(slo, step).threshold_percent == percent


def test_of_a_mixed_step_rows_with_a_higher_threshold_are_exempt():
    """The lowest is the step's, and a row that refuses brownout goes on refusing it."""
    law = ModelBrownout("law", floor_percent=70)
    code = ModelBrownout("code", ceiling_percent=20)
    rows = (BASE, LS, True), (BASE, LS, True), (LAW, LS, True), (LAW, LS, False)
    (*_, mixed) = steps(*rows)
    assert mixed.row_models.tolist() == [BASE, BASE, LAW, LAW]
    assert control(fixed(law), mixed) == (40, fixed().code, 0)
    assert mixed.rows[:, EXEMPT].tolist() == [0, 0, SPARED, REFUSES]
    (*_, mixed) = steps(*rows, (CODE, LS, True))
    assert control(fixed(law, code), mixed).threshold_percent == 20
    assert mixed.exempt.tolist() == [True, True, True, True, False]
    (*_, mixed) = steps(*rows)
    assert control(fixed(law, percent=70), mixed).threshold_percent == 70
    assert mixed.exempt.tolist() == [False, False, False, True]  # nobody's is higher


def test_best_effort_of_a_model_is_not_degraded_below_its_floor_in_place_of_others():
    law = ModelBrownout("law", floor_percent=60)
    for own, least, found in ((law, 60, 80), (replace(law, floor_percent=0), 0, 60)):
        prefill, decode = steps((LAW, LS, True), (LAW, BE, True))
        given = control(fixed(own, percent=80), decode)
        assert given.least_percent == least
        # Half of the rows alone can give up 40 in place of 20 of a hundred.
        assert decode.degrade_best_effort_first(given) == (60 if least <= 60 else found)
        assert prefill.phase is Phase.PREFILL


def test_cached_pages_serve_whom_the_models_bounds_let():
    slo = fixed(ModelBrownout("law", floor_percent=70), percent=40)
    code = slo.code, 8
    assert slo.accepted(sequence_of([1], model=BASE)) == Brownout(40, code)
    assert slo.accepted(sequence_of([1], model=LAW)) == Brownout(70, code)


def test_a_bound_on_expected_loss_is_above_a_ceiling():
    own = ModelBrownout("law", ceiling_percent=10)
    slo = fixed(own, max_expected_loss=0.1)
    slo.losses.least_percent = lambda *of: 50
    assert control(slo, steps((LAW, LS, True))[0]) == (50, slo.code, 50)


# ---- objectives ---------------------------------------------------------------------------------


def play(slo, model, itl_s, *, shares=(1.0, 1.0)):
    """Lets tokens of a model take so long, and controllers decide."""
    now = 10.0
    queued = {LS: QueuedClass(shares=shares), BE: QueuedClass()}
    slo.maybe_update(now, queued)
    slo.observe(Latencies(previous_at={(LS, model, ""): [now + 0.1] * 8}), now + 0.1, now + 0.9)
    assert math.isclose(itl_s, 0.8)
    slo.maybe_update(now + 1.0, queued)
    return slo.ls.decode.threshold_percent


def test_a_token_is_late_by_its_own_models_objective():
    """0.8 s: late for all, in time for `law`."""
    law = ModelBrownout("law", itl_slo_s=1.6)
    assert play(analyser(law, seconds=(1.0, 0.4)), BASE, 0.8) == 80
    assert play(analyser(law, seconds=(1.0, 0.4)), LAW, 0.8, shares=(1.0, 4.0)) == 100
    strict = ModelBrownout("law", itl_slo_s=0.4)
    assert play(analyser(strict, seconds=(1.0, 1.6)), LAW, 0.8, shares=(1.0, 0.25)) == 80
    assert play(analyser(strict, seconds=(1.0, 1.6)), BASE, 0.8, shares=(1.0, 0.25)) == 100


def test_the_state_has_latencies_in_seconds_of_the_common_objective():
    slo = analyser(ModelBrownout("law", itl_slo_s=1.6), seconds=(1.0, 0.4))
    play(slo, LAW, 0.8, shares=(1.0, 4.0))
    state = slo.state()
    assert state.itl_p90_s == pytest.approx(0.2)  # half of the objective, as 0.8 is of 1.6
    assert state.models[LAW] == ModelBrownout("law", itl_slo_s=1.6)
    assert [own.name for own in state.models] == ["base", "law", "code"]


def test_the_strictest_objective_of_requests_that_are_there_is_in_force():
    slo = analyser(ModelBrownout("law", 0.25), ModelBrownout("code", itl_slo_s=0.3))
    assert slo.shares == {LAW: (0.25, 1.0), CODE: (1.0, pytest.approx(3.0))}

    def there(*models):
        scheduler = Scheduler(LIMITS, Fcfs())
        for model in models:
            scheduler.add(sequence_of([1], model=model, arrived_at=2.0))
        waits = scheduler.waits(LS, 3.0, slo.shares)
        slo.maybe_update(3.0, {LS: waits, BE: QueuedClass()})
        return slo.in_force, waits.oldest_s

    assert there() == ((1.0, 0.1), 0.0)
    assert there(BASE) == ((1.0, 0.1), 1.0)
    assert there(LAW) == ((0.25, 0.1), 4.0)  # a second is four of its objectives
    assert there(CODE) == ((1.0, pytest.approx(0.3)), 1.0)
    assert there(CODE, LAW, BASE) == ((0.25, 0.1), 4.0)
    slo.apply(BrownoutChange(ttft_slo_s=0.5), 0.0)  # a model's own stays what it is
    assert slo.objectives(LS, LAW) == (0.25, 0.1)
    assert slo.objectives(LS, BASE) == (0.5, 0.1)
    assert there(LAW) == ((0.25, 0.1), 2.0)


@pytest.mark.parametrize("controller", ["algorithm2", "predictive"])
def test_a_controller_sees_seconds_of_the_objective_in_force(controller):
    """What decides sees the same, whatever the objective of all is beside a model's own."""
    seen = []
    for itl_slo_s in (0.4, 0.2, 3.0):
        slo = analyser(ModelBrownout("law", 0.5, 0.4), seconds=(1.0, itl_slo_s))
        decide = slo.ls.controller.decide
        slo.ls.controller.decide = lambda one, decide=decide: seen.append(one) or decide(one)
        play(slo, LAW, 0.8, shares=slo.shares[LAW])
    for one in seen[1::2]:
        assert (one.prefill.slo_s, one.decode.slo_s) == pytest.approx((0.5, 0.4))
        assert one.decode.p90_s == pytest.approx(0.8)
        assert one.decode.late_share == 1.0
    assert len(seen) == 6


# ---- settings and changes -----------------------------------------------------------------------


def test_settings_name_models():
    entries = ("law:itl_slo_s=0.05", "law:floor_percent=60", "a:b=c:ceiling_percent=50")
    assert brownout_of_models(entries) == {
        "law": ModelBrownout("law", itl_slo_s=0.05, floor_percent=60),
        "a:b=c": ModelBrownout("a:b=c", ceiling_percent=50),
    }


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("law",), "has 'law'; it must be NAME:KEY=VALUE, a KEY of ttft_slo_s, itl_slo_s, floor"),
        (("law:slo=1",), "law:slo=1"),
        (("law:floor_percent=1.5",), "law:floor_percent=1.5"),
        (("law:floor_percent=101",), "floor_percent of model 'law' is 101; .* whole percentage"),
        (("law:itl_slo_s=-1",), "itl_slo_s of model 'law' is -1.0; it must be a number of seconds"),
        (("law:itl_slo_s=nan",), "itl_slo_s of model 'law' is nan"),
        (("law:itl_slo_s=1", "law:itl_slo_s=2"), "has law:itl_slo_s twice; leave one out"),
        (("law:floor_percent=60", "law:ceiling_percent=50"), "at most its ceiling_percent, 50"),
        (("tax:floor_percent=60",), "models that engine.models names, and 'tax' is none"),
    ],
)
def test_wrong_settings_name_the_value(entries, words):
    engine = EngineConfig(models=("base=b", "law=l"), brownout=BrownoutConfig(models=entries))
    with pytest.raises(SettingsError, match=words):
        check(ServerConfig(engine=engine))


def test_a_change_of_one_model_leaves_the_others():
    slo = analyser(ModelBrownout("law", floor_percent=50))
    slo.apply(BrownoutChange(model="law", ttft_slo_s=0.5), 0.0)
    assert slo.models[LAW] == ModelBrownout("law", 0.5, floor_percent=50)
    assert slo.is_own_objective
    slo.apply(BrownoutChange(model="law", ttft_slo_s=0.0, floor_percent=0), 0.0)
    assert slo.models[LAW] == ModelBrownout("law")
    assert slo.shares == {}
    assert (slo.salc_enabled, slo.ttft_slo_s) == (True, 1.0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "tax"}, NotFound, "model 'tax' is not served; 'base', 'law', 'code' are"),
        ({"model": ""}, InvalidRequest, "model is empty; name one, or leave it out for all"),
        ({"model": "law", "strategy": "full"}, InvalidRequest, "strategy is 'full' of model 'law'"),
        ({"model": "law", "salc_enabled": False}, InvalidRequest, "salc_enabled is False of model"),
        ({"model": "law", "floor_percent": -1}, InvalidRequest, "floor_percent of model 'law' is"),
        ({"floor_percent": 40}, InvalidRequest, "floor_percent is 40, of no model; name one"),
        ({"ceiling_percent": 40}, InvalidRequest, r"or set engine\.salc\.ceiling_percent"),
    ],
)
def test_a_wrong_change_names_the_value_and_changes_nothing(change, error, words):
    slo = analyser()
    with pytest.raises(error, match=words):
        slo.check(BrownoutChange(**change))
    assert slo.state().models == analyser().state().models


async def test_an_engine_counts_late_tokens_by_model_and_forgets_a_model_that_goes():
    told = []

    class Heard:
        def __getattr__(self, name):
            return lambda *given: told.append((name, *given[1:]))

    names = ("counter", "second")
    brownout = BrownoutConfig(models=("second:ttft_slo_s=7", "second:floor_percent=60"))
    engine = counting_engine(
        model=family_of(names), models=tuple(f"{n}={n}" for n in names), brownout=brownout
    )
    engine.accounts._observers = (Heard(),)
    for name in names:
        await collect(engine, [1], 2, model=name)
    first = [given for event, *given in told if event == "first_tokens"]
    assert first == [[1.0, LS, "counter"], [7.0, LS, "second"]]
    assert [given[2] for event, *given in told if event == "further_tokens"] == list(names)
    await engine.set_brownout(BrownoutChange(model="second", itl_slo_s=0.5))
    assert engine.get_brownout().models[1] == ModelBrownout("second", 7.0, 0.5, 60)
    await engine.stop()


def test_windows_of_a_server_without_own_objectives_are_as_before():
    """Not a bit differs."""
    slo, samples = analyser(), np.random.default_rng(0).random(8)
    slo.observe(Latencies(arrived_at={(LS, BASE, ""): samples.tolist()}), 2.0, 2.0)
    (batch,) = slo.ls.prefill.window._batches
    assert (batch[2] == 2.0 - samples).all()


@pytest.mark.parametrize(("itl_slo_s", "stays"), [(0.001, True), (0.05, False)])
def test_what_cannot_keep_a_models_objective_is_forgotten_with_it(itl_slo_s, stays):
    slo = analyser(ModelBrownout("law", itl_slo_s=0.001))
    for now in range(3):
        slo.ls.decode.judge("the ITL objective cannot be kept", 0.01, now)
    slo.apply(BrownoutChange(model="law", itl_slo_s=itl_slo_s), 3.0)
    assert bool(slo.state().objective_state) == stays
