import asyncio
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
        "segment_s": 1.0,
        "pairs": 1,
        "spare_pairs": 1,
        "calibration_s": 0.6,
        "pause_s": 0.1,
        "tasks": tasks,
        "out": tmp_path / "out",
        "server": SCRIPTED,
        "startup_timeout_s": 120.0,
    }
    return DemoConfig(**settings | change)


def quiet():
    return Console(file=open(os.devnull, "w"), width=120, record=True)


def fake_watch(monkeypatch, others=0.0):
    """Fakes the share that other programs take in every segment, since tests run on busy
    machines.
    """
    monkeypatch.setattr(demo, "LOOK_S", 0.01)
    monkeypatch.setattr(demo.Watch, "others", lambda _: others)


def test_demo_measures_both_halves_and_stores_them(tmp_path, monkeypatch):
    fake_watch(monkeypatch)
    console = quiet()
    result = run_demo(config(tmp_path), console)
    text = console.export_text()
    assert "a full batch without brownout:" in text
    assert "live page: http://127.0.0.1:9\n" in text
    assert text.index("pair 1, without brownout\n") < text.index("pair 1, with brownout\n")
    assert result["verdict"][:30] in text.replace("\n", " ")
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    stored = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert str(tmp_path) not in json.dumps(stored)
    zero, brownout = stored["runs"]["zero"], stored["runs"]["brownout"]
    # The script: 20 ms a token, 10 ms at a threshold of 0; a busy machine wakes late, never early.
    batches = [stored["calibration"][kind] for kind in ("zero", "full")]
    itl_s = [batch["itl_p90_s"] for batch in batches]
    assert itl_s[0] > 0.019
    assert itl_s[1] > 0.009
    assert stored["slo"]["itl_s"] == pytest.approx(math.prod(itl_s) ** 0.5, rel=1e-3)
    assert stored["slo"]["ttft_s"] >= 3 * 0.02
    capacities = [batch["capacity_per_s"] for batch in batches]
    assert stored["gain"] == pytest.approx(capacities[1] / capacities[0], rel=1e-3)
    assert stored["steady_rate_per_s"] == pytest.approx(capacities[0] / 2, rel=1e-3)
    burst_per_s = capacities[0] ** 0.75 * capacities[1] ** 0.25
    assert stored["burst_rate_per_s"] == pytest.approx(burst_per_s, rel=1e-3)
    assert zero["completed"] == brownout["completed"] == stored["num_requests"]
    assert zero["degraded_share"] == 0.0
    assert brownout["degraded_share"] > 0.4
    assert zero["burst"]["mean_thresholds_percent"]["decode"] == 100
    assert brownout["burst"]["mean_thresholds_percent"]["decode"] == 20
    assert zero["accuracy"] == 1.0
    assert {"machine", "versions", "commit", "calibration", "config", "model"} <= set(stored)


