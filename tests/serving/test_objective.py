"""`admission: objective`: what would get its first token too late is refused, with a time."""

import asyncio

import pytest
from counting import collect

from serving.config import BrownoutConfig
from serving.errors import Overloaded
from serving.plan import Limits
from serving.request import Priority

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
    # A slot comes free every half second: two start at once, and two can wait for a second.
    assert len(refused) == 4
    assert all(len(answer[-1].token_ids) for answer in found if answer not in refused)
    assert (
        "4 requests wait already: a first token would come 0.5 s later than the objective"
        in str(refused[0])
    )
    assert refused[0].retry_after_s == pytest.approx(0.5, abs=0.05)


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
