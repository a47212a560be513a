"""How process 0 tells the other processes of a mesh what to run, and how they notice each other's
end.

A gRPC stream a follower, opened by the follower at the address of `engine.coordinator`. It is
grpcio's, which is here already; messages stay in order; and it says within `peer_timeout_s` that
the other end is gone, even of a machine that fell silent, which jax's key-value store would leave
to be found out. Messages are protobuf, arrays are bytes: nothing that comes from the network is
ever run.

Where the processes share a secret, both ends prove by TLS that they know it, and a stranger gets no
further than the handshake. Without one (on loopback), other users of the machine can join; they are
not told the values of settings. What has not joined is bounded in number and time either way.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc

from serving.cluster.secret import TLS_NAME, ClusterSecret
from serving.errors import Lost, PeerLost, SettingsError, Unavailable, shown
from serving.proto.jmoe.v1 import hosts_pb2 as pb
from serving.proto.jmoe.v1 import hosts_pb2_grpc as rpc

log = logging.getLogger(__name__)

CALLS_OF_ANY_SIZE = ("grpc.max_receive_message_length", -1)
"""For a follower alone: united experts travel in calls. What process 0 receives is short."""
SPEAKS_WITHIN_S = 10.0
"""How long a connection to process 0 may shake hands, and a stream wait with its first message."""
MOST_CONNECTIONS = 512
"""To process 0: more are closed as they come."""
STREAMS_BESIDE = 64
"""Streams that process 0 listens to at a time beside those of its followers; others wait."""


def channel_options(peer_timeout_s: float) -> list[tuple[str, int]]:
    """Returns gRPC's options, with which a silent end is noticed within that time."""
    ping_ms = max(1, int(1000 * peer_timeout_s / 3))
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", ping_ms),
        ("grpc.http2.ping_timeout_ms", ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ping_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _listening_options(peer_timeout_s: float) -> list[tuple[str, int]]:
    """Returns gRPC's options of process 0, which bound what strangers can hold."""
    return [
        *channel_options(peer_timeout_s),
        ("grpc.server_handshake_timeout_ms", int(1000 * SPEAKS_WITHIN_S)),
        ("grpc.max_connection_idle_ms", int(1000 * SPEAKS_WITHIN_S)),  # without a stream
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
        ("grpc.max_concurrent_streams", 4),  # a connection
        ("grpc.max_receive_message_length", 1 << 20),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
    ]


class Followers(rpc.HostsServicer):
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
        self._queues: dict[int, SimpleQueue[pb.ToFollower | None]] = {}
        self._ending = False
        self._shares_secret = secret is not None
        pool = ThreadPoolExecutor(
            num_processes + STREAMS_BESIDE, thread_name_prefix="jmoe-followers"
        )
        self._server = grpc.server(pool, options=_listening_options(peer_timeout_s))
        rpc.add_HostsServicer_to_server(self, self._server)
        try:
            if secret is None:
                self.port = self._server.add_insecure_port(address)
            else:
                key, certificate = secret.certificate()
                own = grpc.ssl_server_credentials(
                    [(key, certificate)], certificate, require_client_auth=True
                )
                self.port = self._server.add_secure_port(address, own)
        except RuntimeError as error:
            raise SettingsError(
                f"engine.coordinator is {address!r}, and this process, number 0, cannot listen "
                f"there ({error}); give an address of its machine and a port that is free"
            ) from None
        self._server.start()

    def wait_for_all(self, timeout_s: float) -> None:
        """Waits until every process has joined. Raises Unavailable, naming who is missing."""
        wanted = set(range(1, self.num_processes))
        with self._changed:
            self._changed.wait_for(
                lambda: wanted <= self._queues.keys() or self.lost.reason, timeout_s
            )
            missing = sorted(wanted - self._queues.keys())
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
        self._send(pb.ToFollower(begin=pb.Begin(jax_coordinator=jax_coordinator)))

    def call(self, call: pb.Call) -> None:
        """Tells everybody to make a call. Returns at once. Raises PeerLost."""
        if self.lost.reason:
            raise PeerLost(self.lost.reason)
        self._send(pb.ToFollower(call=call))

    def close(self, *, stop: bool = True) -> None:
        """Ends what the others do: with Stop, or as if this process had died. Safe to call again.

        Waits until they have heard it.
        """
        with self._changed:
            if self._ending:
                return
            self._ending = True
        if stop and not self.lost.reason:
            self._send(pb.ToFollower(stop=pb.Stop()))
            self._send(None)
        grace_s = self.stops_within_s if stop and not self.lost.reason else 0.0
        self._server.stop(grace_s).wait(self.stops_within_s)
        self._send(None)  # what is left of their threads

    def _send(self, message: pb.ToFollower | None) -> None:
        with self._changed:
            for queue in self._queues.values():
                queue.put(message)

    def Follow(self, request_iterator: Any, context: Any) -> Iterator[pb.ToFollower]:
        """Serves a follower's stream, in a thread of its own."""
        silent = threading.Timer(SPEAKS_WITHIN_S, context.cancel)
        silent.daemon = True
        silent.start()
        try:
            join = next(request_iterator, pb.FromFollower()).join
        finally:
            silent.cancel()
        queue: SimpleQueue[pb.ToFollower | None] = SimpleQueue()
        with self._changed:
            refusal, answer = self._refusal(join)
            if not refusal:
                self._queues[join.process_index] = queue
                self._changed.notify_all()
        if refusal:
            log.warning("a process was refused: %s", refusal)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, answer)
        log.info("process %d of %d joined", join.process_index, self.num_processes)
        listen = threading.Thread(
            target=self._listen, args=(request_iterator, join.process_index, queue), daemon=True
        )
        listen.start()
        while (message := queue.get()) is not None:
            yield message

    def _refusal(self, join: pb.Join) -> tuple[str, str]:
        """Returns why a process may not follow, for the log and for that process; empty: it may.

        Values of process 0's settings are only for who knows the secret.
        """
        index = join.process_index
        if not 0 < index < self.num_processes:
            reason = (
                f"engine.process_index is {index}; it must be above 0 and below "
                "engine.num_processes of process 0"
            )
            return reason, reason
        if index in self._queues:
            reason = (
                f"engine.process_index is {index}, and such a process has joined already; give "
                "each its own"
            )
            return reason, reason
        for name in sorted(self._facts.keys() | join.facts.keys()):
            here, there = self._facts.get(name, ""), join.facts.get(name, "")
            if here != there:
                if name not in self._facts:
                    name, there = shown(name), shown(there)
                reason = (
                    f"{name} is {there} in process {index} and {here} in process 0; it has to be "
                    "alike in every process"
                )
                if self._shares_secret:
                    return reason, reason
                return reason, f"{name} differs from process 0's, whose log has both values"
        return "", ""

    def _listen(
        self, messages: Iterator[Any], index: int, queue: SimpleQueue[pb.ToFollower | None]
    ) -> None:
        """Reads what a follower says until its stream ends."""
        who, reason = f"process {index} of {self.num_processes}", ""
        try:
            for message in messages:
                reason = reason or f"{who} failed: {message.failed}"
        except Exception:  # the stream broke: that is what is waited for
            log.debug("the stream of %s broke", who, exc_info=True)
        queue.put(None)
        with self._changed:
            ending = self._ending
            self._changed.notify_all()
        if not ending:
            self.lost.say(reason or f"{who} is gone; start all of them again")
            with self._changed:
                self._changed.notify_all()


