"""Simulated drift before the mover: scenes by hand, popularities from their seeds, a short run."""

import numpy as np
import pytest

from benchmarks.mesh import __main__ as mesh
from benchmarks.mesh import drift
from serving.config import BalanceConfig

SCENE = drift.Scene(seconds=20, layers=1, experts=4, devices=2)
FIRST, THEN = [0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25]
POPULARITY = np.array([[FIRST]] * 12 + [[THEN]] * 8)
CONFIG = BalanceConfig(spare_slots=1, interval_s=4.0, half_life_s=1.0)


def test_a_scene_by_hand():
    """Experts 0 and 1 are at home on device 0; the busiest one's copy evens both out.

    After 4 s the mover sees it. The load turns round at 12 s: the copy that is there still makes
    it worse for 4 s, until the mover looks the next time but one tick.
    """
    np.testing.assert_allclose(drift.placed_anew(SCENE, POPULARITY, 1), 1)
    played = drift.play(SCENE, POPULARITY, CONFIG)
    stale = 2 * (0.5 + 0.25 + 0.125 / 2)
    wanted = [1.5] * 5 + [1.0] * 7 + [stale] * 5 + [1.0] * 3
    np.testing.assert_allclose(played["imbalance"], wanted)
    assert (played["layers_written"], played["most_in_a_tick"]) == (2, 1)
    assert len(played["look_ms"]) == 4
    found = drift.figures(SCENE, CONFIG, POPULARITY, np.ones(20))
    assert found["mover"] == pytest.approx((9 * 1.0 + 5 * stale) / 14)  # of 6 s and later
    assert found["excess"] == pytest.approx(found["mover"] - 1)


def test_at_most_one_layer_is_written_a_tick():
    scene = drift.Scene(seconds=30, layers=3)
    config = BalanceConfig(spare_slots=1, interval_s=1.0, half_life_s=2.0)
    played = drift.play(scene, scene.popularity(), config)
    assert played["most_in_a_tick"] == 1
    assert played["layers_written"] > 3


@pytest.mark.parametrize("kind", drift.KINDS)
def test_popularities_follow_from_the_seed_and_change(kind):
    scene = drift.Scene(kind, 5, 400, layers=2)
    found = scene.popularity()
    np.testing.assert_array_equal(found, scene.popularity())
    assert (found != drift.Scene(kind, 6, 400, layers=2).popularity()).any()
    assert found.shape == (400, 2, 128)
    np.testing.assert_allclose(found.sum(axis=2), 1)
    logs = np.log(found).reshape(400, -1)
    assert np.corrcoef(logs[0], logs[2])[0, 1] > 0.95
    assert np.corrcoef(logs[0], logs[399])[0, 1] < 0.5
    assert logs.std(axis=1) == pytest.approx(drift.SKEW, rel=0.25)


def test_a_short_run_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(drift, "SPARE", (1,))
    found = mesh.main(["drift", "--dry-run"])["drift"]
    printed = capsys.readouterr().out
    assert [one["kind"] for one in found] == list(drift.KINDS)
    for one in found:
        assert 1 <= one["anew"] <= one["mover"] * 1.01
        assert f"| {one['kind']} | 1 |" in printed
