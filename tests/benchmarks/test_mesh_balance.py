"""Balance of one step: traces and baselines by hand, and a tiny run of all of it."""

import numpy as np
import pytest

from benchmarks.mesh import __main__ as mesh
from benchmarks.mesh import balance
from tests import planned
from tests.jmoe.parallel import balance_oracle as oracle

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def step(made, **changes):
    made = np.asarray(made, np.int32)
    given = {"predicted": made, "history": made.astype(float)}
    return balance.Step(made, **{**given, "num_replicas": 1, "per_pair": None, **changes})


def test_traces_are_skewed_and_follow_from_the_seed():
    some, more = balance.draw(3, 5), balance.draw(4, 5)
    for one, same in zip(some, more, strict=False):
        np.testing.assert_array_equal(one.made, same.made)
        np.testing.assert_array_equal(one.predicted(0.6), same.predicted(0.6))
        assert one.made.shape == one.history.shape == (8, 128)
        assert one.made.max() <= balance.NUM_ROWS
        assert balance.imbalance(one.at_home) >= balance.LEAST_IMBALANCE
        np.testing.assert_allclose(one.history.sum(axis=1), balance.NUM_ROWS * 8, rtol=1e-3)
    assert (balance.draw(1, 6)[0].made != some[0].made).any()


@pytest.mark.parametrize("accuracy", [0.85, 0.6])
def test_a_prediction_is_as_right_as_was_asked_for(accuracy):
    for trace in balance.draw(3, 7):
        guess = trace.predicted(accuracy)
        right = np.minimum(guess, trace.made).sum() / trace.made.sum()
        assert right == pytest.approx(accuracy, abs=0.003)
        np.testing.assert_allclose(guess.sum(axis=1), trace.made.sum(axis=1), rtol=0.01)


MADE = [[8, 0, 1, 1], [8, 0, 0, 2]]  # of two devices with experts 0, 1 and 2, 3


def test_baselines_by_hand():
    assert balance.none(step(MADE)).tolist() == [16, 4]
    # EPLB: experts 0 and 3 on both devices; visits at random.
    load = balance.eplb(step(MADE, seed=3))
    assert load.sum() == 20
    assert 4 <= load.min() <= load.max() <= 16
    assert balance.eplb(step(MADE, seed=3)).tolist() == load.tolist()
    assert balance.libra(step(MADE)).tolist() == [10, 10]


@pytest.mark.parametrize(("alpha", "per_pair"), [(0.0, None), (0.5, None), (0.5, 1), (1.0, 1)])
def test_libra_as_printed_is_the_papers_listings(alpha, per_pair):
    for seed in range(40):
        counts, hosts = map(np.asarray, planned.draw(seed, *[(3, 7), (8, 20)][seed % 2]))
        home, lists = hosts.argmax(axis=1), (counts.tolist(), hosts.tolist())
        for num_replicas in (1, 4):
            held = balance.printed_replicas(counts, hosts, num_replicas, per_pair, alpha)
            want = oracle.algorithm_1(*lists, num_replicas, alpha, per_pair)
            np.testing.assert_array_equal(held & ~hosts, want)
            found = balance.printed_shares(counts, held, home)
            want = oracle.algorithm_2(counts.tolist(), held.tolist(), home.tolist())
            np.testing.assert_array_equal(found, want)


@pytest.mark.deep
def test_every_strategy_on_the_same_traces():
    rows = balance.by_strategy(balance.draw(2, 5), 0.85)
    assert set(rows) == set(balance.STRATEGIES)
    assert all(1 <= row["median"] <= row["p99"] for row in rows.values())
    assert rows["Libra, modelled"]["p99"] < 1.1 < rows["none"]["median"]


@pytest.mark.deep
def test_a_tiny_run_prints_tables(capsys):
    found = mesh.main(["balance", "--dry-run"])
    printed = capsys.readouterr().out
    for name in balance.STRATEGIES:
        assert f"| {name} |" in printed
        for accuracy in ("85", "60"):
            row = found["synthetic"][accuracy][name]
            assert 1 <= row["median"] <= row["p99"]


def test_planning_is_timed():
    assert 0 < balance.plan_time(True)["ms"] < 1000
