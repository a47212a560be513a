"""The engine of asynchronous workers over a crew that counts up, whenever units leave."""

import asyncio
import json
import random
from typing import ClassVar

import numpy as np
import pytest
from counting import collect
from fake_crew import asynchronous_engine

from jmoe.brownout import strategy_code
from serving.config import BrownoutConfig, SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Unavailable,
    WorkerLost,
)
from serving.execution.executor import FailedRows, LostRows, Stages
from serving.frontend.metrics import Metrics
from serving.pipeline.messages import Left, WorkerUp
from serving.plan import Limits, Phase
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.telemetry.timeline import Timeline

pytestmark = pytest.mark.simulated_time


@pytest.fixture
async def start():
    engines = []

    def make(*args, **options):
        engines.append(asynchronous_engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()


def tokens_of(outputs):
    return [token for out in outputs for token in out.token_ids]


async def settle(engine):
    assert await engine.drain(100)
    engine.scheduler.check_idle()
    assert engine.watchdog.launched == engine.watchdog.ended
    assert not any(engine.executor.inside)


@pytest.mark.sized(deep=("4-0.0", "4-0.2", "5-0.0", "5-0.2", "6-0.0", "6-0.2", "7-0.0", "7-0.2"))
@pytest.mark.parametrize("lost_share", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(8))
async def test_whatever_leaves_when_each_request_gets_its_own_tokens(start, seed, lost_share):
    """Pages are few, prompts are longer than a chunk, and some callers go away. Every other time
    layers are recurrent, so that rows may run once only.
    """
    rng = random.Random(seed)
    sizes = {"num_layers": 2, "num_ranks": 2, "max_decode_seqs": 6}
    limits = Limits(8, 20, 4, 8, 4, **sizes, recurrent=seed % 2 == 1)
    reuse = "off" if limits.recurrent else "on"
    engine = start(rng, limits, lost_share=lost_share, prefix_reuse=reuse)

    async def one(number):
        prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 20))]
        count, stops_at = rng.randrange(1, 16), rng.randrange(1, 40)
        priority = rng.choice(list(Priority))
        await asyncio.sleep(rng.uniform(0, 1))
        sampling, got = SamplingParams(max_new_tokens=count, prompt_logprobs=number % 3 == 0), []
        stream = engine.generate(prompt, sampling, priority=priority)
        async for output in stream:
            got += output.token_ids
            if number % 3 == 0 and len(got) == 1:
                assert output.prompt_logprobs == tuple(-float(p) for p in range(1, len(prompt)))
            if len(got) == stops_at:
                await stream.aclose()
                break
        assert got == [(prompt[-1] + n) % 1000 for n in range(1, min(count, stops_at) + 1)]

    await asyncio.gather(*map(one, range(40)))
    await settle(engine)
    assert engine.executor.most_inside > 2
    assert bool(engine.executor.num_lost) == bool(lost_share)
    assert engine.stats().evictions > 0


async def test_nobody_waits_for_a_slower_row(start):
    """Two requests on two workers, of which one is slow: the other has all its tokens before."""
    rng = random.Random(0)
    engine = start(rng, slowest_s=0.01)
    slow = asyncio.create_task(collect(engine, [1], 10))
    await asyncio.sleep(0)
    engine.executor.slowest_s = 0.0
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    rank = next(rank for rank, units in enumerate(engine.executor.inside) if units)
    held, engine.executor.inside[rank] = engine.executor.inside[rank], []
    assert tokens_of(await collect(engine, [7], 10)) == list(range(8, 18))
    assert not slow.done()
    engine.executor.inside[rank] = held
    engine.executor._some_leave(rank)
    assert tokens_of(await slow) == list(range(2, 12))
    await settle(engine)


async def test_pages_of_a_request_that_ended_are_its_own_until_its_row_has_left(start):
    engine = start(random.Random(0), slowest_s=1.0)
    stream = engine.generate([5] * 7, SamplingParams(max_new_tokens=50))
    assert (await anext(stream)).token_ids == (6,)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert any(engine.executor.inside)
    await stream.aclose()
    places = engine.scheduler.places
    assert places.num_free_pages < engine.scheduler.limits.num_pages
    assert not engine.scheduler.idle
    await settle(engine)
    assert places.num_free_pages == engine.scheduler.limits.num_pages
    assert engine.stats().requests_aborted == 1


