"""Limits for HTTP/1.1: number of connections, size of headers, and time to receive a request.

uvicorn's httptools protocol has none of these. The application limits the size of bodies.
"""

import asyncio
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

MAX_HEADER_BYTES = 16 << 10
"""Limit for a request line and its headers; the same as for gRPC metadata."""
MAX_WAITING = 8
"""Pipelined requests that may wait on one connection for earlier responses."""
LINGER_S = 1.0
"""How long to discard input after refusing a request, so that the client can read the response."""
KEEP_ALIVE_S = 75
"""How long a connection may be idle between requests. Longer than clients keep idle connections, so
that usually the client closes first.
"""
PROBE_S, MAX_PROBE_S = 0.1, 5.0
"""How long after a client has closed its side to ask whether it is still there: at first, and at
most. Each time doubles it.
"""


class BoundedHttp(HttpToolsProtocol):
    """A connection that is closed if its client sends too much, or too slowly."""

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        message_timeout_s: float,
        refused: Callable[[int], None],
        **kwargs: Any,
    ) -> None:
        """Connections beyond `max_connections` are closed at once. A message may take
        `message_timeout_s` from connecting, or a request's first byte, to its last. `refused` is
        told the status of each request that is answered without the application.
        """
        super().__init__(*args, **kwargs)
        self._max_connections, self._message_timeout_s = max_connections, message_timeout_s
        self._count_refused = refused
        self._half_closed = False  # the client has closed its side
        self._header_bytes = 0  # size of the request line, headers and trailers
        self._unheard_bytes = 0  # since the parser's last callback; it buffers incomplete lines
        self._in_headers = True  # also before a request's first byte
        self._head_bytes = 0  # size of data that had only a request line and headers
        self._completes = False  # the data being parsed contains the end of a request
        self._refused = False
        self._begins_anew = False  # a new parser is being fed what the old one parsed
        self._data = b""  # being parsed
        self._arriving: asyncio.TimerHandle | None = None  # runs while a request arrives
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        if len(self.connections) >= self._max_connections:
            self._refused = True
            transport.abort()
            return
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        if found is not None:  # detects a client that vanished without closing
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._start_clock()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open for the answers to whole requests; otherwise closes it.

        A client that has closed its side for writing and one that has closed its socket look the
        same until something is sent. An encrypted connection cannot be closed on one side.
        """
        whole = self.cycle is not None and not self.cycle.more_body and self._in_headers
        waits = whole and not self.cycle.response_complete and not self._refused
        if not waits or self._unheard_bytes or self.scheme == "https":
            return False
        if self.cycle.scope["http_version"] != "1.1":  # may not be sent what `_probe` sends
            return False
        self.cycle.keep_alive = False
        if not self._half_closed:  # asyncio calls this again whenever reading is resumed
            self._half_closed = True
            self.loop.call_later(PROBE_S, self._probe, PROBE_S)
        return True

    def _probe(self, after_s: float) -> None:
        """Closes the connection if the client, which has closed its side, has left.

        An interim response, or a comment in a stream of events, asks for that: the machine of a
        client that has left refuses it, which the next call sees. Clients must ignore both.
        """
        if self.transport.is_closing():
            return
        polled = select.poll()
        polled.register(self.transport.get_extra_info("socket").fileno(), 0)
        if polled.poll(0):  # an error, or closed on both sides
            self.transport.abort()
            return
        if self._running is not None and not self.flow.write_paused:
            if not self._running.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self._running.scope.get("state", {}).get("streams_events"):
                self.transport.write(b"3\r\n:\n\n\r\n")  # a chunk
        after_s = min(2 * after_s, MAX_PROBE_S)
        self.loop.call_later(after_s, self._probe, after_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_clock()
        if self.transport is None:
            return  # connection_made refused it
        running = self._running
        super().connection_lost(exc)
        # uvicorn notifies only the newest request; an earlier one may be running while it waits.
        if running is not None and not running.response_complete:
            _leave(running)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused:
            return
        if self._arriving is None:
            self._start_clock()
        self._unheard_bytes += len(data)
        self._data, self._completes = data, False
        super().data_received(data)
        self._data = b""
        if self._in_headers and not self._completes:
            self._head_bytes += len(data)
        self._check_size()

    def _is_heard(self) -> bool:
        """Notes that the parser has called back; returns whether what it says is to be used."""
        self._unheard_bytes = 0
        return not (self._begins_anew or self._refused)

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._is_heard():
            self._in_headers, self._header_bytes = True, 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if self._is_heard():
            self._header_bytes += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if not self._is_heard():
            return
        self._header_bytes += len(name) + len(value)
        if self._in_headers:  # trailers are counted but ignored
            super().on_header(name, value)
        self._check_size()

    def on_headers_complete(self) -> None:
        """See httptools."""
        if not self._is_heard():
            return
        self._in_headers, self._head_bytes = False, 0
        if len(self.pipeline) >= MAX_WAITING:
            what = f"more than {MAX_WAITING} requests wait for the one before them; send fewer"
            self._refuse(400, "too_many_waiting", what)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self._is_heard():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._unheard_bytes = 0
        if self.parser.should_upgrade() and self._length_headers():
            return  # its body is still to come: see `_unsupported_upgrade_warning`
        self._in_headers, self._header_bytes, self._completes = True, 0, True
        self._stop_clock()
        if not self._refused:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores a request's wish to upgrade to another protocol, such as those of Java's client.

        A server may answer as if the client had not asked. But the parser treats all further data
        as the other protocol, so a new parser replaces it, and is told the body's length.
        """
        told = sys.exception()
        assert isinstance(told, httptools.HttpParserUpgrade)
        rest = self._data[told.args[0] :]
        self.parser, length = httptools.HttpRequestParser(self), self._length_headers()
        if length:
            self._begins_anew = True
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % length)
            except httptools.HttpParserError:  # e.g. an invalid length, not checked until now
                self.send_400_response("")
                return
            finally:
                self._begins_anew = False
        self._data = rest
        if rest and not self._refused:
            super().data_received(rest)

    def _length_headers(self) -> bytes:
        """Returns this request's headers that delimit its body; empty if it has no body."""
        found = [
            b"%b: %b\r\n" % header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        ]
        return b"".join(found)

    def _check_size(self) -> None:
        count = max(self._header_bytes + self._unheard_bytes, self._head_bytes)
        if count > MAX_HEADER_BYTES and not self._refused:
            what = f"its line and headers have more than {MAX_HEADER_BYTES} bytes; send less"
            self._refuse(431, "headers_too_large", f"the request: {what}")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_clock(self) -> None:
        self._arriving = self.loop.call_later(self._message_timeout_s, self._too_slow)

    def _stop_clock(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _too_slow(self) -> None:
        """Closes a connection that sent no whole request in time.

        If the application is already running the request, reading its body times out there.
        """
        self._arriving = None
        if self._running is None or self._running.response_complete:
            self._refused = True
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn, which calls this for input that is not HTTP."""
        self._refuse(400, "not_http", "this is no HTTP/1.1 request; send one")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Responds without calling the application, and closes the connection."""
        self._refused = True
        self._count_refused(status)
        self._stop_clock()
        running = self._running
        if not self._in_headers and self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # this request was answered already
            return
        if running is not None and not running.response_complete:
            if running.response_started:  # another response must not be mixed into it
                self.transport.close()
                return
            _leave(running)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": error})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(b"%b%b%d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


def _leave(cycle: RequestResponseCycle) -> None:
    """Tells the application that the client disconnected; its further output is dropped."""
    cycle.disconnected = True
    cycle.message_event.set()
