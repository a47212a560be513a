"""`jmoe bench priority`: what is made of the runs, by hand."""

import json

import numpy as np
import perfetto
import pytest

from serving.bench.priority import (
    VARIANTS,
    Played,
    PriorityConfig,
    draw,
    points,
    ratios,
    run_priority,
    table,
)
from serving.bench.results import Record
from serving.bench.workload import Arrival


def record(at_s, first_s, end_s, tokens=2, code="OK"):
    token_s = [at_s + first_s, *[at_s + end_s] * (tokens - 1)]
    return Record("", at_s, at_s, at_s + end_s, token_s, code=code)


ARRIVALS = [
    Arrival("a", 2, at_s=0.0),
    Arrival("b", 2, at_s=1.0, best_effort=True),
    Arrival("c", 2, at_s=2.0),
]


def played(factor, stalls=(), only=(0, 1, 2)):
    records = {i: record(float(i), 0.1 * factor, 0.5 * factor) for i in only}
    return Played(records, list(stalls), 3.0, {"parks": 3, "joins": 1, "evictions": 0})


def result_of(runs):
    found = points({name: {0.8: one} for name, one in runs.items()}, {0.8: ARRIVALS})
    return {"points": found, "saturated_rate_per_s": 100.0}


def test_figures_by_hand():
    runs = {"alone": played(1, only=(0, 2)), "fcfs": played(4), "iteration": played(3)}
    result = result_of(runs | {"ls_first": played(1.5), "qllm": played(1)})
    by = {p["variant"]: p for p in result["points"]}
    assert by["fcfs"]["ls"]["ttft_p50_ms"] == pytest.approx(400)
    assert by["fcfs"]["best_effort"]["turnaround_mean_ms"] == pytest.approx(2000)
    assert by["fcfs"]["tokens_per_s"] == pytest.approx(6 / 4)  # the last ends at 2 + 4 * 0.5
    assert by["alone"]["best_effort"] is None
    (mine,) = (r for r in ratios(result) if r["variant"] == "ls_first")
    assert mine["ttft_p99_to_alone"] == pytest.approx(1.5)
    assert mine["ttft_p99_to_iteration"] == pytest.approx(0.5)
    assert mine["ttft_mean_of_fcfs"] == pytest.approx(4 / 1.5)
    assert mine["be_turnaround_to_fcfs"] == pytest.approx(1.5 / 4)
    text = table(result)
    assert "0.8 ls_first" in text
    assert text.count("\n") == 12


def test_who_overlaps_a_stall_of_any_variant_counts_in_none():
    runs = {v.name: played(1) for v in VARIANTS}
    runs["fcfs"] = played(1, stalls=[(0.2, 0.3)])  # the first request ends at 0.5
    result = result_of(runs)
    assert [p["left_out"] for p in result["points"]] == [1] * 5
    assert all(p["ls"]["num"] == 1 for p in result["points"])
    assert [p["num_stalls"] for p in result["points"]] == [0, 1, 0, 0, 0]


def test_a_side_that_a_stall_left_nothing_of_has_no_ratio():
    result = result_of({v.name: played(1, stalls=[(0.0, 9.0)]) for v in VARIANTS})
    assert ratios(result) == []
    assert "nan" in table(result)


def test_the_picture_is_drawn(tmp_path):
    draw(result_of({v.name: played(1) for v in VARIANTS}), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_requests": 3}, "num_requests is 3"),
        ({"ls_share": 1.0}, "ls_share is 1.0"),
        ({"loads": ()}, "loads is"),
        ({"loads": (0.5, -1)}, "loads is"),
    ],
)
def test_what_leaves_nothing_to_play_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        PriorityConfig(**changes)


@pytest.mark.exhaustive
def test_the_whole_bench_on_the_bundled_model(tmp_path):
    said = []
    config = PriorityConfig(
        num_requests=60, loads=(0.9,), part_layers=2, saturation_s=2.0, out=tmp_path
    )
    run_priority(config, said.append)
    stored = json.loads((tmp_path / "priority.json").read_text())
    by = {p["variant"]: p for p in stored["points"]}
    assert set(by) == {v.name for v in VARIANTS}
    assert all(p["failed"] == 0 for p in by.values())
    assert stored["part_layers"]["ls_first"]["prefill 128"] == 2
    assert by["fcfs"]["parks"] == by["iteration"]["parks"] == 0
    assert by["ls_first"]["parks"] > 0
    assert np.isfinite(by["ls_first"]["ls"]["ttft_p99_ms"])
    assert (tmp_path / "priority.png").exists()
    problems, parked = perfetto.queries(
        tmp_path / "timeline-ls_first.json",
        [perfetto.PROBLEMS, "select count(*) as num from slice where name = 'park'"],
    )
    assert problems == []
    assert parked == [{"num": by["ls_first"]["parks"]}]