async def test_a_deadline_ends_a_request_on_its_way(start):
    engine = start(random.Random(0), slowest_s=1.0)
    with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
        await collect(engine, [1], 100, timeout_s=0.5)
    await settle(engine)


async def test_a_crew_that_fails_tells_everybody_and_lets_go(start):
    engine = start(random.Random(0), slowest_s=1e6)
    waiting = [asyncio.create_task(collect(engine, [n], 5)) for n in range(12)]
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    engine._fail("worker 1: it is gone")
    for task in waiting:
        with pytest.raises(Unavailable, match="worker 1: it is gone"):
            await task
    assert engine.scheduler.idle
    engine.executor.report(WorkerUp("attention", 0))  # a crew goes on telling
    assert not engine._news
    with pytest.raises(Unavailable, match="worker 1"):
        await collect(engine, [1], 1)


async def test_stopping_aborts_what_is_on_its_way(start):
    engine = start(random.Random(0), slowest_s=1e6)
    waiting = asyncio.create_task(collect(engine, [1], 5))
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(Aborted):
        await waiting


async def test_requests_are_spread_over_the_workers(start):
    engine = start(random.Random(0), slowest_s=1.0)
    tasks = [asyncio.create_task(collect(engine, [n], 3)) for n in range(6)]
    while sum(map(len, engine.executor.inside)) < 6:
        await asyncio.sleep(0)
    assert [len(units) for units in engine.executor.inside] == [3, 3]
    await asyncio.gather(*tasks)
    await settle(engine)


async def test_stages_hear_of_thresholds_and_outputs_tell_which_they_had(start):
    brownout = BrownoutConfig(
        strategy="full", salc=False, prefill_threshold_percent=70, decode_threshold_percent=40
    )
    engine = start(random.Random(0), brownout=brownout)
    outputs = await collect(engine, [1], 3)
    spans = outputs[-1].prefill_threshold, outputs[-1].decode_threshold
    assert [(s.min_percent, s.max_percent) for s in spans] == [(70, 70), (40, 40)]
    exempt = await collect(engine, [1], 3, allow_brownout=False)
    assert exempt[-1].decode_threshold.min_percent == 100


async def test_a_worker_that_ends_takes_its_own_requests_with_it(start):
    """Others go on, new ones go elsewhere, until it is back."""
    engine = start(random.Random(0), slowest_s=0.5)
    tasks = [asyncio.create_task(collect(engine, [100 * n], 40)) for n in range(6)]
    while sum(map(len, engine.executor.inside)) < 6:
        await asyncio.sleep(0)
    engine.executor.lose(1)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    lost = [each for each in found if isinstance(each, WorkerLost)]
    assert len(lost) == 3
    assert str(lost[0]) == "worker attention-1 is gone; send the request again"
    assert lost[0].retry_after_s == 3.0
    kept = [(n, each) for n, each in enumerate(found) if isinstance(each, list)]
    for number, outputs in kept:
        assert tokens_of(outputs) == [100 * number + n for n in range(1, 41)]
    assert len(kept) == 3
    more = [asyncio.create_task(collect(engine, [n], 3)) for n in range(3)]
    while not engine.executor.inside[0]:
        await asyncio.sleep(0)
    assert not engine.executor.inside[1]
    await asyncio.gather(*more)
    engine.executor.lose(0)
    await asyncio.sleep(0.1)
    with pytest.raises(WorkerLost, match="no worker with attention is there"):
        await collect(engine, [1], 1)
    for rank in (0, 1):
        engine.executor.report(WorkerUp("attention", rank))
    await asyncio.sleep(0.1)
    assert tokens_of(await collect(engine, [1], 2)) == [2, 3]
    await settle(engine)
    assert engine.stats().requests_aborted == 3


