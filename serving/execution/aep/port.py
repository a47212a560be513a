"""A process's end of the connections between workers.

Rows travel by value: their bytes are a frame of the message that says where they belong. By
`jax.experimental.transfer` they are no sooner there (measured between two processes of a CPU, value
took 0.8 to 0.9 of its time), and it is not fit for peers that end: a pull from one that was killed
before the connection never returns, nor does one from a peer that is stopped, whatever timeout
they are given; what waits for a puller that was killed is never freed
(`python -m benchmarks.row_transport`).

There is no authentication and no encryption: listen where only workers are.
"""

import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import jax
import zmq

from serving.execution.aep.wire import MAX_FRAME_BYTES, Part, Rows, Wire, WireError, to_frame

MOST_AT_ONCE = 1024
"""Messages of one `receive`: who sends without end does not keep it from returning."""
LOOKS_EVERY_S = 1e-4
"""Whether rows have been computed; jax calls nobody back."""
_INCARNATION_BYTES = 16


class PortError(ValueError):
    """An address that a port cannot listen at or connect to, or a peer that it was not told of."""


class PeerBehind(RuntimeError):
    """As many messages wait for a peer as may: it takes none, or takes them too slowly."""


class Peer(NamedTuple):
    """What a port has to know of another one."""

    name: str
    address: str  # of ZeroMQ
    incarnation: bytes  # of the port, not of its name: the next port of that name has another


class _Outgoing:
    """The socket of a peer, and what it has yet to be given."""

    def __init__(self, socket: zmq.Socket, envelope: bytes) -> None:
        self.socket, self.envelope = socket, envelope
        self.waiting: deque[list[Part]] = deque()
        self.is_full = False

    def flush(self) -> bool:
        """Gives it messages in order, up to the first whose rows have yet to be computed; whether
        there is one.
        """
        self.is_full = False
        while self.waiting:
            parts = self.waiting[0]
            if not all(map(_is_computed, parts)):
                return True
            frames = [self.envelope, *map(to_frame, parts)]
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.is_full = True
                return False
            self.waiting.popleft()
        return False


def _is_computed(part: Any) -> bool:
    return not isinstance(part, jax.Array) or cast(Any, part).is_ready()


