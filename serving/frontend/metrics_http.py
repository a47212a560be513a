"""Metrics and health probes over HTTP, on a port of their own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import make_wsgi_app
from starlette.exceptions import HTTPException

from serving.errors import PermissionDenied, ServingError, Unauthenticated, shown
from serving.frontend.access import ANYBODY
from serving.frontend.origin import Origins
from serving.frontend.web import Listener

if TYPE_CHECKING:
    from serving.frontend.server import Server

PATHS = ("/metrics", "/healthz", "/readyz")


def front_end(server: "Server") -> "MetricsPort | None":
    """Offers metrics and probes on `metrics_port`."""
    config = server.config
    return MetricsPort(server, config.host, config.metrics_port) if config.metrics_port else None


class MetricsPort(Listener):
    """The port of one server's metrics and probes."""

    def __init__(self, server: "Server", host: str, port: int) -> None:
        """`port` may be 0, for any free one."""
        super().__init__(
            *(server, "metrics", make_app(server, host), host, port, server.config.max_connections),
            port_flag="metrics-port",
        )

    async def start(self) -> str:
        """See Listener. Returns nothing to be printed: the log says where it listens."""
        await super().start()
        return ""


def make_app(server: "Server", host: str) -> FastAPI:
    """Makes the application of a server that listens on `host`.

    `/metrics` is for Prometheus, which must send a key that may read metrics if the server has
    keys. `/healthz` is 200 as long as the process answers. `/readyz` is 200 or 503, with a word of
    why.
    """
    handlers: dict[Any, Any] = {HTTPException: _refuse, ServingError: _refuse}
    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=handlers)
    scraped, origins = scraping(server), Origins(host)

    async def metrics(request: Request) -> Response:
        caller = server.access.caller(request.headers.get("authorization"))
        caller.require_metrics()
        asked = request.headers.get("host")
        if caller is ANYBODY and asked and origins.is_loopback and not origins.has(asked):
            raise PermissionDenied(f"this server is not {shown(asked)}; ask for localhost")
        return await scraped(request)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        ready, word = server.readiness()
        return PlainTextResponse(f"{word}\n", 200 if ready else 503)

    for path, route in zip(PATHS, (metrics, healthz, readyz), strict=True):
        app.add_route(path, route)
    return app


def scraping(server: "Server") -> Callable[[Request], Awaitable[Response]]:
    """Returns what answers a request for a server's metrics, whose caller may read them."""
    written = make_wsgi_app(server.metrics.registry)

    async def scraped(request: Request) -> Response:
        # In a thread, as tokens would wait for so much text.
        return await asyncio.to_thread(_scraped, written, request)

    return scraped


def _scraped(written: Callable[..., Any], request: Request) -> Response:
    """Returns what the client library's application answers, in the format that is asked for."""
    environ = {
        "PATH_INFO": "/metrics",
        "REQUEST_METHOD": "GET",
        "QUERY_STRING": request.url.query,
        **{f"HTTP_{name.upper().replace('-', '_')}": v for name, v in request.headers.items()},
    }
    headers: dict[str, str] = {}
    body = b"".join(written(environ, lambda status, given: headers.update(given)))
    return Response(body, headers=headers)


async def _refuse(request: Request, error: Exception) -> Response:
    """Says in one line why a request is refused."""
    if isinstance(error, HTTPException):
        line = f"nothing is at this path; there are {', '.join(PATHS)}"
        line = "use GET" if error.status_code == 405 else line
        return PlainTextResponse(f"{line}\n", error.status_code, error.headers)
    if isinstance(error, Unauthenticated):
        return PlainTextResponse(f"{error}\n", 401, {"www-authenticate": "Bearer"})
    return PlainTextResponse(f"{error}\n", 403)
