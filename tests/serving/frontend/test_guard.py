"""What one caller sends over a real socket, and what others notice of it: nothing."""

import asyncio
import contextlib
import gc
import time
import tracemalloc
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import CODE, Setup, collect, failure, request, serving, until

from serving.config import EngineConfig, ServerConfig
from serving.errors import Overloaded
from serving.frontend.inbox import MAX_MESSAGE_BYTES, PLACES_PER_CONNECTION
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange

GENERATE = "/jmoe.v1.Generation/Generate"
SAMPLING = pb.SamplingParams


def another(s: Setup) -> grpc.aio.Channel:
    """Opens another connection."""
    return grpc.aio.insecure_channel(
        s.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
    )


def silent(channel: grpc.aio.Channel, method: str = GENERATE):
    """Opens a call that sends no message."""
    return channel.stream_stream(method)()


async def opened(s: Setup, count: int) -> None:
    await until(lambda: s.server.guard.inbox.num_callers >= count)


async def test_undecodable_messages_are_invalid_and_cost_a_line_of_log(caplog) -> None:
    async with serving() as s:
        for _ in range(200):
            error = await failure(s.channel.unary_stream(GENERATE)(b"\xff\xff\xff"))
            assert error.code() == CODE.INVALID_ARGUMENT
            assert "(3 bytes) is not what /jmoe.v1.Generation/Generate takes" in error.details()
        assert len(await collect(s.counting(2))) == 2
    assert [(r.event, r.count) for r in caplog.records] == [
        ("calls_invalid", 1),
        ("calls_invalid", 199),
    ]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request([1], sampling=SAMPLING(stop_token_ids=[1, 256])), "stop_token_ids has 256"),
        (request([1], sampling=SAMPLING(stop_token_ids=[-1])), "stop_token_ids has -1"),
        (request([1] * 2_000_000), "the message has 20000"),
        (request([1], request_id="x" * 1_000_000), "the message has 1000"),
    ],
)
async def test_what_cannot_fit_is_invalid(bad, named: str) -> None:
    async with serving() as s:
        error = await failure(s.stub.Generate(bad))
    assert error.code() == CODE.INVALID_ARGUMENT
    assert named in error.details()
    assert s.engine.calls == []


