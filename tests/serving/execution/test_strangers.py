"""Strangers at the port where the processes of a mesh meet, over real sockets."""

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq
from zmq.utils import z85

from serving.cluster import followers as module
from serving.cluster import port as port_module
from serving.cluster.followers import Followers, Leader
from serving.cluster.members import GREETINGS, Fact, Join
from serving.cluster.secret import ClusterSecret
from serving.cluster.wire import MAX_FRAME_BYTES, Wire
from serving.errors import SettingsError
from serving.execution.replay import UseWay

pytestmark = pytest.mark.usefixtures("processes_meet_at_once")

FACTS = {"engine.page_size": "16", "engine.policy": "'secret.module:Policy'"}
SECRET, OTHER = ClusterSecret(b"0" * 64), ClusterSecret(b"1" * 64)


@contextmanager
def served(secret):
    """Process 0 of two."""
    leader = Followers("127.0.0.1:0", 2, FACTS, peer_timeout_s=30, secret=secret)
    try:
        yield leader
    finally:
        leader.close(stop=False)


@contextmanager
def joins(leader, secret):
    """A follower joins, though whatever has been done to process 0, and hears a call."""
    other = Leader(f"127.0.0.1:{leader.port}", 1, FACTS, peer_timeout_s=30, secret=secret)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(other.join, 60)
        try:
            leader.wait_for_all(60)
            leader.begin("there:1")
            assert joined.result(60) == "there:1"
            yield other
            leader.call(UseWay(4))
            assert next(other.calls()) == UseWay(4)
            assert not leader.lost.reason
            assert not other.lost.reason
        finally:
            other.close()


def key_of(secret):
    return (secret or ClusterSecret(b"")).derive("connections between processes of a mesh")


@contextmanager
def stranger(leader, key, server):
    """Yields a socket to process 0 with a key of its own, which takes the server's for another's
    (None: without encryption), and a socket of events that tells when the connection is refused.
    """
    with zmq.Context() as context:
        one = context.socket(zmq.PUSH)
        one.linger = 0
        if key is not None:
            one.curve_secretkey = z85.encode(key)
            one.curve_publickey = zmq.curve_public(z85.encode(key))
            one.curve_serverkey = zmq.curve_public(z85.encode(server))
        # Before it connects: who breaks the protocol is refused once, and does not try again.
        refused = one.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        one.connect(f"tcp://127.0.0.1:{leader.port}")
        try:
            yield one, refused
        finally:  # both, or the context waits for ever
            one.disable_monitor()
            refused.close()
            one.close()


def greeting(message, *more):
    """Returns a greeting's frames."""
    frames = Wire(GREETINGS).encode(message)
    return [bytes(16) + secrets.token_bytes(16) + bytes(17), *frames, *more]


def join(index=1, facts=FACTS, address="tcp://127.0.0.1:9"):
    return Join(index, address, "ab" * 16, [Fact(*fact) for fact in facts.items()])


@pytest.mark.parametrize(
    ("key", "server"),
    [(None, None), (OTHER, OTHER), (OTHER, SECRET)],
    ids=["no encryption", "another secret", "another key"],
)
def test_who_has_not_the_secret_is_told_nothing_and_neither_joins_nor_ends_the_server(
    key, server, caplog
):
    with served(SECRET) as leader:
        with stranger(leader, key and key_of(key), server and key_of(server)) as (
            one,
            refused,
        ):
            with suppress(zmq.Again):  # it may have been refused already, for good
                one.send_multipart(greeting(join()), zmq.NOBLOCK)
            assert refused.poll(20_000)
        assert not leader._joined
        with joins(leader, SECRET):
            pass
    assert "came to nothing: they have another secret" in caplog.text


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with", "without"])
def test_whoever_has_the_key_and_says_nonsense_does_not_join(secret):
    nonsense = [
        [b""],
        [b"garbage"],
        [bytes(49)],
        [bytes(49), b"[]"],
        [bytes(49), b'["Join", {}]'],
        [bytes(49), b'["Stop", {}]'],
        [bytes(49), *[bytes(MAX_FRAME_BYTES)] * 20],
        [bytes(49), bytes(2 * MAX_FRAME_BYTES)],
        greeting(join(), b"more"),
        greeting(join(index=2**63 - 1)),
        greeting(join(address="http://nobody")),
        greeting(Join(1, "tcp://127.0.0.1:9", "no hex", [])),
    ]
    with served(secret) as leader:
        with ExitStack() as stack:
            for frames in nonsense:
                key = key_of(secret)
                one, _ = stack.enter_context(stranger(leader, key, key))
                one.send_multipart(frames)
            with joins(leader, secret):
                pass
        assert leader._joined == {"process 1 of 2"}


def test_a_follower_tells_its_settings_to_nobody_without_the_secret():
    """It does not join a false process 0, which would send it what to run."""
    for false in (OTHER, None):
        with served(false) as leader:
            address = f"127.0.0.1:{leader.port}"
            follower = Leader(address, 1, FACTS, peer_timeout_s=30, secret=SECRET)
            with pytest.raises(module.Unavailable, match=r"the same secret \(engine.secret_file"):
                follower.join(0.5)
            assert not leader._joined


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "loopback"])
def test_idle_connections_and_garbage_are_bounded_and_work_goes_on(secret, monkeypatch):
    monkeypatch.setattr(port_module, "HANDSHAKE_WITHIN_MS", 1000)
    monkeypatch.setattr(port_module, "MOST_CONNECTIONS", 150)
    with served(secret) as leader, ExitStack() as stack:
        stack.enter_context(joins(leader, secret))
        idle, most = [], 0
        for number in range(200):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", leader.port)))
            if number % 2:
                one.sendall(b"\x00\xffGET / garbage" * 100)
            one.settimeout(20)
            idle.append(one)
            most = max(most, len(leader._port._connections))
        began_at = time.monotonic()
        for one in idle:
            ended(one)  # all, as none of them ever shakes hands
        assert time.monotonic() - began_at < 10
        assert 0 < most <= 160


def test_connections_beyond_the_most_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(port_module, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(port_module, "HANDSHAKE_WITHIN_MS", 60_000)
    with served(SECRET) as leader, ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", leader.port), 20))
            for _ in range(40)
        ]
        for one in idle[20:]:
            ended(one)
        idle[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            ended(idle[0])


def ended(connection):
    """Reads a connection to its end, or fails after its time limit."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with", "without"])
def test_values_are_told_only_to_who_has_the_secret(secret, caplog):
    facts = FACTS | {"engine.page_size": "32"}
    with served(secret) as leader:
        address = f"127.0.0.1:{leader.port}"
        with pytest.raises(SettingsError, match=r"engine.page_size") as refused:
            Leader(address, 1, facts, peer_timeout_s=30, secret=secret).join(60)
        assert ("is 32 in process 1 of 2 and 16 in" in str(refused.value)) == (secret is not None)
        assert ("16" in str(refused.value)) == (secret is not None)
        with pytest.raises(SettingsError, match=r"engine.process_index is 9") as refused:
            Leader(address, 9, FACTS, peer_timeout_s=30, secret=secret).join(60)
        with pytest.raises(SettingsError, match=r"differ.*|is .* in process 1") as refused:
            Leader(address, 1, {"a\nb" * 99: "c\n"}, peer_timeout_s=30, secret=secret).join(60)
    assert "engine.page_size is 32 in process 1 of 2 and 16 in process 0" in caplog.text
    assert not any("\n" in record.getMessage() for record in caplog.records)