class Port:
    """Sends messages to other ports and receives theirs.

    ZeroMQ's sockets are for one thread: the one that makes a port calls its methods, but for
    `wake`, which any may call.
    """

    def __init__(
        self,
        name: str,
        messages: Sequence[type],
        *,
        device: Any = None,
        bind: str = "tcp://127.0.0.1:0",
        most_waiting: int = 0,
    ) -> None:
        """Listens.

        Args:
            name: by which others know this port.
            messages: types that travel, as of Wire; the same in all ports.
            device: of jax, where rows that come are put; None: they are NumPy's, read-only.
            bind: address of ZeroMQ, which others have to reach, so none that stands for all
                interfaces; port 0: one that is free.
            most_waiting: messages for one peer that may wait here, and as many in ZeroMQ's hands
                at either end; 0: any number. Rows on their way are few, so that a mark far above
                what they make says that a peer is gone.

        Raises PortError where it cannot listen, WireError for messages that cannot travel.
        """
        self._wire, self._device, self._most = Wire(messages), device, most_waiting
        self._incarnation = secrets.token_bytes(_INCARNATION_BYTES)
        self._peers: dict[str, _Outgoing] = {}
        self._name_of: dict[bytes, str] = {}  # of each incarnation that may send
        self._known: set[str] = set()  # and those that are gone
        self._came: list[tuple[str, Any]] = []
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm, self._inbox.maxmsgsize = most_waiting, MAX_FRAME_BYTES
        try:
            self._inbox.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PortError(f"{name} cannot listen at {bind!r}: {error}") from None
        address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = Peer(name, address, self._incarnation)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_open, self._lock = True, threading.Lock()  # a late `wake` must not write elsewhere

    def connect(self, peer: Peer) -> None:
        """Messages go to a peer and may come from it. Of a former one of its name, what waits and
        what still comes is dropped. Ports that are to talk are told of each other before either
        sends: what comes from a stranger is dropped.

        Raises PortError for an address that is none.
        """
        self.forget(peer.name)
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm, socket.linger = self._most, 0
        try:
            socket.connect(peer.address)
        except zmq.ZMQError as error:
            socket.close()
            raise PortError(f"no peer is at {peer.address!r}: {error}") from None
        self._known.add(peer.name)
        self._name_of[peer.incarnation] = peer.name
        self._peers[peer.name] = _Outgoing(socket, peer.incarnation + self._incarnation)

    def forget(self, name: str) -> None:
        """A peer is gone: what waits for it and what is sent to it later is dropped, and what still
        comes from it.
        """
        if outgoing := self._peers.pop(name, None):
            outgoing.socket.close(linger=0)
            self._name_of.pop(outgoing.envelope[:_INCARNATION_BYTES], None)
            self._came = [(sender, message) for sender, message in self._came if sender != name]

    def send(self, to: str, message: Any) -> None:
        """Returns at once, whatever the peer does. One peer's messages come in the order in which
        they were sent. Rows may have yet to be computed; they leave during a later `send` or
        `receive`, and until then must not be donated. Arrays of a message must stay as they are.

        A connection that breaks though both processes live loses what was under way.

        Raises PortError for a peer that never was, PeerBehind for one that has `most_waiting`
        messages waiting here already, WireError for a message that cannot travel, and what the
        computation of rows raised.
        """
        if (outgoing := self._peers.get(to)) is None:
            if to not in self._known:
                raise PortError(f"{to!r} is no peer; there are {sorted(self._peers)}")
            return
        outgoing.flush()
        if self._most and len(outgoing.waiting) >= self._most:
            raise PeerBehind(f"{len(outgoing.waiting)} messages wait for {to}, the most there may")
        parts = self._wire.encode(message)
        for part in parts:
            if isinstance(part, jax.Array):
                part.copy_to_host_async()
        outgoing.waiting.append(parts)
        outgoing.flush()

    def receive(self, timeout_s: float | None) -> list[tuple[str, Any]]:
        """Names and messages, in the order in which they came: all that are there, up to
        `MOST_AT_ONCE`. Waits for the first up to a time in seconds, None: however long; returns
        without any after that, and after `wake`.

        Raises WireError for a peer's message that is none; the next call has what came before it.
        Also raises what the computation of rows that were to leave raised.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            computing = sum(outgoing.flush() for outgoing in self._peers.values()) > 0
            left_s = 0.0 if self._came else max(0.0, deadline - time.monotonic())
            woken = self._wait(0.0 if computing else left_s)
            self._take()
            if self._came or woken or not left_s:
                came, self._came = self._came, []
                return came
            if computing:
                time.sleep(min(left_s, LOOKS_EVERY_S))

    def wake(self) -> None:
        """Lets `receive` return, this time or the next; for any thread, at any time."""
        with self._lock:
            if self._is_open:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Drops what has yet to leave. Safe to call again; else only `wake` may be called then."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            os.close(self._wakes)
        self._peers.clear()
        self._context.destroy(linger=0)

    def _wait(self, timeout_s: float) -> bool:
        """Until something comes, a peer that took no more does, or `wake`; whether it was that."""
        sockets = [(self._wakes, zmq.POLLIN), (self._inbox, zmq.POLLIN)]
        sockets += [(each.socket, zmq.POLLOUT) for each in self._peers.values() if each.is_full]
        zmq.zmq_poll(sockets, -1 if timeout_s == math.inf else math.ceil(1e3 * timeout_s))
        with suppress(BlockingIOError):
            return bool(os.eventfd_read(self._wakes))
        return False

    def _take(self) -> None:
        """All that has come."""
        with suppress(zmq.Again):
            while len(self._came) < MOST_AT_ONCE:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
                envelope, *parts = [frame.buffer for frame in frames]
                to, sender = envelope[:_INCARNATION_BYTES], bytes(envelope[_INCARNATION_BYTES:])
                name = self._name_of.get(sender)
                if to != self._incarnation or name is None:
                    continue
                try:
                    self._came.append((name, self._wire.decode(parts, self._rows)))
                except WireError as error:
                    raise WireError(f"from {name}: {error}") from None

    def _rows(self, view: Rows) -> Any:
        return view if self._device is None else jax.device_put(view, self._device)
