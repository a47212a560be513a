"""A process's end of the connections between the processes of one server.

Rows travel by value: their bytes are a frame of the message that says where they belong. By
`jax.experimental.transfer` they are no sooner there (measured between two processes of a CPU, value
took 0.8 to 0.9 of its time), and it is not fit for peers that end: a pull from one that was killed
before the connection never returns, nor does one from a peer that is stopped, whatever timeout
they are given; what waits for a puller that was killed is never freed
(measured on two processes of a CPU).

**Who may talk.** Every connection is encrypted and authenticated by ZeroMQ's CURVE with one key
pair, which all ports of a server derive from one secret. Who does not have it gets no message in;
what he can make a port keep is a frame for each of a bounded number of connections, until the
handshake's time is up. The log says that he was there.

**Who is not known yet** but has the key greets: of `greetings` alone, a message may come from a
port that this one was not told of, so that it may be told.

**What is lost comes again.** Messages for a peer are numbered, and kept until it says that they
came, along with messages the other way or by itself. A peer that misses one asks, and gets all from
there on. So a connection that breaks loses, doubles and reorders nothing while both processes live.
"""

import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from serving.cluster.wire import (
    MAX_FRAME_BYTES,
    MOST_FRAMES,
    Buffer,
    Wire,
    WireError,
)

log = logging.getLogger(__name__)

MOST_AT_ONCE = 1024
"""Messages of one `receive`, whoever sent them: who sends without end does not keep it from
returning.
"""
SAYS_WITHIN_S, SAYS_AFTER = 0.1, 32
"""Time and messages after which a peer is told, by a message of its own, what has come."""
ASKS_EVERY_S = 0.25
"""For what is missing."""
PROBES_AFTER_S = 0.5
"""For which a peer has not said that a message came: it is told which the last one was."""
SAYS_EVERY_S = 0.01
"""At most, by messages of their own."""
CURVE_BYTES = 64
"""At least what encryption adds to a frame."""
HANDSHAKE_WITHIN_MS = 5000
PING_EVERY_MS, PONG_WITHIN_MS = 1000, 5000
"""A connection that carries nothing is closed and made anew."""
MOST_CONNECTIONS = 512
"""To a port: more are closed as they come."""
NAMES_EVERY_S = 30.0
"""How often, at most, the log says that connections were refused."""
MOST_BEATS_WAITING = 4
MOST_GREETING_FRAMES = 8
GREETS_WITHIN_MS = 1000
STRANGER = ""
"""Name under which greetings come."""
_INCARNATION_BYTES = 16
_HEAD = struct.Struct(f"!{_INCARNATION_BYTES}s{_INCARNATION_BYTES}sQQ?")
"""The first frame: the incarnations of receiver and sender; the message's number from 1 on, 0 of a
beat, and without further frames that of the last message sent; the number up to which all of the
receiver's came; whether those behind it are to come again.
"""
_ANYBODY = bytes(_INCARNATION_BYTES)
"""The receiver of a greeting."""


class PortError(ValueError):
    """An address that a port cannot listen at or connect to, or a peer that it was not told of."""


class PeerBehind(RuntimeError):
    """As many messages wait for a peer as may: it takes none, or takes them too slowly."""


class Peer(NamedTuple):
    """What a port has to know of another one; it may be sent in a message."""

    name: str
    address: str  # of ZeroMQ
    incarnation: str  # of the port, in hexadecimal: the next port of that name has another


class _Sent(NamedTuple):
    """A message that a peer has yet to acknowledge."""

    number: int
    frames: list[Buffer]


