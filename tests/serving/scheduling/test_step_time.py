"""The model of step times, against steps whose times follow a rule that one can reckon."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serving.plan import Phase
from serving.scheduling.step_time import CLIP, StepTimeModel

SIZES = (1, 2, 4, 8, 16, 32, 64)


def true_s(size, percent):
    """Returns a step's time: 10 ms, and for each row a half of what its threshold leaves."""
    return 0.010 + 0.0005 * size * (0.5 + percent / 200)


def taught(rule=true_s, num_steps=4000, sizes=SIZES, percents=(0, 25, 50, 75, 100), noise=0.0):
    rng, model = np.random.default_rng(0), StepTimeModel()
    for _ in range(num_steps):
        size, percent = int(rng.choice(sizes)), float(rng.choice(percents))
        seconds = rule(size, percent) * math.exp(noise * rng.standard_normal())
        model.observe(Phase.DECODE, size, percent, seconds)
    return model


def test_before_the_first_step_nothing_is_known():
    model = StepTimeModel()
    assert math.isnan(model.expected_s(Phase.DECODE, 4))
    assert model.longest_s == math.inf
    assert model.line(Phase.PREFILL) is None
    assert not model.knows(Phase.DECODE)
    model.observe(Phase.DECODE, 4, 100.0, 0.02)
    assert model.expected_s(Phase.DECODE, 4) == pytest.approx(0.02)
    assert math.isnan(model.expected_s(Phase.PREFILL, 4))


def test_it_learns_sizes_and_thresholds_that_come():
    model = taught()
    for size in SIZES:
        for percent in (0, 25, 50, 75, 100):
            expected_s = model.expected_s(Phase.DECODE, size, percent)
            assert expected_s == pytest.approx(true_s(size, percent), rel=0.02)
    # The rule is a plane, so that what lies between is known as well.
    assert model.expected_s(Phase.DECODE, 24, 60) == pytest.approx(true_s(24, 60), rel=0.02)
    assert model.error < 0.01
    curve = model.curve(Phase.DECODE, 24, np.array([0.0, 60.0]))
    assert curve.tolist() == pytest.approx([model.expected_s(Phase.DECODE, 24, p) for p in (0, 60)])


def test_between_thresholds_that_came_it_goes_evenly():
    model = taught(percents=(0, 100))
    assert model.expected_s(Phase.DECODE, 16, 50) == pytest.approx(true_s(16, 50), rel=0.02)


def test_what_brownout_saves_carries_over_to_sizes_that_saw_none():
    def rule(size, percent):
        return 0.001 * size * (0.6 + 0.4 * percent / 100)

    model = StepTimeModel()
    for _ in range(200):
        model.observe(Phase.DECODE, 32, 100.0, rule(32, 100))
        model.observe(Phase.DECODE, 32, 0.0, rule(32, 0))
        model.observe(Phase.DECODE, 16, 100.0, rule(16, 100))
    assert model.expected_s(Phase.DECODE, 16, 0) == pytest.approx(rule(16, 0), rel=0.02)
    assert model.expected_s(Phase.DECODE, 16, 100) == pytest.approx(rule(16, 100), rel=0.02)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Phase)),
            st.integers(1, 5000),
            st.floats(0, 100),
            st.floats(1e-5, 10.0),
        ),
        min_size=1,
        max_size=80,
    )
)
@example(
    [(Phase.PREFILL, 1, 0.0, 1e-5), (Phase.PREFILL, 3, 1.0, 9.0), (Phase.PREFILL, 5, 15.0, 1e-5)]
)
@example(
    [(Phase.PREFILL, 1, 0.0, 1e-5), (Phase.PREFILL, 3, 1.0, 8.0), (Phase.PREFILL, 4, 21.0, 1e-5)]
)
def test_a_step_never_takes_longer_for_fewer_rows_or_a_lower_threshold(steps):
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    sizes, percents = (1, 3, 8, 31, 100, 5000), np.array([0.0, 10, 50, 80, 100])
    for phase in {step[0] for step in steps}:
        grid = np.array([model.curve(phase, size, percents) for size in sizes])
        assert np.isfinite(grid).all()
        assert (grid > 0).all()
        assert (np.diff(grid, axis=0) >= -1e-12 * grid[1:]).all()
        assert (np.diff(grid, axis=1) >= -1e-12 * grid[:, 1:]).all()
    assert 0 <= model.error <= 1


