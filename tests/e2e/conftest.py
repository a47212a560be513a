"""The real server as a process of its own, talked to over a real socket."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

FEW_PROGRAMS = (
    "engine.decode_buckets=32",
    "engine.prefill_buckets=128",
    "engine.max_num_seqs=32",
    "engine.max_queue_len=64",
    "engine.audit.share=0",  # for those who count pages, and compare what company changes
)


@contextmanager
def serving(
    *settings, preset="demo", log_path=None, start_timeout_s=240, cpu_devices=1, hurry=False
):
    """Yields (process, address) of `jmoe serve --config PRESET` once it is ready; the log stays in
    the file `log_path`. It compiles as a user's does, unless in a `hurry`, where others see to it
    that what is compiled is right.
    """
    command = [sys.executable, "-m", "serving.cli", "serve", "--config", preset, "--port", "0"]
    command += [part for value in settings for part in ("--set", value)]
    with open(log_path, "w+") if log_path else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parents[2],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": os.environ["XLA_FLAGS"] if hurry else "",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(hurry)),
                "JAX_NUM_CPU_DEVICES": str(cpu_devices),
            },
        )
        try:
            yield process, _address(process, log, start_timeout_s)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _address(process, log, timeout_s):
    deadline = time.monotonic() + timeout_s
    for line in process.stdout:
        if found := re.search(r"jmoe ready on (\S+)", line):
            return found.group(1)
        if time.monotonic() > deadline:
            break
    log.seek(0)
    raise AssertionError(f"the server did not get ready: {log.read()[-2000:]}")


@pytest.fixture(scope="module")
def server():
    """Yields one server for a module's tests."""
    with serving(*FEW_PROGRAMS) as found:
        yield found
