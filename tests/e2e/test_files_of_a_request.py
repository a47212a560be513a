"""How many of the project's files a request goes through, from its bytes to its last token."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("jmoe", "pallas_kernels", "serving", "training")
MOST = 70
"""62 now, and what runs beside it may add some; it was over 80 before modules were merged."""
COUNTED = """
import json, signal, sys
tool, events, seen = 3, sys.monitoring.events, set()
sys.monitoring.use_tool_id(tool, "files")
sys.monitoring.register_callback(tool, events.LINE, lambda code, line: seen.add(code.co_filename))

def begin(*_):
    sys.monitoring.set_events(tool, events.LINE)
    print("counting", flush=True)

def end(*_):
    sys.monitoring.set_events(tool, 0)
    print("counted", json.dumps(sorted(seen)), flush=True)

signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
from serving.cli.main import main
main()
"""


def line_of(process, start):
    """Returns what follows the first line that the server prints from here on with this start."""
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"the server ended with {process.wait()}")


@pytest.mark.deep
def test_a_prompt_over_http_goes_through_few_files():
    command = [sys.executable, "-c", COUNTED, "serve", "--port", "0"]
    command += ["--set", "engine.decode_buckets=64", "--set", "engine.prefill_buckets=512"]
    # What is compiled goes through no more files, however well it is.
    hurry = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **hurry}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        url = line_of(process, "jmoe http on ")
        line_of(process, "jmoe ready on ")
        asked = {"model": "bundled", "prompt": "The capital of", "max_tokens": 8, "temperature": 0}

        def ask():
            return httpx2.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()

        first = ask()  # what is imported or compiled at first use does not count
        process.send_signal(signal.SIGUSR1)
        line_of(process, "counting")
        assert ask().json()["choices"] == first.json()["choices"]
        process.send_signal(signal.SIGUSR2)
        files = [Path(name) for name in json.loads(line_of(process, "counted"))]
        own = [file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT)]
        found = sorted(str(file) for file in own if file.parts[0] in PACKAGES)
    finally:
        process.kill()
        process.wait()
    assert {"serving/engine.py", "serving/frontend/openai/call.py"} <= set(found)
    assert len(found) <= MOST, found
