"""Messages between processes: as frames and back, and between ports over real sockets."""

import json
import re
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from zmq.utils import z85

from serving.cluster.port import Peer, PeerBehind, Port, PortError
from serving.cluster.wire import (
    MAX_ARRAY_BYTES,
    MOST_FRAMES,
    Wire,
    WireError,
)
from serving.pipeline.messages import FromExperts, ToExperts

SOON_S = 10.0
KEY = bytes(range(32))


@dataclass(frozen=True)
class Part:
    number: int
    word: str | None
    scores: Float[np.ndarray, "a b"]


class Whole(NamedTuple):
    rows: Any
    maybe_rows: Any | None
    flag: bool
    ratio: float
    name: str
    ints: list[int]
    floats: list[float]
    words: list[str] | None
    index: Int[np.ndarray, "n"]
    maybe: Int[np.ndarray, "n"] | None
    part: Part
    parts: list[Part]


class Note(NamedTuple):
    number: int
    rows: Any | None = None


INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)


@st.composite
def arrays(draw, dtypes, rank):
    shape = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


ROWS = arrays([ml_dtypes.bfloat16, np.float16, np.float32], 2)
INDEX = arrays([np.int8, np.int32, np.int64], 1)
PARTS = st.builds(
    Part, INTS, st.none() | st.text(), arrays([np.float32, np.float64, ml_dtypes.bfloat16], 2)
)
WHOLES = st.builds(
    Whole,
    ROWS,
    st.none() | ROWS,
    st.booleans(),
    FLOATS,
    st.text(),
    st.lists(INTS),
    st.lists(FLOATS),
    st.none() | st.lists(st.text()),
    INDEX,
    st.none() | INDEX,
    PARTS,
    st.lists(PARTS, max_size=3),
)
WIRE = Wire([Whole, Note])


def frames_of(message):
    return [bytes(frame) for frame in WIRE.encode(message)]


def decoded(frames):
    return WIRE.decode(frames)


def same(one, other):
    """Returns whether values are equal bit by bit, since there are many NaN."""
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Part):
        return type(other) is Part and same(list(vars(one).values()), list(vars(other).values()))
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@settings(max_examples=30)
@given(WHOLES)
def test_a_message_is_what_it_was(message):
    assert same(decoded(frames_of(message)), message)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rows_are_read_where_they_came(dtype):
    rows = np.arange(12).reshape(3, 4).astype(dtype)
    found = decoded(frames_of(Note(1, rows)))
    assert same(found.rows, rows)
    assert not found.rows.flags.owndata
    assert not found.rows.flags.writeable


def test_arrays_that_are_strided_travel_and_are_whole_when_they_come():
    index = np.arange(10)[::3]
    message = FromExperts(1, np.ones((4, 8), np.float32).T, index, index)
    wire = Wire([ToExperts, FromExperts])
    frames = [bytes(frame) for frame in wire.encode(message)]
    found = wire.decode(frames)
    assert same(found, message)
    assert found.row.flags.writeable


MESSAGE = Whole(
    np.zeros((2, 3), np.float32), None, True, 1.0, "n", [1], [1.0], None,
    np.arange(4), None, Part(1, None, np.zeros((1, 1))), [],
)  # fmt: skip


@given(st.data())
def test_whatever_comes_is_a_message_or_refused(data):
    frames = frames_of(MESSAGE)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(frames[0]) - 1))
        cut = data.draw(st.integers(at, len(frames[0])))
        frames[0] = frames[0][:at] + data.draw(st.binary(max_size=4)) + frames[0][cut:]
    else:
        at = data.draw(st.integers(0, len(frames)))
        frames[at:] = data.draw(st.lists(st.binary(max_size=40), max_size=4))
    try:
        found = decoded(frames)
    except WireError:
        return
    assert type(found) in (Whole, Note)


