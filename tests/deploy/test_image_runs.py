"""What the image starts, started here: it becomes healthy, answers, and drains when stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from dockerfile import command, health
from typer.testing import CliRunner

from serving.bench.scrape import free_port
from serving.cli.main import app
from serving.client import Client
from serving.client.connection import Connection
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

pytestmark = pytest.mark.deep

SMALL = {
    "engine.max_model_len": 64,
    "engine.max_num_seqs": 4,
    "engine.max_prefill_tokens": 32,
    "engine.max_prefill_seqs": 2,
    "engine.decode_buckets": 4,
    "engine.prefill_buckets": 32,
    "engine.threshold_buckets_percent": 100,
}


def test_the_images_command_starts_answers_and_drains(tmp_path):
    _, words = command()
    ports = {name: free_port() for name in ("--port", "--http-port", "--metrics-port")}
    for name, value in {**ports, "--model": "bundled", "--host": "127.0.0.1"}.items():
        words[words.index(name) + 1] = str(value)
    at = words.index("engine.compilation_cache=/cache/xla")
    words[at] = f"engine.compilation_cache={tmp_path}/xla"
    key = (
        CliRunner()
        .invoke(app, ["keys", "new", "ops", "--admin", "--file", f"{tmp_path}/keys"])
        .stdout
    )
    words[words.index("--keys-file") + 1] = f"{tmp_path}/keys"
    words += [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    log = (tmp_path / "log").open("w+")
    child = subprocess.Popen(
        [sys.executable, "-m", "serving.cli", *words],
        stderr=log,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
    )
    try:
        first = child.stdout.readline()
        assert first.startswith("jmoe admin on 127.0.0.1:"), log.read()
        assert health(ports["--metrics-port"]) != 0  # it listens, and is not ready
        while not (line := child.stdout.readline()).startswith("jmoe ready on"):
            assert line, Path(log.name).read_text()
        assert health(ports["--metrics-port"]) == 0
        asyncio.run(ask(f"127.0.0.1:{ports['--port']}", key.strip()))
        metrics = Request(f"http://127.0.0.1:{ports['--metrics-port']}/metrics")
        metrics.add_header("Authorization", f"Bearer {key.strip()}")
        with urlopen(metrics) as answer:
            assert b"jmoe_generation_tokens_total 4.0" in answer.read()
        child.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert child.wait(timeout=120) == 0
        assert time.monotonic() - began < 45  # as the service and the pod allow
    finally:
        child.kill()
        child.wait()
        log.close()


async def ask(address, key):
    async with Client(address, connection=Connection(key)) as client:
        sampling = pb.SamplingParams(max_new_tokens=4, ignore_eos=True)
        answers = [answer async for answer in client.generate("What is 2 + 3?", sampling)]
    assert sum(len(answer.token_ids) for answer in answers) == 4
