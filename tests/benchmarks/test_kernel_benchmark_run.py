"""The kernel benchmark as a command, on a CPU: what it stores, skips and says."""

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from benchmarks.harness import store
from benchmarks.kernels import judge, measure, run, sweep, table, timing
from benchmarks.kernels.cases import DRY, Case, all_cases
from benchmarks.kernels.shapes import MODELS
from pallas_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.exhaustive

# ---- The whole command, on a CPU ----


@pytest.fixture(scope="module", autouse=True)
def _same_sources(compiled_in_a_hurry):
    """Whoever runs these tests may be writing a kernel. Inputs are the same in every run, too: of
    64 numbers, as here, some draws err by more than the tolerance of a model's size.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            store, "revision", lambda commit, paths: {"commit": commit, "sources": "same"}
        )
        patch.setattr(run, "secrets", SimpleNamespace(randbits=lambda bits: 1))
        yield


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    assert run.main(["--dry-run", "--out", str(folder), "--commit", "abc"]) == 0
    return folder


def records_of(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    texts = [path.read_text() for path in sorted(folder.glob("*.json"))]
    return [r for text in texts for r in json.loads(text, parse_constant=refuse)]


KEYS = {
    "case": dict,
    "commit": str,
    "sources": str,
    "date": str,
    "seed": int,
    "machine": dict,
    "implementation": str,
    "tile": (dict, type(None)),
    "check": dict,
    "facts": dict,
    "ceilings": dict,
    "expected": dict,
    "timing": dict,
    "target": (dict, type(None)),
    "libraries": dict,
}


def test_every_case_leaves_a_whole_record(dry):
    records = records_of(dry)
    by_file = sorted(all_cases(DRY), key=lambda case: case.op)
    assert [r["case"]["name"] for r in records] == [case.name for case in by_file]
    for got in records:
        for key, kind in KEYS.items():
            assert isinstance(got[key], kind), key
        assert got["commit"] == "abc"
        assert {"device", "python", "jax"} <= got["machine"].keys()
        assert got["check"]["passed"]
        assert got["timing"]["us_min"] <= got["timing"]["us"] <= got["timing"]["us_max"]
        has_rates = got["case"]["op"] != "routing"
        assert ("figures" in got, "count" in got) == (has_rates, has_rates)
        assert got["implementation"] == "xla"
        assert 0 < got["expected"]["expected_share"] <= 1
        assert got["expected"]["expected_us"] >= got["expected"]["floor_us"] > 0
        for name, library in got["libraries"].items():
            assert ("skipped" in library) != ("ratio" in library), name


def test_what_is_expected_is_printed_beside_what_was_measured(dry):
    """Of the dry run's first record, its floor is one launch and next to nothing to move."""
    record = records_of(dry)[0]
    line, header = table.line(record).split(), table.HEADER.split()
    assert header[:4] == ["case", "us", "expected", "floor"]
    measured, expected, share = line[1:4]
    assert float(measured) == pytest.approx(record["timing"]["us"], abs=0.01)
    assert float(expected) == pytest.approx(record["expected"]["expected_us"], abs=0.01)
    assert share == f"{record['expected']['expected_share']:.1%}"
    assert table.line(record).endswith(record["expected"]["largest_loss"] + " [xla]")


def test_libraries_that_a_cpu_has_agree_with_the_ops(dry):
    took_part = {
        name for r in records_of(dry) for name, lib in r["libraries"].items() if "ratio" in lib
    }
    assert took_part == {
        "lax.ragged_dot",
        "XLA reference",
        "ours in bfloat16",
    }


def test_what_is_stored_is_not_measured_again(dry, monkeypatch, capsys):
    monkeypatch.setattr(measure.Bench, "run", lambda *_: pytest.fail("measured again"))
    args = ["--dry-run", "--out", str(dry), "--commit", "abc"]
    assert run.main(args) == 0
    assert f"{len(all_cases(DRY))} cases are stored" in capsys.readouterr().out


def test_only_what_is_asked_for_and_not_yet_stored_is_measured(dry, monkeypatch):
    asked = []

    def fake(self, case, seed):
        asked.append(case)
        return {"failed": "faked"}

    monkeypatch.setattr(measure.Bench, "run", fake)
    monkeypatch.setattr(store.Store, "put", lambda *_: None)
    args = ["--dry-run", "--out", str(dry), "--commit", "abc"]
    only = ["--only", "kv_write,routing", "--phase", "decode"]
    assert run.main([*args, *only, "--again"]) == 1  # a failure is not success
    assert [(case.op, case.phase) for case in asked] == [
        ("routing", "decode"),
        ("kv_write", "decode"),
    ]
    asked.clear()
    assert run.main([*args[:-1], "another", "--limit-s", "0"]) == 0
    assert asked == []
    assert run.main([*args[:-1], "another"]) == 1
    assert len(asked) == len(all_cases(DRY))


