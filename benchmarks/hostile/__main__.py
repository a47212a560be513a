"""Attacks a jmoe server of its own, and tells what must hold meanwhile.

`python -m benchmarks.hostile [--protocol grpc|kserve|http] [--out FILE.json]` starts a server: the
demo's, or with --step-ms one whose device only passes time, for much fuzz in little time. It sends
requests of many clients, some cancelled, malformed, oversized or late, while memory, health checks
and a polite stream are watched; then fuzzed messages. Prints a table of what must hold; ends with
status 1 where something does not. What is watched beside the load is watched over gRPC, whatever
the protocol.
"""

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import store
from benchmarks.hostile.attempts import learn
from benchmarks.hostile.report import Line, must_be, table
from benchmarks.hostile.run import PROTOCOLS, Run
from serving.bench.launch import running_server


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.hostile", description=__doc__)
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="grpc", help="of load and fuzz")
    add("--requests", type=_count(0), default=5000, help="of the load; 0: none")
    add("--clients", type=_count(1), default=64)
    add("--seed", type=int, default=7)
    add("--fuzz", type=_count(0), default=100_000, help="messages to each service; 0: none")
    add("--idle-s", type=float, default=10.0, help="how long the idle server is watched, before")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the demo's server")
    add("--step-ms", help="start a server whose steps only pass so much time")
    add("--out", type=Path, help="the figures, as JSON")
    return parser.parse_args()


@contextlib.asynccontextmanager
async def _server(
    args: argparse.Namespace, lines: list[Line]
) -> AsyncIterator[tuple[str, int, str]]:
    """Yields address, pid and HTTP address; adds the faults in its log to `lines`."""
    command = ["-m", "serving.cli", "serve", "--config", "demo", "--port", "0"]
    command += [part for value in args.set for part in ("--set", value)]
    if args.step_ms:
        command = ["-m", "benchmarks.pairs.passing_time", args.step_ms]
    print("starting a server", flush=True)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        async with running_server(command, log, 600) as (address, pid):
            over_http = re.search(r"jmoe http on http://(\S+)", log.read_text())
            yield address, pid, over_http[1] if over_http else ""
        _, *faults = log.read_text(errors="replace").split("Traceback (most recent call last)")
        lines.append(must_be("tracebacks in the server's log", 0, len(faults)))
        for fault in faults[:3]:
            print("in the server's log:", fault[:4000], flush=True)


async def _main(args: argparse.Namespace) -> bool:
    task = asyncio.current_task()
    assert task is not None
    # Ended from outside, it takes the server it started with it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    lines: list[Line] = []
    async with _server(args, lines) as (address, pid, http_address):
        run = Run(args, await learn(address, http_address), pid)
        await run.play()
    lines = run.lines + lines
    print("\n".join(table(lines)), flush=True)
    if args.out:
        told = {
            **store.origin(shlex.join(["python", "-m", "benchmarks.hostile", *sys.argv[1:]])),
            "server": asdict(run.facts) | {"texts": len(run.facts.texts)},
            "lines": [asdict(line) for line in lines],
            **run.figures,
        }
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return not any(line.ok is False for line in lines)


def main() -> None:
    """Runs the command line."""
    try:
        sys.exit(0 if asyncio.run(_main(_parsed())) else 1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit("ended before its time")


if __name__ == "__main__":
    main()
