"""Accepts TLS connections, each with the current SSL context; asyncio's servers never change it."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from serving.frontend.tls import HANDSHAKE_S

log = logging.getLogger(__name__)

MOST_AT_ONCE = 128
"""Concurrent handshakes. One more cancels the oldest, so that stalled clients block nobody."""
BACKLOG = 2048
FULL_S = 0.1
"""How long to wait before the next accept when the process has too many open files."""


class Door:
    """Accepts connections from a socket, and gives a protocol to those whose handshake succeeds."""

    def __init__(
        self,
        bound: socket.socket,
        context: Callable[[], ssl.SSLContext],
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        """`make` makes a connection's protocol; `context` is called for each connection."""
        self._bound, self._context, self._make = bound, context, make
        self._under_way: dict[asyncio.Task[None], None] = {}  # running handshakes, the oldest first
        self._accepting: asyncio.Task[None] | None = None

    @property
    def num_handshakes(self) -> int:
        """The number of running handshakes."""
        return len(self._under_way)

    def open(self) -> None:
        """Starts to listen and accept connections."""
        self._bound.setblocking(False)
        self._bound.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(), name="jmoe-https")

    async def close(self) -> None:
        """Closes the socket and cancels handshakes; established connections stay open."""
        tasks = [task for task in (self._accepting, *self._under_way) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._bound.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._bound)
            except OSError as error:  # the client is gone already, or too many files are open
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
        if task.cancelled():  # maybe before it began; otherwise a transport owns the socket
            connection.close()

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # includes ssl.SSLError: no TLS, no certificate, or a disconnect
            log.debug("a handshake failed: %s", error)
