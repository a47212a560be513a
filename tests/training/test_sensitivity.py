"""The search of levels on costs that are known, and what is compared at equal saving."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jmoe
from jmoe.brownout import LowestGate
from jmoe.levels import Levels
from training.evaluation.divergence import Cost, Divergence
from training.evaluation.run import EvaluateConfig, Work
from training.evaluation.sensitivity import (
    SAVINGS,
    Search,
    at_saving,
    compare,
    evaluate_levels,
)

GOLDEN = Path(__file__).parents[1] / "golden"
HARM = (8.0, 1.0, 3.0)  # of a layer that is all degraded
LAYERS = len(HARM)


class Known:
    """Stands in for measurements: harm grows with the square of what is degraded, and two layers
    that are degraded together harm each other.
    """

    num_tokens = np.array([10, 10])

    def __init__(self, together=0.0):
        self.together, self.asked = together, 0

    def decode(self, setting, levels):
        self.asked += 1
        row = levels[:, 2, 0] / 100  # partial, by visits
        degraded = 1 - row
        harm = np.array(HARM) @ degraded**2 + self.together * degraded[1] * degraded[2]
        items = np.array([0.25, 0.75]) * harm
        return Cost(items, items, 8 + 52 * row)


def search(**given):
    found = Search(Known(**given), 8, "visits", LAYERS)
    return found, found.path(lambda notch: None)


def harm(row, together=0.0):
    degraded = 1 - np.array(row) / 100
    return np.array(HARM) @ degraded**2 + together * degraded[1] * degraded[2]


def test_the_path_goes_down_where_it_costs_least():
    _, path = search()
    assert [point.row for point in (path[0], path[-1])] == [(100,) * 3, (0,) * 3]
    assert len(path) == 1 + 10 * LAYERS
    for above, below in pairwise(path):
        (moved,) = np.flatnonzero(np.subtract(above.row, below.row))
        prices = {
            layer: harm(np.array(above.row) - 10 * np.eye(LAYERS)[layer]) - harm(above.row)
            for layer in range(LAYERS)
            if above.row[layer]
        }
        assert prices[moved] == pytest.approx(min(prices.values()))


def test_what_layers_do_to_each_other_counts():
    _, path = search(together=20.0)
    (row,) = [point.row for point in path if sum(point.row) == 190]
    # Alone, layer 2 is cheaper to degrade than layer 0; beside a degraded layer 1 it is not.
    assert harm((100, 40, 50)) < harm((50, 40, 100))
    assert row[0] < row[2]


@pytest.mark.parametrize("level", [0, 7, 25, 50, 83, 100])
def test_a_level_has_as_many_active_experts_as_the_threshold_in_every_layer(level):
    found, path = search()
    table = found.levels(path)
    active = sum(8 + 52 * threshold / 100 for threshold in table.rows[level])
    assert active == pytest.approx(LAYERS * (8 + 52 * level / 100), abs=0.6)
    assert harm(table.rows[level]) <= harm((level,) * LAYERS) + 1e-9
    assert (np.diff(np.array(table.rows), axis=0) >= 0).all()
    assert found.measure.asked < 100  # rows are measured once


def test_equal_saving_is_between_its_neighbours():
    active = [np.array([60.0, 60.0]), np.array([50.0, 30.0]), np.array([10.0, 10.0])]
    costs = [
        Cost(np.array([d, 2 * d]), np.zeros(2), a) for d, a in zip((0, 4, 9), active, strict=True)
    ]
    assert at_saving(costs, 0.4).tolist() == [4, 8]
    assert at_saving(costs, 0.2).tolist() == [2, 4]
    assert at_saving(costs, 0.7).tolist() == [6.5, 13]


@pytest.mark.parametrize("keep", ["visits", "weight"])
def test_thresholds_alike_and_levels_are_compared_in_turn_whatever_is_kept(keep):
    """By visits, thresholds alike are the paper's plan itself; levels are made to cost half."""

    def decode(setting, levels=None):
        share = 0 if setting is None else 1 - setting.threshold_percent / 100
        cheaper = 1 if levels is None else 2
        harm = share / cheaper * (1 if setting is None or setting.keep == "visits" else 0.8)
        return Cost(np.full(4, harm), np.zeros(4), np.full(2, 60 - 40 * share))

    scored: Any = SimpleNamespace(decode=decode, num_tokens=np.ones(4))
    table = Levels(8, keep, tuple((level,) * 2 for level in range(101)))
    found = compare("decode", scored, table, lambda done: None)
    assert [one.choice for one in found] == [keep, "levels"] * len(SAVINGS)
    assert [one.saving_percent for one in found[::2]] == list(SAVINGS)
    alike = 1 if keep == "visits" else 0.8
    for one in found:
        want = alike if one.choice == keep else alike / 2
        assert (one.ratio, one.low, one.high) == pytest.approx((want, want, want))


