"""When steps are planned: late, but never so late that the device waits for the host."""

import asyncio
import gc
import random
import weakref
from dataclasses import replace
from functools import partial

import pytest
from counting import collect

from serving.plan import Limits
from serving.request import SamplingParams
from serving.scheduling.pace import Lead
from serving.scheduling.step import ScheduledStep
from tests.serving.fake_runner import FakeRunner

LIMITS = Limits(16, 4000, 4, 64, 512)
STEP_S = 0.007


@pytest.mark.simulated_time
@pytest.mark.sized(deep=("0.0", "0.001", "0.004", "0.006"))
@pytest.mark.parametrize("launch_s", [0.0, 0.001, 0.0025, 0.004, 0.006])
async def test_a_device_that_steps_come_to_late_is_kept_busy(start, launch_s):
    """A device that waits could begin `launch_s` after the launch. Half of a stream is learnt by,
    and judged is the other half.
    """
    runner = partial(FakeRunner, checks_context=False, launch_s=launch_s)
    engine = start(STEP_S, LIMITS, runner=runner, prefix_reuse="off", max_model_len=4000)
    clock = asyncio.get_running_loop().time
    streams = [asyncio.create_task(collect(engine, [1], 2000)) for _ in range(4)]
    await asyncio.sleep(1000 * STEP_S)
    at, launched = clock(), len(engine.executor.launches)
    await asyncio.gather(*streams)
    assert (clock() - at) / (len(engine.executor.launches) - launched) < 1.02 * STEP_S


class TimesLaunches(FakeRunner):
    """A device whose launches are made, and timed, by a thread of its own."""

    def _schedule(self, plan, result, future):
        called_at = asyncio.get_running_loop().time() + self.launch_s
        super()._schedule(plan, replace(result, called_at=called_at), future)


@pytest.mark.simulated_time
@pytest.mark.parametrize(("launch_s", "write_s"), [(0.004, 0.0), (0.003, 0.0014)])
async def test_what_launches_and_other_tasks_take_is_known_at_once(start, launch_s, write_s):
    """Each of four streams keeps the event loop for `write_s` with every token: where that leaves
    no time for a launch, the launch goes first.
    """
    runner = partial(TimesLaunches, checks_context=False, launch_s=launch_s)
    engine = start(STEP_S, LIMITS, runner=runner, prefix_reuse="off", max_model_len=4000)
    loop, ended_at = asyncio.get_running_loop(), []

    async def read():
        async for _ in engine.generate([1], SamplingParams(max_new_tokens=150)):
            loop.now += write_s
            ended_at.append(loop.time())

    await asyncio.gather(*(read() for _ in range(4)))
    steps = ended_at[::4]
    assert (steps[-10] - steps[-90]) / 80 < 1.02 * STEP_S


def lead_after(num_steps, late_s, noise, seed=0):
    """Returns the lead (s) after steps that take `late_s` less the lead longer than 7 ms."""
    lead, rng, found = Lead(), random.Random(seed), []
    for _ in range(num_steps):
        tries = lead.tries()
        own_s = lead.tried_s if tries else lead.seconds
        took_s = STEP_S * rng.lognormvariate(0, noise) + max(0.0, late_s - own_s)
        lead.observe(tries, took_s / STEP_S)
        found.append(lead.seconds)
    return sum(found[-1000:]) / 1000


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_lead_is_what_a_launch_takes_and_little_more(noise):
    assert 0.8 * 0.003 < lead_after(8000, 0.003, noise) < 1.5 * 0.003


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_where_nothing_is_late_requests_may_come_late_too(noise, seed):
    """A step that is planned early takes in fewer of those that come meanwhile."""
    assert lead_after(8000, 0.0, noise, seed) < 0.05 * STEP_S


@pytest.mark.parametrize("rhythm", [(1.5, 0.5), (1.2, 1.2, 0.6), (1.17, 1.17, 1.17, 0.5)])
def test_a_rhythm_of_steps_is_no_reason_to_plan_earlier(rhythm):
    lead = Lead()
    for _ in range(2000):
        for ratio in rhythm:
            lead.observe(lead.tries(), ratio)
    assert lead.seconds < 0.05 * STEP_S


def steps_kept():
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is ScheduledStep]


@pytest.mark.simulated_time
async def test_no_step_is_kept_by_an_engine_at_rest(start):
    others = weakref.WeakSet(steps_kept())  # by what other tests have left
    engine = start(STEP_S, LIMITS)
    await asyncio.gather(*(collect(engine, [1, 2], 6) for _ in range(3)))
    await asyncio.sleep(1)
    assert set(steps_kept()) <= set(others)
