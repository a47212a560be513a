"""How near the forecasts of `jmoe.parallel.asynchronous` come to what was simulated.

    python -m benchmarks.aep_simulator.forecast --json benchmarks/results/aep_forecast.json

For each case of aep_simulated.json: the imbalance of its routing, and tokens a second of
every way by the forecast. And what a message may cost, simulated anew: half a minute in all.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.aep_simulator.routing import place
from benchmarks.aep_simulator.study import (
    SPARE,
    WAITS_S,
    Case,
    pickers_of,
    play,
    routing_of,
    system_of,
    times_of,
)
from benchmarks.harness import store
from benchmarks.harness.command import markdown, write_figures
from jmoe.parallel.asynchronous import (
    MARGIN,
    MOST_DEVICES,
    Deployment,
    Overheads,
    forecast,
    forecasts,
    synchronous_tokens_per_s,
)

SIMULATED = store.ROOT / "benchmarks" / "results" / "aep_simulated.json"
BUILT = ("synchronous", "libra")  # ways that jmoe has besides
MESSAGES_US = (0, 2, 5, 10)
MESH_SPLITS = ((32, 14, 1), (32, 10, 2), (64, 28, 1))
"""Devices, attention workers and experts a token of the cases beyond 16 devices, 32,768 in flight,
by the splits of aep_simulated.json."""
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "8 and 16 devices, 256 and 2,048 in flight": lambda row: (
        row["devices"] <= MOST_DEVICES and row["in_flight"] < 8192
    ),
    "8 and 16 devices, 8,192 and 32,768 in flight": lambda row: (
        row["devices"] <= MOST_DEVICES and row["in_flight"] >= 8192
    ),
    "32 to 512 devices": lambda row: row["devices"] > MOST_DEVICES,
}


def case_of(row: dict[str, Any]) -> Case:
    """Returns the case that a record was made of."""
    numbers = (row[key] for key in ("model", "top_k", "devices", "in_flight", "skew", "same"))
    return Case(*numbers)


def imbalances(case: Case) -> dict[str, float]:
    """Of a case on all its devices, as `Deployment` names them."""
    popularity = routing_of(case).popularity

    def loads(spare: int) -> np.ndarray:
        shares = place(popularity, case.devices, spare).shares(case.devices)
        found = np.einsum("le,led->ld", popularity, shares)
        return found / found.mean(axis=1, keepdims=True)

    level = loads(SPARE)
    return {
        "imbalance": float(loads(0).max(axis=1).mean()),
        "imbalance_with_copies": float(level.max(axis=1).mean()),
        "imbalance_over_layers": float(level.mean(axis=0).max()),
    }


def compare(simulated: dict[str, Any], uneven: dict[str, Any]) -> dict[str, Any]:
    """Forecasts of a simulated case, at its split and at the best, whether the KV fits or not."""
    case, systems = case_of(simulated), simulated["systems"]
    found = Deployment(case.geometry(), case.devices, case.in_flight, times_of(case), **uneven)
    best = max(forecasts(found), key=lambda split: split.tokens_per_s)
    at = systems["async"]["attention_devices"]
    ways = {
        "synchronous": synchronous_tokens_per_s(found),
        "libra": synchronous_tokens_per_s(found, copies=True),
        "async": forecast(found, at).tokens_per_s,
    }
    return {
        key: simulated[key] for key in ("model", "top_k", "devices", "in_flight", "skew", "same")
    } | {
        "imbalances": uneven,
        "forecast": ways,
        "best_attention_devices": best.attention_devices,
        "ratio": best.tokens_per_s / max(ways[name] for name in BUILT),
        "simulated": {name: systems[name]["tokens_per_s"] for name in ways},
        "simulated_ratio": systems["async"]["tokens_per_s"]
        / max(systems[name]["tokens_per_s"] for name in BUILT),
    }


def messages(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns tokens a second by what a batch takes of a link beside its bytes,
    beyond 16 devices.
    """
    found = []
    for devices, ours, top_k in MESH_SPLITS:
        case = Case("mixtral-8x7b", top_k, devices, 32768, 0.5, False)
        for micros in MESSAGES_US:
            system = system_of(case, ours, SPARE, Overheads(message_s=micros * 1e-6))
            pickers = pickers_of("defrag", system, case.in_flight, WAITS_S[0])
            run = play(system, case.in_flight, pickers, 0.1, 2, 3)
            found.append(
                {"top_k": top_k, "devices": devices, "attention_devices": ours}
                | {"message_us": micros, "tokens_per_s": run.tokens_per_s}
            )
            say(f"{devices} devices, top-{top_k}, {micros} us: {run.tokens_per_s:,.0f}")
    return found


def accuracy(rows: list[dict[str, Any]]) -> list[str]:
    """Returns forecast over simulated: the mean factor off, smallest and largest;
    and who agrees.
    """
    cells = []
    for name, belongs in GROUPS.items():
        of_group = [row for row in rows if belongs(row)]
        if not of_group:  # a dry run has two cases
            continue
        cells.append([name, len(of_group)])
        for way in ("synchronous", "libra", "async"):
            off = [row["forecast"][way] / row["simulated"][way] for row in of_group]
            cells[-1].append(_spread(off))
        cells[-1].append(_spread([row["ratio"] / row["simulated_ratio"] for row in of_group]))
        same = [(r["ratio"] >= MARGIN) == (r["simulated_ratio"] >= MARGIN) for r in of_group]
        cells[-1].append(f"{sum(same)} of {len(same)}")
    heads = ["", "cases", "synchronous", "libra", "async, same split", "ratio, best split"]
    return markdown([*heads, f"same side of {MARGIN:g}"], cells)


def _spread(factors: list[float]) -> str:
    mean = np.exp(np.abs(np.log(factors)).mean())
    return f"{mean:.2f} ({min(factors):.2f} to {max(factors):.2f})"


def by_message(rows: list[dict[str, Any]]) -> list[str]:
    """Thousands of tokens a second."""
    cells = []
    for devices, ours, top_k in MESH_SPLITS:
        rates = [
            f"{row['tokens_per_s'] / 1e3:,.1f}"
            for row in rows
            if (row["devices"], row["top_k"]) == (devices, top_k)
        ]
        cells.append([f"{devices} devices ({ours} + {devices - ours}), top-{top_k}", *rates])
    return markdown(["a message, us", *map(str, MESSAGES_US)], cells)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Compares every case and prints tables."""
    parser = argparse.ArgumentParser("benchmarks.aep_simulator.forecast")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--dry-run", action="store_true", help="two cases, and no messages")
    args = parser.parse_args(arguments)
    simulated = json.loads(SIMULATED.read_text(encoding="utf-8"))
    cases = simulated["eight"] + simulated["more"]
    if args.dry_run:
        cases = [simulated["eight"][0], next(c for c in cases if c["in_flight"] > 2048)]
    found = {
        "simulated": {key: simulated[key] for key in ("commit", "date")},
        "cases": [compare(row, imbalances(case_of(row))) for row in cases],
        "messages": [] if args.dry_run else messages(lambda line: print(line, flush=True)),
    }
    if args.json:
        write_figures(args.json, found)
    print("\n".join(accuracy(found["cases"])))
    if found["messages"]:
        print("\n".join(["", *by_message(found["messages"])]))
    return found


if __name__ == "__main__":
    main()
