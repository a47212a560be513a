"""The comparison with the paper's table, and the ablation's bookkeeping on a tiny model."""

import csv
import dataclasses
import sys

import pytest
from rich.progress import Progress

from benchmarks.accuracy import __main__ as comparison
from benchmarks.accuracy import ablation
from training.distill import DistillConfig

pytestmark = pytest.mark.deep

QUICK = DistillConfig(
    rows=512,
    steps=4,
    batch=128,
    decode_batch=32,
    eval_every=2,
    refine_rows=2,
    length=64,
    dtype="float32",
)


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


@pytest.mark.exhaustive
def test_the_ablation_runs_once_and_is_read_again(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "TEXTS", 200)

    def run(seeds):
        with Progress(disable=True) as progress:
            return list(
                ablation.run(
                    tmp_path,
                    seeds,
                    model=str(tiny_dir.path),
                    way=4,
                    items=16,
                    refine_steps=2,
                    variants=["baseline", "groups: similarity"],
                    refined=["baseline"],
                    config=QUICK,
                    progress=progress,
                )
            )

    first = run([0])
    assert [(row.variant, row.stage, row.threshold_percent) for row in first] == [
        ("baseline", "layers", 40),
        ("baseline", "layers", 0),
        ("baseline", "end to end", 40),
        ("baseline", "end to end", 0),
        ("groups: similarity", "layers", 40),
        ("groups: similarity", "layers", 0),
    ]
    assert first[1].output_error != first[5].output_error  # of two sets of united experts

    def never(*args):
        raise AssertionError("distilled again")

    monkeypatch.setattr(ablation, "distill", never)
    again = run([0])
    assert [repr(row) for row in again] == [repr(row) for row in first]  # NaN is not equal to NaN


def test_the_table_is_the_mean_over_seeds_with_its_spread(tmp_path):
    row = ablation.Row("baseline", "layers", 0, 40, 1.0, 0.5, 1.5, 0.1)
    rows = [row, dataclasses.replace(row, seed=1, loss_percent=4.0)]
    rows.append(dataclasses.replace(row, stage="end to end", threshold_percent=0))
    text = ablation.table(rows)
    assert "| baseline | 2.5 (1.0 to 4.0) |  |  | 1.0 | 2 |" in text
    ablation.write_csv(tmp_path / "a.csv", rows)
    assert (
        (tmp_path / "a.csv").read_text().splitlines()[1].startswith("baseline,layers,0,40,1.0000")
    )
