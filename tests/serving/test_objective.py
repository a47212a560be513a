"""`admission: objective`: what would get its first token too late is refused, with a time."""

import asyncio
from collections import Counter
from dataclasses import astuple

import numpy as np
import pytest
from counting import collect

from serving.config import BrownoutConfig
from serving.errors import Overloaded
from serving.frontend import convert
from serving.plan import Limits
from serving.request import BrownoutChange, Priority, Refused, SamplingParams
from serving.scheduling.policy import Fcfs
from serving.scheduling.scheduler import Scheduler
from serving.telemetry import accounting
from serving.telemetry.accounting import Accounts

LIMITS = Limits(2, 64, 4, 16, 2)
pytestmark = pytest.mark.simulated_time


async def flood(start, count, *, learnt=True, ttft_slo_s=1.0, priority=None, **config):
    """Sends requests of ten tokens, 0.1 s each, on two slots; returns answers and refusals."""
    brownout = BrownoutConfig(ttft_slo_s=ttft_slo_s)
    engine = start(0.1, LIMITS, brownout=brownout, reserved_ls_seqs=0, **config)
    if learnt:
        await collect(engine, [1], 10)
    options = {} if priority is None else {"priority": priority}
    asked = (collect(engine, [1], 10, **options) for _ in range(count))
    found = await asyncio.gather(*asked, return_exceptions=True)
    await engine.drain(60.0)
    engine.scheduler.check_idle()
    return found, [r for r in found if isinstance(r, Overloaded)]


async def test_what_cannot_meet_its_objective_is_refused(start):
    found, refused = await flood(start, 8, admission="objective")
    # A slot comes free every half second, and a first token takes two steps: two start at once,
    # and one can wait. The next would have its slot after a second, and its token 0.2 s later.
    assert len(refused) == 5
    assert all(len(answer[-1].token_ids) for answer in found if answer not in refused)
    assert (
        "3 requests wait already: a first token would come 0.2 s later than the objective"
        in str(refused[0])
    )
    assert refused[0].retry_after_s == pytest.approx(0.2, abs=0.05)


async def test_by_default_it_waits(start):
    _, refused = await flood(start, 8)
    assert not refused


async def test_nobody_is_refused_by_a_guess(start):
    """Before a request has finished, nothing is known of how long one takes."""
    _, refused = await flood(start, 8, admission="objective", learnt=False)
    assert not refused


async def test_best_effort_without_an_objective_is_not_refused(start):
    best_effort = Priority.BEST_EFFORT
    _, refused = await flood(start, 8, admission="objective", priority=best_effort)
    assert not refused


async def test_who_sets_an_objective_while_serving_has_late_requests_refused(start):
    """Eight requests, two slots, one second: as above; and the state says how many a second."""
    engine = start(0.1, LIMITS, brownout=BrownoutConfig(ttft_slo_s=60.0), reserved_ls_seqs=0)
    await collect(engine, [1], 10)
    state = await engine.set_brownout(BrownoutChange(ttft_slo_s=1.0))
    assert state.objective_state == ""
    asked = (collect(engine, [1], 10) for _ in range(8))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in found) == 5
    assert engine.get_brownout().objective_state == "overloaded: refusing 1/s"  # 5 in 5 s
    await asyncio.sleep(5.0)
    assert engine.get_brownout().objective_state == ""
    await engine.drain(60.0)


async def test_where_admission_is_queue_an_objective_refuses_nobody(start):
    brownout = BrownoutConfig(ttft_slo_s=60.0)
    engine = start(0.1, LIMITS, brownout=brownout, reserved_ls_seqs=0, admission="queue")
    await collect(engine, [1], 10)
    await engine.set_brownout(BrownoutChange(ttft_slo_s=0.1))
    found = await asyncio.gather(*(collect(engine, [1], 10) for _ in range(8)))
    assert len(found) == 8
    await engine.drain(60.0)


async def test_prompts_that_wait_count_though_slots_are_free(start):
    """Each fills a step of 0.1 s: thirty take 3 s."""
    engine = start(0.1, Limits(64, 64, 4, 32, 64), admission="objective")
    assert engine.slo.first_token_s(30) == (0, 0)  # nothing is known
    await collect(engine, [1] * 32, 3)
    assert engine.slo.first_token_s(30) == pytest.approx((3.0, 0.2))
    engine.admission.check_queue(Priority.LATENCY_SENSITIVE, engine.scheduler, 1.6, 1.5)
    with pytest.raises(Overloaded, match=r"a first token would come 0.1 s later"):
        engine.admission.check_queue(Priority.LATENCY_SENSITIVE, engine.scheduler, 1.6, 1.5, 0.2)
    await engine.drain(60.0)


EIGHT = Limits(8, 256, 4, 32, 8)


