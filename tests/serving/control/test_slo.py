"""Algorithm 2 and the latency windows, by hand-computed examples and invariants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import decode_step, prefill_step

from jmoe.brownout import strategy_code
from serving.config import BrownoutConfig, SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.control.controller import PhaseSeen
from serving.control.slo import PhaseControl, SloAnalyser
from serving.control.window import LatencyWindow
from serving.errors import InvalidRequest, SettingsError
from serving.request import BrownoutChange, Priority
from serving.scheduling.waiting import QueuedClass
from serving.telemetry.latencies import Latencies

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT

BY_WEIGHT = strategy_code("partial", "weight")


def test_algorithm_2_shrinks_above_the_slo_and_grows_below_the_warning_line():
    percent, seen = 100.0, []
    for p90 in (1.1, 1.2, 1.01, 0.9, 0.81, 0.79, 0.5, None):
        percent = Algorithm2(SalcConfig()).move(PhaseSeen(percent, 1.0, p90))
        seen.append(round(percent, 6))
    assert seen == [80.0, 64.0, 51.2, 51.2, 51.2, 61.2, 71.2, 71.2]


def test_the_threshold_is_never_rounded_but_a_step_rounds_up():
    phase = PhaseControl(SalcConfig(), 51.2)
    assert (phase.threshold_percent, phase.percent) == (51.2, 52)
    assert PhaseControl(SalcConfig(), 0.0).percent == 0
    assert PhaseControl(SalcConfig(), 100.0).percent == 100


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 10)), max_size=60),
    st.floats(0, 100),
    st.floats(0, 50),
    st.floats(50, 100),
)
def test_it_stays_between_floor_and_ceiling(latencies, start, floor, ceiling):
    algorithm = Algorithm2(SalcConfig(floor_percent=floor, ceiling_percent=ceiling))
    percent = start
    for p90 in latencies:
        moved = algorithm.move(PhaseSeen(percent, 1.0, p90))
        if p90 is None:
            assert moved == percent
        else:
            assert floor <= moved <= ceiling
        percent = moved


def test_p90_counts_only_samples_of_the_window_and_the_current_threshold():
    window = LatencyWindow(window_s=4.0)
    window.add(0.0, 1.0, np.full(10, 9.0))  # falls out of the window
    window.add(5.0, 6.0, np.full(10, 5.0))  # began before the threshold changed
    window.add(7.0, 8.0, np.arange(1.0, 12.0))
    assert window.p90(now=8.0, since=6.5, min_samples=10) == pytest.approx(10.0)
    assert window.p90(now=8.0, since=6.5, min_samples=12) is None
    assert window.p90(now=8.0, since=-math.inf, min_samples=1) == pytest.approx(
        np.percentile([*[5.0] * 10, *np.arange(1.0, 12.0)], 90)
    )


def analyser(**brownout):
    config = BrownoutConfig(ttft_slo_s=1.0, itl_slo_s=0.1, **brownout)
    return SloAnalyser(config, SalcConfig(interval_s=1.0, min_samples=5), way=8)


def first(slo, arrived_at, now, priority=LS, model=0):
    slo.observe(Latencies(arrived_at={(priority, model, ""): arrived_at.tolist()}), now, now)


def further(slo, previous_at, launched_at, now, priority=LS, model=0):
    of = priority, model, ""
    slo.observe(Latencies(previous_at={of: previous_at.tolist()}), launched_at, now)


def control(slo, phase, *, ls=True):
    """Returns threshold and code of a step of eight tokens or rows, all of one class."""
    make, priority = prefill_step if phase == "prefill" else decode_step, LS if ls else BE
    step = make(8, priority=priority)
    return slo.control(step, since_s=0.0, num_decoding=8, now=0.0)[:2]


def update(slo, now, oldest_s, *, slots_taken=False, best_effort=0.0):
    slo.maybe_update(
        now, {LS: QueuedClass(oldest_s, slots_taken), BE: QueuedClass(best_effort, True)}
    )


def test_each_phase_has_its_own_controller():
    slo = analyser()
    now = 10.0
    update(slo, now, 0.0)
    first(slo, np.full(8, now + 0.1), now + 0.9)  # 0.8 s: in the buffer zone
    further(slo, np.full(8, now + 0.1), now + 0.1, now + 0.4)  # 0.3 s: far too late
    update(slo, now + 0.5, 0.0)  # too early
    assert slo.ls.decode.threshold_percent == 100
    update(slo, now + 1.0, 0.0)
    assert slo.ls.decode.threshold_percent == 80
    assert slo.ls.prefill.threshold_percent == 100
    assert control(slo, "decode") == (80, BY_WEIGHT)
    assert slo.state().itl_p90_s == pytest.approx(0.3)


def test_samples_of_steps_launched_under_the_old_threshold_do_not_count():
    slo = analyser()
    update(slo, 0.0, 0.0)
    further(slo, np.full(8, 0.1), 0.1, 0.9)
    update(slo, 1.0, 0.0)
    assert slo.ls.decode.threshold_percent == 80
    further(slo, np.full(8, 1.1), 0.95, 1.9)  # launched before the change
    update(slo, 2.0, 0.0)
    assert slo.ls.decode.threshold_percent == 80
    further(slo, np.full(8, 2.0), 2.0, 2.9)
    update(slo, 3.0, 0.0)
    assert slo.ls.decode.threshold_percent == 64


def test_the_age_of_the_oldest_waiting_request_enters_the_prefill_p90():
    slo = analyser()
    update(slo, 0.0, 0.0)
    update(slo, 1.0, 1.5)  # nobody got a first token, but somebody waits too long
    assert slo.ls.prefill.threshold_percent == 80
    assert slo.ls.decode.threshold_percent == 100


def test_waiting_for_a_slot_is_waiting_for_decode():
    slo = analyser()
    update(slo, 0.0, 0.0)
    update(slo, 1.0, 1.5, slots_taken=True)
    assert slo.ls.decode.threshold_percent == 80
    update(slo, 2.0, 0.5, slots_taken=True)  # not late yet
    assert slo.ls.decode.threshold_percent == 80
    assert math.isnan(slo.state().itl_p90_s)  # no latency was seen


def test_without_data_nothing_changes_until_that_is_evidence_of_no_load():
    slo = analyser(decode_threshold_percent=40)
    for now in range(9):
        update(slo, float(now), 0.0)
    assert slo.ls.decode.threshold_percent == 40
    update(slo, 9.0, 0.0)  # one interval before ten seconds are over
    assert slo.ls.decode.threshold_percent == 100


def test_a_fixed_threshold_turns_the_controllers_off():
    slo = analyser()
    slo.apply(BrownoutChange(decode_threshold_percent=30), now=0.0)
    further(slo, np.full(8, 1.0), 1.0, 1.5)
    update(slo, 5.0, 9.0)
    assert control(slo, "decode") == (30, BY_WEIGHT)
    assert control(slo, "prefill") == (100, BY_WEIGHT)
    slo.apply(BrownoutChange(salc_enabled=True), now=5.0)
    further(slo, np.full(8, 5.5), 5.5, 6.0)
    update(slo, 6.5, 0.0)
    assert control(slo, "decode")[0] == 24


def test_zero_brownout_and_models_without_united_experts_never_degrade():
    slo = SloAnalyser(BrownoutConfig(), SalcConfig(), way=0)
    assert control(slo, "decode") == (100, 0)


def test_thresholds_of_before_are_not_in_force_under_zero_brownout():
    slo = analyser(salc=False, prefill_threshold_percent=0, decode_threshold_percent=0)
    slo.apply(BrownoutChange(strategy="zero"), 1.0)
    assert control(slo, "prefill") == control(slo, "decode", ls=False) == (100, 0)
    state = slo.state(refused_per_s=3.0)
    assert (state.prefill_threshold_percent, state.decode_threshold_percent) == (100, 100)
    assert state.objective_state == "overloaded: refusing 3/s"
    slo.apply(BrownoutChange(strategy="full"), 2.0)
    assert slo.state().decode_threshold_percent == control(slo, "decode")[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "half"}, "half"),
        ({"decode_threshold_percent": 101}, "101"),
        ({"prefill_threshold_percent": -1}, "-1"),
        ({"ttft_slo_s": 0.0}, "ttft_slo_s"),
        ({"itl_slo_s": math.nan}, "itl_slo_s"),
    ],
)
def test_a_bad_change_names_the_value(change, words):
    with pytest.raises(InvalidRequest, match=words):
        analyser().check(BrownoutChange(**change))


@pytest.mark.parametrize(
    ("wanted", "way", "strategy"),
    [
        ("auto", 8, "partial"),
        ("auto", 0, "zero"),
        ("partial", 8, "partial"),
        ("full", 0, "full"),
        ("zero", 8, "zero"),
    ],
)
def test_brownout_starts_as_the_settings_say(wanted, way, strategy):
    slo = SloAnalyser(BrownoutConfig(strategy=wanted), SalcConfig(), way=way)
    assert slo.state().strategy == strategy


def test_partial_brownout_without_united_experts_says_how_to_get_them():
    with pytest.raises(SettingsError, match=r"is .partial., .*jmoe distill --model"):
        SloAnalyser(BrownoutConfig(strategy="partial"), SalcConfig(), way=0)


def test_best_effort_without_an_objective_moves_no_threshold():
    """However late it is and however long it waits."""
    slo = analyser()
    update(slo, 0.0, 0.0)
    for now in range(1, 9):
        first(slo, np.full(8, now - 0.9), now, BE)
        further(slo, np.full(8, now - 0.9), now - 0.9, now, BE)
        update(slo, float(now), 0.0, best_effort=3600.0)
    assert control(slo, "prefill") == control(slo, "decode") == (100, BY_WEIGHT)
    assert control(slo, "decode", ls=False) == (100, BY_WEIGHT)
    assert slo.objectives(BE, 0) == (math.inf, math.inf)


def test_best_effort_with_an_objective_lowers_its_own_steps_only():
    slo = analyser(best_effort_itl_slo_s=0.5)
    update(slo, 0.0, 0.0)
    further(slo, np.full(8, 0.1), 0.1, 0.9, BE)  # 0.8 s
    update(slo, 1.0, 0.0)
    assert control(slo, "decode") == (100, BY_WEIGHT)
    assert control(slo, "decode", ls=False) == (80, BY_WEIGHT)
    assert control(slo, "prefill", ls=False) == (100, BY_WEIGHT)
    further(slo, np.full(8, 1.1), 1.1, 1.9)  # the other class is late, too: it moves all steps
    update(slo, 2.0, 0.0)
    update(slo, 3.0, 0.0)
    assert control(slo, "decode")[0] == control(slo, "decode", ls=False)[0] == 80


def test_fewer_are_taken_while_many_that_were_come_late():
    """One of ten is too many; another class is not asked to pay for it."""
    slo, now = analyser(salc=False), 10.0
    for _ in range(3):
        first(slo, now - np.array([1.2] + [0.5] * 9), now)
        update(slo, now, 0.0)
        now += 1.0
    assert slo.room(LS) == pytest.approx(0.8**3)
    assert slo.room(BE) == 1.0
    for _ in range(40):
        first(slo, now - np.array([0.5] * 9), now)
        update(slo, now, 0.0)
        now += 1.0
    assert slo.room(LS) == 1.0
