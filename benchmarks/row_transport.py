"""How rows get from a process's device to another's: by `jax.experimental.transfer`, or by value.

`python -m benchmarks.row_transport [--json FILE]`, two processes on this CPU:

- latency of a batch of rows, from the call that sends it until it is ready on the other device. By
  transfer: `await_pull`, its number told over ZeroMQ, `pull`. By value: the array's bytes are a
  ZeroMQ frame that neither side copies, then `device_put`. In turn, pair by pair; ratios are of
  pairs. On a CPU neither `device_get` nor `device_put` need copy anything; on a GPU both do.
- what a peer's end does, each case in a process of its own: a transport may hang or kill it.

A transport is fit if every pull from a peer that was killed returns within 5 s, rows or an error.
"""

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zmq
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from serving.bench.facts import commit

WIDTH = 2048  # of bfloat16
SIZES = {"32 KB": 8, "256 KB": 64, "2 MB": 512}
"""Rows of a batch."""
WAYS = ("transfer", "value")
FIT_WITHIN_S = 5.0
WATCHED_S = 15.0
"""From the call in question; then it hangs."""
TIMEOUT_S = 2.0
"""Given to `pull` and `await_pull` where a case says so."""
NEVER_OFFERED = 1 << 40
LEFT, LEFT_BYTES = 64, 1 << 21
"""Arrays that wait for a pull which never comes, and the size of each."""


@dataclass(frozen=True)
class Peer:
    """The other process: it does what the socket says."""

    pid: int
    zmq_address: str
    transfer_address: str


def _rows(num_rows: int) -> jax.Array:
    rows = jnp.arange(num_rows * WIDTH, dtype=jnp.float32).reshape(num_rows, WIDTH)
    return jax.block_until_ready(rows.astype(jnp.bfloat16))


def _server() -> Any:
    """Of this process."""
    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])


def _spec(num_rows: int) -> jax.ShapeDtypeStruct:
    here = SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct((num_rows, WIDTH), jnp.bfloat16, sharding=here)


def _serve() -> None:
    """The peer's life: says its addresses, then does one thing for each message."""
    server, socket = _server(), zmq.Context.instance().socket(zmq.PAIR)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps([f"tcp://127.0.0.1:{port}", server.address()]), flush=True)
    batches = {num_rows: _rows(num_rows) for num_rows in SIZES.values()}
    uuid = 0
    while True:
        what, given = socket.recv_json()
        if what == "connect":
            pulled = server.connect(given).pull(0, _spec(1))
            socket.send_json(float(jax.block_until_ready(pulled)[0, 0]))
        elif what == "transfer":
            began, uuid = time.monotonic(), uuid + 1
            server.await_pull(uuid, batches[given])
            socket.send_json([began, uuid])
        else:
            began = time.monotonic()
            frame = np.asarray(batches[given]).view(np.uint8).data
            socket.send_multipart([json.dumps(began).encode(), frame], copy=False)


