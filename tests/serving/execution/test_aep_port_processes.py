"""Ports of processes that are killed and stopped (kill -9, SIGSTOP)."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from serving.cluster.port import Port
from tests.serving.execution.aep_port_peer import FLOOD, KEY, Note, as_json, from_json

pytestmark = pytest.mark.deep

SOON_S = 60.0
ROWS = np.arange(32 * 2048).reshape(32, 2048).astype(ml_dtypes.bfloat16)  # 128 KB


@pytest.fixture
def port():
    port = Port("one", [Note], KEY, most_waiting=1000)
    yield port
    port.close()


@contextmanager
def peer_of(port):
    """Starts a process connected to the port, and kills it at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.serving.execution.aep_port_peer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            port.connect(from_json(process.stdout.readline()))
            process.stdin.write(f"{as_json(port.peer)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.kill()


def answers(port, count):
    found, deadline = [], time.monotonic() + SOON_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        for name, note in port.receive(1.0):
            assert name == "other"
            assert note.rows.dtype == ROWS.dtype
            np.testing.assert_array_equal(note.rows, ROWS)
            found.append(note.number)
    return found


def test_a_killed_process_blocks_nobody_and_its_successor_gets_what_is_its_own(port):
    with peer_of(port) as process:
        port.send("other", Note(0, ROWS))
        assert answers(port, 1) == [1]
        process.kill()
        process.wait()
        began = time.monotonic()
        for number in range(200):
            port.send("other", Note(number, ROWS))
        assert port.receive(0) == []
        assert time.monotonic() - began < 5
    with peer_of(port):
        port.send("other", Note(1000, ROWS))
        assert answers(port, 1) == [1001]
        assert port.receive(0) == []
    port.forget("other")
    port.send("other", Note(0, ROWS))


def test_a_stopped_process_blocks_nobody_and_goes_on_where_it_was(port):
    with peer_of(port) as process:
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for number in range(400):  # 50 MB: more than sockets keep
            port.send("other", Note(number, ROWS))
        assert time.monotonic() - began < 5
        assert port.receive(0) == []
        process.send_signal(signal.SIGCONT)
        assert answers(port, 400) == list(range(1, 401))


def test_of_who_is_killed_while_it_sends_the_first_messages_come_whole(port):
    with peer_of(port) as process:
        port.send("other", Note(FLOOD, ROWS))
        found = answers(port, 100)
        process.kill()
        process.wait()
        while came := port.receive(1.0):
            found += [note.number for _, note in came]
        assert found == list(range(len(found)))
        port.forget("other")
