"""The balance benchmark: its traces and baselines by hand, and a tiny run of all of it."""

import json

import numpy as np
import pytest

from benchmarks.balance import __main__ as balance
from benchmarks.balance import strategies, timing, traces

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def case(made, **changes):
    made = np.asarray(made, np.int32)
    given = {"predicted": made, "path_table": made, "history": made.astype(float)}
    return strategies.Case(made, **{**given, "num_replicas": 1, "per_pair": None, **changes})


def test_traces_are_skewed_and_follow_from_the_seed():
    some, more = traces.draw(3, 5), traces.draw(4, 5)
    for one, same in zip(some, more, strict=False):
        np.testing.assert_array_equal(one.made, same.made)
        np.testing.assert_array_equal(one.predicted(0.6), same.predicted(0.6))
        assert one.made.shape == one.history.shape == (8, 128)
        assert one.made.max() <= traces.NUM_ROWS
        assert traces.imbalance(one.at_home) >= traces.LEAST_IMBALANCE
        np.testing.assert_allclose(one.history.sum(axis=1), traces.NUM_ROWS * 8, rtol=1e-3)
    assert (traces.draw(1, 6)[0].made != some[0].made).any()


@pytest.mark.parametrize("accuracy", [0.85, 0.6, 0.437])
def test_a_prediction_is_as_right_as_was_asked_for(accuracy):
    for trace in traces.draw(3, 7):
        guess = trace.predicted(accuracy)
        right = np.minimum(guess, trace.made).sum() / trace.made.sum()
        assert right == pytest.approx(accuracy, abs=0.003)
        np.testing.assert_allclose(guess.sum(axis=1), trace.made.sum(axis=1), rtol=0.01)


MADE = [[8, 0, 1, 1], [8, 0, 0, 2]]  # of two devices with experts 0, 1 and 2, 3


def test_baselines_by_hand():
    assert strategies.none(case(MADE)).tolist() == [16, 4]
    assert strategies.history_alone(case(MADE)).tolist() == [16, 4]  # capacity: two a device
    assert strategies.history_alone(case(MADE, history=np.ones((2, 4)))).tolist() == [17, 3]
    # Lina: expert 0 on device 1, expert 3 on device 0; half of each.
    assert strategies.lina(case(MADE)).tolist() == [9.5, 10.5]
    # EPLB: the same two experts on both devices; visits at random.
    load = strategies.eplb(case(MADE, seed=3))
    assert load.sum() == 20
    assert 4 <= load.min() <= load.max() <= 16
    assert strategies.eplb(case(MADE, seed=3)).tolist() == load.tolist()
    exact = strategies.STRATEGIES["exact after routing"](case(MADE, predicted=np.zeros((2, 4))))
    assert exact.tolist() == [10, 10]


@pytest.mark.deep
def test_every_strategy_on_the_same_traces():
    found = balance.synthetic(traces.draw(2, 5), 0.85)
    for bound in ("None", "2"):
        rows = found[bound]
        assert set(rows) == set(strategies.STRATEGIES)
        assert all(1 <= row["median"] <= row["p99"] <= row["worst"] for row in rows.values())
        assert rows["Libra, modelled"]["worst"] < 1.1 < rows["none"]["median"]
    for name in strategies.UNBOUNDED:
        assert found["None"][name] == found["2"][name]


@pytest.mark.deep
def test_a_tiny_run_writes_table_and_json(tmp_path, capsys):
    file = tmp_path / "balance.json"
    args = ["--traces", "3", "--prompts", "100", "--rows", "16", "--calls", "0"]
    found = balance.main([*args, "--json", str(file)])
    printed = capsys.readouterr().out
    stored = json.loads(file.read_text())
    for name in strategies.STRATEGIES:
        assert f"| {name} |" in printed
        for accuracy in ("85", "60"):
            for bound in ("None", "2"):
                row = stored["synthetic"][accuracy][bound][name]
                assert 1 <= row["median"] <= row["p99"] <= row["worst"]
                assert row["steps"] == 3
    assert set(found["bundled"]["pick_accuracy"]) >= {"add", "all"}
    ours = stored["bundled"]["predictors"]["N=8, bound None"]["Libra, modelled"]
    assert ours["perfect"]["gain"] == 1
    assert ours["probe"]["mean"] < stored["bundled"]["predictors"]["N=8, bound None"]["none"]


def test_planning_is_timed():
    found = timing.plan_time(4, 32, 1, 2, seed=1, calls=3)
    assert 0 < found["floor_ms"] < 1000
    assert 0 < found["ms"] < 1000
