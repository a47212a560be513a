"""Servers under streams from this process: on a device that only passes time, or others' at URLs.

The device is idle for as long as the host keeps it waiting. Where this process's share nears a
core, the client may be what it waits for.
"""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.pairs.harness import Figures, Play
from benchmarks.pairs.passing_time import BATCH, PROMPT
from serving.bench.launch import running_server
from serving.bench.loadgen import play as play_load
from serving.bench.loadgen import saturate
from serving.bench.openai import OpenAITarget
from serving.bench.results import Run, summarize
from serving.bench.workload import BUNDLED_TASKS, Arrival, Lengths, load_tasks, synthetic
from serving.client import Client
from serving.client.connection import Connection
from serving.frontend import keys

OUT_TOKENS = 128
PROMPT_LEN = 128
STREAMS = (1, 8, 32, 64)
PEER_FIGURES = {
    "tokens/s": "output_throughput",
    "TTFT P99, ms": "p99_ttft_ms",
    "ITL P99, ms": "p99_itl_ms",
    "TPOT mean, ms": "mean_tpot_ms",
    "TPOT P99, ms": "p99_tpot_ms",
}
"""Of each number of streams: the field of a run's summary."""
_OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
)


@dataclass(frozen=True)
class Load:
    """How long the server's steps last, and how 64 requests at a time reach it."""

    step_ms: float
    secured: bool = False  # with TLS and keys
    over_http: bool = False


@dataclass
class _Server:
    client: Client
    pid: int
    http: OpenAITarget

    async def used(self) -> tuple[float, float, float, int]:
        """Returns the time, the processor seconds of server and client, and the steps so far."""
        stats = await self.client.stats()
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        server_s = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        steps = stats.steps_prefill + stats.steps_decode
        return time.monotonic(), server_s, time.process_time(), steps


@asynccontextmanager
async def served(settings: Mapping[str, Load], dry: bool) -> AsyncIterator[Play]:
    """Starts a server for each kind of load; a play is some seconds of one load."""
    ramp_s, window_s = (0.5, 1.0) if dry else (1.5, 5.0)
    servers: dict[tuple[float, bool], _Server] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        for load in settings.values():
            if (load.step_ms, load.secured) not in servers:
                servers[load.step_ms, load.secured] = await _start(stack, folder, load)

        async def play(name: str, number: int) -> Figures:
            load = settings[name]
            return await _measure(servers[load.step_ms, load.secured], load, ramp_s, window_s)

        yield play


async def _start(stack: AsyncExitStack, folder: Path, load: Load) -> _Server:
    command = ["-m", "benchmarks.pairs.passing_time", str(load.step_ms)]
    connection = Connection()
    if load.secured:
        cert, private, file = (folder / name for name in ("cert.pem", "key.pem", "keys.yaml"))
        made = [*_OPENSSL.split(), "-keyout", str(private), "-out", str(cert)]
        subprocess.run(made, check=True, capture_output=True)
        key = keys.new_key()
        keys.write(file, {"bench": keys.Key(keys.digest(key).hex(), admin=True)})
        command += [f"--keys-file={file}", f"--tls-cert={cert}", f"--tls-key={private}"]
        connection = Connection(key, str(cert))
    log = folder / f"{load.step_ms}-{load.secured}.log"
    address, pid = await stack.enter_async_context(running_server(command, log, 120))
    client = await stack.enter_async_context(Client(address, connection=connection))
    await client.wait_ready(60)
    found = re.search(r"jmoe http on (https?://[^\s/]+)", log.read_text())
    assert found is not None
    http = await stack.enter_async_context(OpenAITarget(found[1], connection))
    return _Server(client, pid, http)


async def _measure(server: _Server, load: Load, ramp_s: float, window_s: float) -> Figures:
    arrivals, start = repeat(Arrival(PROMPT, OUT_TOKENS, ignore_eos=True)), time.monotonic()
    client = server.http if load.over_http else server.client
    streams = asyncio.create_task(
        saturate(client, arrivals, concurrency=BATCH, duration_s=ramp_s + window_s + 0.5)
    )
    await asyncio.sleep(ramp_s)
    before = await server.used()
    await asyncio.sleep(window_s)
    after = await server.used()
    run = _all_answered(await streams)
    came_s = (start + at for record in run.records for at in record.token_s)
    tokens = sum(before[0] <= at < after[0] for at in came_s)
    took_s, server_s, client_s, steps = (b - a for a, b in zip(before, after, strict=True))
    return {
        "tokens_per_s": tokens / took_s,
        "device_idle_share": 1 - steps * load.step_ms / 1e3 / took_s,
        "server_cpu_share": server_s / took_s,
        "client_cpu_share": client_s / took_s,
        "server_us_per_token": server_s / tokens * 1e6,
    }


def _all_answered(run: Run) -> Run:
    """Returns the run. Raises RuntimeError where a request failed."""
    if failed := [record.error for record in run.records if not record.ok]:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    return run


@asynccontextmanager
async def peers(settings: Mapping[str, str], dry: bool) -> AsyncIterator[Play]:
    """Plays the servers of OpenAI's completions at these URLs; a play is one server at each number
    of streams. Prompts are new in each, so that no server's prefix cache has them.

    Prints how many greedy answers are the first server's. A dry run plays one of our own.
    """
    async with AsyncExitStack() as stack:
        if dry:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            ours = (await _start(stack, folder, Load(2.0))).http.address
            settings = dict.fromkeys(settings, ours)
        servers = {
            name: await stack.enter_async_context(OpenAITarget(url, Connection.of_environment()))
            for name, url in settings.items()
        }
        asked = [Arrival(task.prompt, 24) for task in load_tasks(BUNDLED_TASKS)[: 2 if dry else 20]]
        texts = {}
        for name, target in servers.items():
            run = _all_answered(await play_load(target, asked, time_limit_s=300))
            texts[name] = [record.text for record in run.records]
            same = sum(a == b for a, b in zip(texts[name], next(iter(texts.values())), strict=True))
            print(f"{name}: {same} of {len(asked)} greedy texts are the first server's")

        async def play(name: str, number: int) -> Figures:
            figures = {}
            for streams in STREAMS:
                num = 2 if dry else max(8, 4 * streams)
                seed = number * len(STREAMS) + STREAMS.index(streams)
                prompts = synthetic(
                    Lengths(PROMPT_LEN, OUT_TOKENS, 0), num, seed=seed, vocab_size=256
                )
                run = _all_answered(
                    await play_load(
                        servers[name], prompts, time_limit_s=600, max_concurrency=streams
                    )
                )
                found = summarize(run, percentiles=(99,))
                figures |= {f"{streams}: {name}": found[of] for name, of in PEER_FIGURES.items()}
            return figures

        yield play
