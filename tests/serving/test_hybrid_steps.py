"""Rows that decode beside prompts, on a whole engine with predictable step times."""

import asyncio
from functools import partial

import pytest
from counting import collect

from serving.bench.fake import FakeRunner
from serving.config import AsynchronousConfig, BrownoutConfig, EngineConfig, ServerConfig
from serving.errors import SettingsError
from serving.plan import Limits, Phase
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.settings.reading import check

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
LIMITS = Limits(16, 400, 4, 64, 8)
pytestmark = pytest.mark.simulated_time


class Watched(FakeRunner):
    """A runner that notes its steps: (phase, size, rows that decode beside prompts)."""

    def launch(self, plan, control):
        self.__dict__.setdefault("steps", []).append((plan.phase, plan.size, plan.num_decodes))
        return super().launch(plan, control)


def step_s(plan):
    """Returns step times: 10 + n / 10 ms for n tokens in a step with prompts; else 8 ms."""
    return 0.01 + 0.0001 * plan.size if plan.phase is Phase.PREFILL else 0.008


async def streams_and_prompts(
    start,
    step_s=step_s,
    *,
    has_hybrid=True,
    limits=LIMITS,
    prompt=50,
    count=16,
    best_effort=0,
    **config,
):
    """Lets four streams decode while prompts come one after another, each alone in its step.

    Returns the engine, the gaps between tokens of the streams, and the steps of that time.
    """
    runner = partial(Watched, has_hybrid=has_hybrid)
    settings = {"prefix_reuse": "off", "prefill_company": False, "max_model_len": 400}
    engine = start(step_s, limits, runner=runner, **{**settings, **config})
    clock = asyncio.get_running_loop().time
    for size in (4, prompt, limits.max_prefill_tokens) * 5:  # times have to be known
        await collect(engine, [1] * size, 2)
    gaps = []

    async def stream(number):
        tokens, before = [], None
        classes = {"priority": BE if number < best_effort else LS}
        async for out in engine.generate(
            [10 * number], SamplingParams(max_new_tokens=200), **classes
        ):
            now = clock()
            gaps.append(now - before if before else 0.0)
            tokens, before = [*tokens, *out.token_ids], now
        assert tokens == [10 * number + n for n in range(1, 201)]

    streams = [asyncio.create_task(stream(number)) for number in range(4)]
    await asyncio.sleep(0.2)
    first = len(engine.executor.steps)
    gaps.clear()
    for _ in range(count):
        await collect(engine, [500] * prompt, 1)
        await asyncio.sleep(0.02)
    steps, found = engine.executor.steps[first:], list(gaps)
    await asyncio.gather(*streams)
    engine.scheduler.check_idle()
    return engine, found, steps


async def test_streams_do_not_wait_for_a_prompt_and_a_step_of_their_own(start):
    _, apart, _ = await streams_and_prompts(start, has_hybrid=False)
    engine, beside, steps = await streams_and_prompts(start)
    prompts = [(size, rows) for phase, size, rows in steps if phase is Phase.PREFILL]
    assert prompts == [(54, 4)] * 16  # every prompt, with all streams beside it
    assert engine.scheduler.num_hybrid >= 16
    assert max(apart) == pytest.approx(0.015 + 0.008, abs=1e-6)
    assert max(beside) == pytest.approx(0.0154, abs=1e-6)


async def test_a_full_prefill_step_leaves_room_for_rows_that_decode(start):
    _, _, steps = await streams_and_prompts(start, prompt=150, count=4)
    found = [(size, rows) for phase, size, rows in steps if phase is Phase.PREFILL]
    assert found == [(64, 4), (64, 4), (34, 4)] * 4


async def test_rows_decode_apart_where_that_takes_less(start):
    """A row beside a prompt takes 3 ms. The first steps have to show it."""

    def slow(plan):
        return step_s(plan) + 0.003 * plan.num_decodes

    engine, _, steps = await streams_and_prompts(start, slow, count=30)
    beside = [rows > 0 for phase, _, rows in steps if phase is Phase.PREFILL]
    assert sum(beside) <= 10
    assert not any(beside[-5:])
    assert engine.pace.times.expected_s(Phase.PREFILL, 50) == pytest.approx(0.015, rel=0.2)


@pytest.mark.parametrize(
    "given",
    [
        {"best_effort": 1},
        {"brownout": BrownoutConfig("full", prefill_threshold_percent=90, salc=False)},
        {"brownout": BrownoutConfig("full", decode_threshold_percent=90, salc=False)},
        {"has_hybrid": False},
    ],
    ids=["best effort", "prefill degraded", "decode degraded", "an executor without"],
)
async def test_rows_decode_apart_beside(start, given):
    engine, _, steps = await streams_and_prompts(start, **given)
    assert engine.scheduler.num_hybrid == 0
    assert len(steps) > 32


async def test_rows_decode_apart_from_when_brownout_is_set(start):
    brownout = BrownoutConfig("full", salc=False)
    engine, _, _ = await streams_and_prompts(start, brownout=brownout)
    before = engine.scheduler.num_hybrid
    assert before > 0
    await engine.set_brownout(BrownoutChange(decode_threshold_percent=50))
    busy = [asyncio.create_task(collect(engine, [n], 100)) for n in range(4)]
    await asyncio.sleep(0.1)
    for _ in range(8):
        await collect(engine, [500] * 50, 1)
    await asyncio.gather(*busy)
    assert engine.scheduler.num_hybrid == before


async def test_nobody_is_evicted_for_a_hybrid_step(start):
    """In few pages streams grow until some have to go: that is left to steps of their own."""
    limits = Limits(8, 60, 4, 32, 4)
    engine = start(
        step_s,
        limits,
        runner=partial(Watched, has_hybrid=True),
        prefix_reuse="off",
        prefill_company=False,
    )
    for size in (4, 8, 16, 32) * 5:
        await collect(engine, [1] * size, 2)
    prompts = [[100 * n] * (5 + n) for n in range(8)]
    found = await asyncio.gather(*(collect(engine, prompt, 60) for prompt in prompts))
    for n, outputs in enumerate(found):
        assert [t for o in outputs for t in o.token_ids] == [100 * n + i for i in range(1, 61)]
    assert engine.stats().evictions > 0
    assert engine.scheduler.num_hybrid > 0
    assert all(size <= 32 for phase, size, _ in engine.executor.steps if phase is Phase.PREFILL)


WORKERS = AsynchronousConfig(attention=1, experts=1)
HOSTED = {"models": ("one=a", "other=b"), "resident_experts": 8, "spare_experts": 8}


@pytest.mark.parametrize(
    "given",
    [{"mesh": "ep=2"}, {"mode": "aep", "asynchronous": WORKERS}, HOSTED],
    ids=["mesh", "aep", "host experts"],
)
async def test_hybrid_steps_that_could_not_be_are_refused(given):
    with pytest.raises(SettingsError, match="hybrid_steps"):
        check(ServerConfig(engine=EngineConfig(hybrid_steps="on", **given)))
    check(ServerConfig(engine=EngineConfig(**given)))
