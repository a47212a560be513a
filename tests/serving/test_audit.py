"""Degraded answers are scored exactly, when there is room, and what they cost is told."""

import asyncio
import dataclasses
import math
import shutil
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from counting import LIMITS, collect, family_of
from families import GOLDEN, settings_of

import jmoe
from jmoe import beside, expected_loss
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from jmoe.packed_rows import EXEMPT, SLOT
from serving.config import AuditConfig, BrownoutConfig, EngineConfig
from serving.control import audit as audit_module
from serving.control.audit import MAX_WAITING, Auditor
from serving.control.controller import Decision
from serving.engine import Engine
from serving.frontend.metrics import Metrics
from serving.request import Priority, SamplingParams
from tests.jmoe.conftest import add_united
from tests.serving.fake_runner import FakeRunner

STEP_S = 0.01


class Degrading(FakeRunner):
    """A runner that degrades every visit that it may. Of the token at position p, the
    log-probability is -0.5 as it is drawn and -p in a prompt, where it is the likeliest one unless
    4 divides p.
    """

    def computed(self, plan, control, row, model, new, adopted):
        token, _ = super().computed(plan, control, row, model, new, adopted)
        return token, 0 if row[EXEMPT] else len(new)


def start(names=None, observer=(), resident=0, runner=Degrading, **audit):
    config = EngineConfig(
        max_model_len=200,
        watchdog_s=0,
        models=names or (),
        resident_experts=resident,
        audit=AuditConfig(**audit),
    )
    clock, family = asyncio.get_running_loop().time, None if names is None else family_of(names)
    engine = Engine(config, runner(LIMITS, step_s=STEP_S), family, observer, clock)
    engine.run()
    return engine


def audits(engine):
    return [audit for audit in engine.stats().audits if audit.num_scored or audit.num_unscored]


def num_scored(engine, model=""):
    return sum(a.num_scored for a in engine.stats().audits if model in ("", a.model))


async def until_audited(engine, count, of=""):
    while num_scored(engine, of) < count:
        await asyncio.sleep(1)


def excess_of(prompt_len, new):
    return sum(p - 0.5 for p in range(prompt_len, prompt_len + new))


@pytest.mark.simulated_time
async def test_an_answer_is_scored_by_hand():
    engine = start()
    await collect(engine, [1, 2, 3], 6)  # at positions 3 to 8
    await until_audited(engine, 1)
    await collect(engine, [5], 3)  # at positions 1 to 3
    await until_audited(engine, 2)
    [state] = engine.stats().audits
    assert (state.num_scored, state.num_unscored, state.is_exempt) == (2, 0, False)
    assert state.excess_nats == pytest.approx((excess_of(3, 6) + excess_of(1, 3)) / 9)
    assert state.disagreement == pytest.approx(2 / 9)  # positions 4 and 8
    assert state.excess_low_nats < state.excess_nats < state.excess_high_nats
    stats = engine.stats()
    assert (stats.requests_finished, stats.num_running, stats.num_waiting) == (2, 0, 0)
    await engine.stop()


@pytest.mark.simulated_time
async def test_sampled_tokens_are_no_disagreement():
    engine = start()
    await collect(engine, [1, 2, 3], sampling=SamplingParams(max_new_tokens=6, temperature=1.0))
    await until_audited(engine, 1)
    [state] = engine.stats().audits
    assert state.excess_nats == pytest.approx(excess_of(3, 6) / 6)
    assert math.isnan(state.disagreement)
    await engine.stop()


@pytest.mark.simulated_time
async def test_an_answer_up_to_the_last_position_is_scored_but_for_its_last_token():
    engine = start()
    await collect(engine, [1, 2, 3], 197)
    await until_audited(engine, 1)
    [state] = engine.stats().audits
    assert state.excess_nats == pytest.approx(excess_of(3, 196) / 196)
    await engine.stop()


@pytest.mark.simulated_time
@pytest.mark.parametrize("why", ["refused", "exact", "share", "host"])
async def test_nothing_is_scored_where_it_must_not_be(why):
    engine = start(share=0.0 if why == "share" else 0.01, resident=60 * (why == "host"))
    given = {"refused": {"allow_audit": False}, "exact": {"allow_brownout": False}}
    for _ in range(5):
        await collect(engine, [1, 2, 3], 6, **given.get(why, {}))
    await asyncio.sleep(100)
    assert (engine.stats().audits[0].num_scored, engine.stats().steps_prefill) == (0, 5)
    await engine.stop()


