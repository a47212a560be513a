"""The engine's tick over a fake runner: hand-calculable tokens, real scheduling."""

import asyncio
import math

import pytest

from serving.config import EngineConfig
from serving.engine import Engine
from serving.errors import Aborted, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from serving.fake import FakeRunner
from serving.request import BrownoutChange, SamplingParams
from serving.scheduler import Limits

LIMITS = Limits(num_slots=4, num_pages=64, page_size=4, max_prefill_tokens=16, max_prefill_seqs=4)


@pytest.fixture
async def start():
    engines = []

    def make(step_s=0.0, limits=LIMITS, runner=FakeRunner, **config):
        engine = Engine(
            EngineConfig(max_model_len=200, **config), runner(limits, step_s=step_s), None
        )
        engine.run()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


async def collect(engine, prompt, max_new=5, **kwargs):
    sampling = kwargs.pop("sampling", SamplingParams(max_new_tokens=max_new))
    return [out async for out in engine.generate(prompt, sampling, **kwargs)]


async def settle(engine):
    while engine.scheduler.running or engine.scheduler.waiting:
        await asyncio.sleep(0.001)
    engine.scheduler.check_idle()


async def test_a_stream_counts_up_and_says_why_it_ended(start):
    outputs = await collect(start(), [7, 8, 9], 4, request_id="mine")
    assert [t for out in outputs for t in out.token_ids] == [10, 11, 12, 13]
    assert [out.finish_reason for out in outputs] == [None, None, None, "length"]
    assert {out.request_id for out in outputs} == {"mine"}
    usage = outputs[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)
    assert usage.expert_visits == 3 + 3  # the last token is never computed


async def test_a_stop_token_ends_a_stream_and_wastes_no_output(start):
    engine = start()
    sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(12,))
    outputs = await collect(engine, [9], sampling=sampling)
    assert [t for out in outputs for t in out.token_ids] == [10, 11, 12]
    assert outputs[-1].finish_reason == "stop"
    await settle(engine)


async def test_many_streams_share_few_slots(start):
    engine = start()
    results = await asyncio.gather(*[collect(engine, [50 * i], 9) for i in range(20)])
    for i, outputs in enumerate(results):
        assert [t for o in outputs for t in o.token_ids] == [50 * i + n for n in range(1, 10)]
    stats = engine.stats()
    assert (stats.requests_finished, stats.kv_pages_used, stats.num_running) == (20, 0, 0)
    await settle(engine)


async def test_step_n_plus_1_is_launched_before_step_n_is_done(start):
    events = []

    class Watched(FakeRunner):
        def launch(self, plan, control):
            events.append("launch")
            return super().launch(plan, control)

        def read(self, handle):
            result = super().read(handle)
            events.append("done")
            return result

    await collect(start(runner=Watched, step_s=0.06), [1], 5)
    assert events == ["launch", *["launch", "done"] * 4, "done"]


async def test_a_late_arrival_joins_the_very_next_step(start):
    engine = start(step_s=0.08)
    first = asyncio.create_task(collect(engine, [1], 6))
    await asyncio.sleep(0.08 * 3 + 0.02)  # the pace is known; a step has just begun
    before = len(engine.runner.launches)
    second = asyncio.create_task(collect(engine, [5], 1))
    await asyncio.gather(first, second)
    assert engine.runner.launches[before][0] == "prefill"


async def test_a_closed_iterator_frees_its_pages(start):
    engine = start(step_s=0.002)
    stream = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=100))
    async for _ in stream:
        break
    await stream.aclose()
    assert engine.stats().requests_aborted == 1
    await settle(engine)
    assert [t for o in await collect(engine, [5], 2) for t in o.token_ids] == [6, 7]


async def test_a_deadline_ends_a_request_waiting_or_running(start):
    engine = start(step_s=0.005)
    with pytest.raises(DeadlineExceeded, match=r"0\.03"):
        await collect(engine, [1], 150, timeout_s=0.03)
    busy = [asyncio.create_task(collect(engine, [i], 60)) for i in range(4)]
    await asyncio.sleep(0.02)
    with pytest.raises(DeadlineExceeded):
        await collect(engine, [1], 5, timeout_s=0.01)  # never got a slot
    assert all(len(outputs) == 60 for outputs in await asyncio.gather(*busy))
    await settle(engine)


async def test_a_full_queue_refuses_and_says_when_to_come_back(start):
    engine = start(step_s=0.01, max_queue_len=2)
    tasks = []
    for i in range(4):
        tasks.append(asyncio.create_task(collect(engine, [i], 50)))
        await asyncio.sleep(0.03)
    tasks += [asyncio.create_task(collect(engine, [i], 2)) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests wait") as refused:
        engine.check_admission()
    assert refused.value.retry_after_s > 0
    assert engine.stats().requests_rejected == 1
    assert len(await asyncio.gather(*tasks)) == 6


async def test_drain_finishes_what_is_there_and_admits_nothing(start):
    engine = start(step_s=0.002)
    task = asyncio.create_task(collect(engine, [1], 20))
    await asyncio.sleep(0.01)
    drained = asyncio.create_task(engine.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="draining"):
        await collect(engine, [1], 1)
    assert await drained
    assert len(await task) == 20


async def test_a_drain_that_takes_too_long_says_so(start):
    engine = start(step_s=0.01)
    task = asyncio.create_task(collect(engine, [1], 150))
    await asyncio.sleep(0.02)
    assert not await engine.drain(0.05)
    await engine.stop()
    with pytest.raises(Aborted):
        await task


async def test_a_failing_step_fails_its_requests_with_a_reason(start):
    class Broken(FakeRunner):
        def read(self, handle):
            raise RuntimeError("device lost")

    engine = start(runner=Broken)
    with pytest.raises(Unavailable, match="device lost"):
        await collect(engine, [1])
    assert engine.status == "failed"
    with pytest.raises(Unavailable, match="failed"):
        await collect(engine, [1])


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ("text", {}, "no tokenizer"),
        ([1] * 190, {"max_new_tokens": 20}, "210 positions"),
        ([1], {"stop": ("x",)}, "tokenizer"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(start, prompt, sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        await collect(start(), prompt, sampling=SamplingParams(**sampling))


async def test_a_request_larger_than_all_pages_is_refused(start):
    engine = start(limits=Limits(2, 3, 4, 16, 2))
    with pytest.raises(InvalidRequest, match="4 KV pages"):
        await collect(engine, [1] * 10, 5)
    assert len(await collect(engine, [1] * 7, 5)) == 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_sampling_values_out_of_range_are_named(values, words):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**values)


async def test_brownout_can_be_changed_while_serving(start):
    engine = start(step_s=0.002)
    task = asyncio.create_task(collect(engine, [1], 40))
    await asyncio.sleep(0.01)
    state = await engine.set_brownout(BrownoutChange(strategy="full", decode_threshold_percent=30))
    assert (state.strategy, state.decode_threshold_percent) == ("full", 30)
    outputs = await task
    span = outputs[-1].decode_threshold
    assert (span.min_percent, span.max_percent) == (30, 100)
    assert (100, 0) in {c for _, _, c in engine.runner.launches}
    assert (30, 1) in {c for _, _, c in engine.runner.launches}
    with pytest.raises(InvalidRequest, match="united experts"):
        await engine.set_brownout(BrownoutChange(strategy="partial"))
    with pytest.raises(InvalidRequest, match="way is 3"):
        await engine.set_brownout(BrownoutChange(way=3))
