"""Runs a file of tests in a process that has several CPU devices; other tests have one."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_devices(path: Path, count: int = 8, *arguments: str) -> None:
    """Runs the tests in `path`, a file that pytest does not collect by itself; they must pass."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(count),
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, str(path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
