"""Tables of what is stored: `python -m benchmarks.gpu --report`.

Prints Markdown, each table with the command that makes its numbers. What is not stored is named as
missing, never guessed. Needs no device.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import PARTS, module
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.store import Store, markdown

Records = Mapping[str, Mapping[str, Any]]


def main(folder: Path, sizes: Sizes) -> int:
    """Prints the report of a folder; returns 0 if there is anything in it, else 1."""
    kept = Store(folder, {})
    stored = {part: kept.records(part) for part in PARTS}
    print(text(stored, sizes))
    return int(not any(stored.values()))


def text(stored: Mapping[str, Records], sizes: Sizes) -> str:
    """Returns the whole report as Markdown."""
    lines = [*heading(stored)]
    for part, records in stored.items():
        lines += ["", f"## {part}", f"`python -m benchmarks.gpu --parts {part}`", ""]
        if not records:
            lines.append("Nothing is stored.")
            continue
        lines += table(records)
        lines += [f"- FAILED {n}: {r['failed']}" for n, r in records.items() if "failed" in r]
        absent = [case.name for case in module(part).cases(sizes) if case.name not in records]
        lines += [f"- not measured: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def heading(stored: Mapping[str, Records]) -> Iterator[str]:
    """Yields lines with the records' device, versions and commits, and what their weights are."""
    records = [r for found in stored.values() for r in found.values()]
    yield "# Measured on a GPU"
    if not records:
        yield "No figure is stored yet: nothing has been run."
        return
    for key, values in (
        ("device", {r["machine"]["device"] for r in records}),
        ("driver", {r["machine"].get("driver", "?") for r in records}),
        ("jax", {r["machine"].get("jax", "?") for r in records}),
        ("commit", {r["commit"][:12] for r in records}),
        ("date", {r["date"][:10] for r in records}),
        ("weights", {f"{r['weights']} (skew {r['skew']:g})" for r in records}),
    ):
        yield f"- {key}: {', '.join(sorted(values))}"


def table(records: Records) -> list[str]:
    """Returns tables of a part's figures, a row for each case and a table for each kind of case
    (the first word of its name).
    """
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, record in records.items():
        kinds.setdefault(name.partition("/")[0] if "/" in name else "", {})[name] = record
    return [line for of_kind in kinds.values() for line in (*_of_kind(of_kind), "")]


def _of_kind(records: Records) -> list[str]:
    found = {name: r["figures"] for name, r in records.items() if "figures" in r}
    columns = list(dict.fromkeys(key for figures in found.values() for key in figures))
    targets = any(records[name].get("target") for name in found)
    rows = [
        [name, *(_cell(of.get(key)) for key in columns)]
        + ([_verdict(records[name].get("target"))] if targets else [])
        for name, of in found.items()
    ]
    return markdown(["case", *columns, *(["target"] if targets else [])], rows)


def _cell(value: Any) -> str | None:
    if not isinstance(value, float):
        return None if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _verdict(target: Mapping[str, Any] | None) -> str:
    if not target:
        return ""
    limits = ", ".join(f"{key} {value:g}" for key, value in target.items() if key != "met")
    return f"{'met' if target['met'] else 'MISSED'} ({limits})"
