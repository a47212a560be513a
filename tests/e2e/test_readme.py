"""README, block by block: Python as it stands, commands with settings that make them short."""

import ast
import asyncio
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jmoe.api import resolve
from serving.bench.scrape import free_port
from tests.variants import variant

from .conftest import FEW_PROGRAMS, serving

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENV = {**os.environ, "JAX_PLATFORMS": "cpu"}

# What each command is run with besides. A line of README that is not here fails the test.
SHORT = {
    "make demo": None,  # only looked up: it takes minutes
    "make test": None,
    "jmoe serve": FEW_PROGRAMS,
    "jmoe serve DIR": FEW_PROGRAMS,
    "jmoe serve --model DIR --mesh": FEW_PROGRAMS,
    "jmoe serve --model DIR --mode": (*FEW_PROGRAMS, "engine.salc.controller=algorithm2"),
    "jmoe serve --model base=": FEW_PROGRAMS,
    "jmoe serve base=": FEW_PROGRAMS,
    "python -m training.family": (),
    "jmoe serve --config demo": FEW_PROGRAMS,
    "jmoe info": (),
    "jmoe bench serve": ("--num-prompts", "3"),
    "jmoe bench priority": None,  # it takes minutes
    "jmoe distill": (
        *("--rows", "2048", "--steps", "2", "--refine-steps", "2", "--refine-rows", "4"),
        *("--batch", "512", "--ways", "8", "--sampled", "9"),
    ),
    "jmoe evaluate": ("--num", "8", "--only", "8:40", "--error-steps", "1"),
    "jmoe consolidate": ("--rows", "4"),
}


# The others compile as a user's does.
IN_A_HURRY = ("jmoe serve --model DIR --mesh", "jmoe serve --model DIR --mode")


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.S | re.M)
    return [text for of, text in found if of == language]


def commands():
    lines = [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line]


def kind(command):
    return max((name for name in SHORT if command.startswith(name)), key=len, default=None)


def test_every_command_is_known():
    assert len(commands()) >= 9
    for command in commands():
        assert kind(command) is not None, command


