"""Hostile load on a jmoe server of this machine, and what must hold meanwhile.

`python -m benchmarks.hostile [--address HOST:PORT] [--protocol http] [--out FILE.json]`: requests
of many clients, some cancelled, malformed, oversized or late, while memory, health checks and a
polite stream are watched; then fuzzed messages to every service. Without --address it starts a
server of its own. Prints a table of what must hold; ends with status 1 where something does not.
With --protocol http, load and fuzz go over HTTP; what is watched beside them stays the same, over
gRPC.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hostile.protocols import PROTOCOLS
from benchmarks.hostile.report import table
from benchmarks.hostile.run import Plan, run
from serving.bench.launch import running_server


def loopback(address: str) -> str:
    """`HOST:PORT` as it is. Raises ArgumentTypeError where it is not one of this machine."""
    host, _, port = address.rpartition(":")
    try:
        here = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        here = False
    if not (here and port.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{address!r} is refused: it must be HOST:PORT with a HOST of this machine alone, "
            "such as 127.0.0.1:50051, [::1]:50051 or localhost:50051"
        )
    return address


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.hostile", description=__doc__)
    add = parser.add_argument
    add("--address", type=loopback, help="of a running server; without it, one is started")
    add("--http-address", type=loopback, help="of that server over HTTP, for --protocol http")
    add("--admin-address", type=loopback, help="of its Admin service, if not as the server says")
    add("--pid", type=_count(1), help="of the running server, to measure its memory")
    spoken = (*PROTOCOLS, "http")
    add("--protocol", choices=spoken, default="grpc", help="that the load is spoken in")
    add("--requests", type=_count(1), default=5000)
    add("--clients", type=_count(1), default=64)
    add("--seed", type=int, default=7)
    add("--fuzz", type=_count(0), default=100_000, help="messages to each service; 0: none")
    add("--idle-s", type=float, default=10.0, help="how long the idle server is watched, before")
    add("--limit-s", type=float, default=1200.0, help="of the load, and of each service's fuzz")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the server started")
    add("--out", type=Path, help="the figures, as JSON")
    return parser


@contextlib.asynccontextmanager
async def _server(
    args: argparse.Namespace,
) -> AsyncIterator[tuple[str, int | None, str | None]]:
    if args.address:
        yield args.address, args.pid, args.http_address
        return
    command = ["-m", "serving.cli", "serve", "--config", "demo", "--port", "0"]
    command += [part for value in args.set for part in ("--set", value)]
    print("starting a server", flush=True)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        async with running_server(command, log, 600) as (address, pid):
            over_http = re.search(r"jmoe http on http://(\S+)", log.read_text())
            yield address, pid, over_http[1] if over_http else None


async def _main(args: argparse.Namespace) -> bool:
    task = asyncio.current_task()
    assert task is not None
    # Ended from outside, it takes the server it started with it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with _server(args) as (address, pid, http_address):
        plan = Plan(
            address=address,
            admin_address=args.admin_address,
            pid=pid,
            num_requests=args.requests,
            num_clients=args.clients,
            seed=args.seed,
            num_fuzzed=args.fuzz,
            idle_s=args.idle_s,
            limit_s=args.limit_s,
            protocol="grpc" if args.protocol == "http" else args.protocol,
            http_address=http_address if args.protocol == "http" else None,
        )
        lines, figures = await run(plan)
    print(table(lines), flush=True)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return not any(line.ok is False for line in lines)


def main() -> None:
    """Runs the command line."""
    parser = _parser()
    args = parser.parse_args()
    if args.address and args.set:
        parser.error("--set is for a server that is started here; leave --address out")
    if args.address and (args.protocol == "http") != bool(args.http_address):
        parser.error("--protocol http and --http-address go together, with the --address for gRPC")
    if args.pid and not args.address:
        parser.error("--pid is of a running server; give its --address, too")
    try:
        sys.exit(0 if asyncio.run(_main(args)) else 1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit("ended before its time")


if __name__ == "__main__":
    main()
