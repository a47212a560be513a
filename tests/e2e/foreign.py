"""Programs of others that tests talk to a server with, each in a folder of its own.

They are fetched once, into the user's cache. Where that cannot be done, a test is skipped and says
why.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jmoe" / "test-envs"
_TIMEOUT_S = 300


def python_packages(name: str, *requirements: str) -> Path:
    """A folder with Python packages, for `run_python`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return _made(name, [*pip, *requirements, "--target"])


def npm_package(name: str, requirement: str) -> Path:
    """A folder in which npm installed a package; scripts of packages do not run."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here to fetch it with")
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", requirement]
    return _made(name, [*npm, "--prefix"])


def run_python(packages: Path, script: Path, *args: str, stdin: str = "") -> str:
    """What a script prints that sees these packages and the standard library alone."""
    done = subprocess.run(
        [sys.executable, "-S", str(script), *args],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _made(name: str, command: list[str]) -> Path:
    """The folder `name` of the cache, made by `command` with a folder after it, or found there."""
    final = CACHE / name
    if final.is_dir():
        return final
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / name  # whole, or not there: tests may run beside each other
        made.mkdir()
        try:
            done = subprocess.run(
                [*command, str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{name} could not be fetched within {_TIMEOUT_S} s")
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"{name} could not be fetched: {last}")
        if not final.is_dir():
            made.rename(final)
    return final
