"""Calls that take request after request: how many are open, and which of them have to go.

Each may be sending a message at any time, so that their number bounds bytes. One that has requests
under way stays; one without makes room for another, or ends after a while. No jax.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from serving.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable
from serving.frontend.inbox import RETRY_AFTER_S

IDLE_S = 300.0
"""How long a stream may have nothing under way: as long as a connection may have no call."""


class Stream:
    """The messages of one call. One that is refused raises, and those after it still come."""

    def __init__(self, context: Any, parse: Callable[[bytes], Any]) -> None:
        """`parse` makes a message of its bytes, or raises a ServingError."""
        self._context, self._parse = context, parse
        self._num_under_way = 0
        self._ended: ServingError | None = None
        self._waiting: asyncio.Timeout | None = None
        self.idle_since = asyncio.get_running_loop().time()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        """The next message. Raises what `parse` does; or, where no more come, DeadlineExceeded for
        a stream that was idle for too long, and what `end` was given.
        """
        try:
            async with asyncio.timeout(None) as self._waiting:
                self._schedule()
                message = await self._context.read()
        except TimeoutError:
            raise self._ended or DeadlineExceeded(
                f"the stream had no request under way for {IDLE_S:g} s; open another one"
            ) from None
        finally:
            self._waiting = None
        if not isinstance(message, bytes):  # grpc.aio.EOF
            raise StopAsyncIteration
        if not self._num_under_way:
            self.idle_since = asyncio.get_running_loop().time()
        return self._parse(message)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._num_under_way

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request of this stream, under way."""
        self._num_under_way += 1
        self._schedule()
        try:
            yield
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self.idle_since = asyncio.get_running_loop().time()
            self._schedule()

    def end(self, error: ServingError) -> None:
        """Ends the stream with `error`, once it has nothing under way."""
        self._ended = error
        self._schedule()

    def _schedule(self) -> None:
        """When waiting for a message ends."""
        if self._waiting is None or self._waiting.expired():
            return
        if not self.is_idle:
            until = None
        elif self._ended is not None:
            until = asyncio.get_running_loop().time()
        else:
            until = self.idle_since + IDLE_S
        self._waiting.reschedule(until)


class Streams:
    """The open ones of a listener."""

    def __init__(self, most: int, patience_s: float) -> None:
        """`patience_s`: how long a stream may be idle though another waits for its place."""
        self.most, self.patience_s = most, patience_s
        self._open: dict[Stream, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def open(self, context: Any, parse: Callable[[bytes], Any]) -> Iterator[Stream]:
        """A stream while its call lasts. Raises Overloaded where no other makes room."""
        if len(self._open) >= self.most:
            self._make_room()
        stream = Stream(context, parse)
        self._open[stream] = None
        try:
            yield stream
        finally:
            self._open.pop(stream, None)

    def close(self) -> None:
        """Ends them all, each when its requests have ended."""
        for stream in self._open:
            stream.end(Unavailable("the server stops; open a stream to another replica"))

    def _make_room(self) -> None:
        idle = [stream for stream in self._open if stream.is_idle]
        oldest = min(idle, key=lambda stream: stream.idle_since, default=None)
        since_s = asyncio.get_running_loop().time() - self.patience_s
        if oldest is None or oldest.idle_since > since_s:
            raise Overloaded(
                f"{len(self._open)} streams are open already; try again later, or send more "
                "requests on one stream",
                RETRY_AFTER_S,
            )
        del self._open[oldest]
        oldest.end(
            Overloaded(
                f"the stream had no request under way for {self.patience_s:g} s and others wait "
                "for its place; open another one",
                RETRY_AFTER_S,
            )
        )
