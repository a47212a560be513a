"""Prompts that wait for more prompts, on a whole engine with predictable step times."""

import asyncio
import itertools
import math
from functools import partial

import pytest
from counting import collect
from hypothesis import given
from hypothesis import strategies as st

from serving.config import BrownoutConfig
from serving.plan import Limits, Phase
from serving.request import Priority, SamplingParams
from serving.scheduling.policy import Company, View
from tests.serving.fake_runner import FakeRunner

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
LIMITS = Limits(16, 400, 4, 64, 8)
pytestmark = pytest.mark.simulated_time


def step_s(plan):
    """Returns step times: 40 + n ms for a prefill of n tokens, so that 40 are company; 20 ms for
    decode.
    """
    return 0.04 + 0.001 * plan.size if plan.phase is Phase.PREFILL else 0.02


async def prompts(start, ttft_slo_s=1.0, streams=6, best_effort=0, gap_s=0.0153, **config):
    """Returns the TTFT of prompts of 8 tokens that come one after another beside streams, and the
    prefill steps.
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
        await asyncio.sleep(gap_s * number)
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
    assert max(found) < 0.3
    assert max(alone) < max(found)


async def test_prompts_wait_together_as_long_as_their_step_makes_rows_wait(start):
    """A step's fixed 40 ms delay six rows by 240 ms: of two prompts, 100 ms apart, the first waits
    for 170 ms and the second for 70, behind at most one more decode step.
    """
    found, steps = await prompts(start, gap_s=0.1)
    assert steps == [2] * 8
    step_s, decode_s = 0.056, 0.02
    assert max(found[::2]) < 0.17 + decode_s + step_s + decode_s
    assert max(found[1::2]) < 0.07 + decode_s + step_s + decode_s


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0.01, 10))
def test_all_wait_at_most_twice_as_long_as_if_arrivals_were_known(gaps, cost_s):
    """Waiting is that of prompts, and for each step that of the rows beside it, `cost_s`; the least
    is found by trying all ways to cut the arrivals into steps.
    """
    arrivals = list(itertools.accumulate(gaps))
    least = [0.0]
    for end in range(1, len(arrivals) + 1):
        waits = [sum(arrivals[end - 1] - at for at in arrivals[i:end]) for i in range(end)]
        least.append(min(least[i] + waits[i] + cost_s for i in range(end)))
    view = partial(View, *(0.0, 16, (), (), (), (), {}, (), Phase.DECODE, 0.0, True))
    company, total_s, waiting = Company(math.inf, math.inf, cost_s), 0.0, list[float]()
    for at, later in itertools.pairwise([*arrivals, math.inf]):
        waiting.append(at)
        so_far_s = sum(at - one for one in waiting)
        due_at = at + (cost_s - so_far_s) / len(waiting)
        if due_at < later:
            just_before, then = (cost_s * (1 + part) for part in (-1e-6, 1e-6))
            assert not view(company, waited_s=just_before).in_company
            assert view(company, waited_s=then).in_company
            total_s += 2 * cost_s
            waiting = []
    assert total_s <= 2 * least[-1] * (1 + 1e-9)


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


@pytest.mark.parametrize(
    ("number", "length", "waits"),
    [(8, 8, False), (1, 64, False), (8, 2, False), (7, 8, True)],
    ids=["tokens", "a long one", "rows", "one fewer"],
)
async def test_prompts_that_fill_a_step_do_not_wait(start, number, length, waits):
    """A step holds 64 tokens and eight prompts, and takes as long whatever is in it: more company
    would have to run in another.
    """
    runner = partial(FakeRunner, checks_context=False)
    flat = {Phase.PREFILL: 0.1, Phase.DECODE: 0.02}
    engine = start(lambda plan: flat[plan.phase], LIMITS, runner=runner, prefix_reuse="off")
    for size in (8, 64):
        await collect(engine, [1] * size, 2)
    streams = [asyncio.create_task(collect(engine, [1], 60)) for _ in range(6)]
    await asyncio.sleep(0.507)
    clock = asyncio.get_running_loop().time
    began, one = clock(), SamplingParams(max_new_tokens=1)
    prompts = [collect(engine, [2] * length, sampling=one) for _ in range(number)]
    await asyncio.gather(*prompts)
    # Otherwise they wait together as long as the step makes six rows wait.
    assert (clock() - began > 0.02 + 0.1 + 0.02 + 1e-9) == waits
    await asyncio.gather(*streams)


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