def test_windows_of_texts_are_items_whose_second_half_is_the_answer(tmp_path):
    letters = "abcdefghijklmnopqrstuvw"  # 23: the last window overlaps the one before it
    text = tmp_path / "letters.txt"
    text.write_text(letters)
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    model: Any = SimpleNamespace(
        tokenizer=tokenizer,
        name="tiny",
        config=SimpleNamespace(max_position=64),
        home=None,
        pool=SimpleNamespace(format="none"),
    )
    work = Work(model, [], EvaluateConfig(text=(text,), text_window=8, chunk=64))
    found = {(bytes(p), bytes(a)) for p, a in zip(work.prompts, work.answers, strict=True)}
    assert len(work.prompts) == 3
    assert found == {(b"abcd", b"efgh"), (b"ijkl", b"mnop"), (b"pqrs", b"tuvw")}


@pytest.mark.deep
def test_what_levels_cannot_be_compared_on_is_refused(tmp_path):
    golden, text = str(GOLDEN / "qwen2_moe"), tmp_path / "a.txt"
    both = EvaluateConfig(golden, text=(text,), generate_tasks=4)
    with pytest.raises(ValueError, match="tasks and --text; give one"):
        evaluate_levels(both, [2], "weight", 1)
    with pytest.raises(ValueError, match="give either --data FILE or"):
        evaluate_levels(EvaluateConfig(golden), [2], "weight", 1)
    stored = EvaluateConfig("bundled", generate_tasks=4)
    with pytest.raises(ValueError, match=r"way is 8; .*levels.json has no levels of it by visits"):
        evaluate_levels(stored, [8], "visits", 0, stored=True)


@pytest.mark.exhaustive
def test_a_models_own_levels_are_compared_without_a_search(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. ")
    config = EvaluateConfig("bundled", text=(text,), text_window=16, batch=4, out=tmp_path / "out")
    found = evaluate_levels(config, [8], "weight", 0, stored=True)
    assert len(found[8]) == 2 * 2 * len(SAVINGS)
    assert {path.name for path in config.out.iterdir()} == {"sensitivity.md"}


@pytest.mark.deep
def test_divergence_is_of_the_steps_that_it_says():
    model = jmoe.load(GOLDEN / "qwen2_moe", "float32")
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 60, (6, 5)).tolist()
    answers = [rng.integers(1, 60, n).tolist() for n in (3, 1, 2, 3, 2, 3)]
    measure = Divergence(model, prompts, answers, batch=4, chunk=64)
    assert measure.num_tokens.tolist() == [4, 2, 3, 4, 3, 4]
    for run in (measure.decode, measure.prefill):
        assert np.abs(run(None).divergence).max() < 1e-5
    # Row by row, so that company does not matter; the first answer token is of the prompt's end.
    setting = jmoe.Brownout(LowestGate(), 50)
    found = measure.prefill(setting)
    ends = [
        jax.nn.log_softmax(jmoe.forward(model, prompts, each)[:, -1]) for each in (None, setting)
    ]
    first = np.sum(np.exp(ends[0]) * (ends[0] - ends[1]), axis=-1)
    assert (found.divergence >= first - 1e-5).all()
    whole = measure._run(measure._prefill, measure._exact[0])  # under no brownout by now
    assert np.abs(whole.divergence).max() < 1e-5
    _, stats = jmoe.forward(model, prompts, return_stats=True)
    visited = (np.asarray(stats.expert_rows) > 0).sum(axis=1)
    assert measure.prefill(None).active.tolist() == visited.tolist()
