"""Thresholds return to the ceiling when no brownout is needed, or when it is in vain.

The engine is a whole one, with predictable step times.
"""

import asyncio
import logging
import math
from functools import partial

import numpy as np
import pytest
from counting import collect

from serving.config import BrownoutConfig, SalcConfig
from serving.control import slo
from serving.plan import Limits, Phase
from serving.request import BrownoutChange
from tests.serving.fake_runner import FakeRunner

LIMITS = Limits(16, 1000, 4, 64, 8)
PREFILL_S, DECODE_S = 0.02, 0.02  # without brownout
pytestmark = pytest.mark.simulated_time


class Browned(FakeRunner):
    """A runner whose steps take the share `floor` of their time under full brownout."""

    def __init__(self, limits, floor, step_s):
        super().__init__(limits, step_s=self.seconds, checks_context=False)
        self.floor, self.share = floor, 1.0

    def launch(self, plan, control):
        degraded = 1 - control.threshold_percent / 100 if control.strategy else 0.0
        self.share = 1 - (1 - self.floor) * degraded
        return super().launch(plan, control)

    def seconds(self, plan):
        return self.share * (PREFILL_S if plan.phase is Phase.PREFILL else DECODE_S)


@pytest.fixture
def serve(start):
    def make(floor=0.4, ttft_slo_s=0.1, itl_slo_s=0.1, controller="algorithm2", **salc):
        return start(
            limits=LIMITS,
            runner=partial(Browned, floor=floor),
            brownout=BrownoutConfig("full", ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s),
            salc=SalcConfig(controller=controller, **salc),
            prefix_reuse="off",
            max_queue_len=10_000,
        )

    return make


async def ask(engine, rate_per_s, seconds, max_new=5):
    """Sends requests in even gaps; returns when all are answered."""

    async def one(at_s):
        await asyncio.sleep(at_s)
        await collect(engine, [1] * 8, max_new)

    count = int(rate_per_s * seconds)
    await asyncio.gather(*(one(number / rate_per_s) for number in range(count)))


def thresholds(engine):
    state = engine.get_brownout()
    return state.prefill_threshold_percent, state.decode_threshold_percent


@pytest.mark.sized(
    deep=(
        "algorithm2-0",
        "algorithm2-0.5",
        "algorithm2-2.4",
        "algorithm2-5",
        "predictive-0",
        "predictive-1",
    )
)
@pytest.mark.parametrize(
    ("controller", "rate_per_s"),
    [
        *(("algorithm2", rate) for rate in (0, 0.5, 2.4, 2.6, 5)),
        ("predictive", 0),
        ("predictive", 1),
    ],
)
async def test_ten_seconds_after_the_last_late_token_nothing_is_degraded(
    serve, rate_per_s, controller
):
    engine = serve(controller=controller)
    await ask(engine, 110, 6, max_new=20)
    assert min(thresholds(engine)) < 60
    clock, late_at = asyncio.get_running_loop().time, engine.slo.ls.strained_at
    asking = asyncio.create_task(ask(engine, rate_per_s, 20))
    await asyncio.sleep(late_at + 10 - clock())
    assert engine.slo.ls.strained_at == late_at
    assert thresholds(engine) == (100, 100)
    launched = len(engine.executor.launches)
    await asking
    await collect(engine, [1] * 8)
    assert {control.threshold_percent for _, _, control in engine.executor.launches[launched:]} == {
        100
    }


