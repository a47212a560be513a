"""`jmoe consolidate`: flags reach the run, and bad input is one line."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from jmoe.sharing import Sharing
from serving.cli import main as cli
from training.consolidate import run as run_module
from training.consolidate.run import ALL, ConsolidateConfig, Consolidation

MODELS = ["--model", "chat=/m/chat", "--model", "code=/m/co=de"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jmoe", "consolidate", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


@pytest.fixture
def calls(monkeypatch):
    """Records what `consolidate` is called with; of four positions it shares one."""
    seen = []

    def consolidate(directories, out, config, progress, say):
        seen.append((directories, out, config))
        progress("consolidate", 1, 1)
        owners = np.array([[[0, 0, 0, 0]], [[0, 1, 1, 1]]], np.int32)
        sharing = Sharing(tuple(directories), owners)
        return Consolidation(sharing, {"chat": 0.25, "code": 0.5})

    monkeypatch.setattr(run_module, "consolidate", consolidate)
    return seen


def test_flags_are_the_fields_of_the_configuration() -> None:
    flags = {parameter.name for parameter in get_command(cli.app).commands["consolidate"].params}
    fields = {field.name for field in dataclasses.fields(ConsolidateConfig)}
    assert flags == fields | {"model", "out"}


def test_flags_reach_the_run(calls, monkeypatch, capsys) -> None:
    flags = "--out o/family.json --rule paper --budget 12GiB --rows 9 --length 7 --seed 3"
    data = ["--data", "all.txt", "--data", "code=c.jsonl", "--data", "a=b.txt"]
    assert run(monkeypatch, *MODELS, *flags.split(), *data) == 0
    ((directories, out, config),) = calls
    assert directories == {"chat": Path("/m/chat"), "code": Path("/m/co=de")}
    assert out == Path("o/family.json")
    texts = {ALL: [Path("all.txt"), Path("a=b.txt")], "code": [Path("c.jsonl")]}
    assert config == ConsolidateConfig(
        rule="paper", budget="12GiB", data=texts, rows=9, length=7, seed=3
    )
    told = capsys.readouterr().out
    assert "7 slots for 8 experts, 25.0 % shared" in told
    assert "code: relative squared error 0.500000" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "chat", "--share", "50"], "--model is 'chat'; write --model NAME=DIR"),
        (["--model", "=dir", "--share", "50"], "write --model NAME=DIR"),
        ([*MODELS, "--model", "chat=x", "--share", "50"], "--model chat is given twice"),
        (MODELS, "one of --share PERCENT, --budget"),
        ([*MODELS, "--share", "50"], "functional rule measures"),
        ([*MODELS, "--share", "50", "--rule", "best"], "rule is 'best'"),
        ([*MODELS, "--share", "50", "--rule", "paper"], "/m/chat"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, arguments, words) -> None:
    assert run(monkeypatch, "--out", "family.json", *arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.strip().splitlines()) == 1
