"""What the GPU benchmarks share: records that are found again, the clock, and one case's record."""

import json
import math

import pytest

from benchmarks.harness import command, store


def record(name, **more):
    return {"case": {"name": name}, "commit": "a", "sources": "1", **more}


def test_what_is_stored_is_found_for_the_same_revision_only(tmp_path):
    kept = store.Store(tmp_path / "h200", {"commit": "a", "sources": "1"})
    assert not kept.has("op", "x")
    kept.put("op", record("x", us=1))
    kept.put("op", record("y", failed="why"))
    kept.put("op", record("x", us=2))
    assert kept.has("op", "x")
    assert not kept.has("op", "y")
    assert kept.has("op", "y", failed=True)
    assert [r["case"]["name"] for r in json.loads((tmp_path / "h200/op.json").read_text())] == [
        "x",
        "y",
    ]
    assert kept.records("op")["x"]["us"] == 2
    for other in ({"commit": "b", "sources": "1"}, {"commit": "a", "sources": "2"}):
        assert not store.Store(tmp_path / "h200", other).has("op", "x")


def test_what_is_no_number_is_null_and_digits_are_six(tmp_path):
    kept = store.Store(tmp_path, {})
    kept.put("op", record("y", us=math.nan, more=(math.inf, {1: 1 / 3})))
    assert kept.records("op")["y"]["us"] is None
    assert kept.records("op")["y"]["more"] == [None, {"1": 0.333333}]


def test_sources_are_code_and_data_at_the_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    for path, content in {"op/a.py": "1", "op/notes.md": "1", "one.py": "1"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    first = store.revision("abc", ["op", "one.py"])
    (tmp_path / "op" / "notes.md").write_text("2")
    assert store.revision("abc", ["op", "one.py"]) == first
    assert first["commit"] == "abc"
    assert store.commit() == "unknown"  # there is no git to ask
    (tmp_path / "one.py").write_text("2")
    assert store.sources(["op"]) != store.sources(["op", "one.py"]) != first["sources"]


def test_folder_of_a_device():
    assert store.device_folder("NVIDIA H200") == store.ROOT / "benchmarks" / "h200"
    assert store.device_folder("NVIDIA H100 80GB HBM3").name == "h100-80gb-hbm3"


def test_clock_stops_while_the_longest_piece_would_still_fit(monkeypatch):
    now = 100.0
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    clock = command.Clock(20)
    for now, has_time in ((100.0, True), (108.0, True), (111.0, True), (112.5, False)):  # noqa: B007
        assert clock.has_time() == has_time
    assert clock.left_s == 7.5
    assert clock.has_time(7.0)
    assert not clock.has_time(8.0)


def test_a_case_is_stored_before_it_runs_and_after(tmp_path):
    kept = store.Store(tmp_path, {})

    def fine():
        assert kept.records("op")["x"]["failed"] == command.STARTED
        return {"us": 1}

    done = command.attempt(kept, "op", record("x"), fine)
    assert done["us"] == 1
    assert "failed" not in kept.records("op")["x"]
    assert kept.records("op")["x"]["wall_s"] >= 0

    def broken():
        raise RuntimeError("no memory")

    assert command.attempt(kept, "op", record("x"), broken)["failed"] == "RuntimeError: no memory"
    with pytest.raises(KeyboardInterrupt):  # what ends the process leaves the stored start
        command.attempt(kept, "op", record("x"), lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert kept.records("op")["x"]["failed"] == command.STARTED


def test_choices_name_what_is_none_of_them(capsys):
    parser = command.parser("bench", "about")
    command.add_choices(parser, "--only", ("a", "b"))
    assert parser.parse_args([]).only == ["a", "b"]
    assert parser.parse_args(["--only", "b"]).only == ["b"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "a,c"])
    assert "'c' is none of a, b" in capsys.readouterr().err


def test_figures_are_written_a_record_a_line(tmp_path):
    long = [{"rows": n, "us": [n / 3, None, True]} for n in range(9)]
    found = {"commit": "a", "few": [1, 2], "none": {}, "records": long, "by": {"x": long, "y": 1}}
    path = tmp_path / "found.json"
    command.write_figures(path, {**found, "by": {"x": long, 16: math.nan}})
    found["by"] = {"x": long, "16": None}
    text = path.read_text(encoding="utf-8")
    for record in long:
        record["us"][0] = float(f"{record['us'][0]:.6g}")
    assert json.loads(text) == found
    assert len(text.splitlines()) == 2 + 3 + (2 + 9) + (2 + 2)


def test_what_is_stored_is_json(request):
    """As the standard has it: without NaN."""

    def refuse(word):
        raise ValueError(word)

    files = sorted((request.config.rootpath / "benchmarks").rglob("*.json"))
    assert len(files) > 30
    for file in files:
        json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
