"""What HTTP costs beside gRPC, on the server's processor.

`python -m benchmarks.host_path_http [--out benchmarks/host_path_http.json]`: the server of
`benchmarks.host_path`, whose device only passes time, with 64 streams of 128 tokens at a time, in
turns over gRPC and over HTTP (server-sent events), from this process. A pair is a span of each, the
order changing from pair to pair, so that what else the machine does meets both alike. The figure is
the server's processor time a token; ended with status 1 where HTTP's is more than `--most` times
gRPC's.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.host_path import BATCH, OUT_TOKENS, PROMPT, cpu_s
from serving.bench.launch import running_server
from serving.bench.loadgen import saturate
from serving.bench.workload import Arrival
from serving.client import Client
from serving.version import jmoe_version

SPAN_S, RAMP_S = 6.0, 1.5
_END = b"0\r\n\r\n"
_BODY = {
    "prompt": PROMPT,
    "max_tokens": OUT_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True)
class Span:
    """One span over one protocol."""

    protocol: str
    tokens_per_s: float
    server_us_per_token: float  # of processor time
    client_us_per_token: float


class Stream(asyncio.Protocol):
    """A connection that asks again as soon as it has an answer, and counts events: no parser, so
    that the client costs little.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.tokens = 0
        self.failure = ""
        self.asks = True
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_first = True

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_first and not data.startswith(b"HTTP/1.1 200 "):
            self.failure = repr(data[:300])
            self._transport.close()
            return
        self._is_first = False
        self.tokens += data.count(b'"text":')
        if data.endswith(_END):
            self._is_first = True
            if self.asks:
                self._transport.write(self._request)
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self.ended.done():
            self.ended.set_result(None)


class OverHttp:
    """Load over HTTP."""

    def __init__(self, address: str, model: str) -> None:
        host, _, port = address.rpartition(":")
        body = json.dumps({"model": model, **_BODY}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._where, self._request = (host, int(port)), head.encode() + b"\r\n\r\n" + body
        self._streams: list[Stream] = []

    async def start(self) -> None:
        """Opens the streams."""
        loop = asyncio.get_running_loop()
        for _ in range(BATCH):
            _, stream = await loop.create_connection(lambda: Stream(self._request), *self._where)
            self._streams.append(stream)

    def num_tokens(self) -> int:
        """So far."""
        return sum(stream.tokens for stream in self._streams)

    async def stop(self) -> None:
        """Lets every stream end. Raises RuntimeError where one was no success."""
        for stream in self._streams:
            stream.asks = False
        await asyncio.gather(*(stream.ended for stream in self._streams))
        failures = [stream.failure for stream in self._streams if stream.failure]
        if failures:
            raise RuntimeError(f"{len(failures)} streams failed, the first: {failures[0]}")


class OverGrpc:
    """Load over gRPC, by the load generator."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)

    async def start(self) -> None:
        """Opens the streams."""
        arrivals = repeat(Arrival(PROMPT, OUT_TOKENS, ignore_eos=True))
        span_s = RAMP_S + SPAN_S
        self._load = asyncio.create_task(
            saturate(self._client, arrivals, concurrency=BATCH, duration_s=span_s)
        )
        self._started_at = time.monotonic()

    async def tokens_between(self, start: float, end: float) -> int:
        """Tokens that came between two moments. Raises RuntimeError where a request failed."""
        run = await self._load
        await self._client.close()
        failed = [record.error for record in run.records if not record.ok]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
        first, last = start - self._started_at, end - self._started_at
        return sum(first <= at < last for record in run.records for at in record.token_s)


async def _span(protocol: str, grpc_address: str, http: OverHttp, pid: int) -> Span:
    load: Any = http if protocol == "http" else OverGrpc(grpc_address)
    await load.start()
    await asyncio.sleep(RAMP_S)
    before = load.num_tokens() if protocol == "http" else 0
    used, own, start = cpu_s(pid), time.process_time(), time.monotonic()
    await asyncio.sleep(SPAN_S - 1)
    used, own, end = cpu_s(pid) - used, time.process_time() - own, time.monotonic()
    if protocol == "http":
        tokens = load.num_tokens() - before
        await load.stop()
    else:
        tokens = await load.tokens_between(start, end)
    return Span(protocol, tokens / (end - start), used / tokens * 1e6, own / tokens * 1e6)


async def measure(step_ms: float, num_pairs: int, folder: Path) -> list[Span]:
    """Pairs of spans, printed as they come."""
    command = ["-m", "benchmarks.host_path", "--serve-step-ms", str(step_ms)]
    log, spans = folder / "server.log", []
    async with running_server(command, log, 120) as (address, pid):
        found = re.search(r"jmoe http on http://(\S+)", log.read_text())
        assert found is not None
        async with Client(address) as client:
            model = (await client.server_info()).model
        for pair in range(num_pairs):
            for protocol in ("grpc", "http") if pair % 2 else ("http", "grpc"):
                one = await _span(protocol, address, OverHttp(found[1], model), pid)
                spans.append(one)
                print(
                    f"{protocol}: {one.tokens_per_s:,.0f} tokens/s, processor time a token: server "
                    f"{one.server_us_per_token:.1f} us, client {one.client_us_per_token:.1f} us",
                    flush=True,
                )
    return spans


def ratio(spans: list[Span]) -> float:
    """HTTP's processor time a token over gRPC's: the median of the pairs' ratios."""
    ratios = []
    for pair in zip(spans[::2], spans[1::2], strict=True):
        us = {span.protocol: span.server_us_per_token for span in pair}
        ratios.append(us["http"] / us["grpc"])
    return statistics.median(ratios)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--most", type=float, default=1.15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        spans = uvloop.run(measure(args.step_ms, args.pairs, Path(folder)))
    found = ratio(spans)
    print(f"HTTP over gRPC, the median of {args.pairs} pairs: {found:.3f}")
    if args.out:
        result = {
            "batch": BATCH,
            "output_tokens": OUT_TOKENS,
            "step_ms": args.step_ms,
            "ratio": found,
            "cpu_count": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
            "spans": [asdict(span) for span in spans],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(found > args.most)


if __name__ == "__main__":
    main()
