"""The demo's burst over many seeds, on a device that a live demo was recorded of.

    jmoe demo --controllers --out out -- --timeline out/timeline.json
    python -m benchmarks.simulator.burst --live out

First the live demo's own arrivals: late and degraded shares beside the live ones, since the
simulator is worth as much as they agree. Then, with objectives and load calibrated on the simulated
machine as the demo calibrates them on a real one, other seeds under each condition: another speed
of the machine after calibration, more noise, exempt requests, bursts of other shapes. Medians and
the worst of each variant.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from serving.bench.calibrate import Calibration, calibrate
from serving.bench.demo import DemoConfig, run_demo
from serving.bench.results import Sample, Slo, quality, violations
from serving.bench.simulator.server import (
    Machine,
    as_tokens,
    recorded_machine,
    run_simulated,
    simulate,
)
from serving.bench.variants import ALL, VARIANTS, server_settings
from serving.bench.workload import (
    BUNDLED_TASKS,
    Arrival,
    load_tasks,
    piecewise_poisson_times,
    schedule,
    shuffled,
)
from serving.settings import reading as settings
from serving.telemetry.version import commit

FIGURES = {
    "late_first": "late first %",
    "late_other": "late other %",
    "degraded": "degraded %",
    "recovered_s": "browned for s",
}
STEADY, BURST = 0.5, 1.0  # of the capacity without brownout, as in the demo
BURST_AT = 0.3


@dataclass(frozen=True)
class Live:
    """A live demo: what it stored, and the machine that its timeline shows."""

    result: dict[str, Any]
    machine: Machine
    tasks: tuple[Arrival, ...]


@dataclass(frozen=True)
class Condition:
    """Under which a burst is played."""

    speed: float = 1.0  # of the machine, to the one that was calibrated
    noise: float = 1.0  # of step times, to the recorded one's
    exempt_share: float = 0.0  # of the requests
    shape: str = "doubles"


CONDITIONS = {
    "as calibrated": Condition(),
    "speed 0.8": Condition(speed=0.8),
    "speed 1.2": Condition(speed=1.2),
    "noise doubled": Condition(noise=2.0),
    "a fifth exempt": Condition(exempt_share=0.2),
    "triples": Condition(shape="triples"),
    "ramps": Condition(shape="ramps"),
    "comes and goes": Condition(shape="comes and goes"),
    "ends": Condition(shape="ends"),
    "no burst": Condition(shape="steady"),
}


def read_live(folder: Path) -> Live:
    """Reads a folder of `jmoe demo --out FOLDER -- --timeline FOLDER/timeline.json`.

    Raises ValueError for files that are not there or not its own.
    """
    try:
        result = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no result of `jmoe demo --out {folder}`: {error}") from None
    machine = recorded_machine(folder / "timeline.json", settings.load("demo").engine)
    return Live(result, machine, tuple(as_tokens(load_tasks(BUNDLED_TASKS))))


def calibrated(live: Live) -> Calibration:
    """Returns the simulated machine, measured as `serving.bench.calibrate` measures a real one."""
    return run_simulated(
        live.machine,
        settings.load("demo").engine,
        lambda server: calibrate(server, shuffled(live.tasks, 0)),
    )


def pieces_of(shape: str, duration_s: float, capacity_per_s: float) -> list[tuple[float, float]]:
    """Returns (seconds, requests a second) of each piece; the first is before the burst."""
    steady, burst = STEADY * capacity_per_s, BURST * capacity_per_s
    before = (BURST_AT * duration_s, steady)
    left_s = duration_s - before[0]
    if shape == "steady":
        return [before, (left_s, steady)]
    if shape == "doubles":
        return [before, (left_s, burst)]
    if shape == "triples":
        return [before, (left_s, 1.5 * burst)]
    if shape == "ends":
        return [before, (left_s / 2, burst), (left_s / 2, steady)]
    if shape == "ramps":
        rates = (steady + (burst - steady) * (number + 1) / 10 for number in range(10))
        return [before, *((left_s / 10, rate) for rate in rates)]
    if shape == "comes and goes":
        count = int(left_s // 5)
        return [before, *((5.0, steady if number % 2 else burst) for number in range(count))]
    raise ValueError(f"shape is {shape!r}; it must be one of those of CONDITIONS")


def play(
    live: Live,
    slo: Slo,
    pieces: Sequence[tuple[float, float]],
    changes: Mapping[str, object],
    seed: int,
    condition: Condition = CONDITIONS["as calibrated"],
) -> dict[str, float]:
    """Plays the pieces under changed settings; returns shares after the first piece, in percent."""
    arrivals = schedule(shuffled(live.tasks, seed), piecewise_poisson_times(pieces, seed))
    machine = replace(live.machine, speed=condition.speed, noise=condition.noise)
    engine = settings.load(
        "demo",
        {
            "engine.brownout.strategy": "partial",
            "engine.brownout.ttft_slo_s": slo.ttft_s,
            "engine.brownout.itl_slo_s": slo.itl_s,
            **changes,
        },
    ).engine
    run = simulate(machine, engine, arrivals, seed, condition.exempt_share).run
    due = run.due(pieces[0][0])
    late, degraded = violations(due, slo), quality(due)["degraded_share"]
    found = {
        "late_first": 100 * (late["ttft_violation_rate"] or 0.0),
        "late_other": 100 * (late["itl_violation_rate"] or 0.0),
        "degraded": 100 * (degraded or 0.0),
    }
    if pieces[-1][1] < pieces[-2][1]:  # the burst has an end
        found["recovered_s"] = recovered_s(run.samples, pieces)
    return found


def recovered_s(samples: Sequence[Sample], pieces: Sequence[tuple[float, float]]) -> float:
    """Returns seconds from the beginning of the last piece to the last sample in it that is
    degraded.
    """
    begins_s = sum(seconds for seconds, _ in pieces[:-1])
    ends_s = begins_s + pieces[-1][0]
    browned = [
        sample.at_s - begins_s
        for sample in samples
        if begins_s <= sample.at_s < ends_s
        and min(sample.prefill_threshold_percent, sample.decode_threshold_percent) < 100
    ]
    return max(browned, default=0.0)


def live_shares(result: Mapping[str, Any], name: str) -> dict[str, float]:
    """Returns what the live run of that name had in its burst."""
    burst = result["runs"][name]["burst"]
    return {
        "late_first": 100 * burst["ttft_violation_rate"],
        "late_other": 100 * burst["itl_violation_rate"],
        "degraded": 100 * (burst["degraded_share"] or 0.0),
    }


def line_of(words: str, found: Mapping[str, float]) -> str:
    """Returns a line of a table."""
    cells = (f"{found[key]:14.1f}" if key in found else f"{'':14}" for key in FIGURES)
    return f"{words:28}" + "".join(cells)


def compare_with_live(live: Live) -> dict[str, dict[str, dict[str, float]]]:
    """Returns live and simulated shares of the live run's own arrivals, by variant."""
    result = live.result
    slo = Slo(result["slo"]["ttft_s"], result["slo"]["itl_s"])
    burst_at_s, duration_s = result["burst_at_s"], result["duration_s"]
    rates = result["steady_rate_per_s"], result["burst_rate_per_s"]
    pieces = list(zip((burst_at_s, duration_s - burst_at_s), rates, strict=True))
    found = {}
    for name in result["runs"]:
        own = {
            "engine.salc.controller": result["controller"],
            "engine.prefill_company": result["prefill_company"],
        }
        changes = own | server_settings(VARIANTS[name])
        simulated = play(live, slo, pieces, changes, result["seed"])
        found[name] = {"live": live_shares(result, name), "simulated": simulated}
        print(line_of(f"live, {name}", found[name]["live"]))
        print(line_of("  simulated", simulated), flush=True)
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=Path, default=Path("out"), help="folder of the live demo")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--duration-s", type=float, default=75.0)
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), metavar="NAME"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="of a short simulated demo")
    args = parser.parse_args()
    if args.dry_run:
        args.live, args.seeds, args.duration_s, args.json = Path("out/dry"), 1, 5.0, None
        args.conditions = args.conditions[:1]
        run_demo(DemoConfig(simulated=True, segment_s=4.0, pairs=1, spare_pairs=0, out=args.live))
    try:
        live = read_live(args.live)
    except ValueError as error:
        parser.error(str(error))
    head = " " * 28 + "".join(f"{words:>14}" for words in FIGURES.values())
    print(f"the live demo's arrivals\n{head}")
    stored: dict[str, Any] = {
        "command": f"python -m benchmarks.simulator.burst {shlex.join(sys.argv[1:])}",
        "commit": commit(),
        "compared": compare_with_live(live),
        "seeds": args.seeds,
    }
    found = calibrated(live)
    slo, capacity = found.slo, found.zero.capacity_per_s
    stored["calibration"], stored["slo"] = asdict(found), asdict(slo)
    print(
        f"\ncalibrated: {capacity:.1f} requests/s without brownout, "
        f"{found.full.capacity_per_s:.1f} with all of it; "
        f"SLO {1e3 * slo.ttft_s:.0f} and {1e3 * slo.itl_s:.1f} ms"
    )
    for words in args.conditions:
        condition = CONDITIONS[words]
        pieces = pieces_of(condition.shape, args.duration_s, capacity)
        load = max(rate for _, rate in pieces[1:]) / found.full.capacity_per_s / condition.speed
        print(f"\n{words}: at most {load:.2f} of the capacity with all brownout\n{head}")
        stored[words] = {"load": load}
        for name in ALL:
            changes = server_settings(VARIANTS[name])
            runs = [
                play(live, slo, pieces, changes, 1000 + number, condition)
                for number in range(args.seeds)
            ]
            medians = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            worst = {key: max(one[key] for one in runs) for key in runs[0]}
            print(line_of(name, medians))
            print(line_of("  worst", worst), flush=True)
            stored[words][name] = {"median": medians, "worst": worst}
    if args.json:
        args.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
