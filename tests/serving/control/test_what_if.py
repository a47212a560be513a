"""What a change of brownout lets expect, against times and losses that are known by hand."""

import math

import numpy as np
import pytest

from jmoe.expected_loss import Kind
from serving.config import BrownoutConfig, SalcConfig
from serving.control.controller import Load
from serving.control.losses import Losses
from serving.control.slo import SloAnalyser
from serving.errors import InvalidRequest, NotFound
from serving.plan import Phase
from serving.request import BrownoutChange, ModelBrownout
from serving.scheduling.pace import Pace


class Times:
    """A decode step takes 1 ms and 0.2 ms for each percent kept; a prefill step ten times that."""

    def curve(self, phase, size, percents):
        return (0.001 + 0.0002 * percents) * (10 if phase is Phase.PREFILL else 1)


def analyser(**config):
    """Objectives of 300 and 20 ms; each percent not kept costs a thousandth of a nat."""
    curve = [0.001 * (100 - t) for t in range(101)]
    losses = Losses([""], [{Kind(2, "weight", False): curve}], levels=False)
    given = BrownoutConfig(ttft_slo_s=0.3, itl_slo_s=0.02, keep="weight", **config)
    made = SloAnalyser(given, SalcConfig(), way=2, pace=Pace(), losses=losses)
    made._pace.times, made._load = Times(), Load(num_running=8, prompt_tokens=100)
    return made


def test_thresholds_by_hand_are_read_off_the_times():
    made = analyser()
    change = BrownoutChange(prefill_threshold_percent=40, decode_threshold_percent=90)
    found = made.what_if(change)
    decode = found[Phase.DECODE]
    assert list(found) == [Phase.PREFILL, Phase.DECODE]
    assert (decode.threshold_percent, decode.threshold_now_percent) == (90, 100)
    assert (decode.step_s, decode.step_now_s) == pytest.approx((0.019, 0.021))
    assert (decode.loss, decode.loss_now) == pytest.approx((0.01, 0.0))
    assert decode.is_kept is True
    assert found[Phase.PREFILL].step_s == pytest.approx(0.09)
    assert made.state().decode_threshold_percent == 100  # nothing is changed
    assert made.salc_enabled


def test_a_controller_needs_the_highest_threshold_within_its_warning_line():
    """0.8 * 20 ms is a decode step at 75 %; of 0.8 * 126 ms a prefill step has 84.8, at 37 %."""
    found = analyser().what_if(BrownoutChange(ttft_slo_s=0.126))
    assert found[Phase.DECODE].threshold_percent == 75
    assert found[Phase.PREFILL].threshold_percent == 37
    (missed,) = (analyser().what_if(BrownoutChange(itl_slo_s=0.0005))[Phase.DECODE],)
    assert (missed.threshold_percent, missed.is_kept) == (SalcConfig().floor_percent, False)


def test_a_bound_on_expected_loss_is_the_lowest_threshold():
    change = BrownoutChange(decode_threshold_percent=10, max_expected_loss=0.02)
    assert analyser().what_if(change)[Phase.DECODE].threshold_percent == 80


def test_steps_under_another_strategy_are_not_known_and_without_brownout_all_is_exact():
    found = analyser().what_if(BrownoutChange(strategy="full"))[Phase.DECODE]
    assert math.isnan(found.step_s)
    assert math.isnan(found.loss)
    assert found.is_kept is None
    found = analyser().what_if(BrownoutChange(strategy="zero"))[Phase.DECODE]
    assert (found.threshold_percent, found.loss) == (100, 0)
    assert found.step_s == pytest.approx(0.021)


def test_of_a_model_it_is_within_bounds_and_by_objectives_of_its_own():
    """0.8 * 15 ms is a decode step at 55 %; 0.8 * 300 ms less that is more than a prefill step."""
    made = analyser()
    made.models = [ModelBrownout("base"), ModelBrownout("law", floor_percent=60)]
    made.ls.decode.threshold_percent = 50.0

    def decode(model, **change):
        found = made.what_if(BrownoutChange(model=model, **change))[Phase.DECODE]
        return found.threshold_now_percent, found.threshold_percent, found.is_kept

    assert decode("law", itl_slo_s=0.015) == (60, 60, True)
    assert decode("base", itl_slo_s=0.015) == (50, 55, True)
    assert decode("law", floor_percent=100) == (60, 100, False)
    assert decode("base", ceiling_percent=30) == (50, 30, True)
    made.salc_enabled = False
    assert decode("law", floor_percent=0) == (60, 50, True)
    with pytest.raises(InvalidRequest, match="at most its ceiling_percent, 30"):
        decode("law", ceiling_percent=30)
    with pytest.raises(NotFound, match="nobody"):
        decode("nobody", floor_percent=0)


def test_before_the_first_step_nothing_is_known_and_what_is_wrong_is_refused():
    made = analyser()
    made._pace.times.curve = lambda phase, size, percents: np.full(len(percents), np.nan)
    found = made.what_if(BrownoutChange(itl_slo_s=0.01))[Phase.DECODE]
    assert (found.threshold_percent, found.is_kept) == (100, None)
    with pytest.raises(InvalidRequest, match="decode_threshold_percent is 101"):
        made.what_if(BrownoutChange(decode_threshold_percent=101))


@pytest.mark.parametrize(
    ("percent", "p90_s", "says"),
    [
        (
            0.0,
            0.04,
            "overloaded: brownout is exhausted, ITL P90 of 40 ms over its objective of 20 ms",
        ),
        (50.0, 0.04, ""),  # there is more
        (0.0, 0.019, ""),  # it suffices
    ],
)
def test_exhausted_brownout_that_does_not_suffice_is_overload(percent, p90_s, says):
    made = analyser()
    made.ls.decode.threshold_percent, made.ls.decode.p90_s = percent, p90_s
    assert made.state().objective_state == says
