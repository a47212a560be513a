"""A worker in a process of its own: its messages and its loop (AMoE, section 4).

It joins the server as a follower joins process 0 (`serving.cluster.members`), and ends when the
server says so, or when nothing comes from it any more.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from pydantic import TypeAdapter

from serving.cluster.members import BEAT_S, GREETINGS, Alive, Heard, Stop, join
from serving.cluster.port import STRANGER, Peer, Port
from serving.config import EngineConfig
from serving.execution.compilations import Compilations
from serving.execution.executor import FailedRows, LostRows, Stages
from serving.execution.programs import Progress
from serving.pipeline.attention import AttentionWorker
from serving.pipeline.experts import ExpertWorker
from serving.pipeline.messages import (
    ATTENTION,
    EXPERTS,
    Enter,
    FromExperts,
    HasWay,
    Left,
    ToExperts,
    UseWay,
    WorkerDown,
    WorkerUp,
)
from serving.pipeline.recorder import Record, Recorder

SERVER = "server"


class Meet(NamedTuple):
    """Workers of the other kind that are there."""

    peers: list[Peer]


class Met(NamedTuple):
    """A worker has connected to these, and computes for them; by incarnation."""

    incarnations: list[str]


class Beat(NamedTuple):
    """A sign of life, and what a worker has done and has to do."""

    stages: int
    rows: Int[np.ndarray, "layers"]  # that wait before each layer
    oldest_s: float  # for how long the oldest of them has; 0 without any
    compilations: int  # since it was ready
    progress: int  # grows with whatever the process gets done, and while it waits for messages
    unreached: list[str]  # of whom it has not heard for too long that what it sends them comes


MESSAGES = (
    *(Meet, Met, Beat, Alive, Stop, Record, Stages, Enter, Left, LostRows, FailedRows),
    *(WorkerDown, WorkerUp, ToExperts, FromExperts, UseWay, HasWay),
)


@dataclass(frozen=True)
class Assignment:
    """What a worker is to be."""

    kind: str
    number: int  # of its kind
    server: str  # address of its port
    config: EngineConfig
    key: str = field(repr=False)  # of all ports, in hexadecimal
    host: str = "127.0.0.1"  # address of its own machine at which others reach it

    @property
    def name(self) -> str:
        """Name of its port."""
        return name_of(self.kind, self.number)

    @property
    def index(self) -> int:
        """Its place among all workers, attention workers first."""
        return self.number + (self.kind == EXPERTS) * self.config.asynchronous.attention

    def to_json(self) -> str:
        """Returns the assignment as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        """Parses a line. Raises ValueError for one that is no assignment."""
        return TypeAdapter(cls).validate_json(text)


def name_of(kind: str, number: int) -> str:
    """Returns the name of a worker's port."""
    return f"{kind}-{number}"


def names_of(kind: str, numbers: Sequence[int]) -> str:
    """Returns the names of several workers' ports, for a message."""
    return " and ".join(name_of(kind, number) for number in numbers)


Worker = AttentionWorker | ExpertWorker
Make = Callable[[Assignment, Callable[[int, Any], None], Progress], Worker]
"""Loads and warms a worker; it sends by what it is given, and says how far it is."""


def work(
    assignment: Assignment,
    facts: Mapping[str, str],
    make: Make,
    silence_s: float = math.inf,
) -> None:
    """Joins with what has to be as in the server, and runs a worker until the server ends it, or
    has been silent for `silence_s`.

    Raises SettingsError where the server refuses it, TimeoutError for a server that is silent, and
    what `make` and stages raise.
    """
    other = EXPERTS if assignment.kind == ATTENTION else ATTENTION
    port = Port(
        assignment.name,
        MESSAGES,
        bytes.fromhex(assignment.key),
        bind=f"tcp://{assignment.host}:0",
        greetings=GREETINGS,
    )
    pulse = None
    try:
        within_s = assignment.config.join_timeout_s
        port.connect(join(port, SERVER, assignment.server, assignment.index, facts, within_s))

        def send(number: int, message: Any) -> None:
            port.send(name_of(other, number), message)

        pulse = Pulse(port.beats(SERVER))
        pulse.start()
        worker = make(assignment, send, pulse.get_on)
        unreached_s = assignment.config.asynchronous.worker_timeout_s
        Loop(assignment.name, port, worker, pulse, silence_s, unreached_s).run()
    finally:
        if pulse is not None:
            pulse.stop()
        port.close()


