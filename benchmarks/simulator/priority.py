"""`jmoe bench priority` over many seeds, on a device that a live run was recorded of.

    jmoe bench priority --out out
    python -m benchmarks.simulator.priority --live out

First the live run's own arrivals are played, and P90s set beside the live ones: the simulator is
worth as much as they agree. What lies between client and engine is taken to be what the median
first token of the latency-sensitive alone, at the first load, takes longer than simulated. Then
come other seeds, and the mean of each ratio with its 95 % interval.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness.command import write_figures
from serving.bench.priority import (
    VARIANTS,
    Played,
    PriorityConfig,
    Variant,
    by_load,
    points,
    ratios,
    run_priority,
    table,
    variant_settings,
)
from serving.bench.simulator.server import Machine, as_tokens, recorded_machine, simulate
from serving.bench.workload import BUNDLED_TASKS, Arrival, load_tasks, shuffled
from serving.settings import reading as settings
from serving.telemetry.version import commit

RATIOS = {
    "ttft_p99_to_alone": "LS P99, to alone",
    "ttft_p99_to_iteration": "LS P99, to a step",
    "ttft_mean_of_fcfs": "LS mean, fcfs over it",
    "throughput_to_fcfs": "tokens/s, to fcfs",
    "be_turnaround_to_fcfs": "BE time, to fcfs",
}


@dataclass(frozen=True)
class Live:
    """A live run: what it stored, and the machine that its timelines show."""

    result: dict[str, Any]
    config: PriorityConfig
    machine: Machine
    tasks: tuple[Arrival, ...]


def read_live(folder: Path, recorded: Sequence[str]) -> Live:
    """Reads a folder of `jmoe bench priority`; steps are those of the variants `recorded`.

    Raises ValueError for files that are not there or not its own.
    """
    try:
        result = json.loads((folder / "priority.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no result of `jmoe bench priority --out {folder}`: {error}"
        ) from None
    given = result["config"]
    config = PriorityConfig(**{**given, "loads": tuple(given["loads"])})
    timelines = [folder / f"timeline-{name}.json" for name in recorded]
    engine, part_layers = settings.load("demo").engine, result["part_layers"]["ls_first"]
    machine = recorded_machine(timelines, part_layers, engine)
    return Live(result, config, machine, tuple(as_tokens(load_tasks(BUNDLED_TASKS))))


def play_all(
    live: Live, machine: Machine, seed: int, variants: Sequence[Variant] = VARIANTS
) -> dict[str, Any]:
    """Plays every variant at every load; returns a result as of `jmoe bench priority`."""
    config = replace(live.config, seed=seed)
    rate = live.result["saturated_rate_per_s"]
    arrivals = by_load(config, shuffled(live.tasks, seed), rate)
    played = {
        v.name: {load: _play(machine, config, v, asked, seed) for load, asked in arrivals.items()}
        for v in variants
    }
    return {"points": points(played, arrivals), "saturated_rate_per_s": rate}


def _play(
    machine: Machine, config: PriorityConfig, variant: Variant, asked: list[Arrival], seed: int
) -> Played:
    engine = settings.load("demo", variant_settings(config, variant)).engine
    taken = [i for i, a in enumerate(asked) if not (variant.ls_only and a.best_effort)]
    whole = int(variant.settings.get("part_layers", 0)) > 0
    own = replace(machine, part_layers={}) if whole else machine
    done = simulate(own, engine, [asked[i] for i in taken], seed)
    records = dict(zip(taken, done.run.records, strict=True))
    return Played(records, [], done.run.duration_s, done.parks, done.joins, done.evictions)


def with_overhead(live: Live) -> Machine:
    """Returns the machine, with the time between client and engine that the live run had."""
    alone, load = VARIANTS[0], live.config.loads[0]
    simulated = play_all(live, live.machine, live.config.seed, [alone])
    here, there = (
        _point(result, alone.name, load)["ls"]["ttft_p50_ms"] for result in (live.result, simulated)
    )
    return replace(live.machine, overhead_s=max(0.0, (here - there) / 1e3))


def _point(result: dict[str, Any], variant: str, load: float) -> dict[str, Any]:
    return next(p for p in result["points"] if (p["variant"], p["load"]) == (variant, load))


def agreement(live: dict[str, Any], simulated: dict[str, Any]) -> Iterator[tuple[str, float, Any]]:
    """Yields (variant, load, ratios): simulated over live LS TTFT P90, mean BE turnaround and
    tokens/s.
    """
    for there in simulated["points"]:
        here = _point(live, there["variant"], there["load"])
        if here["ls"] is None or there["ls"] is None:
            continue
        mean = [(p["best_effort"] or {}).get("turnaround_mean_ms", math.nan) for p in (there, here)]
        yield (
            there["variant"],
            there["load"],
            (
                there["ls"]["ttft_p90_ms"] / here["ls"]["ttft_p90_ms"],
                mean[0] / mean[1],
                there["tokens_per_s"] / here["tokens_per_s"],
            ),
        )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and half the 95 % interval of the mean (Student's t)."""
    sample = np.asarray(values)
    if len(sample) < 2:
        return float(sample.mean()), math.nan
    half = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / math.sqrt(len(sample))
    return float(sample.mean()), float(half)


