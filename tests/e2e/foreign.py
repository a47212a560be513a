"""Third-party programs with which tests talk to a server, each in a folder of its own.

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
    """Returns a folder with Python packages, for `run_python`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return _made(name, [*pip, *requirements, "--target"])


def npm_package(name: str, requirement: str) -> Path:
    """Returns a folder in which npm installed a package; scripts of packages do not run."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here to fetch it with")
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", requirement]
    return _made(name, [*npm, "--prefix"])


def run_python(packages: Path, script: Path, *args: str, stdin: str = "") -> str:
    """Runs a script that sees only these packages and the standard library; returns what it
    prints.
    """
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
    """Returns the cache's folder `name`; if missing, `command` with a folder appended makes it."""
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
