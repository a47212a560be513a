"""What the engine tells a controller before each step, with predictable step times."""

import asyncio

import pytest
from counting import collect

from serving.config import BrownoutConfig, SalcConfig
from serving.control.controller import Decision
from serving.plan import Limits, Phase
from serving.request import Priority, SamplingParams

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
LIMITS = Limits(8, 400, 4, 64, 8, num_layers=4)
pytestmark = pytest.mark.simulated_time


class Recording:
    """A controller that records what it is told."""

    decided, steps = [], []

    def __init__(self, config):
        type(self).decided, type(self).steps = [], []

    def decide(self, seen):
        self.decided.append(seen)
        return Decision(100, 100)

    def of_step(self, step):
        self.steps.append(step)
        return 100.0


def step_s(plan):
    """Returns the time of a whole step: prefill 40 ms, decode 20 ms."""
    whole = 0.04 if plan.phase is Phase.PREFILL else 0.02
    return whole * plan.num_layers / LIMITS.num_layers


def serving(start, **config):
    """Returns an engine that Recording controls, once a decision."""
    salc = SalcConfig(controller=f"{__name__}:Recording", interval_s=0.1, min_samples=1)
    brownout = BrownoutConfig(strategy="full", itl_slo_s=0.03)
    return start(step_s, LIMITS, brownout=brownout, salc=salc, prefill_company=False, **config)


def of(phase, after=0.0):
    return [step for step in Recording.steps if step.phase is phase and step.now >= after]


async def test_rows_that_wait_and_the_time_they_lost(start):
    engine, clock = serving(start), asyncio.get_running_loop().time
    await collect(engine, [1] * 8, 4)  # steps are known now
    await asyncio.sleep(10.0)
    began = clock()
    streams = [asyncio.create_task(collect(engine, [1], 30)) for _ in range(3)]
    await asyncio.sleep(0.2)
    prompted = clock()
    await collect(engine, [2] * 8, sampling=SamplingParams(max_new_tokens=2))
    prefill = of(Phase.PREFILL, prompted)[0]
    assert (prefill.size, prefill.num_decoding) == (8, 3)
    assert prefill.since_s == pytest.approx(0, abs=0.002)  # a decode step ends as it begins
    first = next(step for step in of(Phase.DECODE, prompted) if step.num_decoding == 4)
    assert first.size == 4
    assert first.since_s == pytest.approx(0.04, rel=0.1)  # the prefill step
    # Idle time is nobody's wait.
    assert max(step.since_s for step in of(Phase.DECODE, began)) < 0.1
    await asyncio.gather(*streams)
    after_decode = of(Phase.DECODE, prompted)[2:]
    assert {step.since_s for step in after_decode} == {0.0}
    load = Recording.decided[-1].load
    assert (load.max_running, load.prompt_tokens > 1) == (8, True)


async def test_a_prefill_step_in_parts_counts_its_own_prompts_out(start):
    engine = serving(start, part_layers=2)
    await collect(engine, [1] * 8, 4)
    low = asyncio.create_task(collect(engine, [1], 60, priority=BE))  # so that steps come in parts
    stream = asyncio.create_task(collect(engine, [1], 30))
    await asyncio.sleep(0.3)
    before = asyncio.get_running_loop().time()
    await collect(engine, [2] * 8, sampling=SamplingParams(max_new_tokens=2))
    assert of(Phase.PREFILL, before)[0].num_decoding == 2
    await asyncio.gather(low, stream)


async def test_best_effort_is_no_load(start):
    """Thresholds serve the other class, and only its load decides them."""
    engine = serving(start)
    low = [asyncio.create_task(collect(engine, [1] * 8, 40, priority=BE)) for _ in range(6)]
    stream = asyncio.create_task(collect(engine, [3] * 5, 40))
    await asyncio.gather(*low, stream)
    loads = [seen.load for seen in Recording.decided]
    assert max(load.num_running for load in loads) == 1
    assert max(load.arrivals_per_s for load in loads) == 1
    assert {load.prompt_tokens for load in loads if load.prompt_tokens} == {5}
    # Rows that are exempt so that best effort is degraded first have not refused brownout.
    assert {load.exempt_share for load in loads} == {0}


async def test_rows_that_refuse_brownout_are_told_of(start):
    engine = serving(start)
    refusing = asyncio.create_task(collect(engine, [1], 20, allow_brownout=False))
    await asyncio.gather(refusing, collect(engine, [1], 20))
    assert {step.exempt_share for step in of(Phase.DECODE)} == {0.5}
    assert Recording.decided[-1].load.exempt_share == pytest.approx(0.5)
