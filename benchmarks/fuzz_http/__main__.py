"""Fuzzed HTTP requests to a real server in a process of its own.

`python -m benchmarks.fuzz_http [--requests 100000] [--out FILE]`: the server,
scheduler, admission and tokenizer are the real ones; the device's steps only pass time
(`benchmarks.pairs.passing_time`). Reports statuses by kind of request. Ends with status 1 for a
status that is a fault of the server's (5xx, but for 503 and, since requests name deadlines, 504),
an answer in another shape, a request without an answer, or a server that is not as before at the
end.
"""

import argparse
import asyncio
import collections
import json
import platform
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fuzz_http.requests import Fuzzed, draw
from benchmarks.hostile.probes import resident_bytes
from serving.bench.launch import running_server
from serving.client import Client
from serving.telemetry.version import jmoe_version

ANSWER_S = 60.0  # without an answer for so long, a request hangs
UNSURE_S = 0.05  # how long an answer is waited for where nobody can say whether one comes
STEP_MS = 0.2
_ALLOWED_FAULTS = (503, 504)


class NoAnswer(Exception):
    """The server closed the connection."""


@dataclass
class Found:
    """What came back."""

    statuses: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, what: str, sent: Fuzzed) -> None:
        """Returns the something that must not be."""
        if len(self.problems) < 50:
            self.problems.append(f"{sent.kind}: {what}; sent {sent.data[:300]!r}")


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, body and headers, in lower case, of the next answer; of a stream, its events. Raises
    NoAnswer at the end.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100 "):
            head = await reader.readuntil(b"\r\n\r\n")
        status, lower = int(head.split(b" ", 2)[1]), head.lower()
        if b"transfer-encoding: chunked" in lower:
            return status, await _chunks(reader), lower
        length = re.search(rb"\r\ncontent-length: (\d+)", lower)
        return status, await reader.readexactly(int(length[1]) if length else 0), lower
    except (asyncio.IncompleteReadError, ConnectionError):
        raise NoAnswer from None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


def flaw(status: int, body: bytes) -> str:
    """Returns what is wrong with an answer; empty where nothing is."""
    if status >= 500 and status not in _ALLOWED_FAULTS:
        return f"status {status}: {body[:300]!r}"
    if body.startswith(b"data: "):
        last = body.rstrip().rpartition(b"\n\n")[2]
        if status == 200 and (last == b"data: [DONE]" or last.startswith(b'data: {"error"')):
            return ""
        return f"a stream with status {status} that ends with {last[-200:]!r}"
    try:
        told = json.loads(body)
        if status < 400 or (status == 503 and "status" in told) or told["error"]["message"]:
            return ""
    except (ValueError, KeyError, TypeError):
        pass
    return f"status {status} with a body that is not as described: {body[:200]!r}"


class _Sender:
    """One connection after another."""

    def __init__(self, address: str, found: Found) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._found = int(port), found
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, sent: Fuzzed) -> None:
        """Sends one, and judges what comes."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(sent.data)
        if sent.half_closes:
            writer.write_eof()
        if sent.leaves:
            self._found.statuses[sent.kind, "left"] += 1
            self.close()
            return
        for _ in range(1 if sent.num_answers is None else sent.num_answers):
            if not await self._take(reader, sent):
                self.close()
                return
        # What else was sent may spoil the next request.
        if sent.half_closes or sent.num_answers is None:
            self.close()

    async def _take(self, reader: asyncio.StreamReader, sent: Fuzzed) -> bool:
        """Takes an answer; False where the connection is of no more use."""
        limit_s = UNSURE_S if sent.num_answers is None else ANSWER_S
        try:
            status, body, _ = await asyncio.wait_for(read_answer(reader), limit_s)
        except NoAnswer:
            self._found.statuses[sent.kind, "closed"] += 1
            # After `connection: close` or an answer to what is no HTTP, the others get none.
            if sent.num_answers == 1:
                self._found.problem("closed without an answer", sent)
            return False
        except TimeoutError:
            self._found.statuses[sent.kind, "none"] += 1
            if sent.num_answers is not None:
                self._found.problem(f"no answer after {ANSWER_S:g} s", sent)
            return False
        self._found.statuses[sent.kind, str(status)] += 1
        if wrong := flaw(status, body):
            self._found.problem(wrong, sent)
        return status not in (408, 431) and b"connection: close" not in sent.data

    def close(self) -> None:
        """Ends the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def fuzz(
    address: str, model: str, num_requests: int, num_connections: int, seed: int
) -> Found:
    """Sends so many, over so many connections at once."""
    rng, found = random.Random(seed), Found()
    left = num_requests

    async def one() -> None:
        nonlocal left
        sender = _Sender(address, found)
        while left > 0:
            left -= 1
            await sender.send(draw(rng, model))
        sender.close()

    await asyncio.gather(*(one() for _ in range(num_connections)))
    return found


async def _idle(client: Client) -> bool:
    """Whether nothing runs, waits or holds pages, once all have gone."""
    for _ in range(300):
        stats = await client.stats()
        if not stats.num_running and not stats.num_waiting and not stats.kv_pages_used:
            return True
        await asyncio.sleep(0.1)
    return False


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns all of it; what was found."""
    log = folder / "server.log"
    command = ["-m", "benchmarks.pairs.passing_time", str(STEP_MS)]
    async with running_server(command, log, 180) as (address, pid), Client(address) as client:
        http = re.search(r"jmoe http on http://(\S+)", log.read_text())
        assert http is not None
        model = (await client.server_info()).model
        before, started_at = resident_bytes(pid), time.monotonic()
        found = await fuzz(http[1], model, args.requests, args.connections, args.seed)
        took_s = time.monotonic() - started_at
        right = Fuzzed("at the end", b"GET /health HTTP/1.1\r\nhost: fuzz\r\n\r\n")
        await _Sender(http[1], found).send(right)
        if found.statuses.pop(("at the end", "200"), 0) != 1:
            found.problem("the server does not say that it is ready", right)
        if not await _idle(client):
            found.problem("requests run on although everybody is gone", right)
        after = resident_bytes(pid)
        tracebacks = log.read_text().count("Traceback (most recent call last)")
    if tracebacks:
        found.problems.append(f"{tracebacks} tracebacks in the server's log")
    kinds: dict[str, dict[str, int]] = {}
    for (kind, status), number in sorted(found.statuses.items()):
        kinds.setdefault(kind, {})[status] = number
    return {
        "requests": args.requests,
        "connections": args.connections,
        "seed": args.seed,
        "took_s": took_s,
        "statuses": kinds,
        "problems": found.problems,
        "resident_bytes": {"before": before, "after": after},
        "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser("benchmarks.fuzz_http", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = asyncio.run(run(args, Path(folder)))
    for kind, statuses in result["statuses"].items():
        print(f"{kind}: {statuses}")
    print(f"{args.requests} requests in {result['took_s']:.0f} s; {result['resident_bytes']}")
    for problem in result["problems"]:
        print(f"not as it should be: {problem}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