def changed(*path_and_value):
    """Returns the frames of MESSAGE with another value in the header."""
    frames = frames_of(MESSAGE)
    header = json.loads(frames[0])
    *path, last, value = path_and_value
    at = header
    for step in path:
        at = at[step]
    at[last] = value
    return [json.dumps(header).encode(), *frames[1:]]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "no frame"),
        ([b"\xff"], "not JSON"),
        ([b"[" * 100_000], "not JSON"),
        ([b"1" * 5000], "not JSON"),
        ([b"[]"], "a name and values"),
        ([b'["Part", {}]'], "'Part' is not among Whole, Note"),
        ([b'["Note", {"number": 1}]'], "must have number, rows"),
        (changed(1, "flag", 1), r"Whole\.flag: it is 1; it must be of bool"),
        (changed(1, "name", None), r"Whole\.name: it is None; it must be of str"),
        (changed(1, "ratio", 10**400), r"Whole\.ratio: .* too much for a float"),
        (changed(1, "ints", [1, "2"]), r"Whole\.ints: it is '2'; it must be of int"),
        (changed(1, "ints", {}), r"Whole\.ints: it is {}; it must be a list"),
        (changed(1, "parts", [1]), r"Whole\.parts: Part is 1; it must have number, word, scores"),
        (changed(1, "part", "word", 3), r"Whole\.part: Part\.word: it is 3"),
        (changed(1, "index", "x"), r"Whole\.index: 'x' is no dtype and shape"),
        (changed(1, "index", ["object", [4]]), r"\['object', \[4\]\] is no dtype and shape"),
        (changed(1, "index", ["int64", [-4]]), "no dtype and shape"),
        (changed(1, "index", ["int64", [True]]), "no dtype and shape"),
        (changed(1, "index", ["int64", [5]]), r"its frame has 32 bytes; int64 \[5\] has 40"),
        (changed(1, "index", ["int64", [10**30]]), "its frame has 32 bytes"),
        (changed(1, "index", ["int64", [4] + [1] * 99]), "no array is"),
        (changed(1, "index", ["uint64", [4]]), r"it is uint64 \[4\]; it must have 1 dimensions"),
        (changed(1, "index", ["int64", [2, 2]]), r"it is int64 \[2, 2\]"),
        (changed(1, "rows", ["int32", [2, 3]]), r"Whole\.rows: it is int32"),
        (frames_of(MESSAGE)[:-1], r"Whole\.part: Part\.scores: its frame is missing"),
        ([*frames_of(MESSAGE), b""], "Whole has 1 frames too many"),
    ],
)  # fmt: skip
def test_frames_that_are_no_message_are_refused_by_name(frames, words):
    with pytest.raises(WireError, match=words):
        decoded(frames)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Part(1, None, np.zeros((1, 1))), "Part is not among Whole, Note"),
        (Note(np.int64(1)), r"Note\.number: it is .*; it must be of int"),
        (Note(1, [[1.0]]), r"Note\.rows: it is .*; it must be rows"),
        (Note(1, np.zeros((2, 3), ">f4")), r"Note\.rows: it is >f4"),
        (Note(1, np.zeros(3, np.float32)), r"Note\.rows: it is float32 \[3\]"),
        (MESSAGE._replace(index=[1]), r"Whole\.index: .* an array of NumPy"),
        (MESSAGE._replace(part=None), r"Whole\.part: it is None; it must be of Part"),
        (Note(1, np.broadcast_to(np.float32(0), (2, MAX_ARRAY_BYTES))), r"Note\.rows: it has"),
    ],
)
def test_messages_that_cannot_travel_are_refused_when_they_are_sent(message, words):
    with pytest.raises(WireError, match=words):
        WIRE.encode(message)


class Deeper(NamedTuple):
    parts: list[Whole]


class Strange(NamedTuple):
    field: dict


class Unranked(NamedTuple):
    field: Int[np.ndarray, "..."]


@pytest.mark.parametrize("message", [Deeper, Strange, Unranked, dict])
def test_types_that_cannot_travel_are_refused_at_once(message):
    with pytest.raises(WireError):
        Wire([message])


def test_two_types_of_one_name_are_refused():
    with pytest.raises(WireError, match="one name"):
        Wire([Note, NamedTuple("Note", [("other", int)])])


