"""`jmoe demo --simulated` on machines whose steps take what a test says."""

import json
import os
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import scripted_server
from rich.console import Console

from serving.bench import calibrate
from serving.bench.calibrate import run_all_steps
from serving.bench.demo import DemoConfig, run_demo, simulate_demo
from serving.bench.report import verdict
from serving.bench.simulator.device import SimulatedDevice
from serving.bench.simulator.server import Machine, run_simulated
from serving.bench.simulator.step_times import Recorded, StepTimes
from serving.bench.workload import Arrival
from serving.plan import StepControl
from serving.settings import reading as settings

LAYERS, PICKS = 4, 2
PLANTS = ("off", "saves_nothing")
ENGINE = settings.load("demo").engine
BUCKETS = {"prefill": ENGINE.prefill_buckets, "decode": ENGINE.decode_buckets}
TASKS = [Arrival("1 2", 9, "12345678", "f")]  # some tokens, all of one length
CONFIG = DemoConfig(simulated=True, segment_s=3.0, pairs=2, spare_pairs=0, calibration_s=2.0)


def machine(prefill_s=0.016, decode_s=0.040, saved=0.5):
    """Makes a machine with fixed times of prefill and decode steps, of which full brownout saves a
    share.
    """
    times = {}
    for phase, seconds in (("prefill", prefill_s), ("decode", decode_s)):
        for bucket in BUCKETS[phase]:  # a token's time at each knot; batches are full in the end
            per_token = seconds / bucket * saved
            costs = [per_token, per_token / 2, 0.0]
            times[phase, bucket] = np.array([seconds * (1 - saved), 0.0, *costs])
    return Machine(StepTimes(BUCKETS, times, np.ones(1)), LAYERS, PICKS)


def planted(launch, plant):
    """Returns a `launch` whose steps take as long as without brownout, whatever is asked: `off`
    degrades nothing, and `saves_nothing` counts the visits as degraded all the same.
    """

    def launch_full(device, plan, control):
        done = launch(device, plan, StepControl(100, 0))
        if plant == "off" or not control.strategy:
            return done
        visits = np.where(plan.exempt, 0, plan.q_lens) * plan.num_layers * PICKS
        degraded = np.rint(visits * (1 - control.threshold_percent / 100)).astype(int).tolist()
        told = Future()
        done.add_done_callback(lambda of: told.set_result(replace(of.result(), degraded=degraded)))
        return told

    return launch_full


def quiet():
    return Console(file=open(os.devnull, "w"), width=150, record=True)


def played(of, **change):
    return simulate_demo(replace(CONFIG, **change), TASKS, of, quiet())


def test_figures_are_those_of_the_steps_by_hand():
    result = played(machine(saved=0.0), pairs=1, segment_s=1.5)
    known = result["calibration"]
    assert known["unloaded_ttft_s"] == pytest.approx(0.016)  # a prefill step alone
    assert known["zero"]["full_decode_step_s"] == pytest.approx(0.040, rel=1e-3)
    # Nothing is saved: a gap is a decode step, or a prefill step and it, with and without.
    assert known["zero"]["itl_p90_s"] == pytest.approx(0.056, rel=1e-3)
    assert known["full"] == pytest.approx(known["zero"], rel=0.01)
    assert result["gain"] == pytest.approx(1.0, rel=0.01)
    (pair,) = result["pairs"]
    assert pair["slo"]["itl_s"] == pytest.approx(0.056, rel=1e-3)
    assert pair["steady_rate_per_s"] == pytest.approx(known["zero"]["capacity_per_s"] / 2)
    assert (pair["slowness"], pair["others"]) == (pytest.approx(1.0), None)
    zero = result["runs"]["zero"]
    assert zero["samples"]["full_decode_step_s"][-1] == pytest.approx(0.040, rel=1e-3)
    assert zero["degraded_share"] == 0.0
    assert zero["completed"] == result["num_requests"]
    assert result["simulated"]
    assert zero["accuracy"] is None


