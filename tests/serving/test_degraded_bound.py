"""A request's own bound on degraded visits holds at every token, and is used."""

import asyncio

import pytest
from counting import LIMITS, collect
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.packed_rows import EXEMPT
from serving.bench.simulated_time import SimulatedLoop
from serving.config import EngineConfig
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.request import Priority
from tests.serving.fake_runner import FakeRunner

BE = Priority.BEST_EFFORT


class Degrading(FakeRunner):
    """A runner that degrades every visit that it may, one a token."""

    def computed(self, plan, control, row, model, new, adopted):
        token, _ = super().computed(plan, control, row, model, new, adopted)
        degraded = 0 if row[EXEMPT] else len(new)
        return token, degraded if plan.is_last else 0


async def play(asked, step_s, *, allow_brownout=True, **options):
    """Sends requests of (prompt length, new tokens, percent) to an engine; returns their usages by
    token.
    """
    runner = Degrading(LIMITS, step_s=step_s, **options)
    config = EngineConfig(max_model_len=200, watchdog_s=0)
    engine = Engine(config, runner, None, (), asyncio.get_running_loop().time)
    engine.run()
    try:
        answers = [
            collect(
                engine,
                [100 * number + at for at in range(length)],
                new,
                max_degraded_percent=percent,
                allow_brownout=allow_brownout,
                priority=BE if number % 3 == 0 else Priority.LATENCY_SENSITIVE,
            )
            for number, (length, new, percent) in enumerate(asked)
        ]
        return [[out.usage for out in found] for found in await asyncio.gather(*answers)]
    finally:
        await engine.stop()


@pytest.mark.deep
@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 30), st.integers(0, 100)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from((0.0, 0.01)),
    st.sampled_from((0, 1)),
)
def test_the_bound_holds_at_every_token(asked, step_s, part_layers):
    with asyncio.Runner(loop_factory=SimulatedLoop) as loop:
        found = loop.run(play(asked, step_s, part_layers=part_layers))
    for (_, _, percent), usages in zip(asked, found, strict=True):
        for usage in usages:
            assert 100 * usage.degraded_visits <= percent * usage.expert_visits


@pytest.mark.simulated_time
@pytest.mark.parametrize("percent", [10, 25, 50, 80, 95])
async def test_the_bound_is_used(percent):
    [usages] = await play([(3, 150, percent)], 0.01)
    # A step may be on its way beside the one that is planned: two tokens are kept back at most.
    assert 100 * (usages[-1].degraded_visits + 2) > percent * usages[-1].expert_visits


@pytest.mark.simulated_time
async def test_none_and_all():
    exact, degraded = await play([(3, 20, 0), (3, 20, 100)], 0.01)
    assert exact[-1].degraded_visits == 0
    assert degraded[-1].degraded_visits == degraded[-1].expert_visits


@pytest.mark.simulated_time
async def test_who_refuses_brownout_has_none_whatever_the_bound():
    [usages] = await play([(3, 40, 60)], 0.01, allow_brownout=False)
    assert usages[-1].degraded_visits == 0


@pytest.mark.simulated_time
@pytest.mark.parametrize("wrong", [-1, 101, 2.5, "20", True])
async def test_what_is_no_percentage_is_named(start, wrong):
    with pytest.raises(InvalidRequest, match=r"max_degraded_percent is .*between 0 and 100"):
        await collect(start(), [1], max_degraded_percent=wrong)


@pytest.mark.simulated_time
async def test_with_substitutes_for_experts_it_is_all_or_nothing(start):
    engine = start(resident_experts=60)
    with pytest.raises(InvalidRequest, match="max_degraded_percent is 20; with experts in host"):
        await collect(engine, [1], max_degraded_percent=20)
    await collect(engine, [1], max_degraded_percent=0)