@pytest.fixture
def port():
    """Yields a function that makes ports; they are closed at the end."""
    made = []

    def make(name, **options):
        made.append(Port(name, [Note, ToExperts], options.pop("key", KEY), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def two(port):
    one, other = port("one"), port("other")
    one.connect(other.peer)
    other.connect(one.peer)
    return one, other


def numbers(port, count, *, helps=()):
    """Returns the numbers of the next `count` notes; `helps` are senders that need turns to send
    them.
    """
    found, deadline = [], time.monotonic() + SOON_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{found} came"
        for each in helps:
            assert each.receive(0) == []
        found += [message.number for _, message in port.receive(0.01 if helps else SOON_S)]
    return found


class Proxy:
    """Relays a port's connections, and closes them on request: what is under way is lost."""

    def __init__(self, peer):
        self.connections, self.count, self.passes = [], 0, True
        host, _, number = peer.address.removeprefix("tcp://").rpartition(":")
        self.target = host, int(number)
        self.listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.peer = peer._replace(address=address)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                ends = self.listener.accept()[0], socket.create_connection(self.target)
                self.connections += ends
                self.count += 1
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self.carry, args=(one, other), daemon=True).start()

    def carry(self, one, other):
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if self.passes:
                    other.sendall(data)

    def reset(self):
        """Closes with an RST, which discards what is in buffers as well."""
        ends, self.connections = self.connections, []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()

    def close(self):
        self.listener.close()
        self.reset()


@pytest.fixture
def proxied(port):
    """Returns two ports, and the proxies through which the second and the first are reached."""
    one, other = port("one"), port("other")
    proxies = Proxy(other.peer), Proxy(one.peer)
    one.connect(proxies[0].peer)
    other.connect(proxies[1].peer)
    yield one, other, *proxies
    for each in proxies:
        each.close()


@pytest.fixture
def raw():
    """Yields a function that makes sockets which send frames as they are."""
    with zmq.Context() as context:
        sockets = []

        def connect(peer, key=KEY, server=KEY):
            sockets.append(context.socket(zmq.PUSH))
            if key is not None:
                sockets[-1].curve_secretkey = z85.encode(key)
                sockets[-1].curve_publickey = zmq.curve_public(z85.encode(key))
                sockets[-1].curve_serverkey = zmq.curve_public(z85.encode(server))
            sockets[-1].connect(peer.address)
            return sockets[-1]

        yield connect
        for socket in sockets:
            socket.close(linger=0)


def head(number, to, sender, said=0, again=False):
    return struct.pack("!16s16sQQ?", bytes.fromhex(to), bytes.fromhex(sender), number, said, again)


def note(number, to, sender):
    return [head(number, to, sender), *frames_of(Note(number))]


def test_messages_come_in_order_with_their_senders_name(two):
    one, other = two
    for number in range(300):
        one.send("other", Note(number))
    assert numbers(other, 300) == list(range(300))
    other.send("one", Note(7))
    assert one.receive(SOON_S) == [("other", Note(7))]
    assert one.receive(0) == []


@pytest.mark.deep
def test_connections_that_are_reset_lose_double_and_reorder_nothing(proxied):
    one, other, *proxies = proxied
    rows, count = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024), 400
    came, resets = {one: [], other: []}, 0
    sent, deadline = 0, time.monotonic() + 3 * SOON_S
    while min(map(len, came.values())) < count:
        assert time.monotonic() < deadline, [len(each) for each in came.values()]
        if sent < min(count, len(came[one]) + 30):
            one.send("other", Note(sent, rows))
            other.send("one", Note(sent, rows))
            sent += 1
        for port in came:
            came[port] += [message for _, message in port.receive(0)]
        if len(came[one]) // 40 > resets:  # when connections carry much
            resets += 1
            for proxy in proxies:
                proxy.reset()
    assert resets >= 5
    assert min(proxy.count for proxy in proxies) > 5
    for messages in came.values():
        assert [message.number for message in messages] == list(range(count))
        assert all(same(message.rows, rows) for message in messages)


