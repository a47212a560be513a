"""Figures as lines of text."""

from collections.abc import Iterable
from typing import Any

NAMES = {"share_of_copy": "of copy", "tb_s": "TB/s", "tflop_s": "TFLOP/s"}

HEADER = (
    f"{'case':58} {'us':>9} {'expected':>9} {'floor':>6} {'TB/s':>6} {'TFLOP/s':>8} {'copy':>6} "
    f"{'product':>7}  target; library time / ours; largest loss expected"
)
"""`expected` and `floor`: microseconds on this GPU by arithmetic (`roofline`), and the share of the
floor in them. What was measured is beside them: `us`, and of the floor the larger of `copy` and
`product`."""


def line(record: dict[str, Any]) -> str:
    """Returns the line of a case: time, what was expected, rates, shares of the ceilings, target,
    ratio to each library, and the loss that was expected to be the largest.
    """
    name = record["case"]["name"]
    if "failed" in record:
        return f"{name:58} FAILED: {record['failed']} {record.get('check', '')}"
    timing, values = record["timing"], record.get("figures")
    expected = record["expected"]
    cells = [f"{name:58} {timing['us']:9.2f}"]
    cells.append(f"{expected['expected_us']:9.2f} {expected['expected_share']:6.1%}")
    if values:
        cells.append(f"{values['tb_s']:6.2f} {values['tflop_s']:8.1f}")
        cells.append(f"{values['share_of_copy']:6.1%} {values['share_of_product']:7.1%} ")
    else:
        cells.append(f"{'launches':>14} {timing['launches'] or '?'!s:<14}")
    if record["target"]:
        cells.append(goal(record["target"]) + ";")
    ratios = [f"{n} {x['ratio']:.2f}" for n, x in record["libraries"].items() if "ratio" in x]
    cells.append("; ".join([*[", ".join(ratios)] * bool(ratios), expected["largest_loss"]]))
    if record["implementation"] != "mosaic":
        cells.append(f"[{record['implementation']}]")
    return " ".join(cells).rstrip()


def goal(target: dict[str, Any]) -> str:
    """Returns a target in words, and whether it was met."""
    least, figure = target["at_least"], target["figure"]
    amount = f"{least:.0%}" if figure.startswith("share") else f"{least:g}"
    return f">= {amount} {NAMES[figure]} {'met' if target['met'] else 'MISSED'}"


def summary(records: Iterable[dict[str, Any]]) -> str:
    """Returns targets met, cases that failed, and why libraries were skipped."""
    records = list(records)
    targets = [r["target"] for r in records if r.get("target")]
    met = sum(t["met"] for t in targets)
    failed = [r["case"]["name"] for r in records if "failed" in r]
    lines = [f"{len(records)} cases; {met} of {len(targets)} targets met; {len(failed)} failed"]
    lines += [f"  failed: {name}" for name in failed]
    clean = sum(r.get("check", {}).get("poisoned") is False for r in records)
    lines += [f"  {clean} cases got memory that was not poisoned"] * (clean > 0)
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for name, library in record.get("libraries", {}).items():
            if "skipped" in library:
                key = name, library["skipped"]
                reasons[key] = reasons.get(key, 0) + 1
    lines += [f"  skipped {n} times: {name}: {why}" for (name, why), n in reasons.items()]
    return "\n".join(lines)
