"""docs/distillation.md, carried out: its commands on a tiny model."""

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serving.cli import main as cli
from serving.client import Client

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[2] / "docs" / "distillation.md"

SMALL = {
    "distill": "--rows 512 --steps 2 --batch 128 --decode-batch 32 --eval-every 1 --length 64 "
    "--refine-steps 2 --refine-rows 2 --dtype float32 --sampled 20",
    "evaluate": "--num 6 --dtype float32 --batch 4 --chunk 64 --error-steps 1",
}
"""Flags added to a command: a test has no time for the defaults."""


def commands():
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def without(line, flags):
    """Returns a command without the flags that `flags` gives."""
    words = shlex.split(line)
    for flag in shlex.split(flags)[::2]:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return [*words, *shlex.split(flags)]


def jmoe(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr()
    assert not caught.value.code, said.err
    return said.out


def serves_what_was_made(line, model, out):
    """Carries out a run's last line, a command: copies what it copies, and starts what it
    starts.
    """
    copy, serve = (shlex.split(part) for part in line.split(" && "))
    (model / "united.safetensors").unlink()
    subprocess.run(copy, check=True)
    assert (model / "united.safetensors").read_bytes() == (out / "united.safetensors").read_bytes()
    assert serve[:2] == ["jmoe", "serve"]
    quick = [f"--set=engine.{each}" for each in ("max_num_seqs=2", "max_model_len=32")]
    words = [*serve[2:], "--port=0", "--http-port=-1", "--max-prefill-tokens=16", *quick]
    server = subprocess.Popen(
        [sys.executable, "-m", "serving.cli", "serve", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        ready = (re.search(r"jmoe ready on (\S+)", line) for line in server.stdout)
        address = next(found[1] for found in ready if found)
        assert asyncio.run(served_ways(address)) == [2, 4, 8]
    finally:
        server.kill()
        server.wait()


async def served_ways(address):
    async with Client(address) as client:
        return list((await client.model_info()).united_ways)


def test_the_page_names_every_step_in_order():
    run = "jmoe distill --model DIR --data FILE --out OUT"
    steps = (
        "jmoe info DIR",
        f"{run} --dry-run\n",
        f"{run}\n",
        "jmoe evaluate ",
        "jmoe serve --model",
    )
    text = PAGE.read_text(encoding="utf-8")
    at = [text.index(step) for step in steps]
    assert at == sorted(at)


def test_its_commands_run_as_they_stand(tiny_dir, tmp_path, monkeypatch, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_dir.path, model)
    names = {"DIR": model, "FILE": model / "tasks.jsonl", "EVAL": model / "tasks.jsonl", "OUT": out}
    printed = []
    for line in commands():
        line = re.sub(r"\b(DIR|FILE|EVAL|OUT)\b", lambda found: str(names[found[1]]), line)
        words = shlex.split(line)
        if words[0] == "cp":
            shutil.copy(words[1], words[2])
            continue
        assert words[0] == "jmoe"
        words = without(line, SMALL.get(words[1], ""))
        printed.append(jmoe(monkeypatch, capsys, words))
        if "--dry-run" in words:
            assert not out.exists()
    assert len(printed) == 4
    info, dry, run, evaluate = printed
    assert "way 2" in info
    for words in ("end to end", "visits an expert", "disk:", "free:"):
        assert words in dry
        assert words in run
    assert "time: about" in dry
    assert max(map(len, dry.splitlines())) <= 80
    for pattern in (
        r"way 4: relative error \d+\.\d{3}, after training \d+\.\d{3}",
        r"way 2: divergence \d\.\d{4}, refined \d\.\d{4}",
        r"report: .*distill.md",
    ):
        assert re.search(pattern, run)
    assert "zero brownout:" in evaluate
    serves_what_was_made(run.splitlines()[-1], model, out)
    again = [words for words in commands() if words.startswith("jmoe distill")][-1]
    again = re.sub(r"\b(DIR|FILE|OUT)\b", lambda found: str(names[found[1]]), again)
    said = jmoe(monkeypatch, capsys, without(again, SMALL["distill"]))
    assert said.startswith("nothing left to do")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model MODEL --out o", "--data is missing"),
        ("--model MODEL --data d", "--out is missing"),
        ("--model MODEL --data d --out o --device-memory-gib 9", "is for --dry-run"),
        ("--model MODEL --data d --out o --devices 2", "is for --dry-run"),
        ("--model MODEL --dry-run --devices -1", "neither can be negative"),
        ("--model MODEL --dry-run --devices 3", "batch is 4096; with 3 devices"),
        ("--model MODEL --dry-run --ways 2;4", "--ways is"),
        ("--model MODEL --dry-run --ways 4 --device-memory-gib 0.00001", "this does not fit"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(tiny_dir, monkeypatch, capsys, arguments, message):
    words = arguments.replace("MODEL", str(tiny_dir.path)).split()
    monkeypatch.setattr(sys, "argv", ["jmoe", "distill", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
