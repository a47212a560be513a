"""Rows that decode beside prompts, on a whole engine with predictable step times."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

import pytest
from counting import collect, family_of

from serving.config import (
    AsynchronousConfig,
    BrownoutConfig,
    EngineConfig,
    SalcConfig,
    ServerConfig,
)
from serving.control.controller import Decision
from serving.errors import SettingsError
from serving.execution.buckets import Buckets
from serving.plan import Limits, Phase
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.scheduling.step_time import StepTimeModel
from serving.settings.reading import check
from tests.serving.fake_runner import FakeRunner

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
    streams=4,
    length=200,
    best_effort=0,
    of_prompts=MappingProxyType({}),
    **config,
):
    """Lets streams decode while prompts come one after another, each alone in its steps.

    Returns the engine, the gaps between tokens of the streams, and the steps of that time.
    """
    runner = partial(Watched, has_hybrid=has_hybrid, checks_context=length == 200)
    settings = {"prefix_reuse": "off", "prefill_company": False, "max_model_len": length + 300}
    engine = start(step_s, limits, runner=runner, **{**settings, **config})
    clock = asyncio.get_running_loop().time
    for size in (4, prompt, limits.max_prefill_tokens) * 5:  # times have to be known
        await collect(engine, [1] * size, 2)
    gaps = []

    async def stream(number):
        tokens, before = [], None
        classes = {"priority": BE if number < best_effort else LS}
        async for out in engine.generate(
            [10 * number], SamplingParams(max_new_tokens=length), **classes
        ):
            now = clock()
            gaps.append(now - before if before else 0.0)
            tokens, before = [*tokens, *out.token_ids], now
        assert tokens == [(10 * number + n) % 1000 for n in range(1, length + 1)]

    running = [asyncio.create_task(stream(number)) for number in range(streams)]
    await asyncio.sleep(0.2)
    first = len(engine.executor.steps)
    gaps.clear()
    for _ in range(count):
        await collect(engine, [500] * prompt, 1, **of_prompts)
        await asyncio.sleep(0.02)
    steps, found = engine.executor.steps[first:], list(gaps)
    await asyncio.gather(*running)
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


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [(150, [(64, 4), (64, 4), (34, 4)]), (128, [(64, 4), (64, 4), (8, 0)])],
    ids=["more than two steps", "two steps, and of eight tokens nothing is known"],
)
async def test_a_full_prefill_step_leaves_room_for_rows_that_decode(start, prompt, sizes):
    _, _, steps = await streams_and_prompts(start, prompt=prompt, count=4)
    found = [(size, rows) for phase, size, rows in steps if phase is Phase.PREFILL]
    assert found == sizes * 4


async def test_beside_more_rows_than_a_chunk_may_have_tokens_prompts_go_on(start):
    """No chunk leaves the objective time, so that each is of the smallest size that pays."""
    _, _, steps = await streams_and_prompts(
        start,
        lambda plan: 0.001 + 0.0002 * plan.size if plan.phase is Phase.PREFILL else 0.008,
        limits=replace(LIMITS, prefill_buckets=(8, 16, 32, 64)),
        brownout=BrownoutConfig(itl_slo_s=0.001, ttft_slo_s=10.0),
        prompt=24,
        count=4,
        streams=12,
    )
    found = [(size - rows, rows) for phase, size, rows in steps if phase is Phase.PREFILL]
    assert 12 in {rows for _, rows in found}
    assert max(tokens for tokens, _ in found) <= 8
    assert sum(tokens for tokens, _ in found) == 4 * 24


def test_programs_of_hybrid_steps_are_compiled_where_there_may_be_some():
    sizes = {"prefill_buckets": (32, 128), "decode_buckets": (64,), "max_num_seqs": 64}
    asked = EngineConfig(hybrid_steps="on", max_prefill_tokens=128, **sizes)
    limits = Limits(64, 100, 16, 128, 16)
    buckets = Buckets(asked, limits)
    programs = buckets.keys()
    beside = [key for key in programs if key.num_decodes]
    assert [(key.size, key.num_decodes) for key in beside] == [(128, 64), (32, 32)]
    assert [buckets.rows(key) for key in beside] == [16 + 64, 16 + 32]
    assert {buckets.rows(key) for key in beside} <= {
        key.size for key in programs if key.phase == "draw"
    }
    plain = buckets.choose("prefill", 33, 100, prompt_logprobs=False)
    chosen = buckets.choose("prefill", 33, 100, prompt_logprobs=False, hybrid=True)
    assert (plain.num_decodes, chosen) == (0, beside[0])
    assert buckets.deltas(chosen) == buckets.deltas(plain) + 64
    none = replace(asked, hybrid_steps="auto"), replace(asked, resident_experts=8)
    for one in none:
        programs = Buckets(one, limits).keys()
        assert not any(key.num_decodes for key in programs)


@pytest.mark.deep
async def test_rows_decode_apart_where_that_takes_less(start):
    """Together they take twice as long. One try has to show it, the next ones come seldom."""

    def slow(plan):
        apart_s = step_s(plan) - 0.0001 * plan.num_decodes + 0.008
        return 2 * apart_s if plan.num_decodes else step_s(plan)

    many = {"count": 200, "length": 2000, "limits": Limits(16, 3000, 4, 64, 8)}
    engine, _, steps = await streams_and_prompts(start, slow, **many)
    beside = [rows > 0 for phase, _, rows in steps if phase is Phase.PREFILL]
    assert len(beside) == 200
    assert sum(beside) <= 4
    assert engine.pace.times.expected_s(Phase.PREFILL, 50) == pytest.approx(0.015, rel=0.2)


def test_whether_it_pays_is_known_by_rows():
    """A row costs a hybrid step three times what it costs a decode step: it pays beside few. Steps
    of few and of many rows come in turn, and say nothing of each other.
    """
    times = StepTimeModel()

    def apart_s(tokens, rows):
        return (0.010 + 0.0001 * tokens) * (tokens > 0) + (0.006 + 0.0001 * rows) * (rows > 0)

    def hybrid_s(tokens, rows):
        return 0.010 + 0.0001 * tokens + 0.0003 * rows

    sizes = (64, 256)
    for tokens, rows in (*product(sizes, (4, 16, 64)),) * 6:
        times.observe(Phase.PREFILL, tokens, 100.0, apart_s(tokens, 0))
        times.observe(Phase.DECODE, rows, 100.0, apart_s(0, rows))
    tried = Counter()
    for tokens, rows in (*product(sizes, (64, 4, 16)),) * 40:
        times.observe(Phase.PREFILL, tokens, 100.0, apart_s(tokens, 0))
        if times.hybrid_pays(tokens, rows):
            tried[rows] += 1
            times.observe_hybrid(tokens, rows, 100.0, hybrid_s(tokens, rows))
    assert tried[4] == tried[16] == 80
    assert 2 <= tried[64] <= 8
    for tokens, rows in product(sizes, (4, 16)):
        assert times.hybrid_s(tokens, rows) == pytest.approx(hybrid_s(tokens, rows), rel=0.02)
    assert times.hybrid_pays(64, 5)  # as with about as many
    assert not times.hybrid_pays(64, 50)


async def test_prompts_have_rows_beside_them_where_these_are_few_enough(start):
    """Eight times the rows cost a hybrid step more than a step of their own would."""

    def dear(plan):
        return step_s(plan) + 0.0004 * plan.num_decodes

    limits = Limits(40, 4000, 4, 256, 8)
    runner = partial(Watched, has_hybrid=True, checks_context=False)
    settings = {"prefix_reuse": "off", "prefill_company": False, "max_num_seqs": 40}
    engine = start(dear, limits, runner=runner, max_model_len=900, **settings)
    for size in (4, 50, 256) * 5:
        await collect(engine, [1] * size, 2)
    for _ in range(6):
        await asyncio.gather(*(collect(engine, [2], 10) for _ in range(32)))
    long = [asyncio.create_task(collect(engine, [3], 800)) for _ in range(4)]
    found = Counter()
    for _ in range(8):
        for short in (28, 0):
            others = [asyncio.create_task(collect(engine, [4], 20)) for _ in range(short)]
            await asyncio.sleep(0.1)
            first = len(engine.executor.steps)
            await collect(engine, [500] * 50, 1)
            rows = [own for phase, _, own in engine.executor.steps[first:] if phase == "prefill"]
            found[short] += sum(own > 0 for own in rows)
            await asyncio.gather(*others)
    for one in long:
        one.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert found[0] == 8
    assert found[28] <= 3


@pytest.mark.sized(deep=("60-False", "70-False"))
@pytest.mark.parametrize(("rows", "beside"), [(14, True), (20, False), (60, False), (70, False)])
async def test_a_prompt_does_not_crawl_beside_many_rows(start, rows, beside):
    """A step of 64 tokens leaves room for 16 rows; beside more, full steps are prompts' alone."""
    limits = Limits(80, 4000, 4, 64, 8)
    settings = {"prompt": 256, "count": 2, "streams": rows, "max_num_seqs": 80}
    engine, _, steps = await streams_and_prompts(start, limits=limits, **settings)
    sizes = [(size, own) for phase, size, own in steps if phase is Phase.PREFILL]
    full = [(64, rows)] * 5 if beside else [(64, 0)] * 4
    assert sizes[: len(full)] == full
    assert len(sizes) == 2 * (len(full) + beside)
    assert (engine.scheduler.num_hybrid > 0) == beside


