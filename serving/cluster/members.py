"""What the processes of one server tell each other, whatever they do: who joins, who is alive, and
that it ends. They talk over ports (`serving.cluster.port`).

A process joins by a greeting at the address of the one that leads, with what has to be alike in all
of them. It is welcomed or refused, and from then on both ends give signs of life. Followers of a
mesh and asynchronous workers do.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from serving.cluster.port import STRANGER, Peer, Port
from serving.errors import SettingsError, shown

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two signs of life, either way."""
ASKS_EVERY_S = 0.25
"""To join."""
LINGERS_S = 1.0
"""For what a port has taken to leave when it is closed."""


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
    incarnation: str  # of the port that it has joined


class Refused(NamedTuple):
    """The process of an incarnation may not join."""

    to: str
    reason: str
    for_good: bool = True  # not where another has its number, which may be its own dead past


class Alive(NamedTuple):
    """A sign of life."""


class Stop(NamedTuple):
    """The server ends."""


GREETINGS = (Join, Welcome, Refused)


def join(
    port: Port,
    name: str,
    address: str,
    index: int,
    facts: Mapping[str, str],
    timeout_s: float,
    silence_s: float = 0.0,
) -> Peer:
    """Asks the port at an address of ZeroMQ to let this process in, and returns it, as a peer of a
    name. It has yet to be connected to. Refused since another process has its number, it goes on
    asking for `silence_s`, within which one that is dead is missed.

    Raises SettingsError where it refuses this process, and TimeoutError where it does not answer.
    """
    own = port.peer
    asked = Join(index, own.address, own.incarnation, [Fact(*fact) for fact in facts.items()])
    until, yields_at = time.monotonic() + timeout_s, math.inf
    while (left_s := until - time.monotonic()) > 0:
        port.greet(address, asked)
        for _, message in port.receive(min(left_s, ASKS_EVERY_S)):
            match message:
                case Welcome(to, incarnation) if to == own.incarnation:
                    return Peer(name, address, incarnation)
                case Refused(to, reason, for_good) if to == own.incarnation:
                    now = time.monotonic()
                    yields_at = min(yields_at, now + silence_s)
                    if for_good or now >= yields_at:
                        raise SettingsError(reason)
    raise TimeoutError(f"{name} did not answer at {address} within {timeout_s:g} s")


def difference(
    here: Mapping[str, str], there: Mapping[str, str], own: str, other: str
) -> tuple[str, str]:
    """Returns the first fact that is not alike in two processes, and a sentence with both values,
    of one line; empty where all are.
    """
    for name in sorted(here.keys() | there.keys()):
        value, another = here.get(name, ""), there.get(name, "")
        if value != another:
            known = name in here
            named = name if known else shown(name)
            another = another if known and another.isprintable() else shown(another)
            return named, (
                f"{named} is {another} in {other} and {value} in {own}; "
                "it has to be alike in every process"
            )
    return "", ""