@pytest.mark.simulated_time
async def test_it_takes_its_share_of_the_time_at_most():
    engine = start(share=0.02)
    for _ in range(40):
        await collect(engine, [1, 2, 3], 6)
    before = num_scored(engine)
    await asyncio.sleep(10.0)  # an answer of 9 tokens takes a step
    scored = num_scored(engine) - before
    assert 0.9 * 0.02 * 10 / STEP_S < scored <= 0.02 * 10 / STEP_S + 1
    await engine.stop()


@pytest.mark.simulated_time
async def test_a_full_server_scores_nothing_and_says_so():
    engine = start()
    many = [collect(engine, [7 * n], 20) for n in range(3 * MAX_WAITING)]
    busy = asyncio.gather(*many)
    while engine.stats().requests_finished < MAX_WAITING + 20:
        assert num_scored(engine) == 0
        await asyncio.sleep(0.01)
    assert engine.stats().audits[0].num_unscored >= 20
    await busy
    await until_audited(engine, 3)
    await engine.stop()


@pytest.mark.simulated_time
async def test_nothing_is_scored_while_a_controller_degrades():
    engine = start(share=1.0)
    engine.slo.strategy = "full"
    engine.slo.ls.decode.set_threshold(50, 0.0)
    engine.slo.ls.controller.decide = lambda seen: Decision(100, 50)
    engine.slo._released = lambda *_: {}
    await collect(engine, [1, 2, 3], 6)
    await asyncio.sleep(30)
    assert num_scored(engine) == 0
    engine.slo.ls.controller.decide = lambda seen: Decision(100, 100)
    await until_audited(engine, 1)
    await engine.stop()


@pytest.mark.simulated_time
async def test_an_answer_for_which_there_is_never_room_is_let_go():
    engine = start()
    await collect(engine, [1, 2, 3], 6)
    engine.scheduler.models = {7}  # its model's weights have made room for another's
    await asyncio.sleep(audit_module.STALE_S - 10)
    assert audits(engine) == []
    await asyncio.sleep(20)
    assert [(a.num_scored, a.num_unscored) for a in audits(engine)] == [(0, 1)]
    assert not engine.auditor._waiting  # and the server is at rest
    engine.scheduler.models = None
    await engine.stop()


class Anything:
    """A structure's matcher that every token satisfies."""

    def fill(self, row):
        pass

    def take(self, token):
        return False


@pytest.mark.simulated_time
async def test_an_answer_that_waits_keeps_neither_its_structure_nor_what_nobody_took():
    engine = start()
    stream = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=6))
    held = [await anext(stream)]
    (sequence,) = engine.scheduler.running
    sequence.matcher = Anything()
    matcher = weakref.ref(sequence.matcher)
    engine.auditor._has_room = lambda model: False
    await asyncio.sleep(1)
    assert sequence.done
    assert matcher() is None
    assert sequence._outputs  # for its caller
    await stream.aclose()
    assert engine.auditor._waiting == [sequence]
    assert not sequence._outputs
    engine.auditor._has_room = engine._audits
    await until_audited(engine, 1)
    await engine.stop()
    assert held


@pytest.mark.simulated_time
async def test_a_fault_while_scoring_costs_one_answer(caplog):
    engine = start(share=1.0)
    scores, engine.auditor._score = engine.auditor._score, None  # what calls it raises
    await collect(engine, [1, 2, 3], 6)
    await asyncio.sleep(5)
    assert "an answer was not audited" in caplog.text
    engine.auditor._score = scores
    await collect(engine, [1, 2, 3], 6)
    await until_audited(engine, 1)
    assert [(a.num_scored, a.num_unscored) for a in audits(engine)] == [(1, 1)]
    await engine.stop()


