"""The pairs' harness, with fakes; the newcomer's clock; what the GPU benchmarks share."""

import json
import math
import os
import sys
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.first_answer import measure
from benchmarks.harness import store
from benchmarks.pairs import __main__ as pairs
from benchmarks.pairs.harness import Pair, medians, ratios
from benchmarks.pairs.harness import measure as measure_pair
from benchmarks.pairs.passing_time import PassingTime, first_allowed
from benchmarks.pairs.served import Load, served

# -- pairs ---------------------------------------------------------------------------------------


def fake_pair(played, **more):
    """Returns a pair on a machine that slows down: play n of setting s takes n * s ms."""

    @asynccontextmanager
    async def workload(settings, dry):
        async def play(name, number):
            played.append((name, number))
            return {"ms": float(settings[name] * len(played)), "rows": 2.0}

        played.append("dry" if dry else "started")
        yield play
        played.append("stopped")

    return Pair("What b costs.", {"a": 1, "b": 3}, workload, ("ms",), rounds=2, **more)


async def test_settings_are_played_in_turns_after_a_warm_up():
    played = []
    found = await measure_pair(fake_pair(played), 2)
    assert (played[0], played[-1]) == ("started", "stopped")
    assert played[1:-1] == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    # Plays count from 2, since the start was noted, too: the warm-up is the second and the third.
    assert found == [
        {"a": {"ms": 4, "rows": 2}, "b": {"ms": 3 * 5, "rows": 2}},
        {"a": {"ms": 7, "rows": 2}, "b": {"ms": 3 * 6, "rows": 2}},
    ]


async def test_a_dry_run_is_a_round_without_a_warm_up():
    played = []
    await measure_pair(fake_pair(played), 1, dry=True)
    assert played == ["dry", ("a", 1), ("b", 1), "stopped"]


ROUNDS = [
    {"a": {"ms": a, "rows": 1}, "b": {"ms": b, "rows": 1}} for a, b in ((1, 2), (6, 3), (4, 12))
]


def test_ratios_are_those_within_rounds():
    assert medians(ROUNDS) == {"a": {"ms": 4, "rows": 1}, "b": {"ms": 3, "rows": 1}}
    by_hand = {"median": 2, "min": 0.5, "max": 3}  # 2 / 1, 3 / 6, 12 / 4
    assert ratios(fake_pair([]), ROUNDS) == {"b over a": {"ms": by_hand}}
    other = ratios(fake_pair([], against=[("a", "b")]), ROUNDS)
    assert other == {"a over b": {"ms": {"median": 0.5, "min": 1 / 3, "max": 2}}}


def test_a_round_without_a_ratio_is_left_out_and_told(monkeypatch, capsys):
    rounds = [{"a": {"ms": a}, "b": {"ms": b}} for a, b in ((0, 2), (6, 3), (4, 12), (0, 0))]
    found = {"median": 1.75, "min": 0.5, "max": 3, "rounds_without": 2}
    assert ratios(fake_pair([]), rounds) == {"b over a": {"ms": found}}
    (none,) = ratios(fake_pair([]), rounds[:1])["b over a"].values()
    assert none["rounds_without"] == 1
    assert np.isnan([none["median"], none["min"], none["max"]]).all()

    async def measured(*_):
        return rounds

    monkeypatch.setattr("benchmarks.pairs.harness.measure", measured)
    run_pairs(monkeypatch, "fake", "--rounds", 4)
    assert "1.750 (0.500 to 3.000; none in 2 of 4 rounds)" in capsys.readouterr().out


def run_pairs(monkeypatch, *words):
    monkeypatch.setattr(pairs, "PAIRS", {"fake": fake_pair([])})
    monkeypatch.setattr(sys, "argv", ["pairs", *map(str, words)])
    pairs.main()


def test_figures_are_written_with_command_and_commit(tmp_path, monkeypatch, capsys):
    run_pairs(monkeypatch, "fake", "--rounds", 3, "--out", tmp_path / "fake.json")
    stored = json.loads((tmp_path / "fake.json").read_text())
    assert stored["command"] == "python -m benchmarks.pairs fake --rounds 3"
    assert stored["commit"]
    assert len(stored["rounds"]) == 3
    # The plays after the warm-up are the 4th to the 9th: a 4, b 5; b 6, a 7; a 8, b 9.
    assert stored["medians"]["a"]["ms"] == 7
    assert stored["ratios"]["b over a"]["ms"] == {"median": 3.375, "min": 2.57143, "max": 3.75}
    assert "ms, b over a: 3.375 (2.571 to 3.750)" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    run_pairs(monkeypatch, "fake", "--dry-run", "--out", tmp_path / "fake.json")
    assert "Medians of 1" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_pairs_are_listed_and_bad_flags_named(monkeypatch, capsys):
    run_pairs(monkeypatch, "--list")
    assert "fake          What b costs.\n              a | b\n" in capsys.readouterr().out
    for words, message in (((), "name a pair"), (("fake", "--rounds", 0), "--rounds is 0")):
        with pytest.raises(SystemExit):
            run_pairs(monkeypatch, *words)
        assert message in capsys.readouterr().err


def plan(rows, waits=False):
    return SimpleNamespace(rows=[None] * rows, waits=waits)


