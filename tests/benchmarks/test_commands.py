"""Commands and results that the pages cite: each command runs dry, each result names its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.pairs.table import PAIRS
from serving.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:python -m (?:benchmarks|training)|jmoe bench) ?[\w.]+[^`|&>#\n]*")
COVERED = {
    "benchmarks.hostile": "tests/benchmarks/test_hostile.py",
    "benchmarks.gpu": "tests/benchmarks/test_gpu_benchmark_dry.py",
    "benchmarks.kernels.roofline": "tests/benchmarks/test_roofline.py",
    "jmoe bench balance": "tests/serving/bench/test_balance_bench.py",
    "jmoe bench controllers": "tests/serving/bench/test_simulator.py",
    "jmoe bench family": "tests/serving/bench/test_family_bench.py",
    "jmoe bench priority": "tests/serving/bench/test_priority.py",
    "jmoe bench serve": "tests/serving/bench/test_bench.py",
    "training.family": "tests/training/test_family_quality.py",
    "training.family.degraded": "tests/training/test_family_quality.py",
    "training.family.quality": "tests/training/test_family_quality.py",
    "training.lookahead": "tests/training/test_lookahead.py",
    "training.remake": "tests/training/test_train.py",
}
"""Commands that need no dry run, since another test file plays all of them on something tiny."""


def commands_of(text):
    """Returns the commands in a page's code spans and blocks, with continued lines joined."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    spans = re.findall(r"`([^`\n]+)`", text)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [found.strip() for code in (*spans, *blocks) for found in COMMAND.findall(code)]


def program_of(command):
    """Returns the module of a command, or `jmoe bench NAME`."""
    words = command.split()
    return words[2] if words[0] == "python" else " ".join(words[:3])


COMMANDS = sorted({one for page in PAGES for one in commands_of(page.read_text(encoding="utf-8"))})
DRY = [
    one
    for one, following in pairwise([*COMMANDS, ""])
    if program_of(one) not in COVERED and not following.startswith(f"{one} ")
]


def test_commands_are_read_from_spans_and_blocks():
    page = """Made by `python -m benchmarks.pairs secured --out a.json`, not by `jmoe serve`.
```sh
jmoe bench serve --port 1 \\
  --num-prompts 2 > log   # in a block
JAX_PLATFORMS=cpu python -m training.family --out DIR && ls
```
"""
    assert commands_of(page) == [
        "python -m benchmarks.pairs secured --out a.json",
        "jmoe bench serve --port 1 --num-prompts 2",
        "python -m training.family --out DIR",
    ]
    assert [program_of(one) for one in commands_of(page)] == [
        "benchmarks.pairs",
        "jmoe bench serve",
        "training.family",
    ]


def test_pages_cite_every_pair_and_no_other():
    cited = {one.split()[3] for one in COMMANDS if program_of(one) == "benchmarks.pairs"}
    assert cited == set(PAIRS)


def test_exceptions_are_cited_and_have_a_test():
    assert {program_of(one) for one in COMMANDS} >= set(COVERED)
    for path in COVERED.values():
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("jmoe ")])
def test_flags_of_jmoe_bench_are_its_own(command):
    _, bench, name, *args = shlex.split(command)
    command = get_command(app).commands[bench].commands[name]
    command.make_context(name, args)  # raises what is wrong with them


@pytest.mark.deep
@pytest.mark.sized(
    exhaustive=(
        "python -m benchmarks.mesh aep --json benchmarks/results/aep_simulated.json",
        "python -m benchmarks.pairs burst_levels",
        "python -m benchmarks.pairs burst_loss --rounds 3",
        "python -m benchmarks.pairs burst_replayed",
        "python -m benchmarks.pairs formats --rounds 12",
        "python -m benchmarks.pairs host_path",
        "python -m benchmarks.pairs kv_cache --rounds 12",
        "python -m benchmarks.pairs page_size",
        "python -m benchmarks.pairs preemption",
        "python -m benchmarks.pairs prefix_reuse",
        "python -m benchmarks.pairs secured",
        "python -m benchmarks.pairs step_time",
        "python -m benchmarks.pairs structured",
        "python -m benchmarks.pairs http --rounds 6",
    )
)
@pytest.mark.parametrize("command", DRY)
def test_the_command_runs_dry(command, tmp_path):
    program, *args = shlex.split(command)
    if program == "jmoe":
        args = ["-m", "serving.cli", *args]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is what takes the time
    done = subprocess.run(
        [sys.executable, *args, "--dry-run"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_that_the_page_cites_name_command_and_commit(page):
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"benchmarks/results/[\w./-]+\.json", text)):
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        for origin in (result, *result.get("origins", {}).values()):
            assert origin["command"].startswith(("python -m ", "jmoe ")), name
            assert origin["commit"], name


def test_results_are_cited():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert f"benchmarks/results/{path.name}" in text, path.name
