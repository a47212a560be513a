import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import scripted_server
from rich.console import Console

from serving.bench import demo, machine
from serving.bench.demo import DemoConfig, run_demo
from serving.bench.launch import LaunchError
from serving.bench.results import Slo
from serving.bench.variants import ALL, VARIANTS, use_variant
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

SCRIPTED = (scripted_server.__file__,)


def config(tmp_path, **change):
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"family": f"f{n}", "prompt": ",".join(["20"] * n), "answer": "x" * n} for n in (4, 6, 8)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "duration_s": 1.5,
        "calibration_s": 0.6,
        "pause_s": 0.1,
        "tasks": tasks,
        "out": tmp_path / "out",
        "benchmarks": tmp_path / "benchmarks",
        "server": SCRIPTED,
        "startup_timeout_s": 120.0,
    }
    return DemoConfig(**settings | change)


def quiet():
    return Console(file=open(os.devnull, "w"), width=120, record=True)


def test_demo_measures_both_runs_and_stores_them(tmp_path):
    console = quiet()
    result = run_demo(config(tmp_path), console)
    text = console.export_text()
    assert "a full batch without brownout:" in text
    assert "live page: http://127.0.0.1:9\n" in text
    assert text.index("playing: without brownout\n") < text.index("playing: with brownout\n")
    assert result["verdict"][:30] in text.replace("\n", " ")
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    stored = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert str(tmp_path) not in json.dumps(stored)
    zero, brownout = stored["runs"]["zero"], stored["runs"]["brownout"]
    # The script: 20 ms a token, 10 ms at a threshold of 0; a busy machine wakes late, never early.
    full_batch = [stored["calibration"][kind]["itl_p90_s"] for kind in ("zero", "full")]
    assert full_batch[0] > 0.019
    assert full_batch[1] > 0.009
    assert stored["slo"]["itl_s"] == pytest.approx(math.prod(full_batch) ** 0.5, rel=1e-3)
    assert stored["slo"]["ttft_s"] >= 3 * 0.02
    assert stored["burst_rate_per_s"] == pytest.approx(2 * stored["steady_rate_per_s"], rel=1e-3)
    assert zero["completed"] == brownout["completed"] == stored["num_requests"]
    assert zero["degraded_share"] == 0.0
    assert brownout["degraded_share"] > 0.4
    assert zero["burst"]["mean_thresholds_percent"]["decode"] == 100
    assert brownout["burst"]["mean_thresholds_percent"]["decode"] == 20
    assert zero["accuracy"] == 1.0
    assert {"machine", "versions", "commit", "calibration", "config", "model"} <= set(stored)


@pytest.mark.parametrize("change", [{"repeat": 0}, {"duration_s": 0.0}, {"duration_s": math.nan}])
def test_nothing_to_play_is_told_before_a_server_starts(tmp_path, change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*; it must be above 0"):
        config(tmp_path, **change)


def test_repeats_store_medians(tmp_path):
    result = run_demo(config(tmp_path, repeat=2, duration_s=0.5), quiet())
    assert len(result["results"]) == 2
    rates = [r["runs"]["zero"]["output_throughput"] for r in result["results"]]
    assert result["medians"]["runs"]["zero"]["output_throughput"] == pytest.approx(sum(rates) / 2)
    assert (tmp_path / "benchmarks" / "demo.json").exists()
    assert (tmp_path / "out" / "demo-2.png").exists()


def test_each_controller_is_played_on_one_calibration(tmp_path):
    result = run_demo(config(tmp_path, controllers=True, duration_s=0.5), quiet())
    assert tuple(result["runs"]) == ALL
    assert (result["controller"], result["prefill_company"]) == ("algorithm2", True)
    degraded = {name: run["degraded_share"] > 0 for name, run in result["runs"].items()}
    assert degraded == {name: name != "zero" for name in ALL}
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


async def test_a_variant_is_the_servers_own_state_but_for_what_it_names():
    server = scripted_server.Scripted()
    client, own = scripted_server.Direct(server), pb.BrownoutState()
    own.CopyFrom(server.state)
    for name, expected in (
        ("algorithm2_alone", ("algorithm2", False)),
        ("predictive", ("predictive", True)),
        ("brownout", ("algorithm2", True)),
    ):
        state = await use_variant(client, VARIANTS[name], own, "partial", Slo(0.2, 0.05))
        assert (state.controller, state.prefill_company) == expected
        assert (state.strategy, state.ttft_slo_s, state.itl_slo_s) == ("partial", 0.2, 0.05)
    state = await use_variant(client, VARIANTS["zero"], own, "partial", Slo(0.2, 0.05))
    assert (state.strategy, state.decode_threshold_percent) == ("zero", 100)


def test_what_else_the_machine_did(monkeypatch):
    real = machine.Watch(os.getpid()).seen()
    assert real.others is None or 0 <= real.others <= 1
    ticks, work = iter([(10, 100), (40, 200)]), iter([800.0, 600.0])
    monkeypatch.setattr(machine.Watch, "_ticks", lambda _: next(ticks))
    monkeypatch.setattr(machine, "work_per_s", lambda: next(work))
    assert machine.Watch(1).seen() == (pytest.approx(0.3), 700.0)


def test_work_is_counted_by_the_second():
    clock = itertools.count(0.0, machine.WORK_S / 4)
    assert machine.work_per_s(lambda: next(clock)) == pytest.approx(3 / machine.WORK_S)


def test_medians_go_number_by_number():
    values = [
        {"a": n, "b": {"c": n * 2.0, "d": None}, "series": [n], "word": "x"} for n in (1, 5, 3)
    ]
    assert demo._medians(values) == {"a": 3.0, "b": {"c": 6.0}}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('no weights', file=sys.stderr); sys.exit(3)", "ended with status 3"),
        (
            "import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(60)",
            "ready",
        ),
    ],
)
def test_a_server_that_does_not_come_up_is_explained(tmp_path, program, message):
    settings = config(tmp_path, server=("-c", program), startup_timeout_s=1.0)
    with pytest.raises(LaunchError, match=message) as error:
        run_demo(settings, quiet())
    assert ("no weights" in str(error.value)) or ("loading" in str(error.value))


def test_a_server_that_refuses_everything_is_explained(tmp_path):
    tasks = tmp_path / "refused.jsonl"
    tasks.write_text(json.dumps({"family": "f", "prompt": "refuse", "answer": "x"}) + "\n")
    with pytest.raises(LaunchError, match="queue is full"):
        run_demo(config(tmp_path, tasks=tasks), quiet())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_demo_stops_its_server(tmp_path, number):
    program = (
        # A shell has what it runs in the background ignore SIGINT, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from pathlib import *; from serving.bench.demo import *;"
        f"run_demo({config(tmp_path, calibration_s=30.0)!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "out" / "server.log", time.monotonic() + 20
    while not (log.exists() and "jmoe ready" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    server_pid = int(log.read_text().split()[1])
    os.kill(server_pid, 0)
    child.send_signal(number)
    assert child.wait(timeout=60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


async def test_light_imports():
    """Client-side modules start fast: none of them brings jax along."""
    program = (
        "import sys, serving.client, serving.bench.workload, serving.bench.loadgen,"
        " serving.bench.report, serving.bench.calibrate, serving.bench.demo;"
        " assert 'jax' not in sys.modules"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
