"""A wheel, installed where nothing else of the project is, runs the notebooks."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.environments import OWN, make

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra: jmoe[dev]")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXTRAS = "serve", "train", "plot"
PACKAGES = "jmoe", "pallas_kernels", "serving", "training", "configs"
RUN = """
import sys, nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
about = {"metadata": {"path": "."}}
nbclient.NotebookClient(notebook, timeout=240, resources=about).execute()
nbformat.write(notebook, sys.argv[2])
"""

pytestmark = pytest.mark.exhaustive


def run(*command, cwd, env):
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns an interpreter that has the wheel, what its metadata asks for, and what executes
    notebooks; a home without a cache, and a folder without the project's files.
    """
    where = tmp_path_factory.mktemp("wheel")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    pinned = "-c", str(ROOT / "constraints.txt")
    python = make(where / "environment", *pinned, *wanted, "nbclient", "ipykernel")
    source, here = where / "source", where / "here"
    own = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=own)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    here.mkdir()
    build = "wheel", "--quiet", "--no-deps", "--wheel-dir", where, source
    run(sys.executable, "-m", "pip", *build, cwd=where, env=OWN)
    (wheel,) = where.glob("*.whl")
    shutil.rmtree(source)
    # Without an index: what the wheel asks for is there, or the notebooks' extras lack it.
    offline = "install", "--quiet", "--no-index", f"{wheel}[{','.join(EXTRAS)}]"
    run(python, "-m", "pip", *offline, cwd=here, env=OWN)
    env = {"PATH": os.environ["PATH"], "HOME": str(where), "JAX_PLATFORMS": "cpu"}
    return python, here, env


def test_what_runs_is_the_wheel(installed):
    python, here, env = installed
    names = ", ".join(PACKAGES)
    told = f"import {names}; print(*(one.__path__[0] for one in ({names})), sep='\\n')"
    found = run(python, "-c", told, cwd=here, env=env).splitlines()
    assert all(Path(each).is_relative_to(python.parents[1]) for each in found)
    run(python.with_name("jmoe"), "--help", cwd=here, env=env)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_the_wheel(installed, path, tmp_path):
    python, here, env = installed
    run(python, "-c", RUN, path, tmp_path / "ran.ipynb", cwd=here, env=env)
    stored, ran = (nbformat.read(one, as_version=4).cells for one in (path, tmp_path / "ran.ipynb"))
    assert [_pictures(cell) for cell in ran] == [_pictures(cell) for cell in stored]


def _pictures(cell):
    return sum("image/png" in out.get("data", {}) for out in cell.get("outputs", ()))
