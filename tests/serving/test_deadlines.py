"""Timeouts of requests, computed by hand: a step takes 10 ms, four requests run at once."""

import asyncio

import pytest
from counting import collect, counting_engine
from served import CODE, Setup, failure, request

from serving.config import ServerConfig
from serving.errors import DeadlineExceeded, QueuedTooLong
from serving.frontend.metrics import Metrics
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

STEP_S = 0.01


def now():
    return asyncio.get_running_loop().time()


def busy(engine, count, max_new):
    return [asyncio.create_task(collect(engine, [i], max_new)) for i in range(count)]


def pages(engine):
    stats = engine.stats()
    return stats.kv_pages_used, stats.num_running, stats.num_waiting


@pytest.mark.simulated_time
async def test_who_waits_too_long_for_a_first_step_is_told(start):
    metrics = Metrics()
    engine = start(step_s=STEP_S, queue_timeout_s=0.2, observer=metrics)
    running = busy(engine, 4, 60)  # 0.6 s
    await asyncio.sleep(0.05)
    came_at = now()
    with pytest.raises(QueuedTooLong, match=r"not begun after 0\.2 s \(engine\.queue_timeout_s\)"):
        await collect(engine, [9], 1)
    assert now() == pytest.approx(came_at + 0.2)
    assert pages(engine)[1:] == (4, 0)
    assert [len(outputs) for outputs in await asyncio.gather(*running)] == [60] * 4
    assert pages(engine) == (0, 0, 0)
    assert dict(metrics.expired) == {"deadline": 0, "queue": 1}
    assert engine.stats().requests_aborted == 1


@pytest.mark.simulated_time
async def test_who_began_in_time_may_take_as_long_as_it_takes(start):
    engine = start(step_s=STEP_S, queue_timeout_s=0.2)
    assert len(await collect(engine, [1], 100)) == 100  # a second
    # Its own deadline counts then, from its arrival.
    came_at = now()
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.5 s$") as late:
        await collect(engine, [1], 100, timeout_s=0.5)
    assert not isinstance(late.value, QueuedTooLong)
    assert now() == pytest.approx(came_at + 0.5)
    assert pages(engine) == (0, 0, 0)


@pytest.mark.simulated_time
async def test_whichever_time_is_up_first_is_named(start):
    metrics = Metrics()
    engine = start(step_s=STEP_S, queue_timeout_s=0.2, observer=metrics)
    running = busy(engine, 4, 100)
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.1 s"):
        await collect(engine, [9], 1, timeout_s=0.1)
    assert dict(metrics.expired) == {"deadline": 1, "queue": 0}
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    assert dict(metrics.expired) == {"deadline": 1, "queue": 0}  # their callers went away


@pytest.mark.simulated_time
async def test_no_timer_is_set_where_there_is_no_limit(start):
    engine = start(step_s=STEP_S)
    running = busy(engine, 5, 200 - 1)
    assert [len(outputs) for outputs in await asyncio.gather(*running)] == [199] * 5


@pytest.mark.simulated_time
async def test_requests_without_a_time_get_the_servers(start):
    engine = start(step_s=STEP_S)
    engine.request_timeout_s = 0.3
    with pytest.raises(DeadlineExceeded, match=r"after 0\.3 s \(request_timeout_s"):
        await collect(engine, [1], 100)
    assert len(await collect(engine, [1], 100, timeout_s=2.0)) == 100  # its own counts


@pytest.mark.simulated_time
async def test_who_has_waited_before_has_what_is_left(start):
    engine, came_at = start(step_s=STEP_S), now()
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.5 s$"):
        await collect(engine, [1], 100, timeout_s=0.5, waited_s=0.3)
    assert now() == pytest.approx(came_at + 0.2)


async def test_a_grpc_call_without_a_deadline_gets_the_servers():
    async with Setup(ServerConfig(port=0, request_timeout_s=0.2)) as s:
        engine = s.engine = counting_engine(step_s=0.05)
        await s.ready()
        sampling = pb.SamplingParams(max_new_tokens=150)  # 7.5 s
        late = await failure(s.stub.Generate(request([1], sampling=sampling)))
        assert late.code() == CODE.DEADLINE_EXCEEDED
        assert "not finished after 0.2 s (request_timeout_s" in late.details()
        engine.scheduler.check_idle()


async def test_a_grpc_call_that_waits_too_long_is_told():
    async with Setup(ServerConfig(port=0)) as s:
        s.engine = counting_engine(step_s=0.05, queue_timeout_s=0.1)
        await s.ready()
        sampling = pb.SamplingParams(max_new_tokens=150)
        calls = [s.stub.Generate(request([1], sampling=sampling)) for _ in range(4)]
        for call in calls:
            await call.read()  # it has begun
        late = await failure(s.stub.Generate(request([1], sampling=sampling)))
        assert late.code() == CODE.DEADLINE_EXCEEDED
        assert "engine.queue_timeout_s" in late.details()
        for call in calls:
            call.cancel()
