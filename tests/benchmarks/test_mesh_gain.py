"""When copies pay: what any such table has to be, and what is stored is what is made."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.mesh import __main__ as mesh
from benchmarks.mesh import gain

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "copies_gain.json"


def test_gains_follow_from_the_break_even():
    rows = gain.rows(True)
    assert len(rows) == len(gain.TOKENS) * len(gain.FORMS)
    for row in rows:
        for imbalance, gained in zip(gain.IMBALANCES, row["gain_ms"], strict=True):
            assert (gained > 0) == (imbalance > row["break_even"])
    for form in gain.FORMS:
        even = [row["break_even"] for row in rows if row["form"] == form]
        assert all(larger < smaller for smaller, larger in pairwise(even))


def test_what_is_stored_is_what_is_made():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    made = mesh.main(["gain", "--dry-run"])
    for one, other in zip(stored["break_even"], made["break_even"], strict=True):
        assert one["gain_ms"] == pytest.approx(other.pop("gain_ms"), rel=1e-4)
        assert one["break_even"] == pytest.approx(other.pop("break_even"), rel=1e-4)
        assert one.items() >= other.items()