async def test_prompts_of_another_model_keep_their_steps(start):
    family = family_of(["counter", "other"])
    settings = {"model": family, "prompt": 64, "of_prompts": {"model": "other"}}
    engine, _, steps = await streams_and_prompts(start, **settings)
    sizes = {(size, rows) for phase, size, rows in steps if phase is Phase.PREFILL}
    assert sizes == {(64, 0)}
    assert engine.scheduler.num_hybrid == 0


class ByStep:
    """A controller that degrades each step of one phase, without moving a threshold."""

    by_step = True

    def __init__(self, config):
        pass

    def decide(self, seen):
        return Decision(100.0, 100.0)

    def of_step(self, step):
        return 50.0 if step.phase is Phase.DECODE else 100.0


async def test_steps_that_a_controller_degrades_by_themselves_are_apart(start):
    """At most one is hybrid, and exact, before a decode step has shown it."""
    brownout = BrownoutConfig("full", ttft_slo_s=1.0, itl_slo_s=1.0)
    salc = SalcConfig(controller=f"{__name__}:ByStep")
    engine, _, steps = await streams_and_prompts(start, brownout=brownout, salc=salc)
    assert sum(rows > 0 for _, _, rows in steps) <= 1
    prefill = [c for phase, _, c in engine.executor.launches if phase is Phase.PREFILL]
    assert {control.threshold_percent for control in prefill} == {100}


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
