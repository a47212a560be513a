"""The gRPC interceptor in front of every service of a port.

The guard authenticates callers, receives each message as bytes, parses it, limits concurrent calls,
and turns exceptions of a service into a gRPC status. So a bad message affects only its own call.
"""

import asyncio
import contextlib
import functools
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import grpc

from serving.errors import ClientLeft, InvalidRequest, Overloaded, ServingError
from serving.frontend.inbox import MAX_MESSAGE_BYTES, RETRY_AFTER_S, Inbox
from serving.frontend.reports import FAULT, REPORTS, report
from serving.frontend.streams import Streams
from serving.request import Bounds

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from serving.frontend.server import Server

log = logging.getLogger(__name__)

SMALL_MESSAGE_BYTES = 16 << 10
"""More than any message without a prompt has."""
MAX_STATUS_BYTES = 1000
"""Limit for a status message. It is sent as metadata, up to three bytes for each of its bytes, and
clients accept 8 KB of metadata.
"""
LOG_EVERY_S = 10.0

_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class Limits:
    """Limits of one listener."""

    max_calls: int  # concurrent calls, without health and reflection
    max_receiving: int  # messages received concurrently
    message_timeout_s: float  # from the opening of a call to its message


@dataclass(frozen=True)
class Service:
    """One gRPC service, and what a guard has to know of it before a message is parsed.

    Methods are named as gRPC does, `/package.Service/Method`.
    """

    descriptor: "ServiceDescriptor"
    servicer: object
    add: Callable[[Any, grpc.aio.Server], None]  # as generated: adds the servicer to a server
    protocol: str  # under which the metrics count its calls
    prompts: Mapping[str, Callable[[Bounds], int]] = field(default_factory=dict)
    """Methods that take a prompt, and so are subject to admission; how large a message may be."""
    lasting: Collection[str] = ()  # methods that take a long-lived stream of requests (`Streams`)
    also_counted: Collection[str] = ()  # routes of the metrics besides the methods
    needs_admin: bool = False  # whether callers need an admin key, on every port

    @property
    def methods(self) -> list[str]:
        """The names of all its methods."""
        name = self.descriptor.full_name
        return [f"/{name}/{method.name}" for method in self.descriptor.methods]


Refuse = Callable[[grpc.StatusCode, str, tuple[tuple[str, str], ...]], Awaitable[None]]
"""Tells a client of an error: its code, a message, and trailing metadata."""


class Guard(grpc.aio.ServerInterceptor):
    """Wraps the methods of a server. Services raise `ServingError`s and do not set gRPC
    statuses.
    """

    def __init__(self, limits: Limits, server: "Server") -> None:
        """`server` has the callers' keys, the engine that admits requests, and the metrics."""
        self.limits, self._server = limits, server
        self.num_calls = 0
        # Health has its own inbox, so that callers of other services cannot block it.
        self.inbox, self._health_inbox = (
            Inbox(limits.max_receiving, 4 * limits.max_calls, limits.message_timeout_s)
            for _ in range(2)
        )
        self.streams = Streams(limits.max_receiving, limits.message_timeout_s)
        self._prompts: dict[str, Callable[[Bounds], int]] = {}  # see Service; of all services
        self._lasting, self._needs_admin = set[str](), set[str]()  # methods
        self._ended: dict[str, Callable[[str, str], None]] = {}  # by route
        self._ended_elsewhere = server.metrics.calls.door("grpc", ["other"], FAULT.grpc.name)
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}
        kinds = {how.counted for how in (*REPORTS.values(), FAULT)}
        self._tallies = {kind: Tally(kind) for kind in kinds if kind is not None}
        self._idle = asyncio.Event()

    def add(self, service: Service) -> None:
        """Learns of a service; of others it knows that they take no prompts."""
        routes = [*service.methods, *service.also_counted]
        ended = self._server.metrics.calls.door(service.protocol, routes, FAULT.grpc.name)
        self._prompts |= service.prompts
        self._lasting |= {*service.lasting}
        self._needs_admin |= {*service.methods} if service.needs_admin else set()
        self._ended |= dict.fromkeys(routes, ended)

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no call is running; returns False if one still is after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_calls:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.num_calls

    def close(self) -> None:
        """Logs the counts that were not logged yet."""
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
                self._ended_elsewhere("other", grpc.StatusCode.UNIMPLEMENTED.name)
                return handler
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        """Wraps a method so that it is called before its message has arrived, and gets raw
        bytes.
        """
        if handler.request_streaming and not handler.response_streaming:
            raise TypeError(f"{method} is of a kind that the guard does not know")
        make = self._stream if handler.request_streaming else self._call
        kind = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(make(method, handler), None, handler.response_serializer)

    def _call(self, method: str, handler: Any) -> Callable[[object, Any], Awaitable[Any]]:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        is_health = method.startswith(_HEALTH)
        inbox = self._health_inbox if is_health else self.inbox
        place = contextlib.nullcontext if is_health else self.place

        async def call(_: object, context: Any) -> Any:
            async with self.answering(method, context, context.abort):
                if not is_health:
                    self._admit(method, context)
                with place():  # if there is no room, refuse before receiving the message
                    pass
                received = [await inbox.receive_one(context)]  # not kept while it is answered
                with place():
                    return await inner(self._parsed(method, handler, received.pop()), context)

        return call

    def _stream(self, method: str, handler: Any) -> Callable[[object, Any], Awaitable[None]]:
        """Wraps a method with a stream of requests; a `lasting` one writes responses itself, and
        takes a `place` per request.
        """
        parse = functools.partial(self._parsed, method, handler)

        async def stream(_: object, context: Any) -> None:
            async with self.answering(method, context, context.abort):
                self._admit(method, context)
                with self.streams.open(context, parse) as messages:
                    answers = handler.stream_stream(messages, context)
                    if method in self._lasting:
                        await answers
                        return
                    async for answer in answers:
                        await context.write(answer)

        return stream

    def _admit(self, method: str, context: Any) -> None:
        """Raises the error with which a call is refused before its message is received.

        So no work is wasted if the server is overloaded or a key's limit is reached.
        """
        caller = self._server.access.caller(authorization(context))
        if method in self._needs_admin:
            caller.require_admin()
        if method not in self._prompts:
            return
        engine = self._server.ready_engine()
        if method not in self._lasting:  # else it is checked for each request of the stream
            engine.check_admission(key=caller.name)
            caller.check_room()

    def _max_message_bytes(self, method: str) -> int:
        engine = self._server.engine
        if engine is None or method not in self._prompts:
            return SMALL_MESSAGE_BYTES
        return min(MAX_MESSAGE_BYTES, self._prompts[method](engine.bounds))

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
        """Raises InvalidRequest if one call asks for more requests than may ever run
        concurrently.
        """
        if count > self.limits.max_calls:
            raise InvalidRequest(
                f"the call asks for {count} answers, and this server works on "
                f"{self.limits.max_calls} at once (max_concurrent_calls); ask for fewer",
                "n",
            )

    @contextlib.contextmanager
    def place(self, count: int = 1) -> Iterator[None]:
        """Counts `count` running calls within the block. Raises Overloaded if there are too
        many.
        """
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
        """Counts a failed call for the log, with a traceback if the error is unexpected."""
        if (kind := report(error).counted) is not None:
            traced = None if _is_expected(error) else error
            self._tallies[kind].note(_detail(method, peer, error), traced)

    @contextlib.asynccontextmanager
    async def answering(
        self, method: str, context: Any, refuse: Refuse, route: str = ""
    ) -> AsyncIterator[None]:
        """Notes an exception raised in the block, and refuses the call with it. Counts the call, as
        OK or with its error, under a route; by default, that is the method.
        """
        code, route = grpc.StatusCode.OK, route or method
        try:
            try:
                yield
            except Exception as error:
                if isinstance(error, grpc.aio.BaseError):  # nothing can be sent on an ended call
                    error = ClientLeft("the client left before its answer was whole")
                self.note(method, context.peer(), error)
                # The error may outlive its call until the next garbage collection, in a cycle of
                # gRPC's context and the exception that `abort` raises: let no message be among its
                # frames.
                traceback.clear_frames(error.__traceback__)
                code = report(error).grpc
                await refuse(code, said(error), _trailing(error))
        except asyncio.CancelledError:
            is_late = context.time_remaining() == 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        finally:
            self._ended.get(route, self._ended_elsewhere)(route, code.name)