async def test_a_silent_worker_holds_up_its_own_requests_alone(start):
    """Prompts that come later are computed by the other, though it has had steps in common."""
    engine = start(random.Random(0), slowest_s=0.01)
    leave = engine.executor._some_leave
    engine.executor._some_leave = lambda rank: leave(rank) if rank == 0 else None
    tasks = []
    for number in range(10):
        tasks.append(asyncio.create_task(collect(engine, [number], 1)))
        await asyncio.sleep(0.2)
    assert sum(task.done() for task in tasks) >= 7
    engine.executor._some_leave = leave
    while engine.executor.inside[1]:
        leave(1)
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks)
    await settle(engine)


async def test_a_drain_ends_with_the_last_row_whatever_becomes_of_it(start):
    for what in (LostRows, lambda numbers: FailedRows(numbers, "no worker")):
        engine = start(random.Random(0), slowest_s=1e6)
        stream = engine.generate([1], SamplingParams(max_new_tokens=5))
        first = asyncio.create_task(anext(stream))
        while not any(engine.executor.inside):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
        draining = asyncio.create_task(engine.drain(100))
        await asyncio.sleep(0.1)
        numbers = [u.number for units in engine.executor.inside for u in units]
        engine.executor.inside = [[], []]
        engine.executor.report(what(numbers))
        assert await asyncio.wait_for(draining, 1)


async def test_who_waits_for_a_slot_is_told_when_the_last_worker_goes(start):
    engine = start(random.Random(0), slowest_s=1e6)
    tasks = [asyncio.create_task(collect(engine, [n], 5)) for n in range(12)]
    while sum(map(len, engine.executor.inside)) < 6:
        await asyncio.sleep(0)
    engine.executor.lose(0)
    engine.executor.lose(1)
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1)
    assert all(isinstance(each, WorkerLost) for each in found)
    assert sum("no worker with attention is there" in str(each) for each in found) == 6


async def test_who_is_being_read_is_told_when_the_last_worker_goes(start):
    engine, is_lost = start(random.Random(0)), asyncio.Event()
    own = engine.admission.sequence

    async def read_slowly(request, arrived_at):
        await is_lost.wait()
        return await own(request, arrived_at)

    engine.admission.sequence = read_slowly
    task = asyncio.create_task(collect(engine, [1], 2))
    await asyncio.sleep(0.1)
    engine.executor.lose(0)
    engine.executor.lose(1)
    await asyncio.sleep(0.1)
    is_lost.set()
    with pytest.raises(WorkerLost, match="no worker with attention is there"):
        await task
    engine.executor.report(WorkerUp("attention", 0))
    await asyncio.sleep(0.1)
    assert tokens_of(await collect(engine, [1], 2)) == [2, 3]
    await settle(engine)


async def test_what_is_said_of_rows_that_are_given_up_comes_too_late(start):
    engine = start(random.Random(0), slowest_s=1.0)
    task = asyncio.create_task(collect(engine, [1], 5))
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    (unit,) = (u for units in engine.executor.inside for u in units)
    rank = next(n for n, units in enumerate(engine.executor.inside) if units)
    engine.executor.lose(rank)
    none, table = np.zeros(0), np.zeros((0, 0), np.int32)
    engine.executor.report(
        Left([unit.number], [9], [0.0], [0], none, 0, [100], [100], table, table, table)
    )

    engine.executor.report(LostRows([unit.number]))
    with pytest.raises(WorkerLost):
        await task
    await settle(engine)


async def test_requests_that_need_an_expert_that_is_gone_are_told(start):
    engine = start(random.Random(0), brownout=BrownoutConfig(strategy="full", salc=False))
    running = asyncio.create_task(collect(engine, [1], 20))
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    engine.executor.unreachable = "expert 3 of MoE layer 0 is gone with experts-1"
    with pytest.raises(WorkerLost, match=r"experts-1, and nothing may stand in for it.*again"):
        await collect(engine, [1], 1, allow_brownout=False)
    assert tokens_of(await collect(engine, [1], 2)) == [2, 3]
    while not any(engine.executor.inside):
        await asyncio.sleep(0)
    rank = next(n for n, units in enumerate(engine.executor.inside) if units)
    units, engine.executor.inside[rank] = engine.executor.inside[rank], []
    engine.executor.report(FailedRows([u.number for u in units], "layer 2 needs experts"))
    with pytest.raises(WorkerLost, match="layer 2 needs experts"):
        await running
    await settle(engine)


