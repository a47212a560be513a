"""What keys and TLS cost: tokens served with both on, against neither, in turns of one run.

`python -m benchmarks.secured [--out benchmarks/secured.json]`: the server and load of
`benchmarks.host_path`, whose device only passes time, twice: one server asks for a key and
encrypts, one does neither. Both stay up, and the load goes to them in turns, so that a machine
that slows down slows both. Processor time of the server for a token is told as well, which others
on the machine change less. CPU figures, about this CPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.host_path import BATCH, OUT_TOKENS, PROMPT, cpu_s
from serving.bench.launch import running_server
from serving.bench.loadgen import saturate
from serving.bench.workload import Arrival
from serving.client import Client
from serving.connection import Connection
from serving.frontend import keys
from serving.version import jmoe_version

STEP_MS, PAIRS = 16.0, 20
RAMP_S, WINDOW_S = 0.5, 2.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One load on one server."""

    tokens_per_s: float
    server_cpu_us_per_token: float


@dataclass(frozen=True)
class Pair:
    """Two turns, one after the other."""

    plain: Turn
    secured: Turn

    @property
    def tokens_ratio(self) -> float:
        """Tokens served with TLS and keys, of those without."""
        return self.secured.tokens_per_s / self.plain.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        """Processor time of a token, likewise."""
        return self.secured.server_cpu_us_per_token / self.plain.server_cpu_us_per_token


def _certificate(folder: Path) -> tuple[Path, Path]:
    """One that signs itself, and its private key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *named, *files], check=True, capture_output=True)
    return cert, key


def _secured(folder: Path) -> tuple[list[str], Connection]:
    """Flags of a server, and how a client connects to it."""
    cert, private = _certificate(folder)
    key, file = keys.new_key(), folder / "keys.yaml"
    keys.write(file, {"bench": keys.Key(keys.digest(key).hex(), admin=True)})
    flags = [f"--keys-file={file}", f"--tls-cert={cert}", f"--tls-key={private}"]
    return flags, Connection(key, str(cert))


async def _turn(client: Client, pid: int, window_s: float) -> Turn:
    arrivals, before_s = repeat(Arrival(PROMPT, OUT_TOKENS, ignore_eos=True)), cpu_s(pid)
    run = await saturate(client, arrivals, concurrency=BATCH, duration_s=RAMP_S + window_s)
    took_s = cpu_s(pid) - before_s
    failed = [record.error for record in run.records if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    times_s = [at for record in run.records for at in record.token_s]
    tokens = sum(RAMP_S <= at < RAMP_S + window_s for at in times_s)
    return Turn(tokens / window_s, 1e6 * took_s / len(times_s))


async def _measure(step_ms: float, num_pairs: int, window_s: float) -> list[Pair]:
    command = ["-m", "benchmarks.host_path", "--serve-step-ms", str(step_ms)]
    found: list[Pair] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        flags, secured = _secured(folder)
        async with AsyncExitStack() as stack:
            servers: dict[str, tuple[Client, int]] = {}
            for kind, more, connection in (
                ("plain", [], Connection()),
                ("secured", flags, secured),
            ):
                log = folder / f"{kind}.log"
                address, pid = await stack.enter_async_context(
                    running_server([*command, *more], log, START_TIMEOUT_S)
                )
                client = await stack.enter_async_context(Client(address, connection=connection))
                await client.wait_ready(START_TIMEOUT_S)
                servers[kind] = client, pid
            for number in range(num_pairs):
                order = list(servers) if number % 2 else list(servers)[::-1]
                pair = Pair(**{kind: await _turn(*servers[kind], window_s) for kind in order})
                found.append(pair)
                print(
                    f"{pair.plain.tokens_per_s:15,.0f} {pair.secured.tokens_per_s:10,.0f} "
                    f"{pair.tokens_ratio:8.3f} {pair.plain.server_cpu_us_per_token:11.0f} "
                    f"{pair.secured.server_cpu_us_per_token:10.0f} {pair.cpu_ratio:8.3f}",
                    flush=True,
                )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--window-s", type=float, default=WINDOW_S)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pairs < 1 or min(args.step_ms, args.window_s) <= 0:
        parser.error("--pairs is at least 1, and --step-ms and --window-s are above 0")
    print("tokens/s: plain    secured    ratio    CPU, us/token: plain, secured, ratio")
    pairs = uvloop.run(_measure(args.step_ms, args.pairs, args.window_s))
    tokens, cpu = (
        statistics.median(getattr(pair, name) for pair in pairs)
        for name in ("tokens_ratio", "cpu_ratio")
    )
    print(f"medians: {tokens:.3f} of the tokens, {cpu:.3f} of the processor time of a token")
    if args.out:
        result = {
            "step_ms": args.step_ms,
            "batch": BATCH,
            "output_tokens": OUT_TOKENS,
            "cpu_count": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
            "pairs": [asdict(pair) for pair in pairs],
            "tokens_ratio": tokens,
            "cpu_ratio": cpu,
            "load_average": os.getloadavg(),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
