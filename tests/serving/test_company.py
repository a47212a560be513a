"""Prompts that wait for more prompts, on a whole engine with predictable step times."""

import asyncio
from functools import partial

import pytest
from counting import collect

from serving.bench.fake import FakeRunner
from serving.config import BrownoutConfig
from serving.plan import Limits, Phase
from serving.request import Priority, SamplingParams

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
LIMITS = Limits(16, 400, 4, 64, 8)
pytestmark = pytest.mark.simulated_time


def step_s(plan):
    """Returns step times: 40 + n ms for a prefill of n tokens, so that 40 are company; 20 ms for
    decode.
    """
    return 0.04 + 0.001 * plan.size if plan.phase is Phase.PREFILL else 0.02


async def prompts(start, ttft_slo_s=1.0, streams=6, best_effort=0, **config):
    """Returns the TTFT of prompts of 8 tokens that come every 31 ms beside streams, and the prefill
    steps.
    """
    runner = partial(FakeRunner, checks_context=False)
    brownout = BrownoutConfig(ttft_slo_s=ttft_slo_s)
    alone = {"prefix_reuse": "off"}  # all prompts are alike here
    engine = start(step_s, LIMITS, runner=runner, brownout=brownout, **alone, **config)
    clock = asyncio.get_running_loop().time
    for size in (8, 64):  # the pace has to have seen two sizes
        await collect(engine, [1] * size, 2)
    classes = [LS] * streams + [BE] * best_effort
    stream = [asyncio.create_task(collect(engine, [1], 150, priority=c)) for c in classes]
    await asyncio.sleep(0.507)  # at no moment at which a step ends
    launched = len(engine.executor.launches)

    async def first_token(number):
        await asyncio.sleep(0.0307 * number)
        began = clock()
        await collect(engine, [2] * 8, sampling=SamplingParams(max_new_tokens=1))
        return clock() - began

    found = await asyncio.gather(*map(first_token, range(16)))
    steps = [rows for phase, rows, _ in engine.executor.launches[launched:] if phase == "prefill"]
    for task in stream:
        await task
    engine.scheduler.check_idle()
    return found, steps


async def test_prompts_beside_streams_share_their_steps(start):
    alone, before = await prompts(start, prefill_company=False)
    found, steps = await prompts(start)
    assert sum(steps) == sum(before) == 16
    assert all(rows >= 5 for rows in steps[:-1])  # forty tokens; the last ones wait their time
    assert len(steps) < len(before)
    # Four fifths of what 1 s leaves beside a prefill step and the decode steps around it, at most.
    assert max(found) < 0.8 + 0.2
    assert max(alone) < max(found)


async def test_where_the_objective_leaves_no_room_nobody_waits(start):
    found, steps = await prompts(start, ttft_slo_s=0.12)
    alone, before = await prompts(start, ttft_slo_s=0.12, prefill_company=False)
    assert found == pytest.approx(alone)
    assert steps == before


async def test_with_best_effort_there_nobody_waits(start):
    found, steps = await prompts(start, best_effort=1)
    alone, before = await prompts(start, best_effort=1, prefill_company=False)
    assert found == pytest.approx(alone)
    assert steps == before


async def test_beside_few_rows_nobody_waits(start):
    found, steps = await prompts(start, streams=5)  # of sixteen
    alone, before = await prompts(start, streams=5, prefill_company=False)
    assert found == pytest.approx(alone)
    assert steps == before


async def test_a_prompt_alone_does_not_wait(start):
    engine = start(step_s, LIMITS, prefix_reuse="off")
    for size in (8, 64, 8):
        began = asyncio.get_running_loop().time()
        await collect(engine, [1] * size, 1)
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.04 + 0.001 * size)


async def test_a_prompt_that_is_begun_goes_on_at_once(start):
    """A hundred tokens in chunks of 64: the rest is no company, and waits for none."""
    engine = start(step_s, LIMITS, prefix_reuse="off")
    for size in (8, 64):
        await collect(engine, [1] * size, 2)
    streams = [asyncio.create_task(collect(engine, [1], 60)) for _ in range(6)]
    await asyncio.sleep(0.3)
    began = asyncio.get_running_loop().time()
    await collect(engine, [1] * 100, 1)
    took_s = asyncio.get_running_loop().time() - began
    # Under way: decode; 64 tokens; decode; 36 tokens.
    assert took_s <= 0.02 + 0.104 + 0.02 + 0.076 + 0.02
    await asyncio.gather(*streams)
