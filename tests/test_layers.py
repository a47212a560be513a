"""Imports point down the layers of docs/architecture.md; the contracts are in pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = (
    "import sys; from importlinter.cli import lint_imports; "
    "sys.exit(lint_imports(config_filename='pyproject.toml', cache_dir=None))"
)


def lint(root):
    # A process of its own, so that the packages under `root` are the ones that are looked at.
    return subprocess.run(
        [sys.executable, "-c", RUN], cwd=root, capture_output=True, text=True, timeout=120
    )


def test_imports_point_down():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kept, 0 broken" in done.stdout


def rooms():
    """Returns the modules that the contracts of pyproject.toml name."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for contract in contracts["contracts"]:
        for container in contract.get("containers", []):
            for layer in contract["layers"]:
                yield from (f"{container}.{name.strip()}" for name in re.split("[:|]", layer))
        yield from contract.get("source_modules", [])
        named = contract.get("forbidden_modules", [])
        yield from (name for name in named if name.startswith("serving."))


def test_imports_that_point_up_are_found(tmp_path):
    """The contracts work: each line of this toy project breaks one."""
    modules = dict.fromkeys(rooms(), "") | {
        "pallas_kernels.op": "import jmoe.model",
        "jmoe.model": "import time",
        "jmoe.api": "import serving.engine",
        "serving.engine": "import training.train",
        "serving.cli.main": "import training.train",
        "serving.scheduling.queue": "import serving.engine; import jax; import serving.plan",
        "serving.execution.run": "import asyncio; import serving.scheduling.queue",
        "serving.plan": "import serving.frontend",
        "training.train": "import serving.engine",
    }
    for name, line in modules.items():
        file = tmp_path / (name.replace(".", "/") + ".py")
        inside = file.with_suffix("") / "__init__.py"
        if any(other.startswith(f"{name}.") for other in modules):
            file = inside
        for folder in file.relative_to(tmp_path).parents:
            (tmp_path / folder).mkdir(exist_ok=True, parents=True)
            if str(folder) != ".":
                (tmp_path / folder / "__init__.py").touch()
        file.write_text(line)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = lint(tmp_path)
    assert done.returncode != 0
    for broken in (
        "pallas_kernels.op -> jmoe.model",
        "jmoe.api -> serving.engine",
        "jmoe.model -> time",
        "serving.engine -> training.train",
        "serving.scheduling.queue -> serving.engine",
        "serving.scheduling.queue -> jax",
        "serving.execution.run -> asyncio",
        "serving.execution.run -> serving.scheduling.queue",
        "serving.plan -> serving.frontend",
        "training.train -> serving.engine",
    ):
        assert broken in done.stdout, done.stdout + done.stderr
    assert "serving.cli.main -> training.train" not in done.stdout


IMPORTS_A_TEST = re.compile(
    r"^ *(?:from|import) +[\w.]*\btest_\w+|^ *from +(?:tests|\.)[\w.]* +import .*\btest_\w+",
    re.MULTILINE,
)


def test_test_modules_import_no_other_test_module():
    """What tests share is in modules that are not collected."""
    files = list((ROOT / "tests").rglob("*.py"))
    assert len(files) > 200
    found = [
        f"{path.relative_to(ROOT)}: {line[0].strip()}"
        for path in files
        for line in IMPORTS_A_TEST.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_nothing_outside_tests_imports_them():
    files = [
        path
        for folder in ("benchmarks", "jmoe", "pallas_kernels", "serving", "training")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 200
    imports = re.compile(r"^ *(?:from|import) +tests\b", re.MULTILINE)
    assert [path for path in files if imports.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        "from test_other import CASES",
        "    from tests.jmoe.test_other import CASES",
        "import test_other",
        "from .test_other import CASES",
        "from . import test_other",
        "from tests.jmoe import GOLDEN, test_other",
    ],
)
def test_an_import_of_a_test_module_is_found(line):
    assert IMPORTS_A_TEST.search(f"import re\n{line}\n")
    assert not IMPORTS_A_TEST.search("from tests.traces import num_traces\nimport testing\n")
