"""Calls that take request after request, by a clock of their own."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from serving.frontend.guard import Guard, Limits
from serving.frontend.kserve import _InferStream
from serving.frontend.metrics import Metrics
from serving.frontend.streams import IDLE_S, Stream, Streams

pytestmark = pytest.mark.simulated_time


class Call:
    """A gRPC call whose caller sends what a test puts in."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue = asyncio.Queue()

    async def read(self):
        return await self.sent.get()


def parse(message: bytes) -> str:
    if message == b"bad":
        raise InvalidRequest("bad")
    return message.decode()


def now() -> float:
    return asyncio.get_running_loop().time()


async def ends(stream: Stream) -> tuple[type[BaseException], float]:
    """Returns the error that ends waiting for a message, and after how long."""
    since = now()
    with pytest.raises((DeadlineExceeded, Overloaded, Unavailable, StopAsyncIteration)) as caught:
        await anext(stream)
    return caught.type, now() - since


async def test_messages_come_in_turn_and_a_bad_one_is_not_the_last() -> None:
    call = Call()
    with Streams(1, 10.0).open(call, parse) as stream:
        for message in (b"a", b"bad", b"b", grpc.aio.EOF):
            call.sent.put_nowait(message)
        assert await anext(stream) == "a"
        with pytest.raises(InvalidRequest):
            await anext(stream)
        assert [message async for message in stream] == ["b"]


async def test_a_stream_with_nothing_under_way_ends_after_a_while() -> None:
    call = Call()
    with Streams(1, 10.0).open(call, parse) as stream:
        await asyncio.sleep(7)
        call.sent.put_nowait(b"a")
        await anext(stream)
        assert await ends(stream) == (DeadlineExceeded, IDLE_S)


async def test_the_time_counts_from_the_end_of_the_last_request() -> None:
    with Streams(1, 10.0).open(Call(), parse) as stream:
        first, second = stream.request(), stream.request()
        first.__enter__()
        second.__enter__()
        waiting = asyncio.create_task(ends(stream))
        await asyncio.sleep(5 * IDLE_S)
        first.__exit__(None, None, None)
        await asyncio.sleep(5 * IDLE_S)
        assert not waiting.done()
        second.__exit__(None, None, None)
        assert await waiting == (DeadlineExceeded, 11 * IDLE_S)


async def test_the_one_idle_for_longest_makes_room_but_not_at_once() -> None:
    streams = Streams(2, 10.0)
    with streams.open(Call(), parse) as older:
        await asyncio.sleep(1)
        with streams.open(Call(), parse) as newer:
            waiting = [asyncio.create_task(ends(stream)) for stream in (older, newer)]
            await asyncio.sleep(8)  # the older is idle for 9 s
            with pytest.raises(Overloaded, match="2 streams are open already"):
                streams.open(Call(), parse).__enter__()
            await asyncio.sleep(1)
            with streams.open(Call(), parse):
                assert await waiting[0] == (Overloaded, 9)
                assert not waiting[1].done()
                assert len(streams) == 2
            assert await waiting[1] == (DeadlineExceeded, IDLE_S)


async def test_a_busy_one_makes_no_room() -> None:
    streams = Streams(1, 10.0)
    with streams.open(Call(), parse) as stream, stream.request():
        waiting = asyncio.create_task(ends(stream))
        await asyncio.sleep(1000)
        with pytest.raises(Overloaded):
            streams.open(Call(), parse).__enter__()
        assert not waiting.done()
        waiting.cancel()
    assert len(streams) == 0


async def test_all_end_where_the_server_does_each_when_it_is_done() -> None:
    streams = Streams(2, 10.0)
    with streams.open(Call(), parse) as idle, streams.open(Call(), parse) as busy:
        waiting = [asyncio.create_task(ends(stream)) for stream in (idle, busy)]
        with busy.request():
            await asyncio.sleep(1)
            streams.close()
            assert await waiting[0] == (Unavailable, 1)
            await asyncio.sleep(30)
            assert not waiting[1].done()
        assert await waiting[1] == (Unavailable, 31)


async def test_what_happens_as_the_time_runs_out_changes_nothing() -> None:
    with Streams(1, 10.0).open(Call(), parse) as stream:
        waiting = asyncio.create_task(ends(stream))
        await asyncio.sleep(0)
        heard = []

        def end() -> None:  # in the turn of the loop in which its wait ends, before it hears of it
            stream.end(Overloaded("", 1))
            heard.append(now())

        asyncio.get_running_loop().call_at(stream.idle_since + IDLE_S, end)
        assert (await waiting)[1] == IDLE_S
        assert heard == [stream.idle_since + IDLE_S]


async def test_a_stream_whose_caller_does_not_read_keeps_its_place() -> None:
    """A stream that still has an error to deliver must not make room: it would stay open without
    counting.
    """
    streams, call = Streams(1, 10.0), Call()
    told, read = asyncio.Event(), asyncio.Event()

    async def write(response) -> None:
        told.set()
        await read.wait()

    call.write = write
    call.peer = lambda: "somebody"
    guard = Guard(Limits(1, 1, 10.0), SimpleNamespace(metrics=Metrics()))
    service = SimpleNamespace(guard=guard)
    with streams.open(call, parse) as stream:
        running = asyncio.create_task(_InferStream(service, stream, call).run())
        call.sent.put_nowait(b"bad")
        await told.wait()
        await asyncio.sleep(11)
        with pytest.raises(Overloaded), streams.open(Call(), parse):
            pass
        read.set()
        call.sent.put_nowait(grpc.aio.EOF)
        await running