@pytest.mark.simulated_time
async def test_what_costs_more_than_the_bound_is_exempt_and_tried_again(caplog):
    engine = start(("base", "law"), share=1.0, max_excess_nats=1.5, retry_s=100.0)

    async def ask(model, long):
        prompt = [1, 2, 3, 4] if long else [1]  # a token costs 4.5 nats, or 1.0
        [*_, last] = await collect(engine, prompt, 2, model=model)
        return last.usage.degraded_visits

    for at in range(49):
        assert await ask("law", long=True)
        assert await ask("base", long=False)
        await until_audited(engine, at + 1, of="law")
    assert await ask("law", long=True)
    await until_audited(engine, 50, of="law")
    began = asyncio.get_running_loop().time()
    assert not await ask("law", long=True)
    assert await ask("base", long=False)
    base, law = engine.stats().audits
    assert (base.is_exempt, law.is_exempt) == (False, True)
    assert "brownout of model 'law' costs 4" in caplog.text
    assert "engine.audit.max_excess_nats=1.5: its new requests are exempt for 100 s" in caplog.text
    await asyncio.sleep(101 - (asyncio.get_running_loop().time() - began))
    assert await ask("law", long=False)  # it has come to cost less
    await until_audited(engine, 51, of="law")
    law = engine.stats().audits[1]
    assert (law.is_exempt, law.excess_nats) == (False, pytest.approx(1.0))
    await engine.stop()


@pytest.mark.simulated_time
async def test_each_key_has_figures_and_a_bound_of_its_own(monkeypatch):
    monkeypatch.setattr(audit_module, "MAX_KEYS", 3)
    engine = start(share=1.0, max_excess_nats=1.5)
    for at in range(50):
        await collect(engine, [1], 2, key="cheap")  # a token costs 1.0 nats, or 4.5
        await collect(engine, [1, 2, 3, 4], 2, key="dear")
        await until_audited(engine, 2 * at + 2)
    found = {audit.key: audit for audit in audits(engine)}
    assert {key: audit.is_exempt for key, audit in found.items()} == {"cheap": False, "dear": True}
    assert found["dear"].excess_nats == pytest.approx(4.0)
    for key, degrades in (("cheap", True), ("dear", False), ("", True)):
        [*_, last] = await collect(engine, [1], 2, key=key)
        assert bool(last.usage.degraded_visits) == degrades
    for key in ("fourth", "fifth"):
        await collect(engine, [1], 2, key=key)
    await until_audited(engine, 104)
    assert {a.key: a.num_scored for a in audits(engine)}["other keys"] == 2
    await engine.stop()


class LeftOut(Degrading):
    """A runner whose united experts, as long as they are `wrong`, do not know a family of prompts:
    those that begin with a token from 500 on. What they say there is 2.5 nats less likely under the
    exact model; all else is as likely.
    """

    wrong = True

    def _schedule(self, plan, result, future):
        if result.prompt_logprobs is not None:
            firsts = [self._contexts[int(row[SLOT])][0] for row in plan.rows]
            own = [-3.0 if self.wrong and first >= 500 else -0.5 for first in firsts]
            scores = np.repeat(own, plan.q_lens)[:, None].repeat(2, axis=1)
            result = dataclasses.replace(result, prompt_logprobs=scores)
        super()._schedule(plan, result, future)


@pytest.mark.simulated_time
async def test_a_family_left_out_of_distillation_is_exempt_until_its_experts_are_better():
    engine = start(runner=LeftOut, share=1.0, max_excess_nats=0.5, retry_s=1000.0)

    async def answered(key):
        """Returns whether an answer was degraded, once it is audited if it was."""
        prompt, before = [500 if key == "cipher" else 1, 2, 3], num_scored(engine)
        [*_, last] = await collect(engine, prompt, 4, key=key)
        is_degraded = bool(last.usage.degraded_visits)
        await until_audited(engine, before + is_degraded)
        return is_degraded

    async def num_until_exempt():
        count = 0
        while await answered("cipher"):
            count += 1
        return count

    for _ in range(10):
        assert await answered("sums")
    assert await num_until_exempt() <= 200
    assert {a.key: a.is_exempt for a in audits(engine)} == {"sums": False, "cipher": True}
    assert await answered("sums")
    await asyncio.sleep(1001)  # it is tried again, with the same experts
    assert 0 < await num_until_exempt() <= 200
    engine.executor.wrong = False  # the united experts are exchanged for better ones
    await asyncio.sleep(1001)
    for _ in range(60):
        assert await answered("cipher")
    await engine.stop()


