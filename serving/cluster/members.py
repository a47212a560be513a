"""What the processes of one server tell each other, whatever they do: who joins, who is alive, and
that it ends. They talk over ports (`serving.cluster.port`).

A process joins by a greeting at the address of process 0, with what has to be alike in all of them.
It is welcomed or refused, and from then on both ends give signs of life.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from serving.cluster.port import STRANGER, Peer, Port
from serving.errors import shown

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two signs of life, either way."""
LINGERS_S = 1.0
"""For what a port has taken to leave when it is closed."""


class Address(NamedTuple):
    """A Peer that can be sent in a message."""

    name: str
    address: str
    incarnation: str  # in hexadecimal

    @classmethod
    def of(cls, peer: Peer) -> "Address":
        """Returns where a port listens."""
        return cls(peer.name, peer.address, peer.incarnation.hex())

    @property
    def peer(self) -> Peer:
        """The peer as a port takes it."""
        return Peer(self.name, self.address, bytes.fromhex(self.incarnation))


class Fact(NamedTuple):
    """What has to be alike in all processes."""

    name: str
    value: str


class Join(NamedTuple):
    """A process asks to join, again and again until it is answered."""

    index: int
    address: str
    incarnation: str  # of its port
    facts: list[Fact]


class Welcome(NamedTuple):
    """The process of an incarnation has joined, which alone knows that it asked."""

    to: str
    incarnation: str  # of process 0's port


class Refused(NamedTuple):
    """The process of an incarnation may not join."""

    to: str
    reason: str


class Alive(NamedTuple):
    """A sign of life."""


class Stop(NamedTuple):
    """The server ends."""


GREETINGS = (Join, Welcome, Refused)


def difference(here: Mapping[str, str], there: Mapping[str, str], index: int) -> tuple[str, str]:
    """Returns the first fact that is not alike, and a sentence with both values, of one line; empty
    where all are.
    """
    for name in sorted(here.keys() | there.keys()):
        own, other = here.get(name, ""), there.get(name, "")
        if own != other:
            known = name in here
            named = name if known else shown(name)
            other = other if known and other.isprintable() else shown(other)
            return named, (
                f"{named} is {other} in process {index} and {own} in process 0; "
                "it has to be alike in every process"
            )
    return "", ""


def run_all(calls: "SimpleQueue[Callable[[], object]]") -> None:
    """Runs the calls that wait in a queue, in order."""
    while True:
        try:
            call = calls.get_nowait()
        except Empty:
            return
        call()


class Members:
    """A port in a thread of its own, with signs of life both ways to all peers that it meets."""

    def __init__(
        self,
        port: Port,
        silence_s: float,
        hear: Callable[[str, Any], None],
        lose: Callable[[str, str], None],
    ) -> None:
        """`hear` is called with names and messages as they come, and `lose` with the name of a peer
        that is gone or has been silent for `silence_s`, and why if there is more to say (with no
        name where the thread itself fails): both in the thread, which `start` starts.
        """
        self._port, self._silence_s, self._hear, self._lose = port, silence_s, hear, lose
        self._beat_s = min(BEAT_S, silence_s / 4)
        self._heard_at: dict[str, float] = {}
        self._look_at = -math.inf
        self._news: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._closes_at = math.inf
        self._thread = threading.Thread(target=self._run, name="jmoe-members", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Runs a call in the thread, in order; for any thread."""
        self._news.put(call)
        self._port.wake()

    def meet(self, peer: Peer) -> None:
        """Connects to a peer, which counts as alive. In the thread."""
        self._port.connect(peer)
        self._heard_at[peer.name] = time.monotonic()

    def tell(self, message: Any) -> None:
        """Sends all peers a message; returns at once, for any thread."""
        self.do(lambda: [self._send(name, message) for name in list(self._heard_at)])

    def close(self, within_s: float) -> None:
        """Ends the thread once all peers have what they were sent, or the time is over. Safe to
        call again; for any other thread.
        """

        def end() -> None:
            self._closes_at = min(self._closes_at, time.monotonic() + within_s)

        self.do(end)
        self._thread.join(within_s + LINGERS_S + BEAT_S)

    def _send(self, name: str, message: Any) -> None:
        try:
            self._port.send(name, message)
        except Exception as error:
            self._drop(name, f"{type(error).__name__}: {error}")

    def _drop(self, name: str, reason: str) -> None:
        self._port.forget(name)
        if self._heard_at.pop(name, None) is not None:
            self._lose(name, reason)

    def _run(self) -> None:
        try:
            spoke_at = -math.inf
            while not self._is_over():
                for name, message in self._port.receive(self._beat_s / 4):
                    if name != STRANGER:
                        self._heard_at[name] = time.monotonic()
                    self._hear(name, message)
                run_all(self._news)
                spoke_at = self._look(spoke_at)
        except Exception as error:
            log.debug("where it came from", exc_info=True)
            self._lose("", f"{type(error).__name__}: {error}")
        finally:
            self._port.close(LINGERS_S)

    def _is_over(self) -> bool:
        if math.isinf(self._closes_at):
            return False
        return time.monotonic() >= self._closes_at or not self._port.undelivered()

    def _look(self, spoke_at: float) -> float:
        """Gives a sign of life if one is due, and drops who is gone; returns when it last spoke."""
        now = time.monotonic()
        if now < self._look_at:
            return spoke_at
        self._look_at = now + self._beat_s / 8
        for name in self._port.gone():
            self._drop(name, "")
        if now - spoke_at < self._beat_s:
            return spoke_at
        held_up = now - spoke_at > 2 * self._beat_s  # who was silent is this process
        for name, heard_at in list(self._heard_at.items()):
            if held_up:
                self._heard_at[name] = now
            elif now - heard_at > self._silence_s:
                self._drop(name, "")
            self._send(name, Alive())
        return now