async def test_the_largest_messages_hold_the_loop_for_milliseconds() -> None:
    """Of 4 MB nothing is parsed; of what may be parsed, the worst kind is soon done."""
    async with serving() as s:
        most = s.server.guard._max_message_bytes(GENERATE)
        for raw in (b"\x22\x00" * (MAX_MESSAGE_BYTES // 2), b"\x22\x02\x3a\x00" * (most // 4)):
            call = s.channel.unary_stream(GENERATE)(raw)
            cpu = time.process_time()
            assert (await failure(call)).code() == CODE.INVALID_ARGUMENT
            assert time.process_time() - cpu < 0.5  # of both sides; parsing 4 MB takes 0.05 alone


async def test_a_bomb_is_not_unpacked() -> None:
    async with serving() as s:
        call = s.channel.unary_stream(GENERATE)(bytes(64 << 20), compression=grpc.Compression.Gzip)
        assert (await failure(call)).code() == CODE.RESOURCE_EXHAUSTED
        assert len(await collect(s.counting(2))) == 2


async def test_a_call_without_a_message_ends() -> None:
    async with serving(message_timeout_s=0.2) as s:
        call = silent(s.channel)
        error = await failure(call)
        assert (error.code(), "no message came" in error.details()) == (
            CODE.DEADLINE_EXCEEDED,
            True,
        )
        call = silent(s.channel)
        await call.done_writing()
        error = await failure(call)
        assert (error.code(), "has no message" in error.details()) == (CODE.INVALID_ARGUMENT, True)


async def test_no_more_calls_than_may_be() -> None:
    async with serving(max_concurrent_calls=2) as s:
        s.engine.gate.clear()
        held = [s.counting(2) for _ in range(2)]
        for call in held:
            await anext(aiter(call))
        error = await failure(s.counting(2))
        assert error.code() == CODE.RESOURCE_EXHAUSTED
        assert "max_concurrent_calls" in error.details()
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert await s.health() == "SERVING"
        assert (await s.admin.GetStats(pb.GetStatsRequest())).num_running == 2
        s.engine.gate.set()
        await asyncio.gather(*map(collect, held))
        assert len(await collect(s.counting(2))) == 2


async def test_no_more_connections_than_may_be() -> None:
    async with serving(max_connections=3) as s, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(another(s)) for _ in range(3)]
        for channel in channels:
            await channel.unary_unary("/jmoe.v1.Generation/GetServerInfo")(b"")
        assert (await failure(s.counting(1))).code() == CODE.UNAVAILABLE
        await s.admin.GetStats(pb.GetStatsRequest())  # the operator's port has its own
        await channels[0].close()
        await channels[1].close()  # the client that was refused tries again, too
        async with asyncio.timeout(60), another(s) as channel:
            await channel.unary_unary("/jmoe.v1.Generation/GetServerInfo")(b"", wait_for_ready=True)


async def test_silent_calls_of_one_connection_are_in_nobodys_way() -> None:
    async with serving(message_timeout_s=30.0) as s, another(s) as rude:
        calls = [silent(rude) for _ in range(5 * PLACES_PER_CONNECTION)]
        await opened(s, len(calls))
        assert len(await collect(s.counting(2))) == 2
        assert await s.health() == "SERVING"
        assert s.server.guard.inbox.num_callers == len(calls)  # none had to give way
        for call in calls:
            call.cancel()
        await until(lambda: s.server.guard.inbox.num_callers == 0)
        assert s.server.guard.inbox._connections == {}


async def test_a_message_is_freed_as_soon_as_it_is_read() -> None:
    """Not by the garbage collector, before which many may come."""
    refused = bytes(MAX_MESSAGE_BYTES - 1000)
    long = b"\x12\x00" * 200_000  # `text`, empty, again and again
    long += request([1]).SerializeToString()
    methods = (GENERATE, "/inference.GRPCInferenceService/ModelStreamInfer")
    calls = [method for method in methods for _ in range(3)]
    async with serving() as s:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for method in calls:
                call = s.channel.stream_stream(method)(iter([refused]))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await collect(call)
            s.engine.gate.clear()
            answers = aiter(s.channel.unary_stream(GENERATE)(long))
            await anext(answers)
            held, _ = tracemalloc.get_traced_memory()
            s.engine.gate.set()
            assert len([answer async for answer in answers]) == 127
        finally:
            tracemalloc.stop()
            gc.enable()
    assert held < len(long)


async def test_silent_calls_of_many_connections_give_way() -> None:
    """There is one place here, and 300 s for a message: the place is not held for so long."""
    fields = {"message_timeout_s": 300.0, "max_bytes_in_flight": MAX_MESSAGE_BYTES}
    async with serving(**fields) as s, another(s) as rude:
        call = silent(rude)
        await opened(s, 1)
        async with asyncio.timeout(60):
            assert len(await collect(s.counting(2))) == 2
        assert (await failure(call)).code() == CODE.DEADLINE_EXCEEDED


async def test_a_full_engine_refuses_before_it_receives() -> None:
    async with serving() as s:
        s.engine.refusal = Overloaded("512 requests wait", retry_after_s=0.25)
        assert (await failure(silent(s.channel))).code() == CODE.RESOURCE_EXHAUSTED


async def test_metadata_is_small() -> None:
    async with serving() as s:
        call = s.stub.Generate(request([1]), metadata=(("note", "x" * 20_000),))
        assert (await failure(call)).code() == CODE.RESOURCE_EXHAUSTED


def watch(channel: grpc.aio.Channel, service: str = ""):
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service))  # type: ignore[attr-defined]


async def test_watchers_of_health_are_told_and_do_not_know_of_each_other() -> None:
    """One that leaves, and one that never reads, change nothing for the others."""
    states = health_pb2.HealthCheckResponse
    async with Setup(ServerConfig(port=0)) as s, another(s) as rude:
        watches = [watch(s.channel) for _ in range(3)]
        for call in watches:
            assert (await call.read()).status == states.NOT_SERVING
        watches.pop().cancel()
        deaf = watch(rude)  # noqa: F841
        await until(lambda: s.server.health._num_watchers == 3)
        await s.ready()
        for call in watches:
            assert (await call.read()).status == states.SERVING
        s.engine.fail("out of luck")
        for call in watches:
            assert (await call.read()).status == states.NOT_SERVING
        unknown = watch(s.channel, "no.such.Service")
        assert (await unknown.read()).status == states.SERVICE_UNKNOWN
        await s.server.drain()
        assert await unknown.read() is grpc.aio.EOF


async def test_many_change_brownout_at_once() -> None:
    async with serving() as s:
        change = pb.SetBrownoutRequest(way=2, decode_threshold_percent=40)
        await asyncio.gather(*(s.admin.SetBrownout(change) for _ in range(300)))
        assert s.engine.changes == BrownoutChange(way=2, decode_threshold_percent=40)
        assert len(await collect(s.counting(2))) == 2


async def test_limits_follow_the_engine_where_they_are_not_set() -> None:
    """So that its queue refuses first, which knows when to come back."""
    engine = EngineConfig(max_num_seqs=3, max_queue_len=2)
    async with serving(engine=engine) as s:
        assert s.server.guard.limits.max_calls == 10
