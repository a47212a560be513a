"""What stands between callers and every service of a port.

The guard receives each message as bytes, parses it, counts calls, and turns what a service raises
into a gRPC status, so that nothing a caller sends reaches more than its own call.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextvars import Context
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import grpc

from serving.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    RequestFailed,
    ServingError,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from serving.frontend.access import ANYBODY, Caller, current
from serving.frontend.inbox import RETRY_AFTER_S, Inbox
from serving.frontend.streams import Streams

log = logging.getLogger(__name__)

SMALL_MESSAGE_BYTES = 16 << 10
"""More than any message but a prompt has."""
MAX_STATUS_BYTES = 1000
"""Of a status message. It travels as metadata, three bytes for one, and clients take 8 KB of it."""
LOG_EVERY_S = 10.0

MAX_STREAMS = 64
"""Calls of methods that take more than one message (reflection's); they are not many."""

_REFUSED, _DENIED, _INVALID = "refused", "denied", "invalid"
_EXPIRED, _FAILED = "expired", "failed"
_KINDS = (_REFUSED, _DENIED, _INVALID, _EXPIRED, _FAILED)
"""What calls are tallied under in the log."""

_HEALTH = "/grpc.health.v1.Health/"

_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Aborted: grpc.StatusCode.CANCELLED,
    RequestFailed: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True)
class Limits:
    """Of one listener."""

    max_calls: int  # that are worked on at once, health and reflection not counted
    max_receiving: int  # messages that are received at once
    message_timeout_s: float  # from the opening of a call to its message


class Told(NamedTuple):
    """What a caller hears of an error: code, message, and trailing metadata."""

    code: grpc.StatusCode
    said: str
    trailing: tuple[tuple[str, str], ...]


class Guard(grpc.aio.ServerInterceptor):
    """Wraps the methods of a server. A service raises `ServingError`s and nothing of gRPC."""

    def __init__(
        self,
        limits: Limits,
        admit: Callable[[str], None] = lambda method: None,
        max_message_bytes: Callable[[str], int] = lambda method: SMALL_MESSAGE_BYTES,
        lasting: Collection[str] = (),
        identify: Callable[[str, str | None], Caller] = lambda method, authorization: ANYBODY,
    ) -> None:
        """Asks `identify` and then `admit` before a message is received, which raise what a caller
        is told, and `max_message_bytes` before one is parsed; all get a method as
        `/package.Service/Method`, and `identify` what the call has as `authorization`. Health is
        for everybody. `lasting` are methods that take request after request (`Streams`).
        """
        self.limits = limits
        self.num_calls = self.num_streams = 0
        self._admit, self._max_message_bytes = admit, max_message_bytes
        self._identify = identify
        # Health has an inbox of its own: callers of other services cannot keep it from answering.
        self.inbox, self._health_inbox = (
            Inbox(limits.max_receiving, 4 * limits.max_calls, limits.message_timeout_s)
            for _ in range(2)
        )
        self._lasting = lasting
        self.streams = Streams(limits.max_receiving, limits.message_timeout_s)
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}
        self._tallies = {what: Tally(what) for what in _KINDS}
        self._idle = asyncio.Event()

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no call is under way; False where one still is after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_calls:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.num_calls

    def close(self) -> None:
        """Logs what was not logged yet."""
        for tally in self._tallies.values():
            tally.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See grpc.aio.ServerInterceptor."""
        method: Any = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler  # UNIMPLEMENTED
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        """The same method, as one that gets bytes, and is called before they are there."""
        if handler.request_streaming and not handler.response_streaming:
            raise TypeError(f"{method} is of a kind that the guard does not know")
        behaviour = None
        if handler.request_streaming:
            make = self._lasting_stream if method in self._lasting else self._stream
            behaviour = make(method, handler)
        kind = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(behaviour or self._call(method, handler), None, handler.response_serializer)

    def _call(self, method: str, handler: Any) -> Callable[[object, Any], Awaitable[Any]]:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        is_health = method.startswith(_HEALTH)
        inbox = self._health_inbox if is_health else self.inbox
        place = contextlib.nullcontext if is_health else self.place

        async def call(_: object, context: Any) -> Any:
            async with self._answering(method, context):
                if not is_health:
                    current.set(self._identify(method, authorization(context)))
                self._admit(method)
                with place():  # refuse before the message is received, where there is no room
                    pass
                message = await inbox.receive_one(context)
                with place():
                    return await inner(self._parsed(method, handler, message), context)

        return call

    def _stream(self, method: str, handler: Any) -> Callable[[object, Any], Awaitable[None]]:
        async def messages(context: Any) -> AsyncIterator[Any]:
            while (message := await self.inbox.receive(context)) is not None:
                yield self._parsed(method, handler, message)

        async def stream(_: object, context: Any) -> None:
            async with self._answering(method, context):
                current.set(self._identify(method, authorization(context)))
                if self.num_streams >= MAX_STREAMS:
                    raise Overloaded(f"{MAX_STREAMS} calls of {method} are open", RETRY_AFTER_S)
                self.num_streams += 1
                try:
                    async for answer in handler.stream_stream(messages(context), context):
                        await context.write(answer)
                finally:
                    self.num_streams -= 1

        return stream

    def _lasting_stream(
        self, method: str, handler: Any
    ) -> Callable[[object, Any], Awaitable[None]]:
        """The handler writes by itself, and takes a `place` for each request."""

        async def stream(_: object, context: Any) -> None:
            async with self._answering(method, context):
                current.set(self._identify(method, authorization(context)))
                self._admit(method)
                parse = functools.partial(self._parsed, method, handler)
                with self.streams.open(context, parse) as messages:
                    await handler.stream_stream(messages, context)

        return stream

    def _parsed(self, method: str, handler: Any, message: bytes) -> Any:
        most = self._max_message_bytes(method)
        if len(message) > most:
            raise InvalidRequest(
                f"the message has {len(message)} bytes; what this server can serve has {most} "
                "at most"
            )
        try:
            return handler.request_deserializer(message)
        except Exception:
            raise InvalidRequest(
                f"the message ({len(message)} bytes) is not what {method} takes"
            ) from None

    def check_count(self, count: int) -> None:
        """Raises InvalidRequest for more requests at once than there will ever be places for."""
        if count > self.limits.max_calls:
            raise InvalidRequest(
                f"the call asks for {count} answers, and this server works on "
                f"{self.limits.max_calls} at once (max_concurrent_calls); ask for fewer"
            )

    @contextlib.contextmanager
    def place(self, count: int = 1) -> Iterator[None]:
        """A place among the calls under way, or several. Raises Overloaded where all are taken."""
        if self.num_calls + count > self.limits.max_calls:
            raise Overloaded(
                f"{self.num_calls} calls are under way already (max_concurrent_calls); "
                "try again later",
                RETRY_AFTER_S,
            )
        self.num_calls += count
        try:
            yield
        finally:
            self.num_calls -= count
            if not self.num_calls:
                self._idle.set()

    def note(self, method: str, peer: str, error: Exception) -> None:
        """Counts what ended a call in the log's tallies, with a traceback of what is no status."""
        expected = isinstance(error, ServingError | ValueError)
        if (what := _kind(error) if expected else _FAILED) is not None:
            self._tallies[what].note(_detail(method, peer, error), None if expected else error)

    @contextlib.asynccontextmanager
    async def _answering(self, method: str, context: Any) -> AsyncIterator[None]:
        """Turns what is raised inside into a gRPC status; no exception reaches the process."""
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            code, said, trailing = self.tell(method, context, error)
            await context.abort(code, said, trailing)

    def tell(self, method: str, context: Any, error: Exception) -> Told:
        """Notes what was raised; what its caller is told of it."""
        self.note(method, context.peer(), error)
        if not isinstance(error, ServingError | ValueError):
            return Told(grpc.StatusCode.INTERNAL, cut(f"{type(error).__name__}: {error}"), ())
        return Told(_code(error), cut(str(error)), _trailing(error))


