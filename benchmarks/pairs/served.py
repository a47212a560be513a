"""Real servers on a device that only passes time, under a full batch of streams from this process.

The device is idle for as long as the host keeps it waiting. Where this process's share nears a
core, the client may be what it waits for.
"""

import asyncio
import json
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
from serving.bench.loadgen import saturate
from serving.bench.workload import Arrival
from serving.client import Client
from serving.client.connection import Connection
from serving.frontend import keys

OUT_TOKENS = 128
_END = b"0\r\n\r\n"
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
    http_address: str
    model: str

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
    found = re.search(r"jmoe http on https?://(\S+)", log.read_text())
    assert found is not None
    return _Server(client, pid, found[1], (await client.server_info()).model)


async def _measure(server: _Server, load: Load, ramp_s: float, window_s: float) -> Figures:
    stream = _over_http if load.over_http else _over_grpc
    streams = asyncio.create_task(stream(server, ramp_s + window_s + 0.5))
    await asyncio.sleep(ramp_s)
    before = await server.used()
    await asyncio.sleep(window_s)
    after = await server.used()
    tokens = sum(before[0] <= at < after[0] for at in await streams)
    took_s, server_s, client_s, steps = (b - a for a, b in zip(before, after, strict=True))
    return {
        "tokens_per_s": tokens / took_s,
        "device_idle_share": 1 - steps * load.step_ms / 1e3 / took_s,
        "server_cpu_share": server_s / took_s,
        "client_cpu_share": client_s / took_s,
        "server_us_per_token": server_s / tokens * 1e6,
    }


async def _over_grpc(server: _Server, duration_s: float) -> list[float]:
    """Returns the times at which tokens came. Raises RuntimeError where a request failed; so does
    _over_http.
    """
    arrivals, start = repeat(Arrival(PROMPT, OUT_TOKENS, ignore_eos=True)), time.monotonic()
    run = await saturate(server.client, arrivals, concurrency=BATCH, duration_s=duration_s)
    failed = [record.error for record in run.records if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    return [start + at for record in run.records for at in record.token_s]


async def _over_http(server: _Server, duration_s: float) -> list[float]:
    asked = {"model": server.model, "prompt": PROMPT, "max_tokens": OUT_TOKENS, "temperature": 0}
    body = json.dumps(asked | {"ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.http_address}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = server.http_address.rpartition(":")
    times_s, ends_at = [], time.monotonic() + duration_s

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.monotonic() < ends_at:
            writer.write(head.encode() + body)
            data = await reader.read(1 << 16)  # no parser: the client shall cost little
            if not data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"a stream failed: {data[:300]!r}")
            while data:
                times_s.extend([time.monotonic()] * data.count(b'"text":'))
                data = b"" if data.endswith(_END) else await reader.read(1 << 16)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(BATCH):
            group.create_task(stream())
    return times_s