def test_without_a_gpu_it_says_so(capsys):
    assert run.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_list_needs_no_gpu(capsys):
    assert run.main(["--list", "--only", "prefill_attention", "--model", "mixtral"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prefill_attention/Mixtral-8x7B/prefill/t16384/c16384 tflop_s 620.0"
    assert len(lines) == 11 + 7  # over all positions, and over its window


def test_summary():
    records = [
        {"case": {"name": "a"}, "target": {"met": True}, "check": {"poisoned": True}},
        {"case": {"name": "b"}, "target": {"met": False}, "check": {"poisoned": False}},
        {"case": {"name": "c"}, "failed": "why"},
        {"case": {"name": "d"}, "target": None, "libraries": {"x": {"skipped": "no GPU"}}},
    ]
    assert table.summary(records).splitlines() == [
        "4 cases; 1 of 2 targets met; 1 failed",
        "  failed: c",
        "  1 cases got memory that was not poisoned",
        "  skipped 1 times: x: no GPU",
    ]


def test_a_line_of_the_table():
    case = Case("paged_attention", MODELS[2], "decode", 256, 8192)
    got = table.line(
        {
            "case": {"name": case.name},
            "timing": {"us": 2000.0, "launches": 2},
            "expected": {"expected_us": 2100.0, "expected_share": 0.95, "largest_loss": "tail"},
            "figures": measure.figures(8_600_000_000, 10**12, 2000.0, timing.Ceilings(4.3, 790.0)),
            "target": {"figure": "tb_s", "at_least": 4.0, "met": True},
            "libraries": {"cuDNN": {"ratio": 1.25}, "torch": {"skipped": "not installed"}},
            "implementation": "mosaic",
        }
    )
    assert got.split() == [
        *(case.name, "2000.00", "2100.00", "95.0%", "4.30", "500.0", "100.0%", "63.3%"),
        *(">=", "4", "TB/s", "met;", "cuDNN", "1.25;", "tail"),
    ]


# ---- Sweeps ----


@dataclass(frozen=True)
class Tile:
    m: int


@pytest.fixture(name="sweep_tiles")
def _sweep_tiles(tmp_path, monkeypatch):
    """Runs a sweep of tiles 16, 128 and 32; returns the tiles that were compiled."""
    compiled = []

    def kernel(case):
        def op(*args, tile, **kwargs):
            compiled.append(tile.m)
            if tile.m == 128:
                raise ValueError("too large")
            return paged_attention(*args, **kwargs)

        return op

    monkeypatch.setattr(sweep, "kernel", kernel)
    monkeypatch.setattr(sweep, "chosen", lambda case: Tile(16))
    monkeypatch.setattr(sweep, "AXES", {"paged_attention": {"m": (16, 128, 32)}})

    def go():
        compiled.clear()
        args = ["--dry-run", "--sweep", "--match", "paged_attention/tiny/decode/t4/c8"]
        assert run.main([*args, "--out", str(tmp_path), "--commit", "abc"]) == 0
        return list(compiled)

    go.folder = tmp_path
    return go


def test_a_sweep_stores_every_tile_and_tries_none_again(sweep_tiles, capsys):
    assert sweep_tiles() == 2 * [16, 128, 32]  # over all positions, and over a window
    records = records_of(sweep_tiles.folder)
    assert [r["tile"] for r in records] == 2 * [{"m": 16}, {"m": 128}, {"m": 32}]
    assert [r.get("failed") for r in records] == 2 * [None, "ValueError: too large", None]
    assert all(("timing" in r) != ("failed" in r) for r in records)
    assert "best of 2" in capsys.readouterr().out
    assert sweep_tiles() == []


def test_a_tile_that_ends_the_program_is_not_tried_again(sweep_tiles, monkeypatch):
    monkeypatch.setattr(judge, "check", lambda *_: sys.exit("hung"))
    with pytest.raises(SystemExit):
        sweep_tiles()
    monkeypatch.undo()
    assert [r["failed"] for r in records_of(sweep_tiles.folder)] == [
        "it was started, and no more is known"
    ]