def test_steps_pass_time_one_after_another():
    runner = PassingTime(SimpleNamespace(num_layers=1), 0.05, [7, 8, 9])
    began = time.monotonic()
    first, second = (runner.launch(plan(rows), None) for rows in (2, 3))
    assert first.result(5).tokens == [7, 8]
    assert second.result(5).tokens == [7, 8, 9]
    assert time.monotonic() - began >= 0.1
    runner.close()


def test_a_structured_step_ends_once_its_tokens_are_allowed():
    runner = PassingTime(SimpleNamespace(num_layers=1), 0.0, [7])
    waiting = runner.launch(plan(1, waits=True), None)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    runner.draw(np.array([[0, 0b1000]], np.int32))
    assert waiting.result(5).tokens == [32 + 3]
    runner.close()


def test_the_first_allowed_token_by_hand():
    last_of_a_word = np.array(1 << 31, np.uint32).view(np.int32)
    rows = [[0b110, 0], [0, 1], [last_of_a_word, 1], [-1, -1]]
    assert first_allowed(np.array(rows, np.int32)) == [1, 32, 31, 0]


@pytest.mark.deep
async def test_a_slow_device_is_kept_busy_over_either_protocol():
    loads = {"grpc": Load(100.0), "http": Load(100.0, over_http=True)}
    async with served(loads, dry=True) as play:
        for name in loads:
            found = await play(name, 1)
            # 64 tokens every 100 ms at most; prefill steps come between.
            assert 0 < found["tokens_per_s"] <= 640 * 1.25
            assert -0.2 < found["device_idle_share"] < 1
            assert 0 < found["server_us_per_token"] < 20_000
            assert 0 < found["client_cpu_share"] < 1


# -- from clone to answer ------------------------------------------------------------------------

README = """
```sh
mkdir -p venv/bin
cat > venv/bin/jmoe <<'END'
#!/usr/bin/env python3
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"text":" Bedrin"}')
server = HTTPServer(("127.0.0.1", 0), Handler)
with (Path.home() / "starts").open("a") as starts:
    starts.write(".")
print(f"jmoe http on http://127.0.0.1:{server.server_port}", flush=True)
print("jmoe ready on 127.0.0.1:1", flush=True)
server.serve_forever()
END
chmod +x venv/bin/jmoe
```

```sh
curl -s http://127.0.0.1:8000/v1/completions
```

and the answer's `text` is `"EXPECTED"`.
"""


def test_each_start_is_timed_until_its_answer(tmp_path):
    seconds = measure(README.replace("EXPECTED", " Bedrin"), tmp_path, os.environ)
    waited = [name for name in seconds if not name.endswith("_cpu")]
    assert waited == ["install", "first", "second"]
    assert all(seconds[f"{name}_cpu"] > 0 for name in waited)
    assert (tmp_path / "home" / "starts").read_text() == ".."


def test_another_answer_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"' Elsewhere' was expected.* Bedrin"):
        measure(README.replace("EXPECTED", " Elsewhere"), tmp_path, os.environ)


# -- what the GPU benchmarks share ---------------------------------------------------------------


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
    first = store.sources(["op", "one.py"])
    (tmp_path / "op" / "notes.md").write_text("2")
    assert store.sources(["op", "one.py"]) == first
    assert store.commit("abc") == "abc"
    assert store.commit() == "unknown"  # there is no git to ask
    (tmp_path / "one.py").write_text("2")
    assert store.sources(["op"]) != store.sources(["op", "one.py"]) != first


def test_folder_of_a_device():
    assert store.device_folder("NVIDIA H200") == store.ROOT / "benchmarks" / "h200"
    assert store.device_folder("NVIDIA H100 80GB HBM3").name == "h100-80gb-hbm3"


def test_a_case_is_stored_before_it_runs_and_after(tmp_path):
    kept = store.Store(tmp_path, {})

    def fine():
        assert kept.records("op")["x"]["failed"] == store.STARTED
        return {"us": 1}

    done = store.attempt(kept, "op", record("x"), fine)
    assert done["us"] == 1
    assert "failed" not in kept.records("op")["x"]
    assert kept.records("op")["x"]["wall_s"] >= 0

    def broken():
        raise RuntimeError("no memory")

    assert store.attempt(kept, "op", record("x"), broken)["failed"] == "RuntimeError: no memory"
    with pytest.raises(KeyboardInterrupt):  # what ends the process leaves the stored start
        store.attempt(kept, "op", record("x"), lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert kept.records("op")["x"]["failed"] == store.STARTED


def test_figures_are_written_a_record_a_line(tmp_path):
    long = [{"rows": n, "us": [n / 3, None, True]} for n in range(9)]
    found = {"commit": "a", "few": [1, 2], "none": {}, "records": long, "by": {"x": long, "y": 1}}
    path = tmp_path / "found.json"
    store.write_figures(path, {**found, "by": {"x": long, 16: math.nan}})
    found["by"] = {"x": long, "16": None}
    text = path.read_text(encoding="utf-8")
    for record in long:
        record["us"][0] = float(f"{record['us'][0]:.6g}")
    assert json.loads(text) == found
    assert len(text.splitlines()) == 2 + 3 + (2 + 9) + (2 + 2)


def test_what_is_stored_is_json(request):
    """By the standard: without NaN."""

    def refuse(word):
        raise ValueError(word)

    files = sorted((request.config.rootpath / "benchmarks").rglob("*.json"))
    assert len(files) > 20
    for file in files:
        json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