class Heard:
    """When peers were last heard. Who was held up itself takes nobody for silent."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s, self.beat_s = silence_s, min(BEAT_S, silence_s / 4)
        self.at: dict[str, float] = {}
        self.was_held_up, self._looked_at = False, -math.inf

    def silent(self, now: float) -> list[str]:
        """Returns of whom nothing has come for too long. Expects a call every beat."""
        self.was_held_up = now - self._looked_at > 2 * self.beat_s
        self._looked_at = now
        if self.was_held_up:
            self.at = dict.fromkeys(self.at, now)
        return [name for name, at in self.at.items() if now - at > self.silence_s]


class Members:
    """A port in a thread of its own, with signs of life both ways to all peers that it meets."""

    def __init__(
        self,
        port: Port,
        silence_s: float,
        hear: Callable[[str, Any], None],
        lose: Callable[[str, str], None],
        *,
        look: Callable[[bool], None] = lambda was_held_up: None,
        may_be_silent: Callable[[str], bool] = lambda name: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hear` is called with names and messages as they come, and `lose` with the name of a peer
        that is gone or has been silent for `silence_s`, unless it `may_be_silent`, and why (with no
        name where the thread itself fails); `look` several times a beat, with whether this process
        was held up: all in the thread, which `start` starts. `clock` is in seconds.
        """
        self._port, self._hear, self._lose, self._clock = port, hear, lose, clock
        self._look, self._may_be_silent = look, may_be_silent
        self._heard, self._peers = Heard(silence_s), dict[str, Peer]()
        self._looks_at = self._speaks_at = -math.inf
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

    def answer(
        self,
        join: Join,
        name: str,
        facts: Mapping[str, str],
        *,
        refusal: str = "",
        tells_values: bool = True,
    ) -> str:
        """Lets a process in under a name, or says why not: for a `refusal`, since another has that
        name, or for what is not as in `facts`, whose values it hears if `tells_values`. Returns why
        not; empty: it has joined, now or before. In the thread.
        """
        own = self._port.peer
        try:
            peer = Peer(name, join.address, join.incarnation)
            if self._peers.get(name) != peer:  # it may have missed the answer
                fact, for_good = "", True
                if not refusal and name in self._peers:
                    for_good = False
                    refusal = f"{name} has joined already; give each process a number of its own"
                elif not refusal:
                    fact, refusal = difference(facts, dict(join.facts), own.name, name)
                if refusal:
                    log.warning("a process was refused: %s", refusal)
                    told = refusal
                    if fact and not tells_values:
                        told = f"{fact} differs from {own.name}'s, whose log has both values"
                    self._port.greet(join.address, Refused(join.incarnation, told, for_good))
                    return refusal
                self.meet(peer)
            self._port.greet(join.address, Welcome(join.incarnation, own.incarnation))
        except ValueError as error:  # an address or incarnation that is none
            log.debug("a process asked to join that cannot be answered", exc_info=True)
            return str(error)
        return ""

    def meet(self, peer: Peer) -> None:
        """Connects to a peer, which counts as alive. In the thread."""
        self._port.connect(peer)
        self._peers[peer.name], self._heard.at[peer.name] = peer, self._clock()

    def forget(self, name: str) -> None:
        """Drops a peer that is gone. In the thread."""
        self._port.forget(name)
        self._peers.pop(name, None)
        self._heard.at.pop(name, None)

    def send(self, name: str, message: Any) -> None:
        """Sends a peer a message; one that takes none is lost. In the thread."""
        try:
            self._port.send(name, message)
        except Exception as error:
            self._drop(name, f"{type(error).__name__}: {error}")

    def tell(self, message: Any) -> None:
        """Sends all peers a message; returns at once, for any thread."""
        self.do(lambda: [self.send(name, message) for name in list(self._peers)])

    def close(self, within_s: float) -> None:
        """Ends the thread once all peers have what they were sent, or the time is over. Safe to
        call again; for any other thread.
        """

        def end() -> None:
            self._closes_at = min(self._closes_at, time.monotonic() + within_s)

        self.do(end)
        self._thread.join(within_s + LINGERS_S + BEAT_S)

    def turn(self) -> None:
        """Waits a little for messages, and acts on all that is known. In the thread."""
        for name, message in self._port.receive(self._heard.beat_s / 4):
            if name in self._peers:
                self._heard.at[name] = self._clock()
            elif name != STRANGER:  # it was dropped since
                continue
            self._hear(name, message)
        while not self._news.empty():
            self._news.get()()
        if (now := self._clock()) >= self._looks_at:
            self._looks_at = now + self._heard.beat_s / 8
            self._look_after_all(now)

    def _drop(self, name: str, reason: str) -> None:
        if name in self._peers:
            self.forget(name)
            self._lose(name, reason)

    def _run(self) -> None:
        try:
            while not self._is_over():
                self.turn()
        except Exception as error:
            log.debug("where it came from", exc_info=True)
            self._lose("", f"{type(error).__name__}: {error}")
        finally:
            self._port.close(LINGERS_S)

    def _is_over(self) -> bool:
        if math.isinf(self._closes_at):
            return False
        return time.monotonic() >= self._closes_at or not self._port.undelivered()

    def _look_after_all(self, now: float) -> None:
        """Drops who is gone, and gives a sign of life if one is due."""
        for name in self._port.gone():
            self._drop(name, "nobody listens there any more")
        for name in self._heard.silent(now):
            if not self._may_be_silent(name):
                self._drop(name, f"silent for {self._heard.silence_s:g} s")
        if now >= self._speaks_at:
            self._speaks_at = now + self._heard.beat_s
            for name in list(self._peers):
                self.send(name, Alive())
        self._look(self._heard.was_held_up)