class _Link:
    """The socket of a peer, messages that it has yet to get or to acknowledge, and what came from
    it.
    """

    def __init__(self, socket: zmq.Socket, to: bytes, sender: bytes) -> None:
        self.socket, self.to, self._sender = socket, to, sender
        self._events = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._is_cut = self._is_gone = False
        self.waiting: deque[_Sent] = deque()
        self.unsaid: deque[_Sent] = deque()  # given to the socket
        self.is_full = False
        self.newest = 0  # number of the newest message for it
        self._said = 0  # up to which it has
        self.progress_at = 0.0  # when it last said that something came, or had said all before
        self._came = 0  # up to which all came from it
        self._to_say, self._to_say_since = 0, 0.0  # messages that it has yet to be told of
        self._lacks, self._asked_at, self._spoke_at = False, -math.inf, -math.inf

    def is_gone(self) -> bool:
        """Returns whether the connection broke, and nobody has listened there since."""
        for event, _ in _events_of(self._events):
            if event == zmq.EVENT_CLOSED:  # an attempt to connect failed
                self._is_gone |= self._is_cut
            else:
                self._is_cut = event == zmq.EVENT_DISCONNECTED
                self._is_gone &= self._is_cut
        return self._is_gone

    def close(self, linger_s: float = 0.0) -> None:
        """Drops what has not left by then."""
        self.socket.disable_monitor()
        self._events.close(linger=0)
        self.socket.close(linger=math.ceil(1e3 * linger_s))

    def flush(self) -> None:
        """Sends messages in order, as far as the peer takes them."""
        self.is_full = False
        while self.waiting:
            sent = self.waiting[0]
            if sent.number > self._said:
                if not self._give(sent.number, sent.frames):
                    return
                if not self.unsaid:
                    self.progress_at = time.monotonic()
                self.unsaid.append(sent)
            self.waiting.popleft()

    def hear(self, said: int, again: bool, now: float) -> None:
        """Notes up to which number all messages came, and whether later ones are wanted again."""
        self._said = max(self._said, said)
        while self.unsaid and self.unsaid[0].number <= said:
            self.unsaid.popleft()
            self.progress_at = now
        if again:
            self.waiting.extendleft(reversed(self.unsaid))
            self.unsaid.clear()

    def is_next(self, number: int, is_message: bool, now: float) -> bool:
        """Returns whether a message is the one that is to come. If others are missing it is to come
        again, with them.
        """
        if number > self._came + is_message:
            self._lacks = True
        if not is_message or number > self._came + 1:
            return False
        if not self._to_say:
            self._to_say_since = now
        self._to_say += 1  # one that came before, too: the peer does not know
        is_new = number > self._came
        self._came = max(self._came, number)
        return is_new

    def speak(self, now: float) -> float:
        """Sends a message of its own if one is due; returns when to be called again."""
        if now >= (due := self._due_at()):
            number = self.unsaid[-1].number if self.unsaid else self._said
            self._spoke_at = now
            if self._lacks:
                self._asked_at = now
            self._give(number, [], again=self._lacks)
            self._lacks = False
            due = self._due_at()
        return due

    def _due_at(self) -> float:
        due = math.inf
        if self._to_say:
            due = self._to_say_since + SAYS_WITHIN_S * (self._to_say < SAYS_AFTER)
        if self._lacks:
            due = min(due, self._asked_at + ASKS_EVERY_S)
        if self.unsaid:
            due = min(due, max(self.progress_at, self._spoke_at) + PROBES_AFTER_S)
        return max(due, self._spoke_at + SAYS_EVERY_S)

    def _give(self, number: int, frames: Sequence[Buffer], *, again: bool = False) -> bool:
        """Returns whether the socket took it."""
        head = _HEAD.pack(self.to, self._sender, number, self._came, again)
        try:
            small = sum(map(len, frames)) < zmq.COPY_THRESHOLD
            self.socket.send_multipart([head, *frames], zmq.NOBLOCK, copy=small)
        except zmq.Again:
            self.is_full = True
            return False
        self._to_say = 0
        return True


def _events_of(monitor: zmq.Socket) -> Iterator[tuple[int, int]]:
    """Yields what has happened to a socket, and the value that comes with it."""
    with suppress(zmq.Again):
        while True:
            found = recv_monitor_message(monitor, zmq.NOBLOCK)
            yield found["event"], found["value"]