class Pulse:
    """Says every second that a process lives, from a thread of its own, and whether it gets on."""

    def __init__(self, tell: Callable[[Beat], None]) -> None:
        """`tell` is called in the thread."""
        self._tell, self._progress = tell, 0
        self._worker: Worker | None = None
        self.unreached: list[str] = []
        self._compilations = Compilations()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jmoe-pulse", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first beat comes at once."""
        self._thread.start()

    def get_on(self, *_: Any) -> None:
        """Records that the worker got something done."""
        self._progress += 1

    def has(self, worker: Worker) -> None:
        """Records that the worker is ready."""
        self._worker = worker
        self._compilations.ready()

    def beat(self) -> Beat:
        """Returns the beat to send now."""
        compiled, progress = self._compilations.since_ready, self._progress
        progress += self._compilations.before + compiled
        if self._worker is None:
            return Beat(0, np.zeros(0, np.int64), 0.0, 0, progress, [])
        queues = self._worker.queues
        rows, waited_s = queues.counts.sum(axis=1), queues.waited_s(time.monotonic())
        return Beat(self._worker.stages, rows, waited_s, compiled, progress, self.unreached)

    def stop(self) -> None:
        """Stops the thread; no beat comes after it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._compilations.close()

    def _run(self) -> None:
        while True:
            self._tell(self.beat())
            if self._stopped.wait(BEAT_S):
                return


class Loop:
    """Takes messages, runs stages, and checks that the server lives."""

    def __init__(
        self,
        name: str,
        port: Port,
        worker: Worker,
        pulse: Pulse,
        silence_s: float = math.inf,
        unreached_s: float = math.inf,
    ) -> None:
        self._port, self._worker, self._pulse = port, worker, pulse
        self._unreached_s, self._look_at = unreached_s, time.monotonic()
        self._heard = Heard(silence_s)
        self._heard.at[SERVER] = self._look_at
        pulse.has(worker)
        self._recorder = Recorder(name, worker)

    def run(self) -> None:
        """Runs until Stop comes. Raises TimeoutError, and what stages raise."""
        ran, worker, port = False, self._worker, self._port
        while True:
            now = time.monotonic()
            wait_s = max(0.0, min(worker.queues.wake_at() - now, self._look_at - now))
            gone = set[str]()  # of whom what is behind the news of their end came too late
            for sender, message in port.receive(0.0 if ran else wait_s):
                if isinstance(message, Stop):
                    return
                if sender not in gone:
                    gone |= self._take(sender, message)
            ran = self._recorder.run_stage(time.monotonic, partial(port.send, SERVER))
            self._pulse.get_on()
            self._look()

    def _take(self, sender: str, message: Any) -> set[str]:
        """Handles a message; returns the peers whose former process it says has ended."""
        now = time.monotonic()
        if sender == SERVER:
            self._heard.at[SERVER] = now
        match message:
            case Record():
                self._recorder.is_on = True
            case Meet(peers):
                for peer in peers:
                    self._port.connect(peer)
                self._port.send(SERVER, Met([peer.incarnation for peer in peers]))
                return {peer.name for peer in peers}
            case UseWay(_, change):
                self._worker.take(message, now)
                self._port.send(SERVER, HasWay(change))
            case WorkerDown(kind, number):
                self._port.forget(name_of(kind, number))
                self._worker.take(message, now)
                return {name_of(kind, number)}
            case _ if sender != STRANGER and not isinstance(message, Alive):
                self._worker.take(message, now)
        return set()

    def _look(self) -> None:
        """Raises TimeoutError if the server is silent; notes which workers do not hear this one."""
        now = time.monotonic()
        if now < self._look_at:
            return
        if self._heard.silent(now):
            raise TimeoutError(f"nothing came from the server for {self._heard.silence_s:g} s")
        self._look_at = now + self._heard.beat_s
        self._pulse.unreached = self._port.unreached(self._unreached_s)