@contextmanager
def _peer() -> Iterator[Peer]:
    """Another process, which is killed in the end."""
    command = [sys.executable, "-m", "benchmarks.row_transport", "--role", "peer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Peer(process.pid, *json.loads(process.stdout.readline()))
        finally:
            process.kill()


def _socket(peer: Peer) -> Any:
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = 0
    socket.connect(peer.zmq_address)
    return socket


def _by_transfer(socket: Any, connection: Any, num_rows: int) -> float:
    """Seconds of one batch."""
    socket.send_json(["transfer", num_rows])
    began, uuid = socket.recv_json()
    jax.block_until_ready(connection.pull(uuid, _spec(num_rows)))
    return time.monotonic() - began


def _by_value(socket: Any, num_rows: int) -> float:
    """Seconds of one batch."""
    socket.send_json(["value", num_rows])
    header, frame = socket.recv_multipart(copy=False)
    rows = np.frombuffer(frame.buffer, jnp.bfloat16).reshape(num_rows, WIDTH)
    jax.block_until_ready(jax.device_put(rows, jax.devices()[0]))
    return time.monotonic() - json.loads(header.bytes)


def latencies(repeats: int) -> dict[str, dict[str, float]]:
    """Medians by size."""
    found = {}
    with _peer() as peer:
        connection, socket = _server().connect(peer.transfer_address), _socket(peer)
        for size, num_rows in SIZES.items():
            pairs = []
            for number in range(repeats + 10):
                seconds = {}
                for way in WAYS if number % 2 else WAYS[::-1]:
                    seconds[way] = (
                        _by_transfer(socket, connection, num_rows)
                        if way == "transfer"
                        else _by_value(socket, num_rows)
                    )
                pairs.append((seconds["transfer"], seconds["value"]))
            pairs = pairs[10:]
            found[size] = {
                "transfer_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
                "value_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
                "value_to_transfer": statistics.median(pair[1] / pair[0] for pair in pairs),
            }
    return found


def _asking() -> None:
    """From now on a case is watched."""
    print(json.dumps(time.monotonic()), flush=True)


def _timeout() -> datetime.datetime:
    return datetime.datetime.now() + datetime.timedelta(seconds=TIMEOUT_S)


def _pull(connection: Any, uuid: int, **options: Any) -> None:
    """Rows are there, or an error is raised."""
    jax.block_until_ready(connection.pull(uuid, _spec(8), **options))


def _connected(peer: Peer) -> tuple[Any, Any, int]:
    """A connection that has carried rows, the peer's socket, and what it offers."""
    connection, socket = _server().connect(peer.transfer_address), _socket(peer)
    _by_transfer(socket, connection, 8)
    socket.send_json(["transfer", 8])
    return connection, socket, socket.recv_json()[1]


def _kill(peer: Peer) -> None:
    os.kill(peer.pid, signal.SIGKILL)
    time.sleep(0.5)  # until the kernel has closed its sockets; its parent has yet to wait for it


def _killed_before(peer: Peer) -> None:
    connection, _, uuid = _connected(peer)
    _kill(peer)
    _asking()
    _pull(connection, uuid)


def _killed_before_connecting(peer: Peer, **options: Any) -> None:
    server = _server()
    _kill(peer)
    _asking()
    _pull(server.connect(peer.transfer_address), 1, **options)


def _killed_before_connecting_timeout(peer: Peer) -> None:
    _killed_before_connecting(peer, timeout=_timeout())


def _killed_outstanding(peer: Peer) -> None:
    connection, _, _ = _connected(peer)
    rows = connection.pull(NEVER_OFFERED, _spec(8))
    _kill(peer)
    _asking()
    jax.block_until_ready(rows)


def _never_offered_timeout(peer: Peer) -> None:
    connection, _, _ = _connected(peer)
    _asking()
    _pull(connection, NEVER_OFFERED, timeout=_timeout())


def _stopped(peer: Peer, **options: Any) -> None:
    connection, _, uuid = _connected(peer)
    os.kill(peer.pid, signal.SIGSTOP)
    _asking()
    _pull(connection, uuid, **options)


def _stopped_timeout(peer: Peer) -> None:
    _stopped(peer, timeout=_timeout())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _puller_killed(peer: Peer, *, timeout: bool = False) -> str:
    """The part of arrays it has not pulled that is still there 5 s later, and of others."""
    server, socket = _server(), _socket(peer)
    server.await_pull(0, _rows(1))
    socket.send_json(["connect", server.address()])
    socket.recv_json()

    def offer(uuid: int, rows: jax.Array) -> None:
        server.await_pull(uuid, rows, **({"timeout": _timeout()} if timeout else {}))

    def end() -> None:
        _kill(peer)
        _asking()

    others = _kept(lambda uuid, rows: None)
    return f"{_kept(offer, end):.0%} are still there; of such as were not offered {others:.0%}"


def _puller_killed_timeout(peer: Peer) -> str:
    return _puller_killed(peer, timeout=True)


def _kept(offer: Callable[[int, Any], None], then: Callable[[], None] = lambda: None) -> float:
    """The part of arrays that this process still holds 5 s after it has given them up."""
    before = _resident_bytes()
    for uuid in range(1, LEFT + 1):
        offer(uuid, jax.block_until_ready(jnp.full((LEFT_BYTES // 4,), uuid, jnp.float32)))
    then()
    time.sleep(FIT_WITHIN_S)
    return (_resident_bytes() - before) / (LEFT * LEFT_BYTES)


def _value_killed(peer: Peer) -> None:
    """By value there is nothing to pull: whoever waits says how long."""
    socket = _socket(peer)
    _by_value(socket, 8)
    _kill(peer)
    _asking()
    socket.send_json(["value", 8])
    if not socket.poll(1000 * TIMEOUT_S):
        raise TimeoutError("nothing came")


CASES: dict[str, tuple[str, Callable[[Peer], str | None]]] = {
    "killed": ("peer killed, then pull over a connection that was there", _killed_before),
    "killed_new": ("peer killed, then connect and pull", _killed_before_connecting),
    "killed_new_timeout": ("... pull with timeout 2 s", _killed_before_connecting_timeout),
    "outstanding": ("pull of what is never offered, then peer killed", _killed_outstanding),
    "never_timeout": ("pull of what is never offered, timeout 2 s", _never_offered_timeout),
    "stopped": ("peer stopped (SIGSTOP), then pull", _stopped),
    "stopped_timeout": ("... pull with timeout 2 s", _stopped_timeout),
    "puller_killed": (
        "puller killed: are 64 arrays of 2 MB that it had not pulled freed?",
        _puller_killed,
    ),
    "puller_killed_timeout": ("... await_pull with timeout 2 s", _puller_killed_timeout),
    "value_killed": ("by value: peer killed, then wait for rows up to 2 s", _value_killed),
}
KILLED = ("killed", "killed_new", "outstanding")
"""The cases by which it is decided whether pulls are fit to be relied on."""


def outcome(name: str) -> dict[str, Any]:
    """Plays a case in a process of its own: how its call returned, and after how many seconds."""
    with _peer() as peer:
        command = [sys.executable, "-m", "benchmarks.row_transport", "--role", name]
        given = json.dumps([peer.pid, peer.zmq_address, peer.transfer_address])
        with subprocess.Popen(
            [*command, "--peer", given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            began = float(process.stdout.readline() or "nan")
            try:
                out, err = process.communicate(timeout=WATCHED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return {"how": "hangs", "seconds": time.monotonic() - began}
            if not out:
                last = err.strip().splitlines()[-1:]
                how = f"the process ends with status {process.returncode}: {' '.join(last)}"
                return {"how": how, "seconds": time.monotonic() - began}
    ended, how = json.loads(out.splitlines()[-1])
    return {"how": how, "seconds": ended - began}


def _play(name: str, peer: Peer) -> None:
    """A case, in this process; it leaves at once, whatever its threads wait for."""
    try:
        how = CASES[name][1](peer) or "returns"
    except Exception as error:
        how = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps([time.monotonic(), how]), flush=True)
    os._exit(0)


def main() -> None:
    """Prints the tables and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=["peer", *CASES], help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "peer":
        _serve()
    elif args.role:
        _play(args.role, Peer(*json.loads(args.peer)))
    console, table = Console(width=130), Table(title="From a device to another process's, ms")
    for column in ("rows", "transfer", "by value", "value / transfer"):
        table.add_column(column)
    latency = latencies(args.repeats)
    for size, figures in latency.items():
        table.add_row(size, *(f"{value:.2f}" for value in figures.values()))
    console.print(table)
    table = Table(title="When a peer ends")
    for column in ("case", "how its call returns", "s"):
        table.add_column(column)
    cases = {}
    for name, (words, _) in CASES.items():
        cases[name] = {"case": words, **outcome(name)}
        table.add_row(words, cases[name]["how"], f"{cases[name]['seconds']:.2f}")
    console.print(table)
    fit = all(cases[name]["seconds"] <= FIT_WITHIN_S for name in KILLED)
    console.print(f"pulls from a killed peer return within {FIT_WITHIN_S:g} s: {fit}")
    if args.json:
        found = {"commit": commit(), "fit": fit, "latency": latency, "cases": cases}
        write_figures(args.json, found)


if __name__ == "__main__":
    main()