def test_the_last_message_is_not_lost_either(proxied):
    one, other, proxy, _ = proxied
    one.send("other", Note(0))
    assert numbers(other, 1, helps=[one]) == [0]
    proxy.passes = False
    one.send("other", Note(1))
    while one.unreached(0.05) != ["other"]:
        assert one.receive(0.01) == other.receive(0) == []
    proxy.reset()
    proxy.passes = True
    assert numbers(other, 1, helps=[one]) == [1]
    while one.unreached(0):
        assert one.receive(0.01) == other.receive(0) == []


def test_beats_come_whatever_else_is_missing(two):
    one, other = two
    beat = one.beats("other")
    thread = threading.Thread(target=beat, args=(Note(5),))
    thread.start()
    thread.join()
    assert other.receive(SOON_S) == [("one", Note(5))]
    one.send("other", Note(6))
    assert other.receive(SOON_S) == [("one", Note(6))]


def test_a_stranger_and_who_means_another_are_not_heard(two, raw):
    one, other = two
    to, sender, socket = other.peer.incarnation, one.peer.incarnation, raw(other.peer)
    stranger = bytes(16).hex()
    socket.send_multipart(note(1, to, stranger))
    socket.send_multipart(note(2, stranger, sender))  # a former port of that address
    socket.send_multipart([b"", b"x"])
    socket.send_multipart([b"x"])
    socket.send_multipart(note(1, to, sender))
    assert other.receive(SOON_S) == [("one", Note(1))]


def test_a_message_that_is_none_is_named_and_loses_no_other(two, raw):
    one, other = two
    to, sender, socket = other.peer.incarnation, one.peer.incarnation, raw(other.peer)
    socket.send_multipart(note(1, to, sender))
    socket.send_multipart([head(2, to, sender), b"{}"])
    socket.send_multipart([head(3, to, sender), *[b""] * MOST_FRAMES])
    socket.send_multipart(note(4, to, sender))
    found, refused, deadline = [], [], time.monotonic() + SOON_S
    while len(found) < 2 and time.monotonic() < deadline:
        try:
            found += numbers(other, 1)
        except WireError as error:
            refused.append(str(error))
    assert found == [1, 4]
    assert refused == [
        "from one: a header is {}; it must be a name and values",
        f"from one: it has {MOST_FRAMES + 1} frames; it may have {MOST_FRAMES}",
    ]


def test_what_a_former_incarnation_sent_is_not_its_successors(two, raw, port):
    one, other = two
    successor = port("one")
    socket = raw(other.peer)
    other.connect(successor.peer)
    socket.send_multipart(note(2, other.peer.incarnation, one.peer.incarnation))
    socket.send_multipart(note(1, other.peer.incarnation, successor.peer.incarnation))
    assert other.receive(SOON_S) == [("one", Note(1))]
    other.send("one", Note(3))
    successor.connect(other.peer)
    assert successor.receive(SOON_S) == [("other", Note(3))]
    assert one.receive(0) == []


def test_what_waited_for_a_former_incarnation_is_dropped(port):
    one, former = port("one"), port("other")
    former.close()
    one.connect(former.peer)
    one.send("other", Note(1))
    successor = port("other", bind=former.peer.address)
    successor.connect(one.peer)
    one.connect(successor.peer)
    one.send("other", Note(2))
    assert successor.receive(SOON_S) == [("one", Note(2))]


def test_who_is_forgotten_is_not_heard_and_gets_nothing(two, raw):
    one, other = two
    other.forget("one")
    other.forget("one")
    other.forget("nobody")
    socket = raw(other.peer)
    socket.send_multipart(note(1, other.peer.incarnation, one.peer.incarnation))
    other.send("one", Note(2))
    other.connect(one.peer)
    socket.send_multipart(note(1, other.peer.incarnation, one.peer.incarnation))
    other.send("one", Note(4))
    assert numbers(one, 1) == [4]
    assert numbers(other, 1) == [1]


def test_who_never_was_is_refused(two):
    with pytest.raises(PortError, match=r"'nobody' is no peer; there are \['other'\]"):
        two[0].send("nobody", Note(1))


@pytest.mark.parametrize("address", ["nowhere", "tcp://", "tcp://127.0.0.1:x"])
def test_addresses_that_are_none_are_refused(port, address):
    with pytest.raises(PortError, match=address):
        port("one", bind=address)
    with pytest.raises(PortError, match=address):
        port("one").connect(Peer("other", address, bytes(16).hex()))


