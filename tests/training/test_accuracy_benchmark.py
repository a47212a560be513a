"""The comparison with the paper's table."""

import csv
import sys

import pytest

from benchmarks.accuracy import __main__ as comparison

pytestmark = pytest.mark.deep


def test_the_committed_table_holds_every_bound(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy"])
    assert comparison.main() == 0
    assert "every bound is held" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "way", "loss"), [("partial", "8", "4.9"), ("partial", "2", "3"), ("full", "", "2")]
)
def test_a_loss_past_its_bound_is_found(monkeypatch, capsys, tmp_path, strategy, way, loss):
    """At t 40 the paper has 4.82 at way 8 and 2.92 at way 2; full has to be clearly worse."""
    with (comparison.HERE / "bundled.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    setting = {"strategy": strategy, "way": way, "threshold_percent": "40"}
    (row,) = [row for row in rows if setting.items() <= row.items()]
    row["accuracy_loss_percent"] = loss
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(sys, "argv", ["accuracy", str(tmp_path / "t.csv")])
    assert comparison.main() == 1
    assert "NOT every bound" in capsys.readouterr().out
