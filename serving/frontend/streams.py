"""Long-lived calls that send many requests: limits how many are open, and ends idle ones.

Each may be sending a message at any time, so limiting their number limits memory. A stream with
running requests stays open; an idle one makes room for another, or ends after a while. Does not
import jax.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from serving.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable
from serving.frontend.inbox import RETRY_AFTER_S

IDLE_S = 300.0
"""How long a stream may be without running requests; the same as for a connection without calls."""


class Stream:
    """The messages of one call. A bad message raises an error; iteration may go on after it."""

    def __init__(self, context: Any, parse: Callable[[bytes], Any]) -> None:
        """`parse` parses a message's bytes, or raises a ServingError."""
        self._context, self._parse = context, parse
        self._num_under_way = 0
        self._ended: ServingError | None = None
        self._waiting: asyncio.Timeout | None = None
        self.idle_since = asyncio.get_running_loop().time()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        """Returns the next message.

        Raises what `parse` raises. If the stream was ended, raises the error given to `end`, or
        DeadlineExceeded if it was idle for too long.
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
        """Whether no request is running."""
        return not self._num_under_way

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a running request of this stream within the block."""
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
        """Ends the stream with `error` once it has no running request."""
        self._ended = error
        self._schedule()

    def _schedule(self) -> None:
        """Sets the time at which waiting for the next message ends."""
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
    """The open streams of a listener."""

    def __init__(self, most: int, patience_s: float) -> None:
        """`most` streams may be open. If another arrives, one idle for `patience_s` is ended."""
        self.most, self.patience_s = most, patience_s
        self._open: dict[Stream, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def open(self, context: Any, parse: Callable[[bytes], Any]) -> Iterator[Stream]:
        """Opens a stream for the block. Raises Overloaded if all places are taken and none is
        freed.
        """
        if len(self._open) >= self.most:
            self._make_room()
        stream = Stream(context, parse)
        self._open[stream] = None
        try:
            yield stream
        finally:
            self._open.pop(stream, None)

    def close(self) -> None:
        """Ends all streams, each once its requests have ended."""
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
