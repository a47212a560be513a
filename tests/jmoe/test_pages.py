"""The pages for researchers: the notebook's blocks run in order, and what pages name exists."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.md"
ARCHITECTURE = ROOT / "docs" / "new-architecture.md"
RUN = """
import ast, asyncio, inspect, re, sys
blocks = re.findall(r"```python\\n(.*?)```", open(sys.argv[1], encoding="utf-8").read(), re.S)
async def main():
    names = {"__name__": "notebook"}
    for block in blocks:
        code = compile(block, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.isawaitable(done):
            await done
    print(len(blocks), "blocks ran")
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Returns what the notebook prints, in a process and a home directory of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path_factory.mktemp("home"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_notebook_runs_as_it_stands(output):
    assert output.endswith(f"{NOTEBOOK.read_text().count('```python')} blocks ran\n")


@pytest.mark.exhaustive
def test_the_notebook_shows_answers_that_are_right(output):
    texts = "[' 47+38=85;12+90=102;55+66=121', ' Bedrin']"
    assert output.startswith(texts)
    assert f"# {texts}" in NOTEBOOK.read_text()
    shares = [int(share) for share in re.findall(r"(\d+)% degraded instead of (\d+)%", output)[0]]
    assert 0 < shares[1] != shares[0]


def resolves(name):
    """Returns whether a dotted name is a module of this project, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


PACKAGES = "jmoe|pallas_kernels|serving|training"


@pytest.mark.parametrize("page", [NOTEBOOK, ARCHITECTURE], ids=lambda path: path.name)
def test_names_exist(page):
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md|jsonl|json))`", text))
    names = set(re.findall(rf"`((?:{PACKAGES})(?:\.\w+)+)(?:\(.*?\))?`", text)) - files
    assert files
    assert names
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_a_name_that_does_not_exist_is_found():
    assert resolves("jmoe.config.from_hf")
    assert not resolves("jmoe.config.from_gguf")
    assert not resolves("jmoe.gguf")