async def test_metrics_say_what_waits_for_each_worker(start):
    metrics = Metrics()
    metrics.engine = start(random.Random(0), observer=metrics)
    await collect(metrics.engine, [1], 3)
    found = {family.name: family for family in metrics.collect()}
    assert [s.labels for s in found["jmoe_worker_up"].samples] == [
        {"worker": "attention-0"},
        {"worker": "attention-1"},
    ]
    assert {s.value for s in found["jmoe_worker_oldest_row_seconds"].samples} == {0.5}
    assert "jmoe_worker_stages" in found
    assert metrics.expert_rows.tolist() == [[3, 3, 3]]
    assert "jmoe_expert_rows" in found


@pytest.mark.parametrize(
    ("change", "words"),
    [({"prefill_company": True}, "prefill_company is True; .*no prompt waits for another")],
)
async def test_changes_that_only_steps_know_are_refused_by_name(start, change, words):
    engine = start(random.Random(0), mode="aep")
    with pytest.raises(InvalidRequest, match=words):
        await engine.set_brownout(BrownoutChange(strategy="full", **change))
    assert engine.get_brownout().strategy == "zero"
    await engine.set_brownout(BrownoutChange(controller="algorithm2", prefill_company=False))


def use_way(engine, way):
    return asyncio.create_task(engine.set_brownout(BrownoutChange(way=way)))


async def test_rows_leave_before_the_way_changes_and_enter_once_all_have_changed(start):
    engine = start(random.Random(0), ways=(2, 4), slowest_s=1.0)
    crew = engine.executor
    running = [asyncio.create_task(collect(engine, [100 * n], 12)) for n in range(4)]
    while sum(map(len, crew.inside)) < 4:
        await asyncio.sleep(0)
    changing = use_way(engine, 4)
    await asyncio.sleep(0.01)
    under_way = {unit.number for units in crew.inside for unit in units}
    assert under_way
    new = asyncio.create_task(collect(engine, [7], 3))
    while not crew.way_changes:
        assert {unit.number for units in crew.inside for unit in units} <= under_way
        await asyncio.sleep(0.01)
    assert engine.get_brownout().way == 2
    assert engine.slo.way_in_force == -1
    assert engine.watchdog.launched == engine.watchdog.ended + 1  # one that hangs is noticed
    assert (await changing).way == 4
    assert engine.slo.way_in_force == 4
    for number, outputs in enumerate(await asyncio.gather(*running)):
        assert tokens_of(outputs) == [100 * number + n for n in range(1, 13)]
    assert tokens_of(await new) == [8, 9, 10]
    await settle(engine)
    assert crew.ways == [4]
    assert (await engine.set_brownout(BrownoutChange(way=2))).way == 2  # of an engine without work
    assert crew.ways == [4, 2]


@pytest.mark.parametrize("lost_share", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(4))
async def test_ways_change_at_any_time_and_nobody_is_lost(start, seed, lost_share):
    """Changes come together, too: each is made in turn, and equal ones once."""
    rng = random.Random(seed)
    engine = start(rng, ways=(2, 4, 8), lost_share=lost_share)

    async def ask(number):
        await asyncio.sleep(rng.uniform(0, 1))
        count = rng.randrange(1, 16)
        priority = rng.choice(list(Priority))
        got = await collect(engine, [50 * number], count, priority=priority)
        assert tokens_of(got) == [(50 * number + n) % 1000 for n in range(1, count + 1)]

    async def change(way):
        await asyncio.sleep(rng.choice((0.2, 0.5, rng.uniform(0, 1))))
        await engine.set_brownout(BrownoutChange(way=way))

    await asyncio.gather(*map(ask, range(16)), *map(change, 2 * (2, 4, 4, 8)))
    await settle(engine)
    assert len(engine.executor.ways) >= 2
    assert engine.get_brownout().way == engine.executor.ways[-1]
    assert not engine.loader.busy


