"""Holds the forecasts of `jmoe.parallel.asynchronous` to what `aep` simulated."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import store
from benchmarks.harness.store import markdown
from benchmarks.mesh.aep import DESIGNED, TRANSPORTS
from benchmarks.mesh.cases import SPARE, Case
from benchmarks.mesh.compare import errors
from benchmarks.mesh.routing import place
from jmoe.parallel import asynchronous
from jmoe.parallel.asynchronous import MARGIN, ON_TIME, Late, Overheads

SIMULATED = store.ROOT / "benchmarks" / "results" / "aep_simulated.json"
KEYS = ("model", "top_k", "devices", "in_flight", "skew", "same")
WAYS = ("synchronous", "libra", "async")
GROUPS = (
    "8 and 16 devices, 256 and 2,048 in flight",
    "8 and 16 devices, 8,192 and 32,768 in flight",
    "32 to 512 devices",
)


def case_of(row: dict[str, Any]) -> Case:
    """Returns the case that a record was made of."""
    return Case(*(row[key] for key in KEYS))


def imbalances(case: Case) -> dict[str, float]:
    """Returns those of a case on all its devices, as `Deployment` names them."""
    popularity = case.routing().popularity

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


def compare(
    simulated: dict[str, Any],
    uneven: dict[str, Any],
    overheads: Overheads = DESIGNED,
    late: Late = ON_TIME,
) -> dict[str, Any]:
    """Forecasts a simulated case, at its split and at the best, whether the KV fits or not."""
    case, systems = case_of(simulated), simulated["systems"]
    sizes = case.geometry(), case.devices, case.in_flight, case.times()
    found = asynchronous.Deployment(*sizes, overheads=overheads, late=late, **uneven)
    best = max(asynchronous.forecasts(found), key=lambda split: split.tokens_per_s)
    ways = {
        "synchronous": asynchronous.synchronous_tokens_per_s(found),
        "libra": asynchronous.synchronous_tokens_per_s(found, copies=True),
        "async": asynchronous.forecast(found, systems["async"]["attention_devices"]).tokens_per_s,
    }
    rates = {name: systems[name]["tokens_per_s"] for name in WAYS}
    return {key: simulated[key] for key in KEYS} | {
        "imbalances": uneven,
        "forecast": ways,
        "best_attention_devices": best.attention_devices,
        "ratio": best.tokens_per_s / max(ways["synchronous"], ways["libra"]),
        "simulated": rates,
        "simulated_ratio": rates["async"] / max(rates["synchronous"], rates["libra"]),
    }


def cases(dry: bool) -> list[dict[str, Any]]:
    """Forecasts every case of aep_simulated.json; dry, two."""
    stored = json.loads(SIMULATED.read_text(encoding="utf-8"))
    rows = stored["eight"] + stored["more"]
    if dry:
        rows = [rows[0], next(row for row in rows if row["in_flight"] > 2048)]
    return [compare(row, imbalances(case_of(row))) for row in rows]


def late(dry: bool) -> list[dict[str, Any]]:
    """Forecasts every case of the part `late` of aep_simulated.json; dry, one."""
    rows = json.loads(SIMULATED.read_text(encoding="utf-8"))["late"]
    found, uneven = [], imbalances(case_of(rows[0]))
    for row in rows[-1:] if dry else rows:
        transport, late = row["transport"], Late(*row["late"])
        one = compare(row, uneven, TRANSPORTS[transport], late)
        found.append(one | {"transport": transport, "late": late})
    return found


PARTS: dict[str, Callable[[bool], Any]] = {"cases": cases, "late": late}


def _group(row: dict[str, Any]) -> int:
    return 2 if row["devices"] > asynchronous.MOST_DEVICES else int(row["in_flight"] >= 8192)


def accuracy(rows: list[dict[str, Any]]) -> list[str]:
    """Returns forecast over simulated: the mean factor off, smallest and largest;
    and who agrees.
    """
    cells = []
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=_group):
        by_group.setdefault(GROUPS[_group(row)], []).append(row)
    for name, of_group in by_group.items():
        pairs = [[(r["simulated"][way], r["forecast"][way]) for r in of_group] for way in WAYS]
        pairs.append([(row["simulated_ratio"], row["ratio"]) for row in of_group])
        same = [(r["ratio"] >= MARGIN) == (r["simulated_ratio"] >= MARGIN) for r in of_group]
        spread = (
            f"{off['factor']:.2f} ({off['least']:.2f} to {off['most']:.2f})"
            for off in map(errors, pairs)
        )
        cells.append([name, len(of_group), *spread, f"{sum(same)} of {len(same)}"])
    heads = ["", "cases", "synchronous", "libra", "async, same split", "ratio, best split"]
    return markdown([*heads, f"same side of {MARGIN:g}"], cells)


def table(found: dict[str, Any]) -> list[str]:
    """Returns how far forecasts are off."""
    lines = accuracy(found["cases"]) if "cases" in found else []
    return [*lines, "", *of_late(found["late"])] if "late" in found else lines


def of_late(rows: list[dict[str, Any]]) -> list[str]:
    """Returns forecast over simulated by transport, at the same split."""
    cells = [
        [row["transport"], *row["late"]]
        + [f"{row['forecast'][way] / row['simulated'][way]:.2f}" for way in WAYS]
        for row in rows
    ]
    return markdown(["transport", "late by", "of stages", *WAYS], cells)
