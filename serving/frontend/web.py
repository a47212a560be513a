"""HTTP ports: an ASGI application in uvicorn, in the server's own event loop."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.routing import Match

from serving.cluster.addresses import join
from serving.frontend.bounded_http import KEEP_ALIVE_S, BoundedHttp
from serving.frontend.handshake import Door
from serving.frontend.listen import bind_socket

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from serving.frontend.server import Server

log = logging.getLogger(__name__)

Ended = Callable[[str, int], None]


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that does not handle signals, which the process does itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


class _Counted:
    """An application whose requests are counted by route and status when they end."""

    def __init__(self, app: FastAPI, ended: Ended) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """See ASGI. `scope["state"]["code"]` has the status of an error within a stream."""
        code = 500

        def sending(message: "Message") -> Any:  # not a coroutine: it is called for every token
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._ended(self._route(scope), scope["state"].get("code", code))

    def _route(self, scope: "Scope") -> str:
        found = scope.get("route")
        if found is None:  # refused before it was routed
            matching = (one for one in self._app.routes if one.matches(scope)[0] is not Match.NONE)
            found = next(matching, None)
        return getattr(found, "path", "other") or "/"


class Listener:
    """One application on one port."""

    def __init__(
        self,
        server: "Server",
        protocol: str,
        app: FastAPI,
        host: str,
        port: int,
        max_connections: int,
        *,
        prefix: str = "",
        first: int = 0,
        port_flag: str = "http-port",
    ) -> None:
        """`protocol` is what the metrics count requests under, by route and status, which is
        `other` for paths that are not served. Connections beyond `max_connections` are closed at
        once. `prefix` and `port_flag` make the flags which errors name, such as `--admin-http-port`
        (see `bind_socket`); `first` is the port that is tried first where `port` is 0.
        """
        routes = [*(getattr(route, "path", "") or "/" for route in app.routes), "other"]
        ended: Ended = server.metrics.calls.door(protocol, routes, "500")
        self._app, self._serving, self._host = _Counted(app, ended), server, host
        self._first = 0 if port else first
        self._bind = partial(bind_socket, host, port, prefix, first, port_flag)
        self._make_protocol = partial(
            BoundedHttp,
            max_connections=max_connections,
            message_timeout_s=server.config.message_timeout_s,
            refused=partial(ended, "other"),
        )
        self.port = 0  # the bound one, after start
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self.door: Door | None = None  # accepts connections of an encrypted port

    @property
    def address(self) -> str:
        """The `host:port` at which it listens."""
        return join(self._host, self.port)

    async def start(self) -> str:
        """Starts to listen, encrypted if the server has certificates, and returns the URL.

        Raises OSError if the address cannot be bound.
        """
        certificates = self._serving.certificates
        bound = self._bind()
        self.port = bound.getsockname()[1]
        if self._first and self.port != self._first:
            if self._serving.main.port == self._first:
                log.warning(
                    "--port is gRPC's, and HTTP is on port %d: clients of OpenAI's API need "
                    "--http-port %d, and another --port",
                    *(self.port, self._first),
                )
            else:
                log.info("port %d is taken; HTTP is on port %d", self._first, self.port)
        config = uvicorn.Config(
            self._app,
            http=self._make_protocol,  # type: ignore[arg-type]  # a factory of protocols
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # otherwise any local client could forge its address
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._server = server = _Uvicorn(config)
        own = [bound] if certificates is None else []  # sockets that uvicorn accepts from
        self._task = asyncio.create_task(server.serve(own), name="jmoe-http")
        while not server.started and not self._task.done():
            await asyncio.sleep(0)
        if certificates is not None:
            protocol = partial(
                self._make_protocol,
                config=config,
                server_state=server.server_state,
                app_state=server.lifespan.state,
            )
            self.door = Door(bound, lambda: certificates.context, protocol)
            self.door.open()
        return f"{self._serving.scheme}://{self.address}"

    async def stop(self) -> None:
        """Stops accepting connections, and ends open ones within a second."""
        if self._server is None or self._task is None:
            return
        if self.door is not None:
            await self.door.close()
        self._server.should_exit = True
        await self._task
        self._server = self._task = None


# uvicorn would warn about every client that does not send HTTP; such clients get an error response.
logging.getLogger("uvicorn").setLevel(logging.ERROR)
