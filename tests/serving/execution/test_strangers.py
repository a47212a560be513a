"""Strangers at the port where the processes of a mesh meet, over real sockets."""

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event

import grpc
import pytest

from serving.cluster import followers as module
from serving.cluster.followers import Followers, Leader
from serving.cluster.secret import ClusterSecret
from serving.errors import SettingsError
from serving.proto.jmoe.v1 import hosts_pb2 as pb
from serving.proto.jmoe.v1 import hosts_pb2_grpc as rpc

FACTS = {"engine.page_size": "16", "engine.policy": "'secret.module:Policy'"}
JOIN = pb.FromFollower(join=pb.Join(process_index=1))
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
    other = Leader(f"127.0.0.1:{leader.port}", 2, 1, FACTS, peer_timeout_s=30, secret=secret)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(other.join, 60)
        try:
            leader.wait_for_all(60)
            leader.begin("there:1")
            assert joined.result(60) == "there:1"
            yield other
            leader.call(pb.Call(use_way=4))
            assert next(other.calls()).use_way == 4
            assert not leader.lost.reason
            assert not other.lost.reason
        finally:
            other.close()


def plain(port, options):
    return grpc.insecure_channel(f"127.0.0.1:{port}", options)


def with_tls(secret, root):
    """Of one who has a secret and trusts the server of another, or has no certificate at all."""

    def channel(port, options):
        pair = secret.certificate() if secret else (None, None)
        credentials = grpc.ssl_channel_credentials(root.certificate()[1], *pair)
        return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)

    return channel


@pytest.mark.parametrize(
    "channel",
    [plain, with_tls(OTHER, OTHER), with_tls(OTHER, SECRET), with_tls(None, SECRET)],
    ids=["no TLS", "another secret", "another's certificate", "no certificate"],
)
def test_who_has_not_the_secret_is_told_nothing_and_neither_joins_nor_ends_the_server(channel):
    options = [("grpc.ssl_target_name_override", "jmoe")]
    with served(SECRET) as leader, channel(leader.port, options) as stranger:
        for said in ([JOIN], [pb.FromFollower(failed="an end")], []):
            with pytest.raises(grpc.RpcError) as refused:
                next(rpc.HostsStub(stranger).Follow(iter(said), timeout=60))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "engine." not in refused.value.details()
        assert not leader._queues
        with joins(leader, SECRET):
            pass


def test_a_follower_tells_its_settings_to_nobody_without_the_secret():
    """It does not join a false process 0, which would send it what to run."""
    for false in (OTHER, None):
        with served(false) as leader:
            address = f"127.0.0.1:{leader.port}"
            follower = Leader(address, 2, 1, FACTS, peer_timeout_s=30, secret=SECRET)
            with pytest.raises(module.Unavailable, match=r"the same secret \(engine.secret_file"):
                follower.join(0.5)
            assert not leader._queues


@pytest.mark.parametrize("secret", [SECRET, None], ids=["TLS", "loopback"])
def test_idle_connections_and_garbage_are_bounded_and_work_goes_on(secret, monkeypatch):
    monkeypatch.setattr(module, "SPEAKS_WITHIN_S", 0.5)
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 150)
    with served(secret) as leader, ExitStack() as stack:
        stack.enter_context(joins(leader, secret))
        idle = []
        for number in range(200):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", leader.port)))
            if number % 2:
                one.sendall(b"\x00\xffGET / garbage" * 100)
            one.settimeout(20)
            idle.append(one)
        began_at = time.monotonic()
        for one in idle:
            ended(one)  # all, as none of them ever shakes hands
        assert time.monotonic() - began_at < 10


def ended(connection):
    """Reads a connection to its end, or fails after its time limit."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass


def test_a_handshake_with_another_secret_ends_at_the_certificate(tmp_path):
    """As a tool of one's own would try it, without checking the server."""
    (tmp_path / "pair").write_bytes(b"".join(OTHER.certificate()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tmp_path / "pair")
    with served(SECRET) as leader:
        raw = socket.create_connection(("127.0.0.1", leader.port), timeout=20)
        with raw, context.wrap_socket(raw) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with suppress(ssl.SSLError, ConnectionError):  # an alert, or an end without one
                assert stranger.recv(1) == b""


def test_streams_that_say_nothing_are_ended_and_hold_nobody_up(monkeypatch):
    """On loopback without a secret, where any user of the machine can open them."""
    monkeypatch.setattr(module, "SPEAKS_WITHIN_S", 0.2)
    over = Event()
    with served(None) as leader, ExitStack() as stack:
        silent = []
        for _ in range(100):
            channel = plain(leader.port, [("grpc.use_local_subchannel_pool", 1)])
            stubs = rpc.HostsStub(stack.enter_context(channel))
            silent.append(stubs.Follow(iter(lambda: over.wait(60), True)))
        stack.callback(over.set)
        with joins(leader, None):
            for stream in silent:
                with pytest.raises(grpc.RpcError):
                    next(stream)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with", "without"])
def test_values_are_told_only_to_who_has_the_secret(secret, caplog):
    facts = FACTS | {"engine.page_size": "32"}
    with served(secret) as leader:
        address = f"127.0.0.1:{leader.port}"
        with pytest.raises(SettingsError, match=r"engine.page_size") as refused:
            Leader(address, 2, 1, facts, peer_timeout_s=30, secret=secret).join(60)
        assert ("is 32 in process 1 and 16 in" in str(refused.value)) == (secret is not None)
        assert ("16" in str(refused.value)) == (secret is not None)
        with pytest.raises(SettingsError, match=r"engine.process_index is 9") as refused:
            Leader(address, 2, 9, FACTS, peer_timeout_s=30, secret=secret).join(60)
        with pytest.raises(SettingsError, match=r"differ.*|is .* in process 1") as refused:
            Leader(address, 2, 1, {"a\nb" * 99: "c\n"}, peer_timeout_s=30, secret=secret).join(60)
    assert "engine.page_size is 32 in process 1 and 16 in process 0" in caplog.text
    assert not any("\n" in record.getMessage() for record in caplog.records)