def authorization(context: Any) -> str | None:
    """What a call says of its caller; None where it says nothing, or several things."""
    said = [value for name, value in context.invocation_metadata() if name == "authorization"]
    return said[0] if len(said) == 1 and isinstance(said[0], str) else None


def _kind(error: Exception) -> str | None:
    """Under which line of the log an error counts; None where it is nothing to log."""
    if isinstance(error, Aborted):
        return None  # by its caller, or by a server that stops
    if isinstance(error, Overloaded | Unavailable):
        return _REFUSED
    if isinstance(error, Unauthenticated | PermissionDenied):
        return _DENIED
    if isinstance(error, DeadlineExceeded):
        return _EXPIRED
    return _INVALID if isinstance(error, InvalidRequest | NotFound | ValueError) else _FAILED


def _detail(method: str, peer: str, error: Exception) -> str:
    """One line, whatever the error says."""
    said = " ".join(cut(str(error)).split()) or type(error).__name__
    return f"the last one, {method} from {peer}: {said}"


def _code(error: Exception) -> grpc.StatusCode:
    codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
    return next(codes, grpc.StatusCode.INTERNAL)


def _trailing(error: Exception) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, Overloaded | WorkerLost):
        return ()
    wait_ms = ceil(round(error.retry_after_s * 1000, 6))  # who comes earlier is refused again
    return (("grpc-retry-pushback-ms", str(max(1, wait_ms))),)


def cut(text: str) -> str:
    """A status message that any client can receive."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_STATUS_BYTES:
        return text
    return encoded[: MAX_STATUS_BYTES - 3].decode("utf-8", "ignore") + "..."


class Tally:
    """Logs calls of a kind: one line at once, then one with a count every `LOG_EVERY_S`."""

    def __init__(self, what: str) -> None:
        self._what = what  # as in "71 calls refused"
        self._count = 0
        self._detail = ""
        self._since_s = 0.0
        self._flush: asyncio.TimerHandle | None = None

    def note(self, detail: str, error: Exception | None = None) -> None:
        """One more. The traceback of an `error` is logged where the line comes at once."""
        self._count, self._detail = self._count + 1, detail
        if self._flush is None:
            self._write("", error)
            self._wait()

    def close(self) -> None:
        """Writes the count that waits for its time."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush_now()
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._since_s = loop.time()
        # In no request's context: what is logged then is about several.
        self._flush = loop.call_later(LOG_EVERY_S, self._flush_now, context=Context())

    def _flush_now(self) -> None:
        self._flush = None
        if self._count:
            self._write(f" in {asyncio.get_running_loop().time() - self._since_s:.3g} s")
            self._wait()

    def _write(self, when: str, error: Exception | None = None) -> None:
        calls = "call" if self._count == 1 else "calls"
        log.warning(
            "%d %s %s%s; %s",
            *(self._count, calls, self._what, when, self._detail),
            exc_info=error,
            extra={"event": f"calls_{self._what}", "count": self._count},
        )
        self._count = 0
