"""The parts `kernels` and `sweep` of the GPU benchmark, on a CPU: what they store."""

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from benchmarks.gpu import kernels_part, run, sweep_part
from benchmarks.harness import store
from benchmarks.kernels import judge, sweep
from benchmarks.kernels.cases import DRY, all_cases
from pallas_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module", autouse=True)
def _same_sources(compiled_in_a_hurry):
    """Whoever runs these tests may be writing a kernel. Inputs are the same in every run, too: of
    64 numbers, as here, some draws err by more than the tolerance of a model's size.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "sources", lambda paths: "same")
        for module in (kernels_part, sweep_part):
            patch.setattr(module, "secrets", SimpleNamespace(randbits=lambda bits: 1))
        patch.setenv("JAX_PLATFORMS", "cpu")  # both are what a dry run sets itself
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield


def dry_run(folder, *args):
    return run.main(["--dry-run", "--out", str(folder), "--commit", "abc", *args])


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    assert dry_run(folder, "--parts", "kernels") == 0
    return json.loads((folder / "kernels.json").read_text())


KEYS = {
    "case": dict,
    "commit": str,
    "sources": str,
    "date": str,
    "seed": int,
    "machine": dict,
    "implementation": str,
    "tile": (str, type(None)),
    "check": dict,
    "facts": dict,
    "ceilings": dict,
    "expected": dict,
    "timing": dict,
    "target": (dict, type(None)),
    "libraries": dict,
}


def test_every_case_leaves_a_whole_record(dry):
    assert [r["case"]["name"] for r in dry] == [case.name for case in all_cases(DRY)]
    for got in dry:
        for key, kind in KEYS.items():
            assert isinstance(got[key], kind), key
        assert got["commit"] == "abc"
        assert {"device", "python", "jax"} <= got["machine"].keys()
        assert got["check"]["passed"]
        assert got["timing"]["us_min"] <= got["timing"]["us"] <= got["timing"]["us_max"]
        has_rates = got["case"]["op"] != "routing"
        assert ("tb_s" in got["figures"], "count" in got) == (has_rates, has_rates)
        assert got["figures"]["us"] == got["timing"]["us"]
        assert got["figures"]["expected_us"] == got["expected"]["expected_us"]
        assert got["implementation"] == "xla"
        assert 0 < got["expected"]["expected_share"] <= 1
        assert got["expected"]["expected_us"] >= got["expected"]["floor_us"] > 0
        for name, library in got["libraries"].items():
            assert ("skipped" in library) != ("ratio" in library), name
            assert (f"{name} over it" in got["figures"]) == ("ratio" in library)


def test_libraries_that_a_cpu_has_agree_with_the_ops(dry):
    took_part = {name for r in dry for name, lib in r["libraries"].items() if "ratio" in lib}
    assert took_part == {
        "lax.ragged_dot",
        "XLA reference",
        "ours in bfloat16",
    }


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

    def go(*more):
        compiled.clear()
        args = ["--parts", "sweep", "--match", "paged_attention/tiny/decode/t4/c8", *more]
        assert dry_run(tmp_path, *args) == 0
        return list(compiled)

    go.folder = tmp_path
    return go


def test_a_sweep_stores_every_tile_and_tries_none_again(sweep_tiles):
    assert sweep_tiles() == 2 * [16, 128, 32]  # over all positions, and over a window
    records = json.loads((sweep_tiles.folder / "sweeps.json").read_text())
    assert [r["tile"] for r in records] == 2 * ["Tile(m=16)", "Tile(m=128)", "Tile(m=32)"]
    assert [r.get("failed") for r in records] == 2 * [None, "ValueError: too large", None]
    assert all(("timing" in r) != ("failed" in r) for r in records)
    whole, windowed = json.loads((sweep_tiles.folder / "sweep.json").read_text())
    of_tile = {r["tile"]: r["timing"]["us"] for r in records[:3] if "timing" in r}
    assert whole["figures"]["us"] == min(of_tile.values()) == of_tile[whole["tile"]]
    assert whole["figures"]["us_before"] == of_tile["Tile(m=16)"]
    assert windowed["figures"]["tiles"] == 3
    assert sweep_tiles("--again") == []


def test_a_tile_that_ends_the_program_is_not_tried_again(sweep_tiles, monkeypatch):
    monkeypatch.setattr(judge, "check", lambda *_: sys.exit("hung"))
    with pytest.raises(SystemExit):
        sweep_tiles()
    monkeypatch.undo()
    records = json.loads((sweep_tiles.folder / "sweeps.json").read_text())
    assert [r["failed"] for r in records] == [store.STARTED]
