"""Creates and binds a server's ports, and explains why one cannot be bound."""

import contextlib
import errno
import socket
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from serving.cluster.addresses import join
from serving.frontend import reflection
from serving.frontend.guard import Guard, Service
from serving.frontend.inbox import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from serving.frontend.server import Server

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, not shared
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # Keeps flow-control windows fixed: an unread call must not buffer more on a faster network.
    ("grpc.http2.bdp_probe", 0),
    # Detects a client that vanished without closing its connection, whose requests are then
    # aborted.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Closes connections that never send anything, or are idle, to make room for others.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
)
Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""As `socket.getaddrinfo` returns it."""
_GRACE_S = 1.0  # for sending last messages after every request has ended
_TRIED_PORTS = 100
_SPARE_STREAMS = 128
"""Calls that one connection may have open beyond `max_calls`, so that health checks and refusals
still get through.
"""


class GrpcPort:
    """A gRPC port: services behind a guard, and health and reflection of them."""

    def __init__(
        self,
        server: "Server",
        guard: Guard,
        host: str,
        port: int,
        max_connections: int,
        prefix: str = "",
    ) -> None:
        """Connections beyond `max_connections` are closed at once. `prefix` is that of the flags
        which errors name, such as `--admin-port`.
        """
        self.guard, self.services = guard, list[Service]()
        self.port = 0  # the bound one
        self._server, self._max_connections = server, max_connections
        self._host, self._wanted, self._prefix = host, port, prefix
        self._grpc: grpc.aio.Server | None = None
        self._started = False

    def add(self, service: Service) -> None:
        """Serves `service`, as soon as it starts."""
        self.guard.add(service)
        self.services.append(service)
        self._server.health.names.add(service.descriptor.full_name)

    @property
    def address(self) -> str:
        """The `host:port` at which it listens."""
        return join(self._host, self.port)

    def bind(self) -> grpc.aio.Server:
        """Takes the port, on which the server that it returns may listen then.

        Raises OSError with one line that names the flag to change: `--<prefix>host`,
        `--<prefix>port`.
        """
        address, certificates = join(self._host, self._wanted), self._server.certificates
        # Checked here, since gRPC logs the reason but does not raise it; and first, since a server
        # of gRPC's that never starts leaves words on stderr when the process ends.
        try:
            _check_free(self._host, self._wanted)
        except OSError as error:
            raise cannot_listen(address, error, self._prefix, "port") from None
        options = (
            *_OPTIONS,
            ("grpc.max_allowed_incoming_connections", self._max_connections),
            ("grpc.max_concurrent_streams", self.guard.limits.max_calls + _SPARE_STREAMS),
        )
        self._grpc = made = grpc.aio.server(interceptors=[self.guard], options=options)
        for service in self.services:
            service.add(service.servicer, made)
        health_pb2_grpc.add_HealthServicer_to_server(self._server.health, made)
        names = (service.descriptor.full_name for service in self.services)
        reflection.add(made, (*names, health.SERVICE_NAME))
        try:
            self.port = (
                made.add_insecure_port(address)
                if certificates is None
                else made.add_secure_port(address, certificates.for_grpc())
            )
        except RuntimeError as error:
            refused = OSError(None, str(error))
            raise cannot_listen(address, refused, self._prefix, "port") from error
        return made

    async def start(self) -> str:
        """Starts to listen, on the port that `bind` has taken or takes now; returns the address."""
        await (self._grpc or self.bind()).start()
        self._started = True
        return self.address

    async def stop(self) -> None:
        """Ends the remaining calls, and closes the port."""
        self.guard.streams.close()
        if self._grpc is not None:
            if not self._started:  # one that never starts leaves words on stderr as well
                await self._grpc.start()
            await self._grpc.stop(_GRACE_S)
        self.guard.close()


def bind_socket(
    host: str, port: int, prefix: str = "", first: int = 0, port_flag: str = "http-port"
) -> socket.socket:
    """Returns a socket for HTTP, bound to the first address of the host name.

    Port 0 is any free one or, with `first`, that or the next free one.

    Raises as `GrpcPort.bind`; the flags are `--<prefix>host` and `--<prefix><port_flag>`.
    """
    if first and not port:
        for tried in range(first, first + _TRIED_PORTS):
            with contextlib.suppress(OSError):
                return bind_socket(host, tried, prefix)
    try:
        return _bound(*addresses(host, port)[0])
    except OSError as error:
        raise cannot_listen(join(host, port), error, prefix, port_flag) from None


def cannot_listen(address: str, refused: OSError, prefix: str, port_flag: str) -> OSError:
    """Returns the error that names the flag to change: `--<prefix><port_flag>`, or `--<prefix>host`
    if the port is not the reason.
    """
    flag = port_flag if refused.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
    advice = f"choose another --{prefix}{flag}"
    if refused.errno == errno.EACCES:
        advice += ", or let this process use it: docs/operating.md, Port 443"
    return OSError(f"cannot listen on {address}: {refused.strerror}; {advice}")


def addresses(host: str, port: int) -> list[Address]:
    """Returns the addresses on which a host's name says to listen. Raises OSError."""
    name, passive = host.strip("[]"), socket.AI_PASSIVE
    try:
        return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=passive)
    except UnicodeError:
        raise OSError(None, "this is no name of a host") from None


def _bound(family: int, kind: int, protocol: int, _: str, where: Any) -> socket.socket:
    """Returns a socket that is bound to one of `addresses`, and listens, so that no other process
    takes the same port. Raises OSError.
    """
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


def _check_free(host: str, port: int) -> None:
    """Raises OSError if an address of the host is taken, or none can be bound."""
    found, refusals = addresses(host, port), list[OSError]()
    for address in found:
        try:
            _bound(*address).close()
        except OSError as error:
            refusals.append(error)
    taken = [error for error in refusals if error.errno in (errno.EADDRINUSE, errno.EACCES)]
    if taken or len(refusals) == len(found):
        raise (taken or refusals)[0]
