"""The timeline of an engine: what is in it, and what a viewer's parser makes of it."""

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import perfetto
import pytest
from counting import LIMITS

from jmoe.packed_rows import NUM_COLUMNS
from serving.cli.main import main
from serving.plan import Phase, StepResult
from serving.request import Priority, SamplingParams
from serving.scheduling.step import ScheduledStep
from serving.telemetry.timeline import Timeline
from tests.serving.fake_runner import FakeRunner

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


async def ask(engine, prompt, count, priority=LS, at_s=0.0):
    await asyncio.sleep(at_s)
    options = {"priority": priority, "request_id": f"{priority}-{prompt[0]}"}
    async for _ in engine.generate(prompt, SamplingParams(max_new_tokens=count), **options):
        pass


async def a_parked_step(start):
    """Layers take a second. Best effort runs from 0 s; at 1.5 s a prompt comes that cannot wait."""
    timeline = Timeline()
    runner, limits = partial(FakeRunner, part_layers=1), replace(LIMITS, num_layers=4)
    engine = start(4.0, limits, runner=runner, observer=timeline)
    await asyncio.gather(ask(engine, [1] * 4, 2, BE), ask(engine, [2] * 4, 1, at_s=1.5))
    return timeline, engine


def spans(events, track):
    return [e for e in events if e["ph"] == "X" and e["tid"] == track]


@pytest.mark.simulated_time
async def test_steps_parks_and_requests_by_hand(start, tmp_path):
    timeline, engine = await a_parked_step(start)
    assert engine.scheduler.num_parks == 1
    timeline.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    device = spans(events, 2)
    assert [e["dur"] for e in device] == pytest.approx([1e6] * len(device))
    (park,) = (e for e in events if e["name"] == "park")
    assert park["args"] == {"phase": "prefill", "rows": 1, "layer": 2}
    # The second layer runs as the other comes; its four go before the third.
    assert [(e["args"]["best_effort_rows"], e["args"]["layers"]) for e in device[:8]] == [
        (1, "0-0"),
        (1, "1-1"),
        (0, "0-0"),
        (0, "1-1"),
        (0, "2-2"),
        (0, "3-3"),
        (1, "2-2"),
        (1, "3-3"),
    ]
    queued = [e for e in events if e["name"] == "queued" and e["cat"] == "latency_sensitive"]
    assert [e["ts"] for e in queued] == pytest.approx([1.5e6, 2e6])
    assert len(spans(events, 1)) == len(device)


@pytest.mark.simulated_time
async def test_the_newest_events_are_kept(start, tmp_path):
    timeline = Timeline(max_events=5)
    engine = start(observer=timeline)
    await ask(engine, [1, 2], 20)
    assert len(timeline) == 5
    timeline.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert events[-1]["name"] == f"{LS}-1"
    assert events[-1]["ph"] == "e"


SLICES = """
    select s.name, s.dur, t.name as track, extract_arg(s.arg_set_id, 'args.layers') as layers,
        extract_arg(s.arg_set_id, 'args.layer') as layer
    from slice s join thread_track on s.track_id = thread_track.id join thread t using (utid)
    order by s.ts, s.id
"""
REQUESTS = """
    select name, category, ts, dur from slice
    where category in ('latency_sensitive', 'best_effort') order by ts, dur desc
"""


@pytest.mark.simulated_time
async def test_a_viewer_reads_it(start, tmp_path):
    """Perfetto's own reader finds every step, park and request, and nothing to complain of."""
    timeline, _ = await a_parked_step(start)
    timeline.write(tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text())  # stricter than the viewer's
    problems, slices, requests = perfetto.queries(
        tmp_path / "t.json", [perfetto.PROBLEMS, SLICES, REQUESTS]
    )
    assert problems == []
    device = [s for s in slices if s["track"] == "device: layers of steps"]
    assert [s["layers"] for s in device[:8]] == [
        *("0-0", "1-1", "0-0", "1-1", "2-2", "3-3", "2-2", "3-3")
    ]
    assert {s["dur"] for s in device} == {10**9}
    (park,) = (s for s in slices if s["name"] == "park")
    assert (park["track"], park["layer"]) == ("host: plan and launch", 2)
    assert [(r["name"], r["category"]) for r in requests] == [
        (f"{BE}-1", BE),
        ("queued", BE),
        (f"{LS}-2", LS),
        ("queued", LS),
    ]
    assert requests[3]["dur"] == 5 * 10**8


@pytest.mark.simulated_time
async def test_an_id_that_is_no_text_costs_nobody_the_timeline(start, tmp_path):
    timeline = Timeline()
    engine = start(observer=timeline)
    sampling = SamplingParams(max_new_tokens=1)
    async for _ in engine.generate([1], sampling, request_id="half \ud83d"):
        pass
    timeline.write(tmp_path / "t.json")
    problems, found = perfetto.queries(
        tmp_path / "t.json",
        [perfetto.PROBLEMS, f"select name from slice where category = '{LS}' order by dur desc"],
    )
    assert problems == []
    assert "half " in found[0]["name"]


def test_touching_steps_whose_times_are_odd_do_not_overlap(tmp_path):
    """Rounded one by one, they would by a nanosecond, and the viewer would drop the second."""
    timeline, at = Timeline(), 1.0006e-6
    rows = np.zeros((1, NUM_COLUMNS), np.int32)
    step = ScheduledStep(Phase.DECODE, rows, sequences=[], sampled=[])
    result = StepResult([], [], [], None, None)
    for _ in range(50):
        timeline.step_read(step, result, at, at := at + 1.0006e-6)
    timeline.write(tmp_path / "t.json")
    problems, slices = perfetto.queries(tmp_path / "t.json", [perfetto.PROBLEMS, SLICES])
    assert problems == []
    assert len(slices) == 50


def test_a_file_that_cannot_be_written_is_known_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["jmoe", "serve", "--timeline", str(tmp_path / "no" / "t.json")]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "t.json': No such file or directory; name a file" in capsys.readouterr().err