@pytest.mark.deep
@pytest.mark.parametrize("slots", [1, 2, 4])
async def test_users_who_have_a_slot_each_are_no_queue(start, slots):
    engine = start(
        limits=Limits(slots, 1000, 4, 64, 8),
        runner=partial(Browned, floor=0.4),
        brownout=BrownoutConfig("full", ttft_slo_s=1.0, itl_slo_s=0.5),
        salc=SalcConfig(controller="predictive"),
        prefix_reuse="off",
    )

    async def user():
        for _ in range(10):
            await collect(engine, [1] * 8, 150)
            await asyncio.sleep(0.3)

    await asyncio.gather(*(user() for _ in range(slots)))
    launches = engine.executor.launches
    assert {control.threshold_percent for _, _, control in launches[len(launches) // 2 :]} == {100}


async def test_an_idle_engine_is_left_alone_once_it_is_at_rest(serve):
    engine = serve()
    await ask(engine, 110, 6, max_new=20)
    await asyncio.sleep(30)
    assert thresholds(engine) == (100, 100)
    loop = asyncio.get_running_loop()
    assert engine.slo.decides_in_s(loop.time()) is None
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]


async def test_where_the_window_has_its_samples_the_papers_step_governs(serve):
    """Steps without brownout would be late, so that being in time says nothing."""
    engine = serve(itl_slo_s=0.019, ttft_slo_s=10.0)
    stream = asyncio.create_task(collect(engine, [1], 180))
    seen = []
    for _ in range(14):
        await asyncio.sleep(2)
        seen.append(thresholds(engine)[1])
        if stream.done():
            stream = asyncio.create_task(collect(engine, [1], 180))
    stream.cancel()
    # A step of 20 ms is late; under 80 % it takes 17.6 ms, between warning line and objective.
    assert seen[3:] == [80.0] * 11
    assert not engine.get_brownout().objective_state


@pytest.mark.deep
@pytest.mark.parametrize(
    ("itl_slo_s", "least_ms"), [(0.0005, 8), (0.0075, 8), (0.0085, None), (0.019, None)]
)
async def test_an_objective_that_no_threshold_can_keep_is_a_state_not_a_reason(
    serve, itl_slo_s, least_ms, caplog
):
    """A decode step takes 20 ms without brownout, and 8 ms under all of it."""
    engine = serve(itl_slo_s=itl_slo_s, ttft_slo_s=10.0)
    streams = [asyncio.create_task(collect(engine, [1], 190)) for _ in range(3)]
    for _ in range(25):
        await asyncio.sleep(2)
        if all(stream.done() for stream in streams):
            streams = [asyncio.create_task(collect(engine, [1], 190)) for _ in range(3)]
    state = engine.get_brownout()
    if least_ms is None:
        assert state.objective_state == ""
        assert state.decode_threshold_percent < 100
        return
    assert state.decode_threshold_percent == 100
    assert state.least_itl_s == pytest.approx(least_ms / 1e3, rel=0.05)
    assert f"the ITL objective of {1e3 * itl_slo_s:g} ms cannot be kept" in state.objective_state
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be kept" in line for line in said) == 1
    await engine.set_brownout(BrownoutChange(itl_slo_s=0.1))
    await asyncio.sleep(3)
    assert engine.get_brownout().objective_state == ""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"itl_slo_s": 0.5}, False),
        ({"itl_slo_s": 0.0005, "ttft_slo_s": 1.0}, True),
        ({"prefill_threshold_percent": 100}, False),
        ({"strategy": "zero"}, False),
    ],
)
async def test_what_cannot_keep_an_objective_is_forgotten_with_it_on_an_idle_engine(
    serve, change, stays
):
    engine = serve(itl_slo_s=0.0005, ttft_slo_s=10.0, shrink_ratio=0.3)
    for _ in range(12):
        await asyncio.gather(*(collect(engine, [1], 190) for _ in range(3)))
    assert "cannot be kept" in engine.get_brownout().objective_state
    state = await engine.set_brownout(BrownoutChange(**change))
    assert ("cannot be kept" in state.objective_state) == stays
    assert math.isnan(state.least_itl_s) != stays