async def test_python_blocks_run_one_after_another(capsys):
    names = {"__name__": "readme"}
    for block in blocks("python"):
        code = compile(block, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.isawaitable(done):
            await done
    printed = capsys.readouterr().out
    for expected in re.findall(r'# (\[\'[^\']*\'\]|" [^"]*")', README):  # beside what prints it
        assert expected.strip("[]\"'") in printed


def test_make_knows_its_targets():
    for command in commands():
        if command.startswith("make"):
            subprocess.run([*command.split(), "-n"], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns what the names in README stand for: a model's directory, texts, conversations."""
    folder = tmp_path_factory.mktemp("readme")
    told = [{"from": "human", "value": "what is 1+2"}, {"from": "gpt", "value": "1+2=3"}]
    conversations = [{"id": str(i), "conversations": told} for i in range(8)]
    (folder / "sharegpt.json").write_text(json.dumps(conversations), encoding="utf-8")
    bundled = resolve("bundled")
    legal = variant(bundled, folder / "legal", seed=1, scale=0.01)
    return folder, {
        "DIR": str(bundled),
        "base=DIR": f"base={bundled}",
        "legal=DIR": f"legal={legal}",
        "FILE": str(bundled / "tasks.jsonl"),
        "family.json": str(folder / "out" / "family.json"),
    }


def run(command, folder, names, **replaced):
    """Runs a command of README; `replaced` are values of its flags."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if words[i - 1] == "--out":
            words[i] = str(folder / "out" / (word if Path(word).suffix else words[1]))
        else:
            words[i] = names.get(word, word)
        flag = words[i - 1].lstrip("-")
        if flag in replaced:
            words[i] = replaced[flag]
    words += SHORT[kind(command)]
    program = {"jmoe": ["-m", "serving.cli"], "python": []}[words[0]]
    # These compile for longer than they compute.
    hurry = str(int(kind(command) in ("jmoe distill", "jmoe evaluate")))
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=folder,
        env={**ENV, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": hurry},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def serve_settings(command, names):
    """Returns the settings of a `jmoe serve` of README, as `tests/e2e/conftest.py` takes them."""
    words = [names.get(word, word) for word in shlex.split(command)[2:]]
    fixed = "--no-salc" in words
    words = [word for word in words if word != "--no-salc"]
    given = {flag: [] for flag in words if flag.startswith("--")}
    for flag, word in itertools.pairwise(words):
        if flag in given:
            given[flag].append(word)
    thresholds = {"--prefill-threshold", "--decode-threshold"}
    own = {"--mesh", "--family", "--mode", "--attention", "--experts", *thresholds}
    assert set(given) <= {"--set", "--config", "--model", "--port", *own}
    settings = given.get("--set", [])
    for flag in thresholds & set(given):
        key = flag.removeprefix("--").replace("-", "_")
        settings += [f"engine.brownout.{key}_percent={given[flag][0]}"]
    settings += ["engine.brownout.salc=false"] if fixed else []
    positional = itertools.takewhile(lambda word: not word.startswith("--"), words)
    models = given.get("--model", []) or list(positional)
    if any("=" in model for model in models):
        settings += [f"engine.models={','.join(models)}"]
    elif models:
        settings += [f"engine.model={models[0]}"]
    for flag in ("mesh", "family", "mode", "asynchronous.attention", "asynchronous.experts"):
        words_of = given.get(f"--{flag.rpartition('.')[2]}", ())
        settings += [f"engine.{flag}={word}" for word in words_of]
    return settings


@pytest.mark.sized(exhaustive=("jmoe serve --model DIR --mesh", "jmoe serve --model DIR --mode"))
@pytest.mark.parametrize(
    "name",
    [
        "jmoe serve",
        "jmoe serve DIR",
        "jmoe serve --model DIR --mesh",
        "jmoe serve --model DIR --mode",
        "jmoe serve --config demo",
    ],
)
async def test_a_server_and_what_asks_it(files, name):
    folder, names = files
    (command,) = [command for command in commands() if kind(command) == name]
    port = free_port()
    settings = (*SHORT[name], f"http_port={port}", *serve_settings(command, names))
    with serving(*settings, hurry=name in IN_A_HURRY) as (_, address):
        options = {"address": address, "port": address.rpartition(":")[2]}
        for asking in commands():
            if kind(asking) in ("jmoe info", "jmoe bench serve"):
                shown = await asyncio.to_thread(run, asking, folder, names, **options)
                assert "bundled" in shown or "Benchmark Result" in shown
        if name == "jmoe serve":
            await asyncio.to_thread(ask_by_curl, port, "bundled")


def ask_by_curl(port, model):
    """Runs the README's curl of a model, against the server's own port, and finds the answer beside
    it; returns the whole reply.
    """
    asking = [block for block in blocks("sh") if block.startswith("curl")]
    (at,) = [at for at, block in enumerate(asking) if f'"model": "{model}"' in block]
    block = asking[at].replace(":8000/", f":{port}/")
    done = subprocess.run(block, shell=True, capture_output=True, text=True, timeout=60)
    answers = re.findall(r"answer's `text` is `(\".*?\")`", README)
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["text"] == json.loads(answers[at]), done
    return reply


def test_a_family_is_consolidated_and_served(files):
    folder, names = files
    (consolidate,) = [command for command in commands() if kind(command) == "jmoe consolidate"]
    assert "experts" in run(consolidate, folder, names)
    (serve,) = [c for c in commands() if kind(c) == "jmoe serve --model base="]
    with serving(*FEW_PROGRAMS, *serve_settings(serve, names)) as (_, address):
        shown = run("jmoe info --address A", folder, names, address=address)
        assert "legal" in shown


@pytest.mark.exhaustive
def test_the_restored_family_is_served_under_brownout(files):
    folder, names = files
    (restore,) = [command for command in commands() if kind(command) == "python -m training.family"]
    assert "cipher" in run(restore, folder, names)
    (serve,) = [command for command in commands() if kind(command) == "jmoe serve base="]
    names = {f"{n}=family/{n}": f"{n}={folder / 'family' / n}" for n in ("base", "cipher")}
    port = free_port()
    with serving(*FEW_PROGRAMS, f"http_port={port}", *serve_settings(serve, names)):
        reply = ask_by_curl(port, "cipher")
    assert reply["usage"]["degraded_share"] > 0.2


@pytest.mark.sized(exhaustive=("jmoe distill",))
@pytest.mark.parametrize("name", ["jmoe distill", "jmoe evaluate"])
def test_commands_of_a_training_engineer(files, name):
    folder, names = files
    found = [command for command in commands() if kind(command) == name]
    assert found
    for command in found:
        assert run(command, folder, names)