def authorization(context: Any) -> str | None:
    """Returns the call's `authorization` metadata; None if it has none or several."""
    said = [value for name, value in context.invocation_metadata() if name == "authorization"]
    return said[0] if len(said) == 1 and isinstance(said[0], str) else None


def _is_expected(error: Exception) -> bool:
    return isinstance(error, ServingError | ValueError)


def said(error: Exception) -> str:
    """Returns what a client is told of an error, cut to what any can receive."""
    return cut(str(error) if _is_expected(error) else f"{type(error).__name__}: {error}")


def _detail(method: str, peer: str, error: Exception) -> str:
    """Describes an error in one line."""
    text = " ".join(cut(str(error)).split()) or type(error).__name__
    return f"the last one, {method} from {peer}: {text}"


def _trailing(error: Exception) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, ServingError) or error.retry_after_s is None:
        return ()
    wait_ms = ceil(round(error.retry_after_s * 1000, 6))  # an earlier retry would be refused again
    return (("grpc-retry-pushback-ms", str(max(1, wait_ms))),)


def cut(text: str) -> str:
    """Shortens a status message to what any client can receive."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_STATUS_BYTES:
        return text
    return encoded[: MAX_STATUS_BYTES - 3].decode("utf-8", "ignore") + "..."


class Tally:
    """Logs failed calls of one kind: the first at once, then a count every `LOG_EVERY_S`."""

    def __init__(self, what: str) -> None:
        self._what = what  # as in "71 calls refused"
        self._count = 0
        self._detail = ""
        self._since_s = 0.0
        self._flush: asyncio.TimerHandle | None = None

    def note(self, detail: str, error: Exception | None = None) -> None:
        """Counts a call. If it is logged at once, the traceback of `error` is logged too."""
        self._count, self._detail = self._count + 1, detail
        if self._flush is None:
            self._write("", error)

    def close(self) -> None:
        """Logs the pending count."""
        while self._flush is not None:
            self._flush.cancel()
            self._flush_now()

    def _flush_now(self) -> None:
        self._flush = None
        if self._count:
            self._write(f" in {asyncio.get_running_loop().time() - self._since_s:.3g} s")

    def _write(self, when: str, error: Exception | None = None) -> None:
        calls = "call" if self._count == 1 else "calls"
        log.warning(
            "%d %s %s%s; %s",
            *(self._count, calls, self._what, when, self._detail),
            exc_info=error,
            extra={"event": f"calls_{self._what}", "count": self._count},
        )
        loop = asyncio.get_running_loop()
        self._count, self._since_s = 0, loop.time()
        # Not in a request's context, since the line will be about several requests.
        self._flush = loop.call_later(LOG_EVERY_S, self._flush_now, context=Context())
