"""Expected loss: curves by hand, and a table of something else is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe import expected_loss
from jmoe.brownout import Brownout
from jmoe.expected_loss import ExpectedLoss, Kind, Point

WAY_8 = Kind(8, "weight")


def table(*points, kind=WAY_8):
    return ExpectedLoss(
        kind, tuple(Point(at, loss, loss - 0.01, loss + 0.01) for at, loss in points)
    )


def test_a_curve_is_linear_between_thresholds_and_0_without_brownout():
    curve = table((60, 0.04), (20, 0.2), (0, 0.3)).curve()
    assert [curve[at] for at in (100, 90, 60, 40, 20, 10, 0)] == pytest.approx(
        [0, 0.01, 0.04, 0.12, 0.2, 0.25, 0.3]
    )


def test_a_lower_threshold_is_never_expected_to_cost_less():
    curve = table((80, -0.01), (60, 0.1), (40, 0.02), (0, 0.3)).curve()
    assert [curve[at] for at in (90, 80, 60, 50, 40)] == pytest.approx([0, 0, 0.1, 0.1, 0.1])
    assert curve[0] == pytest.approx(0.3)


@given(st.lists(st.floats(-1, 3), min_size=1, max_size=6))
def test_a_curve_falls_and_passes_no_measurement_from_below(losses):
    thresholds = [15 * n for n in range(len(losses))][::-1]
    curve = table(*zip(thresholds, losses, strict=True)).curve()
    assert len(curve) == 101
    assert curve[100] == 0
    assert list(curve) == sorted(curve, reverse=True)
    for at, loss in zip(thresholds, losses, strict=True):
        assert curve[at] >= loss - 1e-9


def test_tables_of_other_kinds_stay_and_the_newest_counts(tmp_path):
    path, full = tmp_path / expected_loss.FILE, Kind.of(Brownout("full", 40))
    expected_loss.write(path, [table((0, 0.3)), table((0, 0.5), kind=full)], "a")
    expected_loss.write(path, [table((0, 0.2))], "a")
    found = expected_loss.read(path, "a")
    assert found == {WAY_8: table((0, 0.2)), full: table((0, 0.5), kind=full)}
    assert [str(kind) for kind in (WAY_8, full, Kind(2, "visits", True))] == [
        "way 8 by weight",
        "full brownout by visits",
        "way 2 by visits in levels",
    ]
    expected_loss.write(path, [table((0, 0.2))], "b")  # of another model: nothing stays
    assert list(expected_loss.read(path, "b")) == [WAY_8]


def test_a_table_of_something_else_is_named(tmp_path):
    def refused(words):
        with pytest.raises(ValueError, match=words):
            expected_loss.read(path, "a")

    path = tmp_path / expected_loss.FILE
    refused("has no expected_loss.json; `jmoe evaluate` measures and writes it")
    expected_loss.write(path, [table((0, 0.2))], "b")
    refused("expected_loss.json is of the model 'b', and this one is 'a': weights or united")
    path.write_text("[", encoding="utf-8")
    refused("expected_loss.json is not readable")
    good = {"way": 8, "keep": "weight", "levels": False}
    for wrong in (
        [],
        [[20, 0.1, 0, 1]],
        [[0, 0.1, 0, 1], [20, 0.1, 0, 1]],
        [[0, float("nan"), 0, 1]],
        [[0, 0.1]],
    ):
        rows = [good | {"points": wrong}]
        path.write_text(json.dumps({"model": "a", "tables": rows}), encoding="utf-8")
        refused(r"expected_loss.json is no table of expected loss \(.*\); write it anew")
