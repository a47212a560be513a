"""Balance of expert load: baselines, Libra as printed, Libra as built; one table.

Run: `JAX_PLATFORMS=cpu python -m benchmarks.balance`. Everything but the time of planning follows
from the seed and does not depend on the machine. Nothing here speaks of a GPU's time.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.balance import real, timing
from benchmarks.balance.strategies import STRATEGIES, Case
from benchmarks.balance.traces import Trace, draw, imbalance
from benchmarks.harness import store
from benchmarks.harness.command import markdown, write_figures

ACCURACIES = (0.85, 0.60)
LINAS_ACCURACY = 0.437  # of Lina on Qwen3MoE in Libra's Table 1, on average
BOUNDS = (None, 2)
NUM_REPLICAS = 8
SIZES = ((8, 128), (64, 256))  # devices and experts that planning is timed with


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes the JSON file that is asked for."""
    args = _parser().parse_args(arguments)
    if args.dry_run:
        args.traces, args.prompts, args.rows, args.calls = 3, 100, 16, 0
    traces = draw(args.traces, args.seed)
    found = {
        "commit": store.commit(),
        "date": store.now(),
        "machine": store.machine("cpu"),
        "settings": {
            "traces": args.traces,
            "drawn": traces[-1].number + 1,
            "seed": args.seed,
            "num_replicas": NUM_REPLICAS,
            "prompts": args.prompts,
            "rows_per_device": args.rows,
        },
        "planning": [_planning(*sizes, args) for sizes in SIZES if args.calls],
        "synthetic": {str(round(100 * a)): synthetic(traces, a) for a in ACCURACIES},
        "bundled": real.measure(args.prompts, args.seed, args.rows, NUM_REPLICAS),
    }
    print("\n".join(table(found)))
    if args.json:
        write_figures(args.json, found)
    return found


def _parser() -> argparse.ArgumentParser:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.balance", description=__doc__, formatter_class=words
    )
    parser.add_argument("--traces", type=int, default=300, help="synthetic ones (default: 300)")
    parser.add_argument("--seed", type=int, default=18, help="of traces and prompts (default: 18)")
    parser.add_argument("--prompts", type=int, default=2000, help="of the bundled tasks")
    parser.add_argument("--rows", type=int, default=128, help="rows a device in a bundled batch")
    parser.add_argument("--calls", type=int, default=400, help="timed a median; 0: no times")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--dry-run", action="store_true", help="three traces, a hundred prompts")
    return parser


def synthetic(traces: list[Trace], accuracy: float) -> dict[str, Any]:
    """Returns the imbalance by bound a pair and strategy."""
    out: dict[str, Any] = {}
    for bound in BOUNDS:
        cases = [
            Case(
                trace.made,
                trace.predicted(accuracy),
                trace.predicted(LINAS_ACCURACY),
                trace.history,
                NUM_REPLICAS,
                bound,
                trace.number,
            )
            for trace in traces
        ]
        out[str(bound)] = {
            name: real.summary([imbalance(balance(case)) for case in cases])
            for name, balance in STRATEGIES.items()
        }
    return out


def _planning(devices: int, experts: int, args: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    time = timing.plan_time(devices, experts, NUM_REPLICAS, 2, args.seed, args.calls)
    return time | {"machine_load": load, "cores": os.cpu_count()}


def table(found: dict[str, Any]) -> list[str]:
    """Returns every strategy on the same traces and on the bundled model, median / P99."""
    kinds = [("synthetic", a, str(b)) for a in ("85", "60") for b in BOUNDS]
    rows = []
    for name in STRATEGIES:
        cells = [found["synthetic"][a][b][name] for _, a, b in kinds]
        cells += [found["bundled"]["strategies"][str(b)][name] for b in BOUNDS]
        rows.append([name, *(f"{c['median']:.3f} / {c['p99']:.3f}" for c in cells)])
    lines = ["Fullest device over mean, median / P99"]
    heads = [f"{a} %, {_words(b)}" for _, a, b in kinds]
    heads += [f"bundled, {_words(str(b))}" for b in BOUNDS]
    lines += markdown(["", *heads], rows)
    lines += ["", "Bundled model by predictor, Libra modelled and as printed: mean, part of gain"]
    for setting, result in found["bundled"]["predictors"].items():
        lines += ["", f"{setting}; without balancing {result['none']:.3f}"]
        rows = []
        for by, accuracy in result["count_accuracy"].items():
            both = [result[name][by] for name in ("Libra, modelled", "Libra, both as printed")]
            cells = [f"{cell['mean']:.4f}, {100 * cell['gain']:.1f} %" for cell in both]
            rows.append([by, f"{100 * accuracy:.1f} %", *cells])
        lines += markdown(["predictor", "right by counts", "modelled", "as printed"], rows)
    lines += [""]
    for time in found["planning"]:
        lines.append(
            f"planning {time['devices']} x {time['experts']}: {time['ms']:.3f} ms "
            f"(an empty call {time['floor_ms']:.3f}), load {time['machine_load']:.1f} "
            f"on {time['cores']} cores"
        )
    return lines


def _words(bound: str) -> str:
    return "no bound" if bound == "None" else f"{bound} a pair"


if __name__ == "__main__":
    main()