@pytest.mark.parametrize("change", [{"pairs": 0}, {"segment_s": 0.0}, {"segment_s": math.nan}])
def test_nothing_to_play_is_told_before_a_server_starts(tmp_path, change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*; it must be above 0"):
        config(tmp_path, **change)


@pytest.mark.parametrize("strategy", ["zero", "partail"])
def test_a_strategy_that_degrades_nothing_is_told_before_a_server_starts(tmp_path, strategy):
    with pytest.raises(ValueError, match=f"strategy is '{strategy}'; it must be partial or full"):
        config(tmp_path, strategy=strategy)


def watched(monkeypatch, *shares):
    """Fakes the share that other programs take at each look; returns the looks that are left."""
    left = iter(shares)
    monkeypatch.setattr(demo, "LOOK_S", 0.01)
    monkeypatch.setattr(demo.Watch, "others", lambda _: next(left))
    return left


def played(console):
    """Returns whether each segment that was played had brownout."""
    lines = console.export_text(clear=False).splitlines()
    return ["with" in line.split() for line in lines if line.startswith("playing: ")]


@pytest.mark.deep
def test_pairs_go_to_and_fro_and_what_others_disturb_is_played_again(tmp_path, monkeypatch):
    quiet_now, busy_now = (0.0,), (0.4, 0.0)  # as it looks before something is played
    looks = [
        *(quiet_now, (0.4,), quiet_now, (0.0,)),  # calibration, twice
        *(quiet_now, (0.3,), busy_now, (0.0,)),  # warm-up, twice
        *(quiet_now, quiet_now, (0.0,), busy_now, (0.3,), quiet_now, (0.02,)),
        *(busy_now, quiet_now, (0.1,), quiet_now, (0.05,)),
    ]
    left = watched(monkeypatch, *(share for look in looks for share in look))
    console = quiet()
    result = run_demo(config(tmp_path, pairs=2, segment_s=0.4, calibration_s=0.2), console)
    assert next(left, None) is None
    assert played(console) == [False, True, True, True, False]
    assert console.export_text(clear=False).count("played again: other programs took 40%") == 1
    assert console.export_text(clear=False).count("played again: other programs took 30%") == 2
    assert [pair["seed"] for pair in result["pairs"]] == [0, 1]
    assert [pair["others"] for pair in result["pairs"]] == [0.02, 0.1]


@pytest.mark.deep
def test_a_machine_that_stays_busy_gets_one_pair_that_does_not_count(tmp_path, monkeypatch):
    fake_watch(monkeypatch, others=0.3)
    console = quiet()
    result = run_demo(
        config(tmp_path, pairs=2, segment_s=0.4, calibration_s=0.3, limit_s=0.0), console
    )
    assert played(console) == [False, True]
    (pair,) = result["pairs"]
    assert "other programs took 30% of the processors" in pair["why_not"]
    assert "0 of 1 pairs count" in result["verdict"]


@pytest.mark.deep
def test_a_pair_that_does_not_count_is_made_up_for(tmp_path, monkeypatch):
    fake_watch(monkeypatch)
    monkeypatch.setattr(demo, "_slowness", lambda run, step_s, seen=iter(SEEN): next(seen))
    result = run_demo(config(tmp_path, pairs=2, segment_s=0.4, calibration_s=0.3), quiet())
    assert [pair["why_not"] for pair in result["pairs"]] == [
        "",
        "the machine's speed moved by 20%",
        "",
    ]
    assert [pair["slowness"] for pair in result["pairs"]] == [1.0, 1.0, 1.2]
    assert "2 of 3 pairs count" in result["verdict"]
    assert result["median_pair"] in (1, 3)


SEEN = (1.0, 1.0, 1.0, 1.2, 1.2, 1.25, 1.2)
"""How much slower the machine was: in the warm-up, and in both segments of each of three pairs."""


async def test_a_machine_that_stays_busy_is_waited_for_no_longer_than_told(monkeypatch):
    fake_watch(monkeypatch, others=0.9)
    began = time.monotonic()
    assert not await demo._wait_quiet(1, began + 0.05, quiet())
    assert await demo._wait_quiet(None, began + 60.0, quiet())
    fake_watch(monkeypatch)
    assert await demo._wait_quiet(1, began + 60.0, quiet())
    assert time.monotonic() - began < 5


@pytest.mark.deep
def test_each_controller_is_played_on_one_calibration(tmp_path, monkeypatch):
    fake_watch(monkeypatch)
    result = run_demo(config(tmp_path, controllers=True, segment_s=0.5), quiet())
    assert tuple(result["runs"]) == ALL
    assert (result["controller"], result["prefill_company"]) == ("algorithm2", True)
    degraded = {name: run["degraded_share"] > 0 for name, run in result["runs"].items()}
    assert degraded == {name: name != "zero" for name in ALL}
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def step_times(*seconds):
    """Returns a run in which the server reported these times of a full decode step."""
    return {"samples": {"full_decode_step_s": list(seconds)}}


def test_slowness_is_what_the_server_expects_of_a_step_over_its_calibration():
    assert demo._slowness(step_times(0.012, None, 0.011, 0.013), 0.01) == pytest.approx(1.2)
    assert demo._slowness(step_times(None), 0.01) == 1.0  # a server that says nothing
    assert demo._slowness(step_times(0.009), 0.01) == 1.0  # no more load than was carried
    assert demo._slowness(step_times(0.01), 0.0) == 1.0


def test_what_chance_moves_is_told_from_a_machine_that_changed():
    changed = step_times(*[0.01] * 4, *[0.015] * 5)
    assert demo._chance(changed, 0.01) == 0
    noisy = step_times(*[0.01, 0.012] * 4, 0.01)
    assert demo._chance(noisy, 0.01) == pytest.approx(2 * 1.05 * 0.2 / 3)
    assert demo._chance(step_times(0.01, None, 0.02), 0.01) == 0  # too few to tell


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
    real = machine.Watch(os.getpid()).others()
    assert real is None or 0 <= real <= 1
    ticks = iter([(10, 100), (40, 200)])
    monkeypatch.setattr(machine.Watch, "_ticks", lambda _: next(ticks))
    assert machine.Watch(1).others() == pytest.approx(0.3)


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


def test_a_setting_that_the_server_refuses_is_bad_input(tmp_path):
    program = "import sys; sys.stderr.write('jmoe: way is 3\\n'); sys.exit(2)"
    with pytest.raises(ValueError, match=r"^way is 3$"):
        run_demo(config(tmp_path, server=("-c", program)), quiet())


def test_a_server_that_refuses_everything_is_explained(tmp_path, monkeypatch):
    fake_watch(monkeypatch)
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
