"""How process 0 tells the other processes of a mesh what to run, and how they notice each other's
end.

They are members (`serving.cluster.members`) that join at `engine.coordinator`, and hear calls in
the order in which process 0 makes them. Messages have typed fields: nothing that comes from the
network is ever run. Where the processes share a secret, a stranger gets no message in. Without one
(on loopback), other users of the machine can join; they are not told the values of settings.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from serving.cluster.addresses import join as host_and_port
from serving.cluster.members import (
    ASKS_EVERY_S,
    GREETINGS,
    Alive,
    Join,
    Members,
    Refused,
    Stop,
    Welcome,
    join,
)
from serving.cluster.port import Port, PortError
from serving.cluster.secret import ClusterSecret
from serving.errors import Lost, PeerLost, SettingsError, Unavailable
from serving.execution.replay import CALLS

log = logging.getLogger(__name__)

MOST_CALLS = 4096
"""That may wait for a process, which is lost if there are more. Those of a start are some hundreds,
and collectives hold steps together.
"""


class Begin(NamedTuple):
    """All have joined."""

    jax_coordinator: str  # HOST:PORT


class Failed(NamedTuple):
    """A process cannot go on."""

    reason: str


MESSAGES = (Begin, Failed, Alive, Stop, *CALLS)


def _port_of(name: str, host: str, number: int, secret: ClusterSecret | None) -> Port:
    """Listens. Raises PortError."""
    key = (secret or ClusterSecret(b"")).derive("connections between processes of a mesh")
    return Port(
        name,
        MESSAGES,
        key,
        bind=f"tcp://{host_and_port(host, number)}",
        most_waiting=MOST_CALLS,
        greetings=GREETINGS,
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _resolved(address: str) -> tuple[int, Any]:
    """Returns the family and address of HOST:PORT, of version 4 where there are both. Raises
    OSError.
    """
    found = socket.getaddrinfo(*_split(address), type=socket.SOCK_STREAM)
    return min((int(each[0]), each[4]) for each in found)


class Followers:
    """The other processes, as process 0 sees them."""

    def __init__(
        self,
        address: str,
        num_processes: int,
        facts: Mapping[str, str],
        *,
        peer_timeout_s: float,
        secret: ClusterSecret | None = None,
    ) -> None:
        """Listens at an address. `facts` and `secret` have to be those of every process that joins.

        Raises SettingsError where it cannot listen there.
        """
        self.address, self.num_processes = address, num_processes
        self.stops_within_s = peer_timeout_s  # those who have not heard Stop by then are gone
        self.lost = Lost()
        self._facts = dict(facts)
        self._changed = threading.Condition()
        self._joined = set[str]()
        self._ending = False
        self._shares_secret = secret is not None
        try:
            _, (host, number, *_) = _resolved(address)
            self._port = _port_of("process 0", host, number, secret)
        except (PortError, OSError) as error:
            raise SettingsError(
                f"engine.coordinator is {address!r}, and this process, number 0, cannot listen "
                f"there ({error}); give an address of its machine and a port that is free"
            ) from None
        self.port = _split(self._port.peer.address)[1]
        self._members = Members(self._port, peer_timeout_s, self._hear, self._lose)
        self._members.start()

    def wait_for_all(self, timeout_s: float) -> None:
        """Waits until every process has joined. Raises Unavailable, naming who is missing."""
        wanted = {self._name(index): index for index in range(1, self.num_processes)}
        with self._changed:
            self._changed.wait_for(
                lambda: wanted.keys() <= self._joined or self.lost.reason, timeout_s
            )
            missing = [index for name, index in wanted.items() if name not in self._joined]
        if self.lost.reason:
            raise PeerLost(self.lost.reason)
        if missing:
            raise Unavailable(
                f"of {self.num_processes} processes, {', '.join(map(str, missing))} did not join "
                f"at {self.address} within {timeout_s:g} s (engine.join_timeout_s); start one with "
                f"--process-index {missing[0]}, and the same other settings and secret"
            )

    def begin(self, jax_coordinator: str) -> None:
        """Tells everybody where jax's own service is."""
        self._members.tell(Begin(jax_coordinator))

    def call(self, call: Any) -> None:
        """Tells everybody to make a call of CALLS. Returns at once. Raises PeerLost."""
        if self.lost.reason:
            raise PeerLost(self.lost.reason)
        self._members.tell(call)

    def close(self, *, stop: bool = True) -> None:
        """Ends what the others do: with Stop, or as if this process had died. Safe to call again.

        Waits until they have heard it.
        """
        with self._changed:
            if self._ending:
                return
            self._ending = True
        if stop and not self.lost.reason:
            self._members.tell(Stop())
            self._members.close(self.stops_within_s)
        else:
            self._members.close(0.0)

    def _name(self, index: int) -> str:
        return f"process {index} of {self.num_processes}"

    def _hear(self, name: str, message: Any) -> None:
        match message:
            case Join() if not self.lost.reason:  # else it finds the process 0 that comes next
                self._answer(message)
            case Failed(reason):
                self._say_lost(f"{name} failed: {reason}")

    def _answer(self, join: Join) -> None:
        """Lets a process in, or says why not. Values of process 0's settings are only for who knows
        the secret.
        """
        name, refusal = self._name(join.index), ""
        if not 0 < join.index < self.num_processes:
            refusal = (
                f"engine.process_index is {join.index}; it must be above 0 and below "
                "engine.num_processes of process 0"
            )
        if self._members.answer(
            join, name, self._facts, refusal=refusal, tells_values=self._shares_secret
        ):
            return
        log.info("%s has joined", name)
        with self._changed:
            self._joined.add(name)
            self._changed.notify_all()

    def _lose(self, name: str, reason: str) -> None:
        if name:
            self._say_lost(f"{name} is gone; start all of them again{reason and f' ({reason})'}")
        else:
            self._say_lost(f"the connections to the other processes failed: {reason}")

    def _say_lost(self, reason: str) -> None:
        if self._ending:
            return
        self.lost.say(reason)
        with self._changed:
            self._changed.notify_all()