async def test_a_change_of_way_goes_on_without_a_worker_that_ends(start):
    """Its rows are not waited for, and who waits for the change goes elsewhere afterwards."""
    engine = start(random.Random(0), ways=(2, 4), slowest_s=1e6)
    crew = engine.executor
    tasks = [asyncio.create_task(collect(engine, [100 * n], 3)) for n in range(2)]
    while sum(map(len, crew.inside)) < 2:
        await asyncio.sleep(0)
    changing = use_way(engine, 4)
    await asyncio.sleep(0.1)
    crew.slowest_s = 0.01
    crew.lose(1)
    while crew.inside[0]:
        crew._some_leave(0)
    new = asyncio.create_task(collect(engine, [7], 3))
    assert (await asyncio.wait_for(changing, 10)).way == 4
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(type(each) for each in found if not isinstance(each, list)) == [WorkerLost]
    assert tokens_of(await new) == [8, 9, 10]
    await settle(engine)


async def test_a_caller_may_leave_while_its_row_is_waited_for_or_the_way_changes(start):
    engine = start(random.Random(0), ways=(2, 4), slowest_s=0.5)
    stream = engine.generate([1], SamplingParams(max_new_tokens=50))
    await anext(stream)
    changing = use_way(engine, 4)
    late = asyncio.create_task(collect(engine, [5], 5))
    await asyncio.sleep(0)
    await stream.aclose()
    while not engine.executor.way_changes:
        await asyncio.sleep(0.01)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (await changing).way == 4
    await settle(engine)


async def test_an_engine_that_ends_as_the_way_changes_says_so(start):
    engine = start(random.Random(0), ways=(2, 4), slowest_s=1e6)
    changing = use_way(engine, 4)
    while not engine.executor.way_changes:
        await asyncio.sleep(0)
    engine._fail("worker 1: it is gone")
    with pytest.raises(Unavailable, match="worker 1: it is gone"):
        await changing


async def test_pages_of_one_way_are_not_reused_by_another(start):
    """Those of rows that were degraded; exact ones are everybody's."""
    brownout = BrownoutConfig("full", salc=False, prefill_threshold_percent=40)
    engine = start(random.Random(0), ways=(2, 4), mode="aep", brownout=brownout)
    await engine.set_brownout(BrownoutChange(strategy="partial"))
    prompt, report = list(range(100, 112)), engine.executor.report
    code = strategy_code("partial", "weight")
    degraded = 1

    def degrade(message):
        if isinstance(message, Left):
            message = message._replace(degraded=[degraded] * len(message.numbers), strategy=code)
        report(message)

    engine.executor.report = degrade
    cached = []
    for way in (2, 2, 4, 4, 2):
        await engine.set_brownout(BrownoutChange(way=way))
        cached.append((await collect(engine, [*prompt, 5], 2))[-1].usage.cached_tokens)
    assert cached == [0, 12, 0, 12, 0]
    degraded = 0
    await collect(engine, [*prompt, 6], 2, allow_brownout=False)
    await engine.set_brownout(BrownoutChange(way=4))
    assert (await collect(engine, [*prompt, 5], 2))[-1].usage.cached_tokens == 12
    await settle(engine)


class Alternates(Algorithm2):
    """Sets 30 % in prefill and in decode steps as many percent as sequences decode, and 40."""

    seen: ClassVar = []

    def of_step(self, step):
        self.seen.append(step)
        return 30.0 if step.phase == "prefill" else 40.0 + step.num_decoding


async def test_a_controller_that_goes_by_steps_sets_each_rows_threshold(start):
    brownout = BrownoutConfig(strategy="full", salc=True)
    salc = SalcConfig(controller="test_asynchronous_engine:Alternates", floor_percent=10)
    engine = start(random.Random(0), mode="aep", brownout=brownout, salc=salc)
    (got,) = [await collect(engine, [1], 6)]
    assert (got[-1].prefill_threshold.min_percent, got[-1].prefill_threshold.max_percent) == (
        30,
        30,
    )
    assert (got[-1].decode_threshold.min_percent, got[-1].decode_threshold.max_percent) == (41, 41)
    assert {step.size for step in Alternates.seen if step.phase == "decode"} == {1}
    many = await asyncio.gather(*(collect(engine, [n], 12) for n in range(6)))
    most = max(got[-1].decode_threshold.max_percent for got in many)
    assert 43 <= most <= 46
    assert max(step.size for step in Alternates.seen if step.phase == "decode") >= 3
    await settle(engine)


