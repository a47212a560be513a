"""Plays `jmoe demo` several times: a table of verdicts, on a quiet or a busy machine, or planted.

    python -m benchmarks.demo_series --runs 5 --out series
    python -m benchmarks.demo_series --runs 5 --busy            # a core is taken half of the time
    python -m benchmarks.demo_series --runs 3 --plant off       # must not say "held"
    python -m benchmarks.demo_series --runs 3 --plant saves_nothing

A planted server is the real one, but that its steps run without brownout whatever the thresholds
say: `off` degrades nothing, and `saves_nothing` counts the visits as degraded all the same.
"""

import argparse
import contextlib
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.harness.command import markdown, write_figures
from serving.bench.demo import DemoConfig, run_demo
from serving.bench.launch import LaunchError
from serving.plan import StepControl, StepPlan, StepResult
from serving.telemetry.version import commit

MEAN_STRETCH_S = 60.0
"""Of a stretch in which the core is taken, and of one in which it is not."""
PLANTS = ("off", "saves_nothing")

type Launch = Callable[[Any, StepPlan, StepControl], "Future[StepResult]"]
"""`launch` of a class of runners."""


def planted(launch: Launch, plant: str, visits_per_layer: int) -> Launch:
    """Returns a `launch` whose steps take as long as without brownout, whatever is asked."""

    def launch_full(self: Any, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        done = launch(self, plan, StepControl(100, 0))
        if plant == "off" or not control.strategy:
            return done
        visits = np.where(plan.exempt, 0, plan.q_lens) * plan.num_layers * visits_per_layer
        degraded = np.rint(visits * (1 - control.threshold_percent / 100)).astype(int).tolist()
        told: Future[StepResult] = Future()

        def tell(of: "Future[StepResult]") -> None:
            if not told.set_running_or_notify_cancel():
                return
            if (error := of.exception()) is not None:
                told.set_exception(error)
            else:
                told.set_result(replace(of.result(), degraded=degraded))

        done.add_done_callback(tell)
        return told

    return launch_full


def serve(plant: str, args: Sequence[str]) -> None:
    """Serves the bundled model as `jmoe serve` with these arguments, planted."""
    from jmoe.api import resolve
    from jmoe.config import read_config
    from serving.cli.main import main as jmoe
    from serving.execution.runner import DeviceRunner

    visits = read_config(resolve("bundled")).experts_per_token
    setattr(DeviceRunner, "launch", planted(DeviceRunner.launch, plant, visits))  # noqa: B010
    sys.argv = ["jmoe", "serve", *args]
    jmoe()


def _take_a_core(seed: int) -> None:
    """Takes a core for a random half of the time, drawn by `seed`, until it is ended."""
    rng = random.Random(seed)
    is_busy = rng.random() < 0.5
    while True:
        ends = time.monotonic() + rng.expovariate(1 / MEAN_STRETCH_S)
        while is_busy and time.monotonic() < ends:
            pass
        time.sleep(max(0.0, ends - time.monotonic()))
        is_busy = not is_busy


def play(run: int, config: DemoConfig, busy: bool) -> dict[str, Any]:
    """Plays one demo; what it prints is in `demo.log` of its folder. Raises LaunchError."""
    config.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    loop = context.Process(target=_take_a_core, args=(config.seed,), daemon=True)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((config.out / "demo.log").open("w", encoding="utf-8"))
        if busy:
            loop.start()
            stack.callback(loop.kill)
        result = run_demo(config, Console(file=log, width=120))
    return row(run, result, time.monotonic() - began)


def row(run: int, result: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns what a table says of a demo's result; `uncounted` says why pairs do not count."""
    pairs = result["pairs"]
    uncounted = [
        f"{number}: {pair['why_not']}" for number, pair in enumerate(pairs, 1) if pair["why_not"]
    ]
    return {
        "run": run,
        "verdict": result["verdict"].split(". ")[0],
        "counted": f"{len(pairs) - len(uncounted)} of {len(pairs)}",
        "uncounted": "; ".join(uncounted),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Plays the demos and prints and writes their table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_series",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="take a core half of the time")
    parser.add_argument("--plant", choices=PLANTS, help="what the server does not do")
    parser.add_argument("--simulated", action="store_true", help="play `jmoe demo --simulated`")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; others count on")
    parser.add_argument("--out", type=Path, default=Path("out/series"), help="a folder a run")
    parser.add_argument("--dry-run", action="store_true", help="one short simulated run")
    args = parser.parse_args()
    config = DemoConfig(simulated=args.simulated)
    if args.plant:
        server = ("-m", "benchmarks.demo_series", "serve", args.plant, *config.server[3:])
        config = replace(config, server=server)
    if args.dry_run:
        args.runs = 1
        config = replace(config, simulated=True, segment_s=2.0, pairs=1, spare_pairs=0)
    rows = []
    for run in range(1, args.runs + 1):
        one = replace(config, seed=args.seed + run - 1, out=args.out / str(run))
        try:
            rows.append(play(run, one, args.busy))
        except LaunchError as error:
            sys.exit(f"run {run} failed: {error}")
        print(rows[-1], flush=True)
    print("\n".join(markdown(list(rows[0]), [list(one.values()) for one in rows])))
    command = f"python -m benchmarks.demo_series {' '.join(sys.argv[1:])}"
    write_figures(args.out / "series.json", {"command": command, "commit": commit(), "runs": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        main()