@pytest.mark.deep
async def test_a_queue_that_brownout_shortens_is_no_reason_to_stop(serve):
    """60 requests/s are more than the 40 that can be served without brownout."""
    engine = serve(itl_slo_s=0.03)
    await ask(engine, 60, 12, max_new=20)
    state = engine.get_brownout()
    assert state.objective_state == ""
    assert min(thresholds(engine)) < 70
    late = [control.threshold_percent for _, _, control in engine.executor.launches[-500:]]
    assert max(late) < 100


async def test_brownout_that_saves_nothing_stops(serve):
    engine = serve(floor=1.0, interval_s=0.5, window_s=1.0, shrink_ratio=0.5)
    await ask(engine, 5, 5)  # steps without brownout
    asking = asyncio.create_task(ask(engine, 60, 10, max_new=20))
    await asyncio.sleep(3.0)
    assert min(thresholds(engine)) < 60
    await asyncio.sleep(6.5)
    state = engine.get_brownout().objective_state
    assert "saves nothing in decode steps" in state
    assert "saves nothing in prefill steps" in state
    assert thresholds(engine) == (100, 100)
    await asking


@pytest.fixture
async def useless(serve, monkeypatch):
    """An engine that has found that brownout saves nothing, and the load that goes on."""
    monkeypatch.setattr(slo, "TRY_AGAIN_S", 2.0)
    monkeypatch.setattr(slo, "CONFIRMED_S", 0.0)
    engine = serve(floor=1.0, interval_s=0.1, window_s=0.3, shrink_ratio=0.5)
    await ask(engine, 5, 2)
    asking = asyncio.create_task(ask(engine, 60, 18, max_new=20))
    while engine.get_brownout().objective_state.count("saves nothing") < len(Phase):
        await asyncio.sleep(0.1)
    yield engine
    await asking


@pytest.mark.deep
async def test_brownout_that_saved_nothing_is_tried_again(useless):
    """A device that waited for the host did not show what brownout saves; now it does."""
    await asyncio.sleep(0.2)
    useless.executor.floor = 0.4
    assert thresholds(useless) == (100, 100)
    await asyncio.sleep(6.0)
    assert min(thresholds(useless)) < 90
    assert "saves nothing" not in useless.get_brownout().objective_state


@pytest.mark.deep
async def test_brownout_that_goes_on_saving_nothing_is_tried_ever_more_rarely(useless, caplog):
    caplog.set_level(logging.INFO)
    launches, before = useless.executor.launches, len(useless.executor.launches)
    await asyncio.sleep(15.0)
    said = [r.levelname for r in caplog.records if "saves nothing in decode" in r.getMessage()]
    assert len(said) > 2
    assert set(said) == {"INFO"}  # a warning was the first
    degraded = [control.threshold_percent < 100 for _, _, control in launches[before:]]
    first, second = degraded[: len(degraded) // 2], degraded[len(degraded) // 2 :]
    assert sum(first) > 2 * sum(second)


async def test_what_saves_nothing_after_another_reason_is_tried_again_too():
    control = slo.PhaseControl(SalcConfig(), 100.0)
    for _ in range(slo.CONFIRMED):
        control.judge("the objective cannot be kept", 0.02, 0.0)
    assert not control.tries_again(1e6)
    control.judge("brownout saves nothing", math.nan, 1e6)
    assert not control.tries_again(1e6 + slo.TRY_AGAIN_S - 1)
    assert control.tries_again(1e6 + slo.TRY_AGAIN_S)


async def test_that_brownout_saves_nothing_is_believed_after_five_seconds():
    control = slo.PhaseControl(SalcConfig(), 100.0)
    for now in np.arange(0.0, 4.9, 0.25).tolist():
        control.judge("brownout saves nothing", math.nan, now)
    assert not control.in_vain
    control.judge("", math.nan, 4.9)  # it was the machine's speed
    for now in np.arange(5.0, 9.9, 0.25).tolist():
        control.judge("brownout saves nothing", math.nan, now)
    assert not control.in_vain
    control.judge("brownout saves nothing", math.nan, 10.0)
    assert control.in_vain