def test_a_dead_peer_blocks_nobody(port):
    one, dead, alive = port("one"), port("dead"), port("alive")
    dead.close()
    alive.connect(one.peer)
    one.connect(dead.peer)
    one.connect(alive.peer)
    rows = np.zeros((64, 2048), np.float32)
    for number in range(100):
        one.send("dead", Note(number, rows))
    one.send("alive", Note(1))
    assert numbers(alive, 1) == [1]
    one.forget("dead")
    one.send("dead", Note(1, rows))
    one.close()


def test_a_peer_that_does_not_receive_is_named_and_loses_nothing(port):
    one, slow = port("one", most_waiting=4), port("slow", most_waiting=4)
    slow.connect(one.peer)
    one.connect(slow.peer)
    sent = 0

    def send_on():
        nonlocal sent
        while sent < 10_000:
            one.send("slow", Note(sent, np.zeros((64, 2048), np.float32)))
            sent += 1

    with pytest.raises(PeerBehind, match="4 messages wait for slow"):
        send_on()
    assert numbers(slow, sent, helps=[one]) == list(range(sent))
    one.send("slow", Note(sent))
    assert numbers(slow, 1, helps=[one]) == [sent]  # ZeroMQ may not have made room again yet


def test_wake_ends_a_wait_now_and_one_that_comes(port):
    one = port("one")
    one.wake()
    assert one.receive(None) == []
    waker = threading.Thread(target=one.wake)
    waker.start()
    assert one.receive(None) == []
    waker.join()
    assert one.receive(0) == []


def test_a_port_is_closed_twice_and_woken_afterwards(port):
    one = port("one")
    one.connect(Peer("other", "tcp://127.0.0.1:9", bytes(16).hex()))
    one.send("other", Note(1))
    one.close()
    one.close()
    one.wake()


def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_strangers_get_nothing_in_and_keep_nobody_from_anything(two, raw):
    """Without CURVE, with another key, with none at all; and many that never finish a handshake."""
    one, other = two
    host, _, number = other.peer.address.removeprefix("tcp://").rpartition(":")
    to, sender = other.peer.incarnation, one.peer.incarnation
    one.send("other", Note(0))
    assert numbers(other, 1) == [0]
    before = resident_bytes()
    stranger = secrets.token_bytes(32)
    for socket_ in (
        raw(other.peer, key=None),
        raw(other.peer, key=stranger),  # knows the public key
        raw(other.peer, key=stranger, server=stranger),
    ):
        with suppress(zmq.Again):  # it has no connection that would take them
            socket_.send_multipart(note(2, to, sender), zmq.NOBLOCK)
            socket_.send_multipart([bytes(1 << 20)] * 8, zmq.NOBLOCK)
            while True:
                socket_.send(b"x", zmq.NOBLOCK)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
    frame = b"\x06" + struct.pack("!Q", 1 << 40) + bytes(1 << 16)
    waiting = []
    for at in range(200):
        waiting.append(socket.create_connection((host, int(number))))
        given = (b"", greeting, greeting + frame, secrets.token_bytes(1 << 16))[at % 4]
        with suppress(OSError):
            waiting[-1].sendall(given)
    assert other.receive(0.3) == []
    for sent in range(1, 200):
        one.send("other", Note(sent, np.zeros((4, 4), np.float32)))
    assert numbers(other, 199) == list(range(1, 200))
    assert other.receive(0.2) == []
    assert resident_bytes() - before < 64 << 20
    for each in waiting:
        each.close()


def test_a_flood_of_what_is_not_heard_does_not_keep_receive_from_returning(two, raw):
    """From a peer that has the key, but to which the port was not told to connect."""
    _, other = two
    flood, over = raw(other.peer), threading.Event()

    def send():
        while not over.is_set():
            with suppress(zmq.Again):
                flood.send(b"x", zmq.NOBLOCK)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        time.sleep(0.05)
        began = time.monotonic()
        assert other.receive(0.1) == []
        assert time.monotonic() - began < SOON_S / 4
    finally:
        over.set()
        thread.join()
