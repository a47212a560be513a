"""Imports point down the rooms of docs/architecture.md; the contracts are in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

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
    assert "2 kept, 0 broken" in done.stdout


def test_imports_that_point_up_are_found(tmp_path):
    """The contracts bite: each line of this toy project breaks one."""
    modules = {
        "pallas_kernels": {"op": "import jmoe.model"},
        "jmoe": {"model": "import time", "api": "import serving.engine"},
        "serving": {"engine": "import training.train", "cli.main": "import training.train"},
        "training": {"train": "import serving.engine"},
    }
    for package, files in modules.items():
        (tmp_path / package).mkdir()
        for name, line in {"__init__": "", **files}.items():
            (tmp_path / package / f"{name}.py").write_text(line)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = lint(tmp_path)
    assert done.returncode != 0
    for broken in (
        "pallas_kernels.op -> jmoe.model",
        "jmoe.api -> serving.engine",
        "jmoe.model -> time",
        "serving.engine -> training.train",
        "training.train -> serving.engine",
    ):
        assert broken in done.stdout, done.stdout + done.stderr
    assert "serving.cli.main -> training.train" not in done.stdout