async def past_capacity(start, per_s, *, over_s=10.0, ttft_slo_s=1.0, **config):
    """Sends requests of ten tokens at random times, so many a second by key; a step takes 0.05 s,
    and eight run together. Returns the engine, and by key how many were sent and how many got a
    first token in time.
    """
    brownout = BrownoutConfig(ttft_slo_s=ttft_slo_s)
    engine = start(0.05, EIGHT, brownout=brownout, reserved_ls_seqs=0, **config)
    await collect(engine, [1], 10)
    began, rng, clock = asyncio.get_running_loop().time(), np.random.default_rng(0), engine._clock
    sent, in_time = Counter(), Counter()

    async def ask(key, at_s):
        await asyncio.sleep(began + at_s - clock())
        outputs = collect_first(engine, [1], 10, key=key)
        if (first_s := await outputs) is not None and first_s - (began + at_s) <= ttft_slo_s + 1e-6:
            in_time[key] += 1

    async with asyncio.TaskGroup() as group:
        for key, rate in per_s.items():
            times_s = rng.uniform(0, over_s, rng.poisson(rate * over_s))
            sent[key] = len(times_s)
            for at_s in times_s:
                group.create_task(ask(key, at_s))
    await engine.drain(60.0)
    engine.scheduler.check_idle()
    return engine, sent, in_time


async def collect_first(engine, prompt, max_new, **options):
    """Returns when the first token of an answer came; None if it was refused."""
    first_s = None
    sampling = SamplingParams(max_new_tokens=max_new)
    try:
        async for _ in engine.generate(prompt, sampling, **options):
            first_s = first_s or engine._clock()
    except Overloaded:
        return None
    return first_s


async def test_a_greedy_key_starves_no_other(start):
    """Who sends a sixth of one and a half capacities has less than a half of one, and gets it; and
    what room is kept for that key costs nothing.
    """
    _, _, alone = await past_capacity(start, {"": 20.0}, admission="objective")
    shared = {"greedy": 20.0 * 5 / 6, "small": 20.0 / 6}
    engine, sent, in_time = await past_capacity(start, shared, admission="objective")
    assert in_time["small"] >= 0.95 * sent["small"]
    assert in_time.total() >= 0.95 * alone.total()
    refused = Counter({one.key: one.count for one in engine.stats().refused})
    assert refused["greedy"] > 0.4 * sent["greedy"]
    assert refused["small"] <= 0.05 * sent["small"]


async def test_keys_share_the_queue(start):
    """Half of it is for keys that have less than others under way, whatever `admission` is."""
    engine = start(0.1, LIMITS, reserved_ls_seqs=0, max_queue_len=8)
    await collect(engine, [1], 2, key="small")

    async def ask(key, count):
        asked = [asyncio.create_task(collect(engine, [1], 20, key=key)) for _ in range(count)]
        await asyncio.sleep(0.01)
        under_way.extend(one for one in asked if not one.done())
        return sum(isinstance(one.exception(), Overloaded) for one in asked if one.done())

    under_way = []

    assert await ask("greedy", 10) == 4  # two run, and four wait
    assert await ask("small", 5) == 1
    assert await ask("greedy", 1) == 1
    assert set(engine.stats().refused) == {
        Refused("greedy", "latency_sensitive", 5),
        Refused("small", "latency_sensitive", 1),
    }
    await asyncio.gather(*under_way)
    await asyncio.sleep(61.0)
    assert await ask("greedy", 11) == 1  # nobody else asks any more
    await asyncio.gather(*under_way)


async def test_a_class_with_room_is_not_refused_for_another(start):
    """Before a request is read, its class is not known."""
    engine = start(0.1, LIMITS, reserved_ls_seqs=0, max_queue_len=1, max_best_effort_queue_len=1)
    asked = [asyncio.create_task(collect(engine, [1], 9)) for _ in range(3)]
    await asyncio.sleep(0.01)
    engine.check_admission()
    with pytest.raises(Overloaded):
        engine.check_admission(Priority.LATENCY_SENSITIVE)
    asked.append(asyncio.create_task(collect(engine, [1], 9, priority=Priority.BEST_EFFORT)))
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        engine.check_admission()
    found = {one.priority: one.count for one in engine.stats().refused}
    assert found == {"latency_sensitive": 1, "any": 1}
    await asyncio.gather(*asked)


def test_keys_beyond_a_thousand_are_counted_together():
    accounts = Accounts([])
    for number in range(5000):
        accounts.request_refused(f"key {number}", Priority.BEST_EFFORT)
    refused = accounts.stats(Scheduler(LIMITS, Fcfs()), 0, 0.0, 0.01, ()).refused
    assert sum(one.count for one in refused) == 5000
    assert len(refused) <= 4000
    assert refused[0] == Refused("key 0", "best_effort", 1)
    assert refused[-1] == Refused("other keys", "best_effort", 5001 - len(refused))
    told = convert.stats(accounts.stats(Scheduler(LIMITS, Fcfs()), 0, 0.0, 0.01, ())).refused
    assert [(one.key, one.priority, one.count) for one in told] == list(map(astuple, refused))


def test_a_key_that_is_refused_while_a_scrape_counts_fails_no_scrape(monkeypatch):
    accounts = Accounts([])
    accounts.request_refused("a", None)

    def counted(*of):
        accounts.request_refused("b", None)  # the event loop's turn
        return Refused(*of)

    monkeypatch.setattr(accounting, "Refused", counted)
    refused = accounts.stats(Scheduler(LIMITS, Fcfs()), 0, 0.0, 0.01, ()).refused
    assert refused == (Refused("a", "any", 1),)
