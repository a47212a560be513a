"""Limits how many messages are received concurrently, and for how long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded

MAX_MESSAGE_BYTES = 4 << 20
"""The size limit that gRPC itself enforces; most requests have a far lower one (`guard.py`)."""
PLACES_PER_CONNECTION = 16
"""Messages received concurrently on one connection; further ones of that connection wait."""
PATIENCE_S = 0.5
"""How long a message may take to arrive while other connections wait for a place."""
RETRY_AFTER_S = 1.0


class Inbox:
    """Receives messages, at most `num_places` at a time over all connections.

    gRPC buffers a message in memory while it arrives, so limiting places limits memory. A call that
    sends nothing loses its place after `timeout_s`, or after `PATIENCE_S` if others wait.
    """

    def __init__(self, num_places: int, max_callers: int, timeout_s: float) -> None:
        self.timeout_s, self.max_callers = timeout_s, max_callers
        self.num_callers = 0
        self._places = asyncio.Semaphore(num_places)
        self._receiving: dict[asyncio.Timeout, float] = {}  # start times, the oldest first
        self._connections = WeakValueDictionary[str, asyncio.Semaphore]()

    @contextlib.asynccontextmanager
    async def receiving(self, peer: str) -> AsyncIterator[None]:
        """Holds a place to receive one message of a connection within the block.

        Raises DeadlineExceeded if the message does not arrive in time, and Overloaded if too many
        calls are waiting.
        """
        if self.num_callers >= self.max_callers:
            raise Overloaded(
                f"{self.num_callers} calls have sent no message yet; try again later",
                RETRY_AFTER_S,
            )
        self.num_callers += 1
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                # Of a connection, they are there as long as anybody uses them.
                places = asyncio.Semaphore(PLACES_PER_CONNECTION)
                async with self._connections.setdefault(peer, places), self._place(limit):
                    yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message came within {self.timeout_s:g} s, or {PATIENCE_S:g} s of a busy "
                "server; send it as soon as the call is open"
            ) from None
        finally:
            self.num_callers -= 1

    async def receive_one(self, context: Any) -> bytes:
        """Returns a call's only message. Raises InvalidRequest if there is none, and as
        `receiving`.
        """
        async with self.receiving(context.peer()):
            message = await context.read()
        if not isinstance(message, bytes):  # grpc.aio.EOF
            raise InvalidRequest("the call has no message; send one")
        return message

    @contextlib.asynccontextmanager
    async def _place(self, limit: asyncio.Timeout) -> AsyncIterator[None]:
        if self._places.locked():
            self._hurry()
        async with self._places:
            self._receiving[limit] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                del self._receiving[limit]

    def _hurry(self) -> None:
        """Shortens the deadline of the oldest receiver not yet shortened, since another
        call waits.
        """
        now = asyncio.get_running_loop().time()
        for limit, since in self._receiving.items():
            soon, until = max(now, since + PATIENCE_S), limit.when()
            if until is not None and until > soon:
                limit.reschedule(soon)
                return
