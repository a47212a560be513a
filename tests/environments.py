"""Environments of their own for clients that the project does not depend on."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jmoe-tests"
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""What a process of such an environment gets."""
INSTALL_S = 300.0


def interpreter_with(*packages: str) -> Path:
    """Returns the interpreter of an environment with these packages, which is made once; skips the
    test where they cannot be installed.
    """
    folder = CACHE / "-".join(re.sub(r"\W", "-", one) for one in packages)
    if not (folder / "made").exists():
        make(folder, *packages)
        (folder / "made").touch()
    return folder / "bin" / "python"


def modules_with(*packages: str) -> Path:
    """Returns a folder in which Node finds these packages of npm, which is made once; skips the
    test where there is no Node, or they cannot be installed.
    """
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} is not installed here")
    folder = CACHE / "-".join(re.sub(r"\W", "-", one) for one in ("node", *packages))
    if not (folder / "made").exists():
        _run("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages)
        (folder / "made").touch()
    return folder


def make(folder: Path, *wanted: str) -> Path:
    """Makes an environment and returns its interpreter; `wanted` is for `pip install`. Skips the
    test where that cannot be installed.
    """
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--clear", folder)
    _run(python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted)
    return python


def _run(*command: str | Path) -> None:
    said = " ".join(map(str, command))
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=OWN)
    except subprocess.TimeoutExpired:
        pytest.skip(f"not within {INSTALL_S:g} s: {said}")
    if made.returncode:
        pytest.skip(f"fails here: {said}: {made.stderr[-300:]}")
