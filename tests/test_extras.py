"""Without an extra, what needs none works, and what needs it names the extra."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def extras(request):
    """Returns the modules that each extra brings and the base does not."""
    project = tomllib.loads((request.config.rootpath / "pyproject.toml").read_text("utf-8"))
    wanted = project["project"]["optional-dependencies"]

    def modules(requirements):
        return {module for text in requirements for module in _modules(_name(text))}

    base = modules(project["project"]["dependencies"])
    return {extra: modules(wanted[extra]) - base for extra in ("serve", "train", "plot", "bench")}


def _modules(name):
    """Returns the top-level modules of a package: `packages_distributions` reads every package's
    list of files, which takes seconds.
    """
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return set()
    tops = {file.parts[0] for file in files if file.suffix in (".py", ".so")}
    return {top.partition(".")[0] for top in tops if not top.endswith((".dist-info", "__"))}


def _name(requirement):
    name = requirement.split(";")[0]
    for mark in "<>=[ ":
        name = name.split(mark)[0]
    return name.strip().lower().replace("_", "-")


def run(hidden, code):
    """Returns the last line that a Python without these modules prints."""
    words = [sys.executable, "-c", HIDE.format(hidden=hidden) + code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.deep
def test_a_notebook_needs_no_extra(extras):
    hidden = set().union(*extras.values())
    assert {"grpc", "typer", "flax", "optax", "orbax", "matplotlib", "yaml"} <= hidden
    status, said = run(
        hidden,
        "import jmoe\n"
        "model = jmoe.load('tests/golden/qwen2_moe', 'float32')\n"
        "print(len(jmoe.generate(model, [[1, 2, 3]], max_new_tokens=1).tokens[0]))\n",
    )
    assert (status, said) == (0, "1")


def test_a_server_imports_nothing_heavy_for_what_few_use():
    """Each takes a third of a second at every start, and tens of megabytes."""
    code = "import serving.engine, serving.frontend.server, serving.cli.main\n"
    code += "print(sorted({'matplotlib', 'numba', 'orbax', 'pandas', 'scipy'} & set(sys.modules)))"
    assert run((), code) == (0, "[]")


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("serve", "import serving.engine"),
        ("serve", "from serving.cli.main import main"),
        ("serve", "from serving.client import Client"),
        ("train", "import training.distill"),
        ("train", "import jmoe; jmoe.save(jmoe.load('tests/golden/qwen2_moe'), '/nonexistent/x')"),
        (
            "bench",
            "from serving.bench.run import BenchConfig, run_bench\n"
            "run_bench(BenchConfig('openai'))",
        ),
        (
            "plot",
            "from pathlib import Path; from training.evaluation.picture import draw\n"
            "draw([], Path('x.png'), '')",
        ),
    ],
)
def test_what_needs_an_extra_names_it(extras, extra, code):
    status, said = run(extras[extra], code)
    assert status != 0
    assert f"pip install 'jmoe[{extra}]'" in said
