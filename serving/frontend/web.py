"""Ports for HTTP: an ASGI application behind uvicorn, in the server's own event loop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from serving.frontend.bounded_http import KEEP_ALIVE_S, HttpLimits, bounded_http
from serving.frontend.handshake import Door
from serving.frontend.listen import bind_socket, join


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


class Listener:
    """One application on one port."""

    def __init__(
        self, app: Any, host: str, port: int, limits: HttpLimits, *, prefix: str = ""
    ) -> None:
        """`prefix` as in `bind`: of the flags that an error names, as in `--admin-http-port`."""
        self._app, self._host, self._wanted, self._prefix = app, host, port, prefix
        self._limits = limits
        self.port = 0  # the bound one, after start
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self.door: Door | None = None  # of an encrypted port

    @property
    def address(self) -> str:
        """`host:port`, where it listens."""
        return join(self._host, self.port)

    async def start(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Listens; with `tls` encrypted, by the context that it returns at each connection.

        Raises OSError where the address cannot be bound.
        """
        bound = bind_socket(self._host, self._wanted, self._prefix)
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=bounded_http(self._limits),  # type: ignore[arg-type]  # calling it makes one
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # or any client of this machine may say who it is
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._server = server = _Uvicorn(config)
        own = [bound] if tls is None else []  # what uvicorn takes connections from
        self._task = asyncio.create_task(self._serve(server, bound, own), name="jmoe-http")
        while not server.started and not self._task.done():
            await asyncio.sleep(0)
        if tls is not None:

            def protocol() -> asyncio.Protocol:
                made: Any = config.http_protocol_class
                state = server.lifespan.state
                return made(config=config, server_state=server.server_state, app_state=state)

            self.door = Door(bound, tls, protocol)
            self.door.open()

    async def _serve(
        self, server: _Uvicorn, bound: socket.socket, own: list[socket.socket]
    ) -> None:
        with bound:
            await server.serve(sockets=own)

    async def stop(self) -> None:
        """Takes no more connections, and ends those that are there within a second."""
        if self._server is None or self._task is None:
            return
        if self.door is not None:
            await self.door.close()
        self._server.should_exit = True
        await self._task
        self._server = self._task = None


# It warns of every client that sends no HTTP, which are told so themselves.
logging.getLogger("uvicorn").setLevel(logging.ERROR)
