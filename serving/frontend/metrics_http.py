"""Metrics and health probes over HTTP, with a thread per connection."""

import asyncio
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from serving.cluster.addresses import join
from serving.errors import PermissionDenied, Unauthenticated, shown
from serving.frontend.access import ANYBODY, Access
from serving.frontend.listen import addresses, cannot_listen
from serving.frontend.origin import Origins

if TYPE_CHECKING:
    from serving.frontend.server import Server

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Concurrent connections, each with a thread; a further one ends the oldest."""
TIMEOUT_S = 10.0
"""Time limit for a request and its response."""

PATHS = ("/metrics", "/healthz", "/readyz")

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def front_end(server: "Server") -> "MetricsPort | None":
    """Offers metrics and probes on `metrics_port`."""
    config = server.config
    return MetricsPort(server, config.host, config.metrics_port) if config.metrics_port else None


class MetricsPort:
    """The port of one server's metrics and probes."""

    def __init__(self, server: "Server", host: str, port: int) -> None:
        """`port` may be 0, for any free one."""
        self._server, self._host, self._wanted = server, host, port
        self.port = 0  # the bound one, after start
        self._http: WSGIServer | None = None

    async def start(self) -> str:
        """Starts to listen. Returns nothing to be printed. Raises OSError if it cannot listen."""
        of, metrics, host, port = self._server, self._server.metrics, self._host, self._wanted
        ended = metrics.calls.door("metrics", PATHS, "500")
        try:
            self._http, _ = serve(
                *(host, port, metrics.registry, of.readiness, metrics.access, of.tls, ended)
            )
        except OSError as error:
            raise cannot_listen(join(host, port), error, "", "metrics-port") from None
        self.port = self._http.server_port
        return ""

    async def stop(self) -> None:
        """Closes the port."""
        if self._http is not None:
            await asyncio.to_thread(self._http.shutdown)
            self._http.server_close()
            self._http = None


class BoundedServer(socketserver.ThreadingMixIn, WSGIServer):
    """A server with a thread per connection, at most `MAX_CONNECTIONS`, each for `TIMEOUT_S`.

    A connection is ended by shutting down its socket: its thread then reads end-of-file and exits.
    """

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, bursts of clients wait for seconds

    def __init__(
        self,
        host: str,
        port: int,
        tls: Callable[[], ssl.SSLContext] | None,
        ended: Callable[[str, int], None],
    ) -> None:
        """See `serve`."""
        self.tls, self.ended = tls, ended
        self._open: dict[socket.socket, float] = {}  # deadlines, the oldest connection first
        self._lock = threading.Lock()
        self.address_family, *_, where = addresses(host, port)[0]
        super().__init__((str(where[0]), port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection; its TLS handshake is left to its thread."""
        request, client_address = super().get_request()
        if self.tls is not None:
            request = self.tls().wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        return request, client_address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handshakes and handles a request, in the connection's thread."""
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(TIMEOUT_S)
            request.do_handshake()
        super().finish_request(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, and ends the oldest connection if there are too
        many.
        """
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _end(oldest)
            self._open[request] = time.monotonic() + TIMEOUT_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections past their deadline; the serving thread calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, until in self._open.items() if until < now]:
                del self._open[request]
                _end(request)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that is done."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed request at DEBUG only, since clients disconnect all the time."""
        log.debug("a metrics request from %s failed", client_address, exc_info=True)


def _end(request: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown, after which its thread would go on without encryption for a
        # moment.
        socket.socket.shutdown(request, socket.SHUT_RDWR)
    except OSError:
        log.debug("a connection was gone already")


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S  # of one read or write

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing: scrapes are not logged."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Counts an answered request; the standard library calls this for each."""
        path = getattr(self, "path", "").partition("?")[0]  # unset if the request was malformed
        self.server.ended(path if path in PATHS else "other", int(code))  # type: ignore[attr-defined]


def serve(
    host: str,
    port: int,
    registry: CollectorRegistry,
    readiness: Callable[[], tuple[bool, str]],
    access: Access | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    ended: Callable[[str, int], None] = lambda route, status: None,
) -> tuple[WSGIServer, threading.Thread]:
    """Starts a thread that answers GET requests, also while the engine is loading; `tls` encrypts.
    `ended` is told of every request: the path, or `other`, and the status.

    `/metrics` is for Prometheus, which must send a key that may read metrics if `access` has keys.
    `/healthz` is 200 as long as the process answers. `/readyz` is 200 or 503 as `readiness`
    returns, whose word is the body; `readiness` is called in threads of this server.

    Raises OSError if it cannot listen.
    """
    server = BoundedServer(host, port, tls, ended)
    server.set_app(_app(registry, readiness, access or Access(), Origins(host)))
    thread = threading.Thread(target=server.serve_forever, name="jmoe-metrics", daemon=True)
    thread.start()
    return server, thread


def _app(
    registry: CollectorRegistry,
    readiness: Callable[[], tuple[bool, str]],
    access: Access,
    origins: Origins,
) -> App:
    written = make_wsgi_app(registry)

    def check(environ: dict[str, Any]) -> None:
        host, caller = environ.get("HTTP_HOST"), access.caller(environ.get("HTTP_AUTHORIZATION"))
        caller.require_metrics()
        if caller is ANYBODY and host and origins.is_loopback and not origins.has(host):
            raise PermissionDenied(f"this server is not {shown(host)}; ask for localhost")

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, line = "200 OK", "ok"
        match environ["PATH_INFO"]:
            case "/metrics":
                try:
                    check(environ)
                    return written(environ, start_response)
                except Unauthenticated as error:
                    status, line = "401 Unauthorized", str(error)
                except PermissionDenied as error:
                    status, line = "403 Forbidden", str(error)
            case "/healthz":
                pass
            case "/readyz":
                ready, line = readiness()
                status = status if ready else "503 Service Unavailable"
            case _:
                message = f"nothing is at this path; there are {', '.join(PATHS)}"
                status, line = "404 Not Found", message
        return _text(environ, start_response, status, line)

    return app


def _text(
    environ: dict[str, Any], start_response: Callable[..., Any], status: str, line: str
) -> Iterable[bytes]:
    headers = [("Content-Type", "text/plain; charset=utf-8")]
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        status, line = "405 Method Not Allowed", "use GET"
        headers.append(("Allow", "GET, HEAD"))
    if status.startswith("401"):
        headers.append(("WWW-Authenticate", "Bearer"))
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else f"{line}\n".encode()
    start_response(status, headers)
    return [body]
