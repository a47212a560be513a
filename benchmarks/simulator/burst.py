"""The demo's burst over many seeds, on a device that a live demo was recorded of.

    jmoe demo --out out -- --timeline out/timeline.json
    python -m benchmarks.simulator.burst --live out

First the live demo's own arrivals: late and degraded shares beside the live ones, since the
simulator is worth as much as they agree. Then other seeds: medians and the worst of each variant,
and whatever else is asked for: another speed of the machine, more noise, exempt requests.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulator.play import Machine, recorded_server, simulate
from serving import settings
from serving.bench.results import Slo, quality, violations
from serving.bench.workload import (
    Arrival,
    burst_pieces,
    piecewise_poisson_times,
    schedule,
    shuffled,
)

VARIANTS: dict[str, dict[str, object]] = {
    "zero": {"engine.brownout.strategy": "zero", "engine.prefill_company": False},
    "zero, company": {"engine.brownout.strategy": "zero"},
    "algorithm2": {"engine.brownout.strategy": "partial", "engine.prefill_company": False},
    "algorithm2, company": {"engine.brownout.strategy": "partial"},
}
FIGURES = {"late_first": "late first %", "late_other": "late other %", "degraded": "degraded %"}


@dataclass(frozen=True)
class Live:
    """A live demo: what it stored, and the machine that its timeline shows."""

    result: dict[str, Any]
    machine: Machine
    tasks: tuple[Arrival, ...]


def read_live(folder: Path) -> Live:
    """A folder of `jmoe demo --out FOLDER -- --timeline FOLDER/timeline.json`.

    Raises ValueError for files that are not there or not its own.
    """
    try:
        result = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no result of `jmoe demo --out {folder}`: {error}") from None
    return Live(result, *recorded_server([folder / "timeline.json"], {}))


def play(
    live: Live,
    machine: Machine,
    changes: Mapping[str, object],
    seed: int,
    pieces: Sequence[tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Shares of the burst, in percent, under changed settings. `pieces` (seconds, requests/s) are
    played in place of the demo's; the first of them is before the burst.
    """
    result = live.result
    slo = Slo(result["slo"]["ttft_s"], result["slo"]["itl_s"])
    if pieces is None:
        pieces = burst_pieces(
            result["duration_s"],
            result["steady_rate_per_s"],
            result["burst_rate_per_s"],
            result["config"]["burst_at"],
        )
    arrivals = schedule(shuffled(live.tasks, seed), piecewise_poisson_times(pieces, seed))
    objectives = {"engine.brownout.ttft_slo_s": slo.ttft_s, "engine.brownout.itl_slo_s": slo.itl_s}
    engine = settings.load("demo", objectives | dict(changes)).engine
    run = simulate(machine, engine, arrivals, seed).run
    due = run.due(pieces[0][0])
    late, degraded = violations(due, slo), quality(due)["degraded_share"]
    return {
        "late_first": 100 * (late["ttft_violation_rate"] or 0.0),
        "late_other": 100 * (late["itl_violation_rate"] or 0.0),
        "degraded": 100 * (degraded or 0.0),
    }


def live_shares(result: Mapping[str, Any], name: str) -> dict[str, float]:
    """What the live run of that name had in its burst."""
    burst = result["runs"][name]["burst"]
    return {
        "late_first": 100 * burst["ttft_violation_rate"],
        "late_other": 100 * burst["itl_violation_rate"],
        "degraded": 100 * (burst["degraded_share"] or 0.0),
    }


def line_of(words: str, found: Mapping[str, float]) -> str:
    """A line of a table."""
    return f"{words:28}" + "".join(f"{found[key]:14.1f}" for key in FIGURES)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=Path, default=Path("out"), help="folder of the live demo")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--speed", type=float, default=1.0, help="of the machine, to the live one")
    parser.add_argument("--noise", type=float, default=1.0, help="of step times, to the live one's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        live = read_live(args.live)
    except ValueError as error:
        parser.error(str(error))
    head = " " * 28 + "".join(f"{words:>14}" for words in FIGURES.values())
    print(f"the live demo's arrivals\n{head}")
    seed = live.result["config"]["seed"]
    own = {"zero": "zero, company", "brownout": "algorithm2, company"}
    for name, variant in own.items():
        print(line_of(f"live, {name}", live_shares(live.result, name)))
        print(line_of("  simulated", play(live, live.machine, VARIANTS[variant], seed)))
    machine = replace(live.machine, speed=args.speed, noise=args.noise)
    stored: dict[str, Any] = {"speed": args.speed, "noise": args.noise, "seeds": args.seeds}
    print(f"\n{args.seeds} seeds, machine at {args.speed:g}, noise {args.noise:g}\n{head}")
    for name, changes in VARIANTS.items():
        found = [play(live, machine, changes, 1000 + number) for number in range(args.seeds)]
        medians = {key: statistics.median(one[key] for one in found) for key in FIGURES}
        worst = {key: max(one[key] for one in found) for key in FIGURES}
        print(line_of(name, medians))
        print(line_of("  worst", worst), flush=True)
        stored[name] = {"median": medians, "worst": worst}
    if args.json:
        args.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
