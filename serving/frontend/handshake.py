"""Connections over TLS, each by the context of its moment: asyncio's servers keep their first."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from serving.frontend.tls import HANDSHAKE_S

log = logging.getLogger(__name__)

MOST_AT_ONCE = 128
"""Handshakes; with one more the oldest ends, so that who stalls keeps nobody out."""
BACKLOG = 2048
FULL_S = 0.1
"""Until the next look, where the process may open no more files."""


class Door:
    """Takes connections from a socket, and hands those whose handshake succeeds to a protocol."""

    def __init__(
        self,
        bound: socket.socket,
        context: Callable[[], ssl.SSLContext],
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        """`make` makes a connection's protocol, `context` is asked at each connection."""
        self._bound, self._context, self._make = bound, context, make
        self._under_way: dict[asyncio.Task[None], None] = {}  # handshakes, the oldest first
        self._accepting: asyncio.Task[None] | None = None

    @property
    def num_handshakes(self) -> int:
        """Those under way."""
        return len(self._under_way)

    def open(self) -> None:
        """Listens."""
        self._bound.setblocking(False)
        self._bound.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(), name="jmoe-https")

    async def close(self) -> None:
        """Takes no more connections, and ends handshakes; who is through stays."""
        tasks = [task for task in (self._accepting, *self._under_way) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._bound)
            except OSError as error:  # it is gone already, or there are too many files
                log.debug("a connection was not taken: %s", error)
                await asyncio.sleep(FULL_S)
                continue
            if len(self._under_way) >= MOST_AT_ONCE:
                oldest = next(iter(self._under_way))
                del self._under_way[oldest]
                oldest.cancel()
            task = loop.create_task(self._shake(connection))
            self._under_way[task] = None
            task.add_done_callback(partial(self._done, connection))

    def _done(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        if task.cancelled():  # maybe before it began; else a transport has the socket
            connection.close()

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # ssl.SSLError is one: no TLS, no certificate, or gone
            log.debug("a handshake failed: %s", error)
