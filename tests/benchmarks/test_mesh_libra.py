"""Libra's prefill: fits and sums by hand, exchanges by sampling, errors anew; and the command."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.mesh import __main__ as mesh
from benchmarks.mesh import libra
from benchmarks.mesh.libra import MODELS, PAPER, SCHEMES

ROOT = Path(__file__).parents[2]
LIBRA, QWEN = SCHEMES["Libra"], MODELS["Qwen3MoE"]
TINY = libra.Geometry(
    num_layers=3,
    num_dense_layers=1,
    d_model=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    num_experts=16,
    experts_per_token=2,
    d_ff_expert=4,
    d_ff_shared=0,
    d_ff_dense=7,
)
PLAIN = libra.Scheme(
    imbalance=1.5,
    local_share=0.0,
    visit_flops_per_s=1e6,
    dispatch_bytes_per_s=1e5,
    combine_bytes_per_s=2e5,
    per_element_s=1e-6,
    broadcast_s=0.0,
    host_s=2e-3,
    planning_s=3e-3,
)


def test_a_layer_by_hand():
    times = libra.layer_times(PLAIN, TINY, own=100, length=10)
    assert times.local == 0
    assert times.remote == pytest.approx(1.5 * 100 * 2 * 6 * 10 * 4 / 1e6)
    assert times.combine == pytest.approx(7 * 100 * 10 * 2 / 2e5)
    assert times.exposed == pytest.approx(7 * 100 * 10 * 2 / 1e5 + 2e-3 + 3e-3)
    assert times.others == pytest.approx(100 * 10 * 1e-6)
    products = 2 * 100 * 10 * (10 + 5 + 5 + 10)  # queries, keys, values, output
    scores = 2 * 2 * 100 * 5 * 10  # two products of 5 keys on average, 10 wide over the heads
    moved = 2 * 100 * (8 * 10 + 2 * (10 + 10))
    attention = products / 790e12 + scores / 550e12 + moved / 4.3e12
    assert times.attention == pytest.approx(attention)
    dense = attention + 6 * 100 * 10 * 7 / 790e12
    step = libra.step_s(PLAIN, TINY, rows=800, length=10)
    assert step == pytest.approx(2 * times.total + dense)


def test_the_local_stage_hides_what_fits_in_it():
    def times(share, **exchange):
        sent = libra.Exchange(**{"dispatch": 0.0, "combine": 0.0, **exchange})
        scheme = PLAIN._replace(imbalance=1.0, local_share=share)
        return libra.layer_times(scheme, TINY, own=100, length=10, sent=sent)

    computing = 100 * 2 * 6 * 10 * 4 / 1e6  # 48 ms
    assert times(0.5).exposed == 0
    assert times(0.5).local == times(0.5).remote == pytest.approx(computing / 2)
    assert times(0.5, dispatch=0.030).exposed == pytest.approx(0.030 - 0.024)  # beside the host's
    assert times(0.5, dispatch=0.030, waits=True).exposed == pytest.approx(0.032 - 0.024)
    assert times(0.99).exposed == pytest.approx(3e-3 - 0.01 * computing)  # planning is left
    assert times(0.01).exposed == pytest.approx(2e-3 - 0.01 * computing)  # the host's work is left


def test_table_2_comes_back():
    for name, scheme in SCHEMES.items():
        times = libra.layer_times(scheme, QWEN, 4096, 1024)
        moe_s = times.total - times.attention
        assert 1e3 * moe_s == pytest.approx(PAPER["breakdown"][name]["total"], abs=0.005)
    parts = PAPER["breakdown"]["SGLang"]
    assert SCHEMES["SGLang"].imbalance == pytest.approx(parts["moe_remote"] / (2.77 + 4.55))
    received = 7 * 4096 * 4096 * 2  # rows of seven others, 4,096 elements of two bytes
    assert SCHEMES["SGLang"].combine_bytes_per_s == pytest.approx(received / 1.34e-3)


def test_more_rows_imbalance_or_context_take_longer():
    for scheme in SCHEMES.values():
        for geometry in MODELS.values():
            for rows in (1024, 8192, 262144):
                base = libra.step_s(scheme._replace(imbalance=1.2), geometry, rows, 1024)
                even = scheme._replace(imbalance=1.2)
                assert libra.step_s(even, geometry, 2 * rows, 1024) > base
                assert libra.step_s(even, geometry, rows, 2048) > base
                slower = libra.step_s(scheme._replace(imbalance=1.3), geometry, rows, 1024)
                hidden = scheme is LIBRA and rows == 1024  # under the host's work
                assert slower == base if hidden else slower > base


def test_the_data_are_as_the_paper_prints_them():
    rows = PAPER["prefill_s"]
    assert [row["table"] for row in rows] == [table for table in range(4, 14) for _ in range(5)]
    lengths = {4: 1024, 5: 2048, 6: 4096, 7: 6144, 8: 8192}
    for row in rows:
        assert row["model"] == ("Qwen3MoE" if row["table"] < 9 else "GLM-4.5")
        assert row["input_length"] == lengths[(row["table"] - 4) % 5 + 4]
    assert [row["batch"] for row in rows] == [8, 16, 32, 48, 64] * 10
    # Printed: 15 rows a table, of which these many ran out of memory.
    out = [sum(row[name] is None for name in SCHEMES) for row in rows]
    assert [sum(out[i : i + 5]) for i in range(0, 50, 5)] == [0, 0, 1, 2, 4, 0, 5, 9, 12, 12]
    assert rows[0]["Libra"] == 0.38
    assert rows[24] == {
        "table": 8,
        "model": "Qwen3MoE",
        "input_length": 8192,
        "batch": 64,
        "Libra": None,
        "Lina": None,
        "SGLang": 23.21,
    }


def test_errors_follow_from_the_data_file():
    found = libra.errors_of_steps(False)
    assert [(entry["model"], entry["rows"]) for entry in found] == [
        (model, rows) for model in MODELS for rows in ("32,768 or more", "fewer")
    ]
    for entry in found:
        expected = []
        for row in PAPER["prefill_s"]:
            rows, length = row["batch"] * row["input_length"], row["input_length"]
            size = "fewer" if rows < 32 * 1024 else "32,768 or more"
            if (row["model"], size) != (entry["model"], entry["rows"]):
                continue
            for name in ("Libra", "Lina", "SGLang"):
                if row[name] is not None:
                    made = libra.step_s(SCHEMES[name], MODELS[row["model"]], rows, length)
                    expected.append((made - row[name]) / row[name])
        assert entry["count"] == len(expected)
        assert entry["mean_absolute"] == pytest.approx(fmean(map(abs, expected)))
        assert entry["mean"] == pytest.approx(fmean(expected))


def test_the_command_writes_keeps_and_prints(tmp_path, capsys):
    """The file in the repository is what it writes; parts that are not asked for stay."""
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"errors": [], "scaling": []}))
    mesh.main(["libra", "--json", str(file), "--parts", "errors"])
    assert json.loads(file.read_text())["scaling"] == []
    found = mesh.main(["libra", "--json", str(file)])
    stored = json.loads(file.read_text())
    assert stored["command"] == "python -m benchmarks.mesh libra"
    kept = json.loads((ROOT / "benchmarks" / "results" / "libra_times.json").read_text())
    for part in ("errors", "scaling"):
        assert kept[part] == stored[part]
    capsys.readouterr()
    mesh.main(["libra", "--json", str(file), "--tables"])
    printed = capsys.readouterr().out
    for entry in found["errors"]:
        assert f"{100 * entry['mean_absolute']:.1f} %" in printed
    with pytest.raises(SystemExit):
        mesh.main(["libra", "--parts", "eight"])
    assert "'eight' is none of errors, scaling" in capsys.readouterr().err


def test_parts_that_are_played_by_themselves_say_so_and_leave_others_theirs(tmp_path, monkeypatch):
    """A file from before it was so names the origin of all its parts, and of one that is gone."""
    file, commits = tmp_path / "times.json", iter("abcd")
    monkeypatch.setattr(mesh.store, "commit", lambda given=None: next(commits))
    before = {"command": "python -m benchmarks.mesh libra", "commit": "z", "date": "then"}
    file.write_text(json.dumps(before | {"errors": [], "scaling": [], "gone": 1}))

    def played(*words):
        mesh.main(["libra", "--json", str(file), *words])
        stored = json.loads(file.read_text())
        own = {name: (of["command"], of["commit"]) for name, of in stored["origins"].items()}
        newest = stored["command"], stored["commit"]
        assert newest in own.values()
        assert set(own) == {"errors", "scaling", "gone"}
        return own, stored

    whole = "python -m benchmarks.mesh libra"
    own, stored = played("--parts", "errors")
    assert own == {
        "errors": (f"{whole} --parts errors", "a"),
        "scaling": (whole, "z"),
        "gone": (whole, "z"),
    }
    assert stored["origins"]["scaling"]["date"] == "then"
    assert stored["scaling"] == []
    own, _ = played("--parts", "scaling")
    assert own["errors"] == (f"{whole} --parts errors", "a")
    assert own["scaling"] == (f"{whole} --parts scaling", "b")
    own, stored = played()
    assert own == dict.fromkeys(("errors", "scaling"), (whole, "c")) | {"gone": (whole, "z")}
    mesh.main(["libra", "--json", str(file), "--tables"])
    assert json.loads(file.read_text()) == stored


def test_an_exchange_takes_as_long_as_its_slower_link():
    geometry = QWEN._replace(d_model=1000)
    scheme = LIBRA._replace(dispatch_bytes_per_s=14e9, combine_bytes_per_s=1e15)
    sent = libra.exchange("all-gather", scheme, geometry, own=1000, devices=16)
    assert sent.dispatch == pytest.approx(14 * 2e6 / 14e9)
    assert sent.combine == pytest.approx(1 * 2e6 / 45e9)
    assert not sent.waits
    assert libra.exchange("direct", scheme, geometry, 1000, 16).waits


def test_all_gather_stops_scaling_and_all_to_all_does_not():
    """Each device has 4,096 rows, so that twice the devices bring 1.5 times the rows a second as
    long as a layer takes at most 4 / 3 of the time."""
    found = libra.scaling(False)
    for model in MODELS:
        sizes = [size for size in found if size["model"] == model]
        assert [size["devices"] for size in sizes] == [8, 16, 32, 64, 128, 256, 512]
        scales_to = dict.fromkeys(libra.WAYS, 8)
        for smaller, larger in pairwise(sizes):
            for way in libra.WAYS:
                ratio = larger["layer_ms"][way] / smaller["layer_ms"][way]
                assert 0.97 < ratio < 2
                if ratio <= 4 / 3:
                    scales_to[way] = larger["devices"]
        assert scales_to == {"all-gather": 16, "direct": 512, "forwarded": 512}
    in_node = found[0]["layer_ms"]["all-gather"]
    assert in_node == pytest.approx(1e3 * libra.layer_times(LIBRA, QWEN, 4096, 1024).total)
