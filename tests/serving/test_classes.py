"""Classes of requests on a whole engine: queues, objectives, degradation, and a flood."""

import asyncio
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from counting import LIMITS, collect

from jmoe.packed_rows import EXEMPT
from serving.config import BrownoutConfig, SalcConfig
from serving.errors import Overloaded
from serving.plan import Limits, Phase
from serving.request import Priority, SamplingParams
from tests.serving.fake_runner import FakeRunner

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
simulated_time = pytest.mark.simulated_time


@simulated_time
async def test_a_full_queue_of_best_effort_refuses_best_effort_alone(start):
    engine = start(step_s=0.01, max_queue_len=8, max_best_effort_queue_len=2)
    tasks = [asyncio.create_task(collect(engine, [i], 50, priority=BE)) for i in range(6)]
    await asyncio.sleep(0.03)
    with pytest.raises(Overloaded, match="2 requests wait"):
        await collect(engine, [9], 1, priority=BE)
    assert len(await collect(engine, [9], 1)) == 1
    await asyncio.gather(*tasks)
    engine.scheduler.check_idle()


@simulated_time
async def test_best_effort_is_told_of_those_who_go_first(start):
    engine = start(step_s=0.01, max_queue_len=2)
    await collect(engine, [1], 50)
    tasks = [asyncio.create_task(collect(engine, [i], 50, priority=BE)) for i in range(4)]
    await asyncio.sleep(0.03)
    tasks += [asyncio.create_task(collect(engine, [i], 50, priority=BE)) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as alone:
        await collect(engine, [9], 1, priority=BE)
    tasks += [asyncio.create_task(collect(engine, [i], 50)) for i in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as behind:
        await collect(engine, [9], 1, priority=BE)
    assert behind.value.retry_after_s > alone.value.retry_after_s
    await asyncio.gather(*tasks)


@simulated_time
async def test_a_backlog_of_best_effort_moves_no_threshold(start):
    """It waits for minutes, against an objective of a second; no other class waits."""
    runner = recording()
    engine = start(
        step_s=0.5,
        runner=runner,
        max_queue_len=100,
        brownout=BrownoutConfig(strategy="full", ttft_slo_s=1.5, itl_slo_s=2.0),
        salc=SalcConfig(interval_s=0.5, min_samples=1),
        best_effort_max_wait_s=0.0,
    )
    backlog = [asyncio.create_task(collect(engine, [i], 20, priority=BE)) for i in range(40)]
    for _ in range(20):
        await asyncio.sleep(5.0)
        assert len(await collect(engine, [1], 2)) == 2
    state = engine.get_brownout()
    assert (state.prefill_threshold_percent, state.decode_threshold_percent) == (100, 100)
    await asyncio.gather(*backlog)


@simulated_time
@pytest.mark.parametrize("step_s", [0.02, 0.1])
async def test_best_effort_that_runs_gets_a_token_within_the_bound_that_is_told(start, step_s):
    """Streams of the other class fill every decode step, one after another, and prompts park."""
    limits = Limits(8, 400, 4, 16, 4, max_decode_seqs=4, num_layers=4)
    engine = start(
        step_s,
        limits,
        runner=partial(FakeRunner, part_layers=1),
        best_effort_max_wait_s=1.0,
        max_queue_len=1000,
    )
    clock = asyncio.get_running_loop().time
    assert engine.pace.best_effort_wait_s(1.0) == math.inf  # no step was seen yet

    async def best_effort():
        sampling = SamplingParams(max_new_tokens=8)
        return np.diff([clock() async for _ in engine.generate([1], sampling, priority=BE)])

    async def flood():
        while not gaps.done():
            await collect(engine, [1] * 10, 150)

    gaps = asyncio.create_task(best_effort())
    await asyncio.sleep(3 * step_s)
    others = [asyncio.create_task(flood()) for _ in range(7)]
    found = await gaps
    bound = engine.pace.best_effort_wait_s(1.0)
    assert bound == pytest.approx(1.0 + 4 * step_s)
    assert 1.0 < max(found) <= bound
    assert engine.pace.best_effort_wait_s(0.0) == math.inf
    await asyncio.gather(*others)


def recording():
    """Returns a runner that records the rows of its steps."""

    class Recording(FakeRunner):
        rows: list

        def launch(self, plan, control):
            self.__dict__.setdefault("plans", []).append((plan, control))
            return super().launch(plan, control)

    return Recording


async def exempt_rows(start, percent, num_ls, num_best_effort, **options):
    """Returns the rows that are exempt in a decode step of both classes, and its threshold."""
    limits = replace(LIMITS, num_slots=8)
    engine = start(
        step_s=0.01,
        limits=limits,
        runner=recording(),
        brownout=BrownoutConfig(strategy="full", decode_threshold_percent=percent, salc=False),
    )
    sampling = SamplingParams(max_new_tokens=20)
    classes = [LS] * num_ls + [BE] * num_best_effort
    asked = [collect(engine, [1], sampling=sampling, priority=c, **options) for c in classes]
    await asyncio.gather(*asked)
    plans = [one for one in engine.executor.plans if len(one[0].rows) == len(classes)]
    plan, control = next(one for one in plans if one[0].phase == "decode")
    return int((plan.rows[:, EXEMPT] > 0).sum()), control.threshold_percent


@simulated_time
@pytest.mark.parametrize(
    ("percent", "num_ls", "num_best_effort", "found"),
    [
        (50, 2, 2, (2, 0)),  # degrading best effort alone saves half
        (49, 2, 2, (0, 49)),  # what is asked for is more: everybody's
        (75, 2, 2, (2, 50)),  # best effort keeps one visit of two, all in all it is three of four
        (20, 1, 4, (1, 0)),
        (21, 1, 3, (0, 21)),
        (100, 2, 2, (2, 100)),
        (30, 4, 0, (0, 30)),  # no best effort: the threshold is theirs
        (30, 0, 4, (0, 30)),
    ],
)
async def test_best_effort_is_degraded_first(start, percent, num_ls, num_best_effort, found):
    assert await exempt_rows(start, percent, num_ls, num_best_effort) == found


@simulated_time
async def test_best_effort_that_refuses_brownout_spares_nobody_else(start):
    """There is nothing to degrade first."""
    assert await exempt_rows(start, 60, 2, 2, allow_brownout=False) == (4, 60)


@simulated_time
async def test_a_flood_of_best_effort_does_not_hold_up_prompts(start):
    """Eighty streams on 64 slots with pages for half of them; three prompts a second."""
    limits = Limits(
        num_slots=72,
        num_pages=32 * 13,
        page_size=16,
        max_prefill_tokens=128,
        max_prefill_seqs=8,
        max_decode_seqs=64,
        num_layers=6,
        prefill_buckets=(32, 64, 128),
    )

    def engine_of(**options):
        def step_s(plan):  # of the bundled model on two cores, roughly
            return 0.004 + 0.0001 * plan.size

        class Quick(FakeRunner):
            def __init__(self, limits, step_s=0.0):
                super().__init__(limits, step_s=step_s, part_layers=2, checks_context=False)

        return start(step_s=step_s, limits=limits, runner=Quick, **options)

    async def prompts(engine, count=30):
        async def one(i):
            await asyncio.sleep(i / 3)
            began = asyncio.get_running_loop().time()
            async for _ in engine.generate([i] * 25, SamplingParams(max_new_tokens=16)):
                return asyncio.get_running_loop().time() - began

        return await asyncio.gather(*(one(i) for i in range(count)))

    alone_s = np.percentile(await prompts(engine_of()), 90)
    engine = engine_of(max_queue_len=100)
    flood = [asyncio.create_task(collect(engine, [i] * 40, 150, priority=BE)) for i in range(80)]
    await asyncio.sleep(1.0)
    flooded_s = np.percentile(await prompts(engine), 90)
    assert flooded_s <= 1.8 * alone_s + 0.010
    answers = await asyncio.gather(*flood)
    assert all(len(outs) == 150 for outs in answers)
    engine.scheduler.check_idle()


@pytest.mark.deep
@simulated_time
async def test_a_backlog_older_than_its_longest_wait_does_not_hold_up_prompts(start):
    """Best effort waits up to twice `best_effort_max_wait_s`, so that its first is promoted."""
    limits = Limits(10, 400, 4, 16, 4, num_layers=2, max_decode_seqs=8)
    runner = partial(FakeRunner, part_layers=1, checks_context=False)
    config = {"best_effort_max_wait_s": 4.0, "prefix_reuse": "off", "runner": runner}
    clock = asyncio.get_running_loop().time

    def step_s(plan):
        return 0.04 if plan.phase is Phase.PREFILL else 0.02

    async def prompts(engine):
        async def one(number):
            await asyncio.sleep(0.153 * number)
            began = clock()
            await collect(engine, [number] * 9, 1)
            return clock() - began

        return await asyncio.gather(*map(one, range(60)))

    alone_s = await prompts(start(step_s, limits, **config))
    engine = start(step_s, limits, **config)
    backlog = [asyncio.create_task(collect(engine, [i] * 9, 120, priority=BE)) for i in range(40)]
    await asyncio.sleep(0.05)
    beside_s = await prompts(engine)
    waited_s = [clock() - s.arrived_at for s in engine.scheduler.queues[BE]]
    assert min(waited_s) > 2 * 4.0
    assert np.percentile(beside_s, 90) <= 1.8 * np.percentile(alone_s, 90)
    assert max(beside_s) <= 3 * max(alone_s)
    assert [len(outs) for outs in await asyncio.gather(*backlog)] == [120] * 40
    engine.scheduler.check_idle()


class DegradesFirst(FakeRunner):
    """A runner that degrades a visit a token in the first layer, and none in others."""

    def computed(self, plan, control, row, model, new, adopted):
        token, _ = super().computed(plan, control, row, model, new, adopted)
        return token, 0 if plan.first_layer or row[EXEMPT] else len(new)


@simulated_time
async def test_visits_of_steps_that_are_begun_and_given_up_are_not_counted(start):
    """Prompts of best effort are evicted between two parts of a step, and parked steps join."""
    limits = Limits(6, 30, 4, 64, 8, num_layers=4)
    percents = {f"{phase}_threshold_percent": 0 for phase in Phase}
    runner = partial(DegradesFirst, part_layers=1)
    engine = start(
        0.04,
        limits,
        runner=runner,
        brownout=BrownoutConfig("full", salc=False, **percents),
        prefix_reuse="off",
        max_queue_len=1000,
        best_effort_share=0.0,
        best_effort_max_wait_s=0.0,
    )

    async def one(number):
        await asyncio.sleep(0.06 * number)
        size, priority = ((40, LS), (60, BE), (4, LS), (4, BE))[number % 4]
        kind = {"priority": priority, "allow_audit": False}
        return (await collect(engine, [number] * size, 4, **kind))[-1].usage

    for usage in await asyncio.gather(*map(one, range(40))):
        assert usage.degraded_visits == usage.expert_visits
    stats = engine.stats()
    assert stats.degraded_visits == stats.expert_visits
    assert stats.evictions
    assert stats.joins
