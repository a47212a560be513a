"""Chunks of prompts that leave rows which decode their objective, on a whole engine with
predictable step times.
"""

import asyncio
from functools import partial
from itertools import pairwise

import pytest
from counting import collect

from serving.config import BrownoutConfig
from serving.plan import Limits, Phase
from serving.request import Priority, SamplingParams
from tests.serving.fake_runner import FakeRunner

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
SIZES = (8, 16, 32, 64)
LIMITS = Limits(16, 400, 4, 64, 8, prefill_buckets=SIZES)
FIXED_S, TOKEN_S, DECODE_S = 0.004, 0.001, 0.02
pytestmark = pytest.mark.simulated_time


async def chunks_of_a_prompt(start, *, streams=4, length=64, priority=LS, **objectives):
    """Returns the tokens of the prefill steps of a prompt that comes beside streams, and when it
    and they got their tokens.
    """
    launched, clock = [], asyncio.get_running_loop().time

    def step_s(plan):
        launched.append((plan.phase, plan.size))
        return FIXED_S + TOKEN_S * plan.size if plan.phase is Phase.PREFILL else DECODE_S

    runner = partial(FakeRunner, checks_context=False)
    alone = {"prefix_reuse": "off", "prefill_company": False}
    brownout = BrownoutConfig(**{"ttft_slo_s": 10.0, **objectives})
    engine = start(step_s, LIMITS, runner=runner, brownout=brownout, **alone)
    for size in SIZES:
        await collect(engine, [1] * size, 2)
    times = [[] for _ in range(streams)]

    async def stream(at):
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
        async for _ in engine.generate([1], sampling):
            times[at].append(clock())

    tasks = [asyncio.create_task(stream(at)) for at in range(streams)]
    await asyncio.sleep(0.3)
    launched.clear()
    one = SamplingParams(max_new_tokens=1)
    await collect(engine, [2] * length, sampling=one, priority=priority)
    sizes = [size for phase, size in launched if phase is Phase.PREFILL]
    await asyncio.gather(*tasks)
    engine.scheduler.check_idle()
    return sizes, times


def longest_gap(times):
    return max(after - at for own in times for at, after in pairwise(own))


@pytest.mark.parametrize(
    ("itl_slo_s", "sizes"),
    [(1.0, [64]), (0.089, [64]), (0.087, [32, 32]), (0.05, [16] * 4), (0.033, [8] * 8)],
)
async def test_a_prompt_comes_in_chunks_that_fit(start, itl_slo_s, sizes):
    found, times = await chunks_of_a_prompt(start, itl_slo_s=itl_slo_s)
    assert found == sizes
    assert longest_gap(times) <= itl_slo_s


async def test_no_chunk_is_smaller_than_pays_its_step(start):
    """Of eight tokens 8 ms, and 4 for the step: there is nothing smaller, though none fits."""
    found, times = await chunks_of_a_prompt(start, itl_slo_s=0.001)
    assert found == [8] * 8
    assert longest_gap(times) == pytest.approx(DECODE_S + FIXED_S + 8 * TOKEN_S)


async def test_a_first_token_that_is_about_to_be_late_goes_first(start):
    """Half of its objective is gone after two chunks: the rest comes at once."""
    found, _ = await chunks_of_a_prompt(start, itl_slo_s=0.05, ttft_slo_s=0.15)
    assert found[:2] == [16, 16]
    assert found[2:] == [32]


async def test_best_effort_that_waits_is_no_reason_to_hurry(start):
    found, times = await chunks_of_a_prompt(start, itl_slo_s=0.05, ttft_slo_s=0.15, priority=BE)
    assert max(found) == 16
    assert longest_gap(times) <= 0.05


async def test_nobody_decodes_and_the_prompt_comes_whole(start):
    found, _ = await chunks_of_a_prompt(start, streams=0, itl_slo_s=0.033)
    assert found == [64]