class Leader:
    """Process 0, as a follower sees it."""

    def __init__(
        self,
        address: str,
        process_index: int,
        facts: Mapping[str, str],
        *,
        peer_timeout_s: float,
        secret: ClusterSecret | None = None,
    ) -> None:
        """`facts` and `secret` have to be those of process 0."""
        self._stops_within_s, self._secret = peer_timeout_s, secret
        self.address, self.index = address, process_index
        self.lost = Lost()
        self._facts = dict(facts)
        self._heard: SimpleQueue[Any] = SimpleQueue()
        self._began: Future[str] = Future()
        self._members: Members | None = None
        self._stopped = False

    def join(self, timeout_s: float) -> str:
        """Joins, waits until all have, and returns the address of jax's own service.

        Raises Unavailable where process 0 does not answer in time, SettingsError where it refuses
        this process, and PeerLost where it ends before.
        """
        until = time.monotonic() + timeout_s
        try:
            host, there = self._reach(until)
            port = _port_of(f"process {self.index}", host, 0, self._secret)
            try:
                left_s, silence_s = until - time.monotonic(), self._stops_within_s
                peer = join(port, "process 0", there, self.index, self._facts, left_s, silence_s)
            except BaseException:
                port.close()
                raise
            self._members = Members(port, self._stops_within_s, self._hear, self._lose)
            self._members.meet(peer)
            self._members.start()
            return self._began.result()
        except OSError:
            raise Unavailable(
                f"process 0 did not answer at {self.address} within {timeout_s:g} s "
                "(engine.join_timeout_s); start it with --process-index 0, correct "
                "engine.coordinator, or give both the same secret (engine.secret_file)"
            ) from None
        except Exception:
            self.close()
            raise

    def calls(self) -> Iterator[Any]:
        """Yields the calls that process 0 makes, in order, until it stops or this end is closed.

        Raises PeerLost where it is gone before.
        """
        while (message := self._heard.get()) is not None:
            yield message
        if self.lost.reason:
            raise PeerLost(self.lost.reason)

    def fail(self, reason: str) -> None:
        """Tells process 0 that this one cannot go on, and ends."""
        if self._members is not None:
            self._members.tell(Failed(reason))
        self._end(self._stops_within_s)

    def close(self) -> None:
        """Ends this end. Safe to call again.

        From any thread: one that waits in `calls` waits no longer.
        """
        self._end(0.0)

    def _end(self, within_s: float) -> None:
        self._stopped = True
        self._heard.put(None)
        if self._members is not None:
            self._members.close(within_s)

    def _reach(self, until: float) -> tuple[str, str]:
        """Returns the address of this machine from which process 0 is reached, and process 0's.

        Tries until a time. Raises OSError.
        """
        while True:
            try:
                family, there = _resolved(self.address)
                with socket.socket(family, socket.SOCK_DGRAM) as route:
                    route.connect(there)  # sends nothing
                    return route.getsockname()[0], f"tcp://{host_and_port(*there[:2])}"
            except OSError:
                if time.monotonic() + ASKS_EVERY_S > until:
                    raise
                time.sleep(ASKS_EVERY_S)

    def _hear(self, _: str, message: Any) -> None:
        assert self._members is not None
        match message:
            case Alive() | Join() | Welcome() | Refused():  # of these, it may come once more
                pass
            case Begin(jax_coordinator):
                self._began.set_result(jax_coordinator)
            case Stop():
                self._stopped = True
                self._members.tell(Alive())  # says that it came
                self._heard.put(None)
            case _ if self._heard.qsize() < MOST_CALLS:
                self._heard.put(message)
            case _:
                self._members.tell(Failed(f"{MOST_CALLS} calls wait here"))

    def _lose(self, name: str, reason: str) -> None:
        if self._stopped:
            return
        reason = f"process 0 at {self.address} is gone; start all processes again" + (
            reason and f" ({reason})"
        )
        if not self._began.done():
            self._began.set_exception(PeerLost(reason))
        self.lost.say(reason)
        self._heard.put(None)
