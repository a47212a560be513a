"""The whole benchmark of several models on one machine, as short as it can be."""

import json

import pytest

from benchmarks.family_qos.__main__ import main
from benchmarks.family_qos.config import ALTERNATIVES
from training.family.make import restore

pytestmark = pytest.mark.exhaustive


def test_a_short_run_measures_every_alternative(tmp_path, capsys):
    restore(tmp_path / "family")
    file, picture = tmp_path / "qos.json", tmp_path / "qos.png"
    where = ["--family", tmp_path / "family", "--out", tmp_path / "out"]
    short = ["--sizes", "2", "--loads", "0.5", "--duration-s", "1", "--rounds", "1"]
    short += ["--singles", "8", "--capacity-s", "2", "--rows", "256", "--slots", "4", "--seed", "1"]
    main([str(word) for word in [*where, *short, "--json", file, "--picture", picture]])
    printed = capsys.readouterr().out
    stored = json.loads(file.read_text())["2 models"]
    points = {one["alternative"]: one for one in stored["points"]}
    assert set(points) == {each.name for each in ALTERNATIVES}
    words = {each.name: each.words for each in ALTERNATIVES}
    asked = {one["requests"] for one in points.values()}
    assert len(asked) == 1  # the same trace
    for name, one in points.items():
        assert one["completed"] == one["requests"] > 0, name
        assert one["tokens_per_s"] > 0
        assert ("by_model" in one) == (name != "alone")
        assert f"| {words[name]} |" in printed
    singles = stored["singles"]
    assert singles["alone"]["requests"] == singles["family"]["requests"] == 8
    assert singles["hit"]["requests"] + singles["miss"]["requests"] == 8
    assert singles["miss"]["requests"] > 0
    assert 0.3 < singles["family_to_alone"] < 3
    assert picture.stat().st_size > 20_000