def over_seeds(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns mean, half interval and worst of every ratio by variant and load."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for result in results:
        for one in ratios(result):
            found.setdefault((one["variant"], one["load"]), []).append(one)
    return [
        {"variant": variant, "load": load}
        | {key: interval([one[key] for one in ones]) for key in RATIOS}
        for (variant, load), ones in sorted(found.items(), key=lambda item: item[0][1])
    ]


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a line for each variant and load."""
    lines = ["", " ".join([f"{'load':>4} {'variant':10}", *(f"{w:>22}" for w in RATIOS.values())])]
    for row in rows:
        cells = [f"{row[key][0]:13.3f} +-{row[key][1]:7.3f}" for key in RATIOS]
        lines.append(" ".join([f"{row['load']:4g} {row['variant']:10}", *cells]))
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=Path, default=Path("out"), help="folder of the live run")
    parser.add_argument(
        "--recorded", nargs="+", default=["alone", "fcfs", "ls_first"], help="variants"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="of a short live run")
    args = parser.parse_args()
    if args.dry_run:
        args.live, args.seeds, args.json = Path("out/dry"), 2, None
        short = PriorityConfig(num_requests=40, loads=(0.8,), saturation_s=1.0, out=args.live)
        run_priority(short)
    try:
        live = read_live(args.live, args.recorded)
    except ValueError as error:
        parser.error(str(error))
    machine = with_overhead(live)
    print(f"between client and engine: {1e3 * machine.overhead_s:.1f} ms")
    own = play_all(live, machine, live.config.seed)
    print(table(own))
    compared = list(agreement(live.result, own))
    print("\nsimulated over live: P90 of LS TTFT, mean BE turnaround, tokens/s")
    for variant, load, found in compared:
        print(f"{load:4g} {variant:10} " + " ".join(f"{value:6.2f}" for value in found))
    results = [play_all(live, machine, 1000 + seed) for seed in range(args.seeds)]
    rows = over_seeds(results)
    print(f"\n{args.seeds} seeds, mean and 95 % interval" + text_of(rows))
    if args.json:
        command = f"python -m benchmarks.simulator.priority {shlex.join(sys.argv[1:])}"
        stored: dict[str, Any] = {"command": command, "commit": commit()}
        stored |= {"overhead_ms": 1e3 * machine.overhead_s, "seeds": args.seeds, "ratios": rows}
        stored["simulated_over_live"] = [[v, load, list(found)] for v, load, found in compared]
        write_figures(args.json, stored)


if __name__ == "__main__":
    main()
