"""What fails for one request ends that one; what fails for all ends them at once, with a reason."""

import asyncio
import math
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from counting import collect, model_with
from served import until

from serving import engine as engine_module
from serving.config import BrownoutConfig, SalcConfig
from serving.control.slo import SloAnalyser
from serving.control.window import LatencyWindow
from serving.errors import Aborted, InvalidRequest, RequestFailed, Unavailable, shown
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.scheduling.waiting import QueuedClass
from serving.telemetry.latencies import Latencies
from serving.telemetry.observer import Observer
from serving.telemetry.watchdog import StuckTimer
from tests.serving.fake_runner import FakeRunner

LS = Priority.LATENCY_SENSITIVE
simulated_time = pytest.mark.simulated_time


class Panic(BaseException):
    """An exception as extension modules raise when their native code panics."""


class Fragile:
    """A tokenizer that fails at one token."""

    longest_token = 10

    def __init__(self, error, at):
        self.error, self.at = error, at

    def encode(self, text, special_tokens=True):
        raise self.error

    def stream(self, skip_special_tokens=True):
        return SimpleNamespace(push=self.push, finish=lambda: "")

    def push(self, token):
        if token == self.at:
            raise self.error
        return "x"


@simulated_time
@pytest.mark.parametrize("error", [RuntimeError("Invalid prefix"), Panic("panicked")])
async def test_text_that_cannot_be_made_ends_one_request(start, error):
    engine = start(step_s=0.01, model=model_with(Fragile(error, at=503)))
    good = asyncio.create_task(collect(engine, [1], 20))
    with pytest.raises(RequestFailed, match=f"token 503 .*{error}"):
        await collect(engine, [500], 20)
    assert len(await good) == 20
    assert len(await collect(engine, [1], 20)) == 20
    stats = engine.stats()
    assert (stats.requests_failed, stats.requests_aborted, stats.requests_finished) == (1, 0, 2)
    assert stats.kv_pages_used == 0


@simulated_time
@pytest.mark.parametrize(
    ("error", "kind"), [(UnicodeError("surrogate"), InvalidRequest), (Panic("p"), RequestFailed)]
)
@pytest.mark.parametrize("length", [5, 1000])
async def test_a_prompt_that_cannot_be_tokenized_ends_one_request(
    start,
    error,
    kind,
    length,
    monkeypatch,
):
    monkeypatch.setattr("serving.intake.admission.LONG_TEXT", 100)
    engine = start(model=model_with(Fragile(error, at=None)))
    with pytest.raises(kind, match="tokenize"):
        await collect(engine, "x" * length)
    assert len(await collect(engine, [1], 5)) == 5
    assert engine.admission.num_tokenizing.total() == 0


async def test_a_prompt_that_waits_to_be_tokenized_is_told_that_the_engine_stops(
    start, monkeypatch
):
    monkeypatch.setattr("serving.intake.admission.LONG_TEXT", 100)
    tokenizer, going = Fragile(None, at=None), threading.Event()
    tokenizer.encode = lambda text, special_tokens: [1] * going.wait()
    engine = start(model=model_with(tokenizer))
    tasks = [asyncio.create_task(collect(engine, "x" * 101)) for _ in range(3)]
    await until(lambda: engine.admission.num_tokenizing.total() == 3)
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    await engine.stop()
    with pytest.raises(Aborted, match="the engine stopped"):
        await tasks[1]
    with pytest.raises(Aborted, match="the engine stopped"):
        await engine.tokenize("x" * 101)
    going.set()
    with pytest.raises(Unavailable):
        await tasks[0]


@simulated_time
async def test_logits_that_are_not_numbers_end_their_request_alone(start):
    class Overflowing(FakeRunner):
        def launch(self, plan, control):
            result = super().launch(plan, control).result()
            logprobs = [math.nan if t == 503 else -0.5 for t in result.tokens]
            future = Future()
            future.set_result(replace(result, logprobs=logprobs))
            return future

    engine = start(runner=Overflowing)
    good = asyncio.create_task(collect(engine, [1], 20))
    with pytest.raises(RequestFailed, match="position 3 are not numbers"):
        await collect(engine, [500], 20)
    assert len(await good) == 20
    assert engine.stats().requests_failed == 1


@simulated_time
async def test_an_observer_that_raises_disturbs_nobody(start, caplog):
    class Broken(Observer):
        def step_read(self, *_):
            raise Panic("observed")

        def first_tokens(self, *_):
            raise RuntimeError("observed")

        request_finished = further_tokens = first_tokens

    engine = start(observer=Broken())
    assert len(await collect(engine, [1], 40)) == 40
    assert 3 < len([r for r in caplog.records if "so far)" in r.message]) < 12