@pytest.mark.deep
def test_a_server_is_timed_and_then_simulated(tmp_path, monkeypatch):
    """The whole way, with a server whose timeline has steps of 16 and of 40 ms."""
    monkeypatch.setattr(calibrate, "BURST_S", 0.001)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"family": "f", "prompt": "1,1", "answer": "1 2 3 4"}))
    server, out = (scripted_server.__file__,), tmp_path / "out"
    console = quiet()
    change = {"tasks": tasks, "out": out, "server": server, "segment_s": 1.0, "pairs": 1}
    result = run_demo(replace(CONFIG, calibration_s=1.0, **change), console)
    assert "simulated from here on, by the times of 40 steps" in console.export_text()
    stored = json.loads((out / "demo.json").read_text())
    assert stored["simulated"]
    assert stored["calibration"]["unloaded_ttft_s"] == pytest.approx(0.016, rel=1e-3)
    assert stored["runs"]["zero"]["client_cpu_share"] is None  # no client was there
    assert stored["model"]["name"] == "scripted"
    assert result["verdict"].startswith("Simulated: Nothing to show: brownout buys too little")
    assert (out / "demo.png").stat().st_size > 10_000


@pytest.mark.deep
def test_brownout_that_saves_half_of_a_step_holds():
    result = played(machine())
    assert result["gain"] > 1.3
    assert verdict(result).startswith("Simulated: Brownout held the SLO")
    assert len(result["pairs"]) == 2


@pytest.mark.exhaustive
def test_noise_of_steps_is_no_change_of_the_machines_speed():
    """What a server expects of a step at one moment is off by a third where steps are as noisy, and
    one pair of eight may look as if it were by chance.
    """
    why_not = []
    for seed in range(2):
        moods = np.random.default_rng(seed).lognormal(-0.06, 0.35, 2000)
        noisy = machine()
        result = played(replace(noisy, times=replace(noisy.times, moods=moods)))
        why_not += [pair["why_not"] for pair in result["pairs"]]
    assert len(why_not) == 4
    assert sum(map(bool, why_not)) <= 1


@pytest.mark.sized(
    deep=(
        "off",
        "saves_nothing",
    )
)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_server_that_saves_nothing_never_holds(plant, monkeypatch):
    launch = planted(SimulatedDevice.launch, plant)
    monkeypatch.setattr(SimulatedDevice, "launch", launch)
    result = played(machine())
    result["verdict"] = verdict(result)
    assert "buys too little here" in result["verdict"]
    assert " held" not in result["verdict"]
    if plant == "off":
        assert result["runs"]["brownout"]["degraded_share"] == 0
    assert result["calibration"]["full"] == pytest.approx(result["calibration"]["zero"], rel=0.02)


@pytest.mark.parametrize("plant", [None, *PLANTS])
def test_steps_of_a_server_are_learnt_with_what_brownout_saves(plant, monkeypatch):
    """A server on which brownout saves nothing yields a machine on which it saves nothing."""
    if plant:
        launch = planted(SimulatedDevice.launch, plant)
        monkeypatch.setattr(SimulatedDevice, "launch", launch)
    steps, of, inner = [], machine(), SimulatedDevice.launch

    def recorded(device, plan, control):
        before, tokens = device.busy_s, int(plan.q_lens.sum())
        done = inner(device, plan, control)

        took_s = device.busy_s - before
        done.add_done_callback(
            lambda future: steps.append(
                Recorded(
                    plan.phase,
                    plan.size,
                    sum(future.result().degraded) / (tokens * LAYERS * PICKS),
                    1.0,
                    took_s,
                )
            )
        )
        return done

    monkeypatch.setattr(SimulatedDevice, "launch", recorded)
    asked = [Arrival((7,) * 5, 10)]
    run_simulated(of, ENGINE, lambda server: run_all_steps(server, asked, bursts=3))
    times = StepTimes.fit(steps, BUCKETS, steady=True)
    assert times.expected_s("decode", 36, 0.0, 1.0) == pytest.approx(0.040, rel=0.01)
    least_s = times.expected_s("decode", 36, 1.0, 1.0)
    assert least_s == pytest.approx(0.040 if plant else 0.020, rel=0.02)


def test_flags_of_a_server_that_is_simulated_are_refused():
    with pytest.raises(ValueError, match=r"--port 1.*leave them out"):
        DemoConfig(simulated=True, server_args=("--port", "1"))


def test_a_slow_stretch_of_the_machine_is_no_part_of_its_steps():
    def taken(number):
        size = 1 + number % 36
        slow = 2.0 if 2000 <= number < 3000 else 1.0
        return Recorded("decode", size, 0.0, 1.0, (0.010 + 1e-4 * size) * slow)

    steps = [*map(taken, range(5000)), Recorded("prefill", 8, 0.0, 1.0, 0.01)]
    for steady, most in ((False, 1.25), (True, 1.01)):
        times = StepTimes.fit(steps, BUCKETS, steady=steady)
        assert 1.0 <= times.expected_s("decode", 36, 0.0, 1.0) / 0.0136 < most