async def test_how_long_rows_pass_is_learnt_and_the_predictive_controller_may_go_by_it(start):
    engine = start(random.Random(0), mode="aep", slowest_s=0.02)
    await asyncio.gather(*(collect(engine, [n] * (n + 1), 30) for n in range(6)))
    times = engine.pace.times
    assert times.knows(Phase.DECODE)
    assert times.knows(Phase.PREFILL)
    assert 0 < times.expected_s(Phase.DECODE, 4) < 0.02  # the longest that a row takes
    state = await engine.set_brownout(BrownoutChange(controller="predictive"))
    assert state.controller == "predictive"


async def test_prompts_begin_with_pages_that_others_have_filled(start):
    """On the worker that has them; not on one that has come back empty."""
    engine = start(random.Random(0), mode="aep")
    prompt = list(range(100, 112))
    assert tokens_of(await collect(engine, [*prompt, 5], 2)) == [6, 7]
    got = await collect(engine, [*prompt, 8], 2)
    assert tokens_of(got) == [9, 10]
    assert got[-1].usage.cached_tokens == 12
    for rank in (0, 1):
        engine.executor.lose(rank)
        engine.executor.report(WorkerUp("attention", rank))
    got = await collect(engine, [*prompt, 8], 2)
    assert (tokens_of(got), got[-1].usage.cached_tokens) == ([9, 10], 0)
    await settle(engine)


async def test_best_effort_is_urgent_while_it_has_had_less_than_its_share(start):
    for share, urgent in ((0.0, {False}), (0.9, {True})):
        engine = start(random.Random(0), mode="aep", best_effort_share=share, slowest_s=0.02)
        entered, enter = [], engine.executor.enter

        def note(units, entered=entered, enter=enter):
            entered.append(
                [(4 * n + u.row[0], u.urgent) for n, own in enumerate(units) for u in own]
            )
            enter(units)

        engine.executor.enter = note
        best_effort = asyncio.create_task(collect(engine, [1], 20, priority=Priority.BEST_EFFORT))
        await asyncio.sleep(0.05)
        slots = {s.slot for s in engine.scheduler.running}
        first = len(entered)
        others = [asyncio.create_task(collect(engine, [n], 40)) for n in (2, 3, 4)]
        await best_effort
        later = [unit for units in entered[first + 20 :] for unit in units]
        assert {is_urgent for slot, is_urgent in later if slot in slots} == urgent
        await asyncio.gather(*others)
        await settle(engine)


async def test_best_effort_with_an_objective_of_its_own_has_a_threshold_of_its_own(start):
    brownout = BrownoutConfig("full", salc=False, best_effort_itl_slo_s=1.0)
    engine = start(random.Random(0), mode="aep", brownout=brownout)
    engine.slo.best_effort.decode.threshold_percent = 35.0
    got = await collect(engine, [1], 4, priority=Priority.BEST_EFFORT)
    assert got[-1].decode_threshold.max_percent == 35
    assert (await collect(engine, [1], 4))[-1].decode_threshold.min_percent == 100


async def test_a_timeline_has_a_track_for_each_worker(tmp_path):
    timeline = Timeline()
    rng = random.Random(0)
    engine = asynchronous_engine(rng, observer=timeline)
    assert engine.executor.records
    layers, rows = np.array([0, 1]), np.array([5, 3])
    began_at, waiting = np.array([1.0, 1.5]), np.array([[5, 0], [0, 3]])
    stages = Stages("experts-1", layers, rows, began_at, began_at + 0.25, waiting)
    engine.executor.report(stages)
    await collect(engine, [1], 2)
    await engine.stop()
    timeline.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (track,) = (e["tid"] for e in events if e.get("args") == {"name": "experts-1"})
    drawn = [e for e in events if e["ph"] == "X" and e["tid"] == track]
    assert [(e["name"], e["ts"], e["dur"]) for e in drawn] == [
        ("layer 0", 1e6, 0.25e6),
        ("layer 1", 1.5e6, 0.25e6),
    ]
    counted = [e["args"] for e in events if e["ph"] == "C"]
    assert counted == [{"layer 0": 5, "layer 1": 0}, {"layer 0": 0, "layer 1": 3}]
    assert not [e for e in events if e["ph"] == "X" and e["tid"] == 2]  # steps overlap