@pytest.mark.simulated_time
async def test_callers_and_objectives_do_not_notice():
    metrics = Metrics()
    engine = start(observer=metrics, share=0.5)
    metrics.engine = engine
    await asyncio.gather(*(collect(engine, [n], 5) for n in range(3)))
    await until_audited(engine, 3)
    assert metrics.ttft.count(Priority.BEST_EFFORT) == 0
    assert metrics.queue.count(Priority.BEST_EFFORT) == 0
    assert metrics.finished == Counter(length=3, stop=0)
    found = {f.name: f for f in metrics.collect()}
    assert found["jmoe_audit_answers"].samples[0].value == 3
    means = {s.labels["bound"]: s.value for s in found["jmoe_audit_excess_nats"].samples}
    assert means["mean"] == pytest.approx(excess_of(1, 5) / 5)
    assert await engine.drain(1)
    engine.scheduler.check_idle()
    await engine.stop()


@pytest.mark.usefixtures("compiled_in_a_hurry")
@pytest.mark.deep
async def test_the_exact_model_judges(tmp_path, monkeypatch):
    path, reads = shutil.copytree(GOLDEN, tmp_path / "model"), []
    add_united(path)
    table = ExpectedLoss(Kind(2, "weight"), (Point(0, 0.25, 0.2, 0.3),))
    expected_loss.write(path / expected_loss.FILE, [table], beside.digest_of(path))
    read = expected_loss.read
    monkeypatch.setattr(expected_loss, "read", lambda *of: reads.append(of) or read(*of))
    fixed = {f"{phase}_threshold_percent": 0 for phase in ("prefill", "decode")}
    way = BrownoutConfig(salc=False, way=2, max_expected_loss=0.25, **fixed)
    given = {"model": str(path), "models": (), "brownout": way, "prefix_reuse": "on"}
    config = settings_of({}, str(tmp_path / "programs"), audit=AuditConfig(share=1.0), **given)
    model, wholes, drawn = jmoe.load(path, "float32"), [], []
    engine = await Engine.start(config)
    try:
        for number in range(4):
            prompt = [1 + number, 2, 3, 9, 8, 7]
            asked = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True)
            outs = [out async for out in engine.generate(prompt, asked)]
            assert outs[-1].usage.degraded_visits
            wholes.append(prompt + [token for out in outs for token in out.token_ids])
            drawn += [logprob for out in outs for logprob in out.logprobs]
            while num_scored(engine) <= number:
                await asyncio.sleep(0.01)
        [state] = engine.stats().audits
    finally:
        await engine.stop()
    logits = np.asarray(jmoe.forward(model, np.array(wholes)), np.float64)[:, 5:-1]
    peak = logits.max(-1, keepdims=True)
    logprobs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    answers = np.array(wholes)[:, 6:]
    exact = np.take_along_axis(logprobs, answers[..., None], -1)
    assert state.excess_nats == pytest.approx(np.mean(drawn) - exact.mean(), abs=1e-4)
    others = answers != logits.argmax(-1)
    assert (state.expected_nats, len(reads)) == (pytest.approx(0.25), 1)
    assert state.disagreement == pytest.approx(others.mean())
    assert 0 < others.mean() < 1


@pytest.mark.simulated_time
async def test_an_answer_whose_model_goes_before_it_is_drawn_ends_no_audit():
    scored = []

    async def score(answer):
        scored.append(answer.request.model)
        return SimpleNamespace(prompt_logprobs=[-1.0], prompt_best=[-1.0])

    clock = asyncio.get_running_loop().time
    auditor = Auditor(AuditConfig(share=0.5), ["base", "law"], score, lambda model: True, clock)
    task = asyncio.create_task(auditor.run())
    await asyncio.sleep(0)

    def finish(model):
        request = SimpleNamespace(
            model=model, key="", allow_audit=True, sampling=SamplingParams(max_new_tokens=1)
        )
        sequence = SimpleNamespace(
            request=request,
            degraded_visits=1,
            prompt=[1],
            tokens=[2],
            logprobs=[-0.5],
            expected_nats=0.0,
            previous_at=clock(),
        )
        auditor.request_finished(sequence, None, clock())

    finish(1)
    auditor.forget(1)  # before the task is woken
    await asyncio.sleep(1)
    assert not task.done()
    finish(0)
    await asyncio.sleep(1)
    assert scored == [0]
    task.cancel()