class Port:
    """Sends messages to other ports and receives theirs.

    ZeroMQ's sockets are for one thread: the one that makes a port calls its methods, but for
    `wake`, which any may call.
    """

    def __init__(
        self,
        name: str,
        messages: Sequence[type],
        key: bytes,
        *,
        bind: str = "tcp://127.0.0.1:0",
        most_waiting: int = 0,
        greetings: Sequence[type] = (),
    ) -> None:
        """Listens.

        Args:
            name: by which others know this port.
            messages: types that travel, as of Wire; the same in all ports.
            key: 32 secret bytes, the same in all ports that may talk to each other.
            bind: address of ZeroMQ, which others have to reach, so none that stands for all
                interfaces; port 0: one that is free.
            most_waiting: messages for one peer that may wait here, and as many in ZeroMQ's hands
                at either end; 0: any number. Rows on their way are few, so that a mark far above
                what they make says that a peer is gone.
            greetings: types that may come of ports that this one was not told of, under the name
                STRANGER; of an invalid one nobody hears.

        Raises PortError where it cannot listen, WireError for messages that cannot travel.
        """
        self._wire, self._most = Wire(messages), most_waiting
        self._greetings = Wire(greetings)
        self._curve = z85.encode(key)
        self._public = zmq.curve_public(self._curve)
        self._incarnation = secrets.token_bytes(_INCARNATION_BYTES)
        self._peers: dict[str, _Link] = {}
        self._name_of: dict[bytes, str] = {}  # of each incarnation that may send
        self._address_of: dict[str, str] = {}  # by name, also of those that are gone
        self._came: list[tuple[str, Any]] = []
        self._context = zmq.Context()
        self._admission = ThreadAuthenticator(self._context)
        self._admission.start()
        self._admission.configure_curve_callback(
            credentials_provider=SimpleNamespace(callback=lambda _, key: key == self._public)
        )
        self._inbox = self._secured(zmq.PULL)
        self._inbox.curve_server = 1
        self._inbox.rcvhwm, self._inbox.ipv6 = most_waiting, "[" in bind
        self._inbox.maxmsgsize = MAX_FRAME_BYTES + CURVE_BYTES
        self._connections, self._refused, self._named_at = set[int](), 0, -math.inf
        self._events = self._inbox.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        try:
            self._inbox.bind(bind)
        except zmq.ZMQError as error:
            self._admission.stop()
            self._context.destroy(linger=0)
            raise PortError(f"{name} cannot listen at {bind!r}: {error}") from None
        address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = Peer(name, address, self._incarnation.hex())
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_open, self._lock = True, threading.Lock()  # a late `wake` must not write elsewhere

    def connect(self, peer: Peer) -> None:
        """Connects to a peer: messages go to it and may come from it. Of a former one of its name,
        what waits and what still comes is dropped. Ports that are to talk are told of each other
        before either sends: what comes from an incarnation that a port was not told of is dropped.
        One that was forgotten is not met again, only its successor.

        Raises PortError for an address that is none, ValueError for an incarnation that is none.
        """
        incarnation = bytes.fromhex(peer.incarnation)
        self.forget(peer.name)
        socket = self._connected(peer.address, self._most)
        self._name_of[incarnation] = peer.name
        self._address_of[peer.name] = peer.address
        self._peers[peer.name] = _Link(socket, incarnation, self._incarnation)

    def forget(self, name: str) -> None:
        """Drops a peer that is gone: what waits for it, what is sent to it later, and what still
        comes from it.
        """
        if link := self._peers.pop(name, None):
            link.close()
            self._name_of.pop(link.to, None)
            self._came = [(sender, message) for sender, message in self._came if sender != name]

    def send(self, to: str, message: Any) -> None:
        """Sends a message and returns at once, whatever the peer does. One peer's messages come in
        the order in which they were sent. Arrays of a message must stay as they are.

        Raises PortError for a peer that never was, PeerBehind for one that has `most_waiting`
        messages waiting here already, and WireError for a message that cannot travel.
        """
        if (link := self._peers.get(to)) is None:
            if to not in self._address_of:
                raise PortError(f"{to!r} is no peer; there are {sorted(self._peers)}")
            return
        link.flush()
        if self._most and len(link.waiting) >= self._most:
            raise PeerBehind(f"{len(link.waiting)} messages wait for {to}, the most there may")
        frames = self._wire.encode(message)
        link.newest += 1
        link.waiting.append(_Sent(link.newest, frames))
        link.flush()

    def greet(self, address: str, message: Any) -> None:
        """Sends one of `greetings` to a port of which no more is known than the address of ZeroMQ.
        It may be lost. Raises PortError for an address that is none.
        """
        socket = self._connected(address, 1)
        head = _HEAD.pack(_ANYBODY, self._incarnation, 0, 0, False)
        socket.send_multipart([head, *self._greetings.encode(message)])
        socket.close(linger=GREETS_WITHIN_MS)

    def gone(self) -> list[str]:
        """Returns peers whose connection broke and at whose address nobody listens any more."""
        return [name for name, link in self._peers.items() if link.is_gone()]

    def undelivered(self) -> list[str]:
        """Returns peers that have yet to acknowledge a message."""
        return [name for name, link in self._peers.items() if link.waiting or link.unsaid]

    def beats(self, to: str) -> Callable[[Any], None]:
        """Returns a function that sends a peer a message that may be lost, in no order with others.
        It may be called in another thread, one, until `close`, whatever the port's own does.

        Raises PortError for a peer that is not there.
        """
        if (link := self._peers.get(to)) is None:
            raise PortError(f"{to!r} is no peer; there are {sorted(self._peers)}")
        socket = self._connected(self._address_of[to], MOST_BEATS_WAITING)
        head = _HEAD.pack(link.to, self._incarnation, 0, 0, False)

        def beat(message: Any) -> None:
            with suppress(zmq.Again):
                socket.send_multipart([head, *self._wire.encode(message)], zmq.NOBLOCK)

        return beat

    def unreached(self, limit_s: float) -> list[str]:
        """Returns peers that have acknowledged nothing for so long, though something is under way
        to them.
        """
        late = time.monotonic() - limit_s
        return [name for name, p in self._peers.items() if p.unsaid and p.progress_at < late]

    def receive(self, timeout_s: float | None) -> list[tuple[str, Any]]:
        """Returns names and messages in the order in which they came: all that are there, up to
        `MOST_AT_ONCE`. Waits for the first up to a time in seconds, None: however long; returns
        without any after that, and after `wake`.

        Raises WireError for a peer's message that is none; the next call has what came before it.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for link in self._peers.values():
                link.flush()
            now = time.monotonic()
            due_at = min([link.speak(now) for link in self._peers.values()], default=math.inf)
            left_s = 0.0 if self._came else max(0.0, deadline - now)
            woken = self._wait(min(left_s, max(0.0, due_at - now)))
            self._take()
            if self._came or woken or not left_s:
                came, self._came = self._came, []
                return came

    def wake(self) -> None:
        """Lets `receive` return, this time or the next; for any thread, at any time."""
        with self._lock:
            if self._is_open:
                os.eventfd_write(self._wakes, 1)

    def close(self, linger_s: float = 0.0) -> None:
        """Drops what has not left by then. Safe to call again; else only `wake` may be called."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            os.close(self._wakes)
        self._inbox.disable_monitor()
        self._events.close(linger=0)
        for link in self._peers.values():
            link.close(linger_s)
        self._peers.clear()
        self._admission.stop()
        self._context.destroy(linger=math.ceil(1e3 * linger_s))

    def _wait(self, timeout_s: float) -> bool:
        """Waits until something comes, a peer can take more, or `wake` is called; returns whether
        it was `wake`.
        """
        sockets = [(each, zmq.POLLIN) for each in (self._wakes, self._inbox, self._events)]
        sockets += [(each.socket, zmq.POLLOUT) for each in self._peers.values() if each.is_full]
        ready = zmq.zmq_poll(sockets, -1 if timeout_s == math.inf else math.ceil(1e3 * timeout_s))
        found = {each for each, _ in ready}
        if self._events in found:
            self._look_at_connections()
        if self._wakes in found:
            os.eventfd_read(self._wakes)
        return self._wakes in found

    def _look_at_connections(self) -> None:
        """Closes connections beyond the most, and logs that some were refused."""
        for event, value in _events_of(self._events):
            if event == zmq.EVENT_ACCEPTED:
                self._connections.add(value)
                if len(self._connections) > MOST_CONNECTIONS:
                    self._end_connection(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.discard(value)
            else:
                self._refused += 1
        now = time.monotonic()
        if self._refused and now - self._named_at > NAMES_EVERY_S:
            log.warning(
                "%s: %d connections came to nothing: they have another secret than this server, or "
                "are none of its processes",
                self.peer.address,
                self._refused,
            )
            self._refused, self._named_at = 0, now

    def _end_connection(self, descriptor: int) -> None:
        """Shuts one of the inbox's connections down, which ZeroMQ then closes."""
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # It may have been closed since, and the descriptor be another's.
            if connection.getsockname()[1] == int(self.peer.address.rpartition(":")[2]):
                connection.shutdown(socket.SHUT_RDWR)

    def _take(self) -> None:
        """Reads what has come, up to `MOST_AT_ONCE` messages, into `_came`."""
        now = time.monotonic()
        with suppress(zmq.Again):
            for _ in range(MOST_AT_ONCE - len(self._came)):
                frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
                head, *parts = [frame.buffer for frame in frames]
                if len(head) != _HEAD.size:
                    continue
                to, sender, number, said, again = _HEAD.unpack(head)
                name = self._name_of.get(sender)
                if to == _ANYBODY:
                    self._take_greeting(parts)
                    continue
                if to != self._incarnation or name is None:
                    continue
                link, is_beat = self._peers[name], not number and len(parts) > 0
                if not is_beat:
                    link.hear(said, again, now)
                    if not link.is_next(number, len(parts) > 0, now):
                        continue
                try:
                    if len(frames) > MOST_FRAMES:
                        raise WireError(f"it has {len(frames)} frames; it may have {MOST_FRAMES}")
                    self._came.append((name, self._wire.decode(parts)))
                except WireError as error:
                    raise WireError(f"from {name}: {error}") from None

    def _take_greeting(self, parts: Sequence[Buffer]) -> None:
        with suppress(WireError):
            if len(parts) <= MOST_GREETING_FRAMES:
                self._came.append((STRANGER, self._greetings.decode(parts)))

    def _secured(self, kind: int) -> zmq.Socket:
        secured = self._context.socket(kind)
        secured.curve_secretkey, secured.curve_publickey = self._curve, self._public
        secured.handshake_ivl = HANDSHAKE_WITHIN_MS
        return secured

    def _connected(self, address: str, most_waiting: int) -> zmq.Socket:
        """Returns a socket to a peer's address. Raises PortError for an invalid one."""
        outbox = self._secured(zmq.PUSH)
        outbox.curve_serverkey = self._public
        outbox.sndhwm, outbox.linger, outbox.ipv6 = most_waiting, 0, "[" in address
        outbox.heartbeat_ivl, outbox.heartbeat_timeout = PING_EVERY_MS, PONG_WITHIN_MS
        try:
            outbox.connect(address)
        except zmq.ZMQError as error:
            outbox.close()
            raise PortError(f"no peer is at {address!r}: {error}") from None
        return outbox