class Leader:
    """Process 0, as a follower sees it."""

    def __init__(
        self,
        address: str,
        num_processes: int,
        process_index: int,
        facts: Mapping[str, str],
        *,
        peer_timeout_s: float,
        secret: ClusterSecret | None = None,
    ) -> None:
        """`facts` and `secret` have to be those of process 0."""
        self._stops_within_s = peer_timeout_s
        self.address, self.num_processes, self.index = address, num_processes, process_index
        self.lost = Lost()
        self._facts = dict(facts)
        options = [*channel_options(peer_timeout_s), CALLS_OF_ANY_SIZE]
        if secret is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            key, certificate = secret.certificate()
            self._channel = grpc.secure_channel(
                address,
                grpc.ssl_channel_credentials(certificate, key, certificate),
                [*options, ("grpc.ssl_target_name_override", TLS_NAME)],
            )
        self._said: SimpleQueue[pb.FromFollower | None] = SimpleQueue()
        self._heard: SimpleQueue[pb.ToFollower | None] = SimpleQueue()
        self._began: Future[str] = Future()
        self._listens: threading.Thread | None = None
        self._stopped = False

    def join(self, timeout_s: float) -> str:
        """Joins, waits until all have, and returns the address of jax's own service.

        Raises Unavailable where process 0 does not answer in time, SettingsError where it refuses
        this process, and PeerLost where it ends before.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise Unavailable(
                f"process 0 did not answer at {self.address} within {timeout_s:g} s "
                "(engine.join_timeout_s); start it with --process-index 0, correct "
                "engine.coordinator, or give both the same secret (engine.secret_file)"
            ) from None
        join = pb.Join(process_index=self.index, facts=self._facts)
        self._said.put(pb.FromFollower(join=join))
        stream = rpc.HostsStub(self._channel).Follow(iter(self._said.get, None))
        self._listens = threading.Thread(target=self._listen, args=(stream,), daemon=True)
        self._listens.start()
        try:
            return self._began.result()
        except Exception:
            self.close()
            raise

    def calls(self) -> Iterator[pb.Call]:
        """Yields the calls that process 0 makes, in order, until it stops or this end is closed.

        Raises PeerLost where it is gone before.
        """
        while (message := self._heard.get()) is not None:
            if message.WhichOneof("kind") == "stop":
                return
            yield message.call
        if self.lost.reason:
            raise PeerLost(self.lost.reason)

    def fail(self, reason: str) -> None:
        """Tells process 0 that this one cannot go on, and ends the stream."""
        self._said.put(pb.FromFollower(failed=reason))
        self.close()

    def close(self) -> None:
        """Ends the stream, once process 0 has heard everything. Safe to call again.

        From any thread: one that waits in `calls` waits no longer.
        """
        self._stopped = True
        self._heard.put(None)
        self._said.put(None)
        if self._listens is not None:
            self._listens.join(self._stops_within_s)
        self._channel.close()

    def _listen(self, stream: Any) -> None:
        """Reads the stream to its end: not in the thread that runs programs, which may hang."""
        try:
            for message in stream:
                kind = message.WhichOneof("kind")
                if kind == "begin":
                    self._began.set_result(message.begin.jax_coordinator)
                    continue
                self._stopped |= kind == "stop"
                self._heard.put(message)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not self._began.done():
                self._began.set_exception(SettingsError(error.details()))
                return
            log.debug("the stream of process 0 broke", exc_info=True)
        if self._stopped:
            return
        reason = f"process 0 at {self.address} is gone; start all processes again"
        if not self._began.done():
            self._began.set_exception(PeerLost(reason))
        self.lost.say(reason)
        self._heard.put(None)
