"""Sets of weights that are swapped, in simulated time, over a runner that checks who may run."""

import asyncio
import random
from concurrent.futures import Future
from functools import partial

import pytest
from counting import LIMITS, collect, family_of

from serving.errors import Unavailable
from serving.request import Priority
from tests.serving.fake_runner import FakeRunner

pytestmark = pytest.mark.simulated_time

STEP_S, SET_S, STAY_S = 0.01, 0.5, 2.0
NAMES = ("a", "b", "c", "d")


@pytest.fixture
def family(start):
    """Returns a function that starts an engine for four models, of which some are on the device."""

    def make(resident, stay_s=STAY_S, **config):
        runner = partial(FakeRunner, resident=list(resident), set_s=SET_S)
        step_s = config.pop("step_s", STEP_S)
        return start(step_s, LIMITS, runner, model=family_of(NAMES), model_stay_s=stay_s, **config)

    return make


def now():
    return asyncio.get_running_loop().time()


def tokens(outputs):
    return [token for out in outputs for token in out.token_ids]


async def ask(engine, model, count=5, **options):
    """Sends a request and checks its tokens, which count up; returns when it was done."""
    found = tokens(await collect(engine, [100], count, model=NAMES[model], **options))
    assert found == [100 + (1 + model) * (1 + at) for at in range(count)]
    return now()


async def test_a_model_that_is_not_there_is_fetched(family):
    engine = family([0, 1])
    began = now()
    assert await ask(engine, 0) - began == pytest.approx(5 * STEP_S)
    began = now()
    assert await ask(engine, 3) - began == pytest.approx(SET_S + 5 * STEP_S, abs=2 * STEP_S)
    assert engine.executor.resident == [0, 3]  # 1 was never asked
    assert engine.registry.num_swaps == 1
    assert engine.registry.swap_s == pytest.approx(SET_S, abs=STEP_S)


async def test_who_was_asked_for_last_stays(family):
    engine = family([0, 1])
    await ask(engine, 1)
    await ask(engine, 0)
    await ask(engine, 2)
    assert sorted(engine.executor.resident) == [0, 2]
    await ask(engine, 3)
    assert sorted(engine.executor.resident) == [2, 3]


async def test_others_go_on_meanwhile(family):
    engine = family([0, 1])
    busy = asyncio.create_task(ask(engine, 0, 100))
    await asyncio.sleep(5 * STEP_S)
    began = now()
    cold = await ask(engine, 2, 1)
    assert SET_S <= cold - began <= SET_S + 4 * STEP_S
    assert await busy == pytest.approx(101 * STEP_S, abs=5 * STEP_S)  # it lost nothing


async def test_a_busy_model_keeps_its_place_for_a_while_and_then_gives_it_up(family):
    engine = family([0, 1])
    hot = [asyncio.create_task(ask(engine, model, 150)) for model in (0, 0, 1, 1)]
    await asyncio.sleep(0.3)
    began = now()
    came = await ask(engine, 2, 1)
    assert STAY_S - 0.3 <= came - began <= STAY_S + SET_S + 5 * STEP_S
    await asyncio.gather(*hot)  # who lost its place got it again, and every token
    assert engine.registry.num_swaps >= 2


async def test_without_anything_to_run_nobody_is_waited_for(family):
    """With one place, whose model has no requests: the minimum stay does not apply."""
    engine = family([0])
    for model in (1, 2, 3, 0):
        began = now()
        assert await ask(engine, model) - began == pytest.approx(SET_S + 5 * STEP_S, abs=0.05)


async def test_the_stay_is_nine_times_what_a_change_takes(family):
    engine = family([0, 1], stay_s=0.0)
    await ask(engine, 2)
    assert engine.registry.stay_s == pytest.approx(9 * SET_S, rel=0.05)
    hot = [asyncio.create_task(ask(engine, model, 1500)) for model in (0, 2)]
    began = now()
    await ask(engine, 3, 1)
    assert now() - began <= engine.registry.stay_s + SET_S + 5 * STEP_S
    for task in hot:
        task.cancel()


@pytest.mark.deep
async def test_nobody_waits_past_the_bound(family):
    """Requests for every model at all times: each set is there within the stated time."""
    engine = family([0, 1])
    stop_at = now() + 25.0

    async def stream(model):
        worst = 0.0
        while now() < stop_at:
            began = now()
            await ask(engine, model, 3)
            worst = max(worst, now() - began)
        return worst

    worst = await asyncio.gather(*map(stream, range(4)))
    bound = 2 * (STAY_S + SET_S) + SET_S
    assert max(worst) <= bound + 0.3  # its own steps, in turn with others'
    swapping = engine.registry.num_swaps * SET_S
    assert swapping <= 25 * SET_S / STAY_S * 2


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_asked_is_answered_or_aborted_and_nothing_leaks(family, seed):
    rng = random.Random(seed)
    engine = family(rng.sample(range(4), rng.randrange(1, 4)), part_layers=1)
    tasks = []
    for _ in range(60):
        model, count = rng.randrange(4), rng.randrange(1, 30)
        priority = rng.choice(list(Priority))
        tasks.append(asyncio.create_task(ask(engine, model, count, priority=priority)))
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.2)))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(e, float | asyncio.CancelledError) for e in ended), ended
    assert sum(isinstance(e, float) for e in ended) > 30
    engine.scheduler.check_idle()
    assert engine.status == "ready"
    assert len(engine.executor.resident) == len(engine.scheduler.models)


async def test_a_copy_that_fails_ends_the_engine_with_its_reason(family):
    engine = family([0])

    def fails(victim, model):
        failed = Future()
        failed.set_exception(MemoryError("no room for the weights of model 2"))
        return failed

    engine.executor.replace_set = fails
    with pytest.raises(Unavailable, match="no room for the weights of model 2"):
        await ask(engine, 2)
    assert engine.status == "failed"