def test_a_machine_that_slows_down_is_followed_whatever_steps_come():
    model = taught()
    for _ in range(60):
        model.observe(Phase.DECODE, 16, 100.0, 2 * true_s(16, 100))
    # Of a size that was not seen since: the whole machine is slower.
    assert model.expected_s(Phase.DECODE, 64, 0) > 1.5 * true_s(64, 0)
    assert model.expected_s(Phase.DECODE, 16, 100) == pytest.approx(2 * true_s(16, 100), rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_whose_speed_changes_twofold_is_followed_within_two_seconds(factor):
    """Decode steps of 4, 16 and 64 rows without and with brownout, with noise of a fifth."""
    model, passed_s, number = taught(), 0.0, 0
    kinds = [(size, percent) for size in (4, 16, 64) for percent in (0, 100)]
    rng = np.random.default_rng(0)
    while passed_s < 2.0:
        kind = kinds[number % len(kinds)]
        seconds = factor * true_s(*kind) * rng.lognormal(0, 0.2)
        model.observe(Phase.DECODE, *kind, seconds)
        passed_s, number = passed_s + seconds, number + 1
    for kind in kinds:
        found_s = model.expected_s(Phase.DECODE, *kind)
        assert found_s == pytest.approx(factor * true_s(*kind), rel=0.15)


def test_a_step_that_stood_still_teaches_little():
    model = taught()
    before = model.expected_s(Phase.DECODE, 16, 100)
    model.observe(Phase.DECODE, 16, 100.0, 1000 * before)
    assert model.expected_s(Phase.DECODE, 16, 100) < before * (1 + CLIP)


def test_a_first_step_that_stood_still_is_forgotten():
    model = StepTimeModel()
    model.observe(Phase.DECODE, 16, 100.0, 60.0)
    for _ in range(50):
        model.observe(Phase.DECODE, 16, 100.0, 0.02)
    assert model.expected_s(Phase.DECODE, 16) == pytest.approx(0.02, rel=0.2)


def test_it_knows_how_far_it_errs():
    model = taught(noise=0.2, num_steps=6000)
    assert model.spread == pytest.approx(0.2, rel=0.25)
    assert model.error == pytest.approx(0.16, rel=0.25)  # the mean deviation of such noise


def test_a_line_has_what_a_step_costs_and_what_its_rows_do():
    fixed_s, per_row_s = taught().line(Phase.DECODE)
    assert fixed_s == pytest.approx(0.010, rel=0.05)
    assert per_row_s == pytest.approx(0.0005, rel=0.05)
    halved_s, of_brownout_s = taught().line(Phase.DECODE, 0.0)
    assert halved_s == pytest.approx(0.010, rel=0.05)
    assert of_brownout_s == pytest.approx(0.00025, rel=0.05)


def test_a_clock_that_stood_still_teaches_nothing():
    model = StepTimeModel()
    model.observe(Phase.DECODE, 4, 100.0, 0.0)
    model.observe(Phase.DECODE, 0, 100.0, 1.0)
    assert not model.num_observed


@pytest.mark.parametrize("odd_s", [1.0, 20e-6])
@pytest.mark.parametrize(("size", "percent"), [(2, 80.0), (64, 100.0), (24, 10.0)])
def test_one_odd_step_of_a_new_kind_moves_nothing_that_is_known(odd_s, size, percent):
    """The machine, or the host that took the time, stood still."""
    model = taught(sizes=(1, 4, 16, 32), percents=(0, 100))
    before = [
        (n, p, model.expected_s(Phase.DECODE, n, p)) for n in (1, 4, 16, 32) for p in (0, 100)
    ]
    model.observe(Phase.DECODE, size, percent, odd_s)
    for n, p, expected_s in before:
        assert model.expected_s(Phase.DECODE, n, p) == pytest.approx(expected_s, rel=0.02)
    for _ in range(10):
        model.observe(Phase.DECODE, size, percent, true_s(size, percent))
    assert model.expected_s(Phase.DECODE, size, percent) == pytest.approx(
        true_s(size, percent), rel=0.15
    )


def test_steps_of_one_size_say_nothing_of_a_row():
    model = StepTimeModel()
    for size in (40, 41, 45):
        model.observe(Phase.PREFILL, size, 100.0, 0.02)
        assert model.line(Phase.PREFILL) is None
    model.observe(Phase.PREFILL, 80, 100.0, 0.03)
    for _ in range(200):
        model.observe(Phase.PREFILL, 80, 100.0, 0.03)
        model.observe(Phase.PREFILL, 40, 100.0, 0.02)
    fixed_s, per_token_s = model.line(Phase.PREFILL)
    assert (fixed_s, per_token_s) == pytest.approx((0.01, 0.00025), rel=0.1)
    assert model.largest(Phase.PREFILL) == 80


def test_what_a_step_takes_longer_is_counted_once():
    model = StepTimeModel()
    for seconds in (0.020, 0.030, 0.030):
        model.observe(Phase.DECODE, 24, 100.0, seconds)  # between two sizes of the table
    assert model.expected_s(Phase.DECODE, 24) == pytest.approx(0.030, rel=0.01)
    assert model.expected_s(Phase.DECODE, 32) == pytest.approx(0.030, rel=0.01)


def test_another_way_of_brownout_is_learnt_anew():
    model = taught()
    model.forget_brownout()
    for size in SIZES:
        expected_s = model.expected_s(Phase.DECODE, size, 100)
        assert expected_s == pytest.approx(true_s(size, 100), rel=0.02)
        guessed_s = model.expected_s(Phase.DECODE, size, 0)
        assert guessed_s == pytest.approx(0.75 * expected_s, rel=0.02)
    for _ in range(10):
        model.observe(Phase.DECODE, 32, 0.0, 0.5 * true_s(32, 100))
    assert model.expected_s(Phase.DECODE, 16, 0) < 0.6 * true_s(16, 100)
