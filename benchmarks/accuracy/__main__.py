"""The bundled model's accuracy loss beside BrownoutServe's Table I, setting by setting.

Run: `python -m benchmarks.accuracy [CSV]`, on a table of `jmoe evaluate` (default: the one beside
this file). Exit status 1 where a partial setting loses more than the larger of the paper's entry
and 1 %, or full brownout is not clearly worse. The paper's figures are of Qwen1.5-MoE-A2.7B-Chat on
PIQA, COPA, C-Eval and OpenBookQA: another model and other tasks, so this compares sizes of loss.
"""

import argparse
import csv
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
NAMED = ((2, 0), (4, 20), (8, 40))
"""The (way, threshold) settings that the paper recommends."""


def read(path: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Returns the rows of `evaluate.csv` by (way or `full`, threshold)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["strategy"] != "zero"]
    return {
        ("full" if row["strategy"] == "full" else row["way"], int(row["threshold_percent"])): row
        for row in rows
    }


def read_paper() -> dict[tuple[str, int], float]:
    """Returns Table I of the paper, in percent, by (way or `full`, threshold)."""
    with (HERE / "paper.csv").open(encoding="utf-8", newline="") as file:
        return {
            (column.removeprefix("way_"), int(row["threshold_percent"])): float(value)
            for row in csv.DictReader(file)
            for column, value in row.items()
            if column != "threshold_percent"
        }


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=HERE / "bundled.csv")
    found, paper = read(parser.parse_args().csv), read_paper()
    table = Table("setting", "loss, %", "95 % interval", "Table I", "bound", "held")
    ok = True
    for (kind, threshold), row in found.items():
        loss, theirs = float(row["accuracy_loss_percent"]), paper[kind, threshold]
        # Partial: at most this. Full: the worst of the partial settings at its threshold, or more.
        bound = max(theirs, 1.0)
        held = loss <= bound
        if kind == "full":
            bound = max(
                float(r["accuracy_loss_percent"]) for (k, t), r in found.items()
                if k != "full" and t == threshold
            )  # fmt: skip
            held = loss > 3 * bound or threshold == 100
        ok &= held
        table.add_row(
            f"{'full' if kind == 'full' else f'way {kind}'}, t {threshold}",
            f"{loss:.2f}",
            f"{float(row['loss_low_percent']):.2f} to {float(row['loss_high_percent']):.2f}",
            f"{theirs:.2f}",
            f"{'> 3 x' if kind == 'full' else '<='} {bound:.2f}",
            "yes" if held else "NO",
        )
    Console().print(table)
    named = [float(found[str(way), t]["accuracy_loss_percent"]) for way, t in NAMED]
    print(f"mean of (2, 0), (4, 20) and (8, 40): {sum(named) / 3:.2f} % (the paper: 4.90)")
    items = next(iter(found.values()))["items"]
    print(f"{items} items; {'every bound is held' if ok else 'NOT every bound is held'}")
    return not ok


if __name__ == "__main__":
    sys.exit(main())
