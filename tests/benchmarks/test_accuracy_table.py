"""The page's accuracy table: what `jmoe evaluate` wrote, beside the paper's Table I."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ROW = re.compile(r"^\| (?:(way) (\d)|(full) \(dropped\)) ((?:\| -?[\d.]+ \([\d.]+\) )+)\|$", re.M)
THRESHOLDS = (80, 60, 40, 20, 0)


def table(name):
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


MEASURED = {
    (row["way"] or row["strategy"], int(row["threshold_percent"])): float(
        row["accuracy_loss_percent"]
    )
    for row in table("accuracy.csv")
}
PAPER = {
    (column.removeprefix("way_"), int(row["threshold_percent"])): float(row[column])
    for row in table("accuracy_paper.csv")
    for column in ("way_2", "way_4", "way_8", "full")
}


def test_the_page_has_the_figures_of_the_files():
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    rows = {way or full: figures for _, way, full, figures in ROW.findall(page)}
    assert sorted(rows) == ["2", "4", "8", "full"]
    for kind, figures in rows.items():
        found = re.findall(r"(-?[\d.]+) \(([\d.]+)\)", figures)
        told = [(float(own), float(paper)) for own, paper in found]
        wanted = [(MEASURED[kind, t], PAPER[kind, t]) for t in THRESHOLDS]
        assert told == [pytest.approx(pair, abs=0.051) for pair in wanted]


def test_losses_are_at_most_the_papers_or_one_percent():
    for (kind, threshold), loss in MEASURED.items():
        if kind == "zero":
            continue
        if kind == "full":  # dropping visits is clearly worse than any substitute
            worst = max(MEASURED[way, threshold] for way in ("2", "4", "8"))
            assert threshold == 100 or loss > 3 * worst
        else:
            assert loss <= max(PAPER[kind, threshold], 1.0)