@simulated_time
@pytest.mark.parametrize("error", [RuntimeError("lost"), Panic("lost"), asyncio.CancelledError()])
async def test_whatever_ends_the_tick_ends_every_request_with_a_reason(start, error):
    class Broken(FakeRunner):
        broken = False

        def launch(self, plan, control):
            if self.broken:
                raise error
            return super().launch(plan, control)

    engine = start(step_s=0.01, runner=Broken)
    engine.restart_s = 40.0
    tasks = [asyncio.create_task(collect(engine, [i], 50)) for i in range(6)]  # two of them wait
    died = asyncio.create_task(engine.died())
    await asyncio.sleep(0.1)
    engine.executor.broken = True
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, Unavailable)
        assert type(error).__name__ in str(result)
        assert result.retry_after_s == 40.0
    assert len({id(result) for result in results}) == 6  # a traceback is one caller's
    assert type(error).__name__ in await died
    assert engine.status == "failed"
    with pytest.raises(Unavailable, match=type(error).__name__) as refused:
        engine.check_admission()  # who comes later hears it, too
    assert refused.value.retry_after_s == 40.0
    assert await engine.drain(1)
    assert engine.status == "failed"


@simulated_time
async def test_a_scheduler_at_fault_leaves_nobody_waiting(start):
    engine = start(step_s=0.01)
    tasks = [asyncio.create_task(collect(engine, [i], 50)) for i in range(4)]
    await asyncio.sleep(0.1)
    engine.scheduler.running.clear()
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(result, Unavailable)


class Stuck(FakeRunner):
    """A runner whose steps never return."""

    def launch(self, plan, control):
        return Future()


async def test_a_step_that_never_returns_is_noticed(start):
    engine = start(runner=Stuck)
    engine.watchdog._limit_s = 0.05
    engine.watchdog.start()
    with pytest.raises(Unavailable, match="a step took longer than"):
        await asyncio.wait_for(collect(engine, [1], 5), 60)
    assert "watchdog_s" in await engine.died()


async def test_a_launch_that_never_returns_is_told_from_outside_the_loop(start, monkeypatch):
    monkeypatch.setattr(engine_module, "UNRESPONSIVE_S", 0.05)
    told = threading.Event()

    class Blocking(FakeRunner):
        def launch(self, plan, control):
            assert told.wait(20)
            return super().launch(plan, control)

    engine = start(runner=Blocking)
    reasons = []
    engine.on_unresponsive = lambda reason: (reasons.append(reason), told.set())
    engine.watchdog._limit_s = 0.05
    engine.watchdog.start()
    with pytest.raises(Unavailable):
        await collect(engine, [1], 5)
    assert "does not answer" in reasons[0]


def test_only_time_in_which_the_process_ran_counts_as_stuck():
    timer = StuckTimer(limit_s=60, period_s=0.25, now=0.0)
    assert not timer.look(120.0, pending=True, progress=0)  # stopped for two minutes
    looks = 0
    while not timer.look(120.25 + looks / 4, pending=True, progress=0):
        looks += 1
    assert looks == pytest.approx(4 * 60, abs=3)


def test_progress_and_idleness_start_the_watchdogs_clock_anew():
    timer, now = StuckTimer(limit_s=1, period_s=0.25, now=0.0), 0.0
    for step in range(100):
        now += 0.25
        assert not timer.look(now, pending=step % 4 != 3, progress=0)
    for step in range(100):
        now += 0.25
        assert not timer.look(now, pending=True, progress=step // 4)


@pytest.mark.parametrize("change", [{}, {"way": 8}, {"strategy": "partial"}, {"ttft_slo_s": 1.0}])
def test_a_caller_who_changes_nothing_holds_up_no_controller(change):
    """The caller sets the same twice as often as the controllers act."""
    salc = SalcConfig(interval_s=1.0, min_samples=4)
    slo = SloAnalyser(BrownoutConfig(itl_slo_s=0.01, ttft_slo_s=1.0), salc, way=8)
    for tick in range(40):
        now = tick / 2
        slo.use_way(8, now)
        slo.apply(BrownoutChange(**change), now)
        late = Latencies(previous_at={(LS, 0, ""): [now - 0.02] * 8})
        slo.observe(late, now - 0.03, now)
        slo.maybe_update(now, {LS: QueuedClass()})
    assert slo.ls.decode.threshold_percent < 20


def test_a_window_keeps_what_it_covers_though_nobody_reads_it():
    window = LatencyWindow(window_s=2.0)
    for step in range(1000):
        window.add(step / 10, step / 10, np.zeros(4))
    assert len(window._batches) <= 21
    assert window.p90(99.9, -math.inf, 1) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 10**6, "'" + "x" * 200 + "'... (1000000 in all)"),
        (range(10**9), "a range of 1000000000"),
        ([1, 2], "[1, 2]"),
        (10**300, "1" + "0" * 199 + "..."),
    ],
)
def test_values_are_cut_in_messages(value, text):
    assert shown(value) == text


@simulated_time
async def test_a_long_generation_is_not_slowed_down_by_its_stop_strings(start):
    engine = start(model=model_with(Fragile(None, at=None)))
    sampling = SamplingParams(max_new_tokens=150, stop=tuple("x" * 1000 + str(i) for i in range(9)))
    outputs = await collect(engine, [1], sampling=sampling)
    assert "".join(out.text for out in outputs) == "x" * 150
