"""`admission: objective`: what would get its first token too late is refused, with a time."""

import asyncio

import pytest
from counting import collect

from serving.config import BrownoutConfig
from serving.errors import Overloaded
from serving.plan import Limits
from serving.request import BrownoutChange, Priority

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
