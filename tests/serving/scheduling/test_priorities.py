"""Classes, preemption between layers, and policies, on a runner that checks rows, pages and layers.

The runner counts up, so that every answer is known whatever went before, between or along with it.
"""

import asyncio
import math
import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from serving.plan import Limits, Phase, StepControl
from serving.request import Priority, Request, SamplingParams
from serving.scheduling.policy import (
    LS_FIRST,
    POLICIES,
    Choice,
    Fcfs,
    LsFirst,
    RequestView,
    make_policy,
)
from serving.scheduling.prefixes import EXACT
from serving.scheduling.queues import Share
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceState, SequenceStatus
from tests.serving.fake_runner import FakeRunner
from tests.traces import num_traces

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
FULL = StepControl(100, 0)
LAYERS = 6
LIMITS = Limits(
    num_slots=6,
    num_pages=24,
    page_size=4,
    max_prefill_tokens=16,
    max_prefill_seqs=4,
    max_decode_seqs=4,
    num_layers=LAYERS,
    prefill_buckets=(8, 16),
)


def sequence(name, prompt, max_new=3, priority=LS, arrived_at=0.0, timeout_s=None):
    return SequenceState(
        Request(name, prompt, SamplingParams(max_new_tokens=max_new), True, priority, timeout_s),
        list(prompt),
        seed=0,
        arrived_at=arrived_at,
        stop_token_ids=frozenset(),
        tokenizer=None,
    )


class Play:
    """Ticks as the engine does: launches, then takes the results of the launch before."""

    def __init__(self, policy=None, limits=LIMITS, part_layers=2, at_once=None, **options):
        self.runner = FakeRunner(limits, part_layers=part_layers)
        at_once = at_once or self.runner.layers_at_once
        self.scheduler = Scheduler(limits, policy or LsFirst(), at_once, **options)
        self.steps, self.answers, self.now = [], {}, 0.0
        self._before = None

    def add(self, *sequences):
        for one in sequences:
            self.answers[one.request.request_id] = []
            self.scheduler.add(one, self.now)

    def tick(self):
        """Runs one tick; returns whether there was anything to do."""
        step = self.scheduler.next_step(now=self.now)
        launched = step and (step, self.runner.launch(step, FULL))
        if step is not None:
            names = "".join(s.request.request_id for s in step.sequences)
            self.steps.append((step.phase.value, names, step.first_layer, step.stop_layer))
        before, self._before = self._before, launched
        if before is not None:
            self._accept(*before)
        self.now += 1.0
        return step is not None or before is not None

    def _accept(self, step, result):
        result = result.result()
        self.scheduler.note_read(step, result.degraded, EXACT, set())
        for at, one in enumerate(step.sequences):
            if step.sampled[at] and not one.done:
                output = one.accept(result.tokens[at], 0.0)
                self.answers[one.request.request_id] += output.token_ids
                if output.finish_reason:
                    self.scheduler.finish(one)

    def finish(self, most=10_000):
        for _ in range(most):
            if not self.tick() and self.scheduler.idle:
                self.scheduler.check_idle()
                return self
        raise AssertionError(f"not done after {most} ticks")


def counted(prompt, count):
    return [(prompt[-1] + 1 + i) % 1000 for i in range(count)]


# ---- what preemption looks like ----


def test_a_prompt_parks_a_best_effort_prefill_and_meets_it_where_it_waits():
    play = Play()
    play.add(sequence("b", [1] * 4, 1, BE))
    play.tick()
    play.add(sequence("a", [7] * 4, 1))
    play.finish()
    assert play.steps == [
        ("prefill", "b", 0, 2),
        ("prefill", "a", 0, 2),  # b is parked at layer 2, where a takes it along
        ("prefill", "ab", 2, 4),
        ("prefill", "ab", 4, 6),
    ]
    assert play.answers == {"a": [8], "b": [2]}
    assert (play.scheduler.num_parks, play.scheduler.num_joins) == (1, 1)


def test_a_step_that_is_cut_elsewhere_does_not_take_along_what_is_parked():
    """Each goes on as it was begun, though the parked one's layer is not one of the other's."""
    play = Play(at_once=lambda phase, size: 2 if size > 4 else 3)
    play.add(sequence("b", [1] * 8, 1, BE))
    play.tick()
    play.add(sequence("a", [7] * 4, 1))
    play.finish()
    assert play.steps == [
        ("prefill", "b", 0, 2),
        ("prefill", "a", 0, 3),
        ("prefill", "a", 3, 6),
        ("prefill", "b", 2, 4),
        ("prefill", "b", 4, 6),
    ]
    assert play.answers == {"a": [8], "b": [2]}
    assert (play.scheduler.num_parks, play.scheduler.num_joins) == (1, 0)


def test_nor_does_one_that_would_be_cut_elsewhere_with_it():
    """Two rows of each are cut alike, four are not."""
    play = Play(at_once=lambda phase, size: 2 if size <= 2 else 3)
    for name in "bc":
        play.add(sequence(name, [1], 2, BE))
    while not any(step[0] == "decode" for step in play.steps):
        play.tick()
    for name in "ad":
        play.add(sequence(name, [7], 2))
    play.finish()
    assert ("decode", "bc", 0, 2) in play.steps
    assert play.scheduler.num_parks > 0
    assert all({*names} not in ({*"abcd"}, {*"abc"}) for _, names, *_ in play.steps)
    assert play.answers == {"a": [8, 9], "b": [2, 3], "c": [2, 3], "d": [8, 9]}


def test_a_step_goes_on_as_it_was_begun_when_rows_leave_it():
    play = Play(at_once=lambda phase, size: 2 if size > 4 else 6)
    one, other = sequence("b", [1] * 8, 1, BE), sequence("c", [1] * 4, 1, BE)
    play.add(one, other)
    play.tick()
    play.scheduler.finish(one)
    play.finish()
    assert play.steps == [
        ("prefill", "bc", 0, 2),
        ("prefill", "c", 2, 4),
        ("prefill", "c", 4, 6),
    ]


def test_a_prompt_whose_log_probabilities_are_wanted_is_cut_as_the_largest_prefill():
    play = Play(at_once=lambda phase, size: 2 if size == 16 else 6)
    wanted = sequence("b", [1] * 4, 1, BE)
    wanted.request = replace(
        wanted.request, sampling=replace(wanted.request.sampling, prompt_logprobs=True)
    )
    play.add(wanted, sequence("c", [1] * 4, 1, BE))
    play.finish()
    assert [step[2:] for step in play.steps] == [(0, 2), (2, 4), (4, 6)]


def test_what_would_make_the_prompts_step_dearer_does_not_join():
    play = Play()
    play.add(sequence("b", [1] * 8, 1, BE))
    play.tick()
    play.add(sequence("a", [7] * 4, 1))  # a bucket of 8: no room for b's 8
    play.finish()
    assert [step[1] for step in play.steps] == ["b", "a", "a", "a", "b", "b"]


def test_a_prompt_parks_a_decode_step_of_best_effort():
    play = Play()
    play.add(sequence("b", [1], 3, BE))
    while not play.steps or play.steps[-1][0] != "decode":
        play.tick()
    play.add(sequence("a", [7], 2))
    play.finish()
    after = play.steps[play.steps.index(("decode", "b", 0, 2)) + 1 :]
    assert after[:3] == [("prefill", "a", 0, 2), ("prefill", "a", 2, 4), ("prefill", "a", 4, 6)]
    assert after[3] == ("decode", "a", 0, 2)  # its own turn, up to where b waits
    assert after[4] == ("decode", "ab", 2, 4)
    assert play.answers == {"a": [8, 9], "b": [2, 3, 4]}


def test_without_best_effort_steps_are_whole():
    play = Play()
    play.add(sequence("a", [7] * 3), sequence("c", [9] * 3))
    play.finish()
    assert {step[2:] for step in play.steps} == {(0, LAYERS)}


def test_with_latency_sensitive_requests_alone_it_is_first_come_first_served():
    rng = random.Random(5)
    lengths = [(rng.randrange(1, 20), rng.randrange(1, 9)) for _ in range(40)]

    def steps(policy):
        play = Play(policy)
        for number, (prompt, new) in enumerate(lengths):
            play.add(sequence(f"{number};", [number] * prompt, new, arrived_at=number))
            play.tick()
        return play.finish().steps

    assert steps(LsFirst()) == steps(Fcfs())


def test_best_effort_fills_a_step_only_where_that_costs_nothing():
    play = Play(part_layers=LAYERS)
    play.add(
        sequence("b", [1] * 6, 1, BE), sequence("d", [2] * 9, 1, BE), sequence("a", [7] * 5, 1)
    )
    play.tick()
    # A bucket of 8 holds five tokens of a, and three of b.
    assert play.steps == [("prefill", "ab", 0, 6)]
    play.finish()
    assert play.answers == {"a": [8], "b": [2], "d": [3]}


# ---- who gives way ----


def test_best_effort_gives_up_slots_and_pages_and_loses_nothing():
    limits = Limits(4, 8, 4, 16, 4, 3, LAYERS)
    play = Play(limits=limits)
    play.add(*(sequence(name, [10 * at] * 7, 9, BE) for at, name in enumerate("bcd")))
    for _ in range(12):
        play.tick()
    play.add(sequence("a", [500] * 15, 4))
    play.finish()
    assert play.answers["a"] == counted([500], 4)
    for at, name in enumerate("bcd"):
        assert play.answers[name] == counted([10 * at], 9)
    assert play.scheduler.num_evictions[BE] > 0
    assert play.scheduler.num_evictions[LS] == 0


def test_a_latency_sensitive_sequence_never_gives_way_to_best_effort():
    limits = Limits(4, 6, 4, 16, 4, 4, LAYERS)
    play = Play(limits=limits)
    play.add(sequence("a", [100] * 7, 12), sequence("b", [200] * 7, 12, BE, arrived_at=-1.0))
    play.finish()
    assert play.scheduler.num_evictions == {LS: 0, BE: 1}
    assert play.answers == {"a": counted([100], 12), "b": counted([200], 12)}


def test_slots_beside_the_decode_batch_are_latency_sensitive_requests_own():
    play = Play()
    play.add(*(sequence(name, [1], 50, BE) for name in "bcdefg"))
    for _ in range(20):
        play.tick()
    assert len(play.scheduler.running) == LIMITS.decode_rows  # of six slots
    play.add(sequence("a", [7], 1))
    for _ in range(8):
        play.tick()
    assert play.answers["a"] == [8]
    assert play.scheduler.num_evictions[BE] == 0


# ---- no starvation ----


def test_a_step_is_parked_a_bounded_number_of_times():
    play = Play()
    play.add(sequence("b", [1] * 8, 1, BE))
    play.tick()
    for number in range(9):  # a prompt at each tick
        play.add(sequence(f"a{number};", [7] * 8, 1, arrived_at=number))
        play.tick()
    done = [at for at, step in enumerate(play.steps) if step[1] == "b"]
    others = {step[1] for step in play.steps[: done[-1]] if step[1] != "b"}
    assert len(others) <= LsFirst.max_parks
    play.finish()


def test_with_less_than_its_share_no_best_effort_step_is_parked():
    play = Play(share=0.5)
    share = play.scheduler.share
    share.observe(1.0, 1.0, best_effort=0.0)
    assert share.had == 0.0
    play.add(sequence("b", [1] * 8, 1, BE))
    play.tick()
    play.add(sequence("a", [7] * 8, 1))
    play.finish()
    assert [step[1] for step in play.steps][:4] == ["b", "b", "b", "a"]
    assert play.scheduler.num_parks == 0


def test_shares_fade():
    share = Share(0.2)
    assert share.may_park
    share.observe(1.0, 1.0, best_effort=0.0)
    assert not share.may_park
    share.observe(1.0, 2.0, best_effort=1.0)
    assert share.had == pytest.approx(1 / (1 + 2.718281828 ** (-1 / 5)))
    share.observe(1.0, 101.0, best_effort=0.0)
    assert share.had < 1e-6


def test_best_effort_that_has_waited_too_long_counts_as_latency_sensitive():
    """Four streams fill the decode batch for good; a fifth gets its turns when it is old."""
    limits = Limits(8, 400, 4, 16, 4, 4, LAYERS)
    for max_wait_s, gets in ((float("inf"), False), (20.0, True)):
        play = Play(limits=limits, max_wait_s=max_wait_s)
        play.add(sequence("b", [1], 5, BE))
        play.tick()
        for name in "acde":
            play.add(sequence(name, [7], 300))
        for _ in range(250):
            play.tick()
        assert (play.answers["b"] == [2, 3, 4, 5, 6]) == gets
        play.finish()


def ran(scheduler, now):
    """Runs the next step to the end and returns its sequences."""
    step = scheduler.next_step(now=now)
    if step.singles is not None:
        scheduler.complete(step.singles.numbers)
    for at, one in enumerate(step.sequences):
        if step.sampled[at]:
            one.accept(2, 0.0)
    return step.sequences


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("policy", ["ls_first", "fcfs"])
def test_promoted_best_effort_waits_for_its_own_class_and_not_in_the_others_way(in_order, policy):
    """Four of best effort fill the decode batch, or all pages; of six slots two are free."""
    for num_pages, length in ((24, 1), (8, 6)):
        limits = replace(LIMITS, num_pages=num_pages)
        scheduler = Scheduler(limits, make_policy(policy), max_wait_s=5.0, in_order=in_order)
        running = [sequence(name, [1] * length, 9, BE) for name in "bcde"]
        promoted, prompt = sequence("f", [1] * length, 9, BE), sequence("a", [7], 9, arrived_at=6.0)
        for one in (*running, promoted):
            scheduler.add(one)
        while sum(bool(one.tokens) for one in running) < 4:
            ran(scheduler, 0.0)
        assert promoted.status is SequenceStatus.WAITING
        scheduler.add(prompt, 6.0)
        short = sequence("s", [3], 9, BE)
        scheduler.add(short)
        assert prompt in [*ran(scheduler, 6.0), *ran(scheduler, 6.0)]
        assert short.status is SequenceStatus.WAITING  # nor does its own class overtake it
        assert promoted.priority is LS
        for one in running:
            scheduler.finish(one)
        scheduler.add(sequence("g", [9], 9, arrived_at=7.0), 7.0)
        assert promoted in [*ran(scheduler, 7.0), *ran(scheduler, 7.0)]  # has the next slot


# ---- policies ----


def test_policies_rank_as_they_say():
    old = sequence("o", [1], arrived_at=1.0)
    urgent = sequence("u", [1], arrived_at=2.0, timeout_s=3.0)
    by = {name: make_policy(name) for name in POLICIES}
    assert set(by) == {"fcfs", "edf", "ls_first", "qllm"}
    for name, first in (("fcfs", old), ("edf", urgent), ("ls_first", old)):
        order = sorted((old, urgent), key=lambda s, name=name: by[name].rank(RequestView(s)))
        assert order[0] is first


def test_qllm_runs_what_its_algorithm_says():
    """Full LS decode, LS prefill, LS decode, BE decode, BE prefill: by hand, with whole steps."""
    play = Play(make_policy("qllm"), part_layers=LAYERS)
    play.add(sequence("b", [1] * 16, 2, BE), sequence("c", [2] * 16, 1, BE))
    play.tick()
    assert play.steps[-1][:2] == ("prefill", "b")
    play.add(sequence("a", [7] * 16, 2))
    play.tick()
    assert play.steps[-1][:2] == ("prefill", "a")  # before b's decode
    play.tick()
    assert play.steps[-1][:2] == ("decode", "ab")  # filled up
    play.finish()
    assert play.steps[-1][:2] == ("prefill", "c")


class Broken(Fcfs):
    """A policy that fails in every way there is, in turn."""

    def __init__(self):
        self.calls = 0

    def rank(self, request):
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("rank")
        return super().rank(request)

    def choose(self, view):
        self.calls += 1
        match self.calls % 7:
            case 0:
                raise RuntimeError("choose")
            case 1:
                return Choice(resume=99)
            case 2:
                return Choice(phase="decode?")
            case 3:
                return Choice(Phase.DECODE, LS_FIRST)
            case 4:
                return Choice(Phase.PREFILL, order=(("urgent",),))
            case 5:
                return None
        return "something else"

    def victim(self, running):
        if self.calls % 2:
            raise RuntimeError("victim")
        return SimpleNamespace(request_id="nobody")


def test_a_policy_that_fails_loses_nothing_and_is_named_once_in_a_while(caplog):
    limits = Limits(4, 8, 4, 16, 4, 3, LAYERS)
    play = Play(Broken(), limits=limits)
    for number in range(20):
        priority = (LS, BE)[number % 2]
        play.add(sequence(f"{number}", [10 * number] * 5, 9, priority, arrived_at=number))
        play.tick()
    play.finish()
    for number in range(20):
        assert play.answers[f"{number}"] == counted([10 * number], 9)
    lines = [record.getMessage() for record in caplog.records]
    assert 2 < len(lines) < 12  # the 1st, 2nd, 4th, 8th, ...
    assert "policy Broken: choose failed (1 so far); first come first served" in lines[0]


class Unspeakable(BaseException):
    def __str__(self):
        raise RuntimeError("no words")


class Odd(Fcfs):
    """A policy that, in turn, returns what looks right, is of another type, or ends the process."""

    parks = True
    ranks = (None, 1.0, (1, 2.0), math.nan, (0, math.nan), "a", np.zeros(2), 1j, 2, SystemExit())
    choices = (
        Choice(resume=0.0),
        Choice(resume=True),
        Choice(resume=np.int64(0)),
        Choice(resume=math.nan),
        Choice(resume=10**5000),
        Choice(Phase.DECODE, ((LS,), (LS, BE))),
        Choice(Phase.PREFILL, ((LS,), (BE,), (LS,))),
        Choice(Phase.PREFILL, (group for group in [(LS, BE)])),
        Choice(Phase.DECODE, (["latency_sensitive"],)),
        Choice(Phase.PREFILL, None),
        asyncio.CancelledError(),
        GeneratorExit(),
        Unspeakable(),
    )

    def __init__(self, rng):
        self.rng = rng

    def _answer(self, answers):
        answer = self.rng.choice(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def rank(self, request):
        return self._answer(self.ranks)

    def choose(self, view):
        with pytest.raises(TypeError):
            view.can_prefill[LS] = True
        return self._answer(self.choices) if self.rng.random() < 0.7 else super().choose(view)

    def victim(self, running):
        return self._answer((*running, Unspeakable(), None, "a"))


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ({"a": None, "b": 1.0, "c": 0.0}, "abc"),
        ({"a": 3.0, "b": (1, 2), "c": 0.0}, "abc"),
        ({"a": math.nan, "b": 1.0, "c": 0.0}, "abc"),
        ({"a": 2.0, "b": 1.0, "c": (0, math.nan)}, "bac"),
    ],
)
def test_ranks_that_cannot_be_compared_are_passed_over_for_arrival(ranks, order, caplog):
    class Mixed(Fcfs):
        def rank(self, request):
            return ranks[request.request_id]

    play = Play(Mixed())
    play.add(*(sequence(name, [7], 1, arrived_at=at) for at, name in enumerate("abc")))
    assert "".join(s.request.request_id for s in play.scheduler.waiting) == order
    play.finish()
    assert "Mixed: rank failed (1 so far); first come" in caplog.text


def test_a_call_of_a_policy_that_takes_long_is_named_once_in_a_while(caplog):
    class Slow(Fcfs):
        def choose(self, view):
            time.sleep(0.002)
            return super().choose(view)

    play = Play(Slow(), slow_s=0.001)
    play.add(sequence("a", [7], 9))
    play.finish()
    lines = [line for line in caplog.messages if "choose took" in line]
    assert "Slow: choose took" in lines[0]
    assert "longer than engine.plugin_slow_ms (1 so far)" in lines[0]
    assert 2 < len(lines) < 6  # of more than nine calls


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fifo", "policy is 'fifo'; it must be one of fcfs, edf, ls_first, qllm, or module:Class"),
        ("no_such_module:Mine", "cannot be made: ModuleNotFoundError"),
        ("json:Mine", "cannot be made: AttributeError"),
        ("ends_the_process:Mine", "cannot be made: SystemExit: 3"),
        ("json:JSONDecoder", "has no rank, choose, victim"),
    ],
)
def test_a_policy_that_is_not_there_is_named(name, words, tmp_path, monkeypatch):
    (tmp_path / "ends_the_process.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=words):
        make_policy(name)


def test_a_policy_of_ones_own_is_named_by_module_and_class():
    assert isinstance(make_policy(f"{__name__}:Broken"), Broken)


def test_the_policy_on_the_page_works(request):
    text = (request.config.rootpath / "docs" / "priorities.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {}
    exec(code, names)
    play = Play(names["ShortestFirst"]())
    play.add(sequence("long", [1] * 12, 2), sequence("b", [2] * 3, 2, BE), sequence("c", [3], 2))
    play.finish()
    assert play.steps[0][1].startswith("c")
    for seed in range(20):
        random_trace(seed, lambda rng: names["ShortestFirst"]())


# ---- anything may happen ----


class Whims(Fcfs):
    """A policy that parks, resumes and joins at random: answers must not depend on it."""

    order = LS_FIRST

    def __init__(self, rng):
        self.rng = rng

    def choose(self, view):
        options = [Choice.go_on(batch) for batch in view.under_way]
        options += [Choice(Phase.PREFILL, self.order), Choice(Phase.DECODE, self.order)]
        options += [Choice(Phase.PREFILL), Choice(Phase.DECODE)]
        return self.rng.choice(options)

    def victim(self, running):
        return self.rng.choice(running)


Whims.parks = True


def random_trace(seed, make):
    """Plays one trace: arrivals of both classes, cancellations, evictions, parks and joins."""
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randrange(1, 8), rng.choice((1, 1, 2, 3))
    num_slots, decode_rows = rng.randrange(2, 7), rng.randrange(1, 5)
    limits = Limits(
        num_slots=num_ranks * num_slots,
        num_pages=num_ranks * rng.randrange(9, 30),
        page_size=4,
        max_prefill_tokens=(tokens := rng.choice((4, 8, 16))),
        max_prefill_seqs=rng.randrange(1, 5),
        max_decode_seqs=num_ranks * decode_rows if decode_rows <= num_slots else 0,
        num_layers=num_layers,
        prefill_buckets=rng.choice(((), (tokens,), (4, tokens))),
        num_ranks=num_ranks,
        windows=((0,), (0,), (5,), (0, 6), (9, 2))[seed % 5],
    )
    play = Play(
        make(rng),
        limits=limits,
        part_layers=rng.randrange(1, num_layers + 1),
        share=rng.choice((0.0, 0.3)),
        max_wait_s=rng.choice((float("inf"), 15.0)),
    )
    pending = [
        sequence(
            str(number),
            [rng.randrange(900)] * rng.randrange(1, 20),
            rng.randrange(1, 12),
            rng.choice((LS, BE)),
            arrived_at=float(number),
        )
        for number in range(rng.randrange(1, 14))
    ]
    everything, cancelled = list(pending), set()
    for tick in range(5000):
        while pending and rng.random() < 0.4:
            play.add(pending.pop(0))
        if tick < 100 and rng.random() < 0.05:
            one = rng.choice(everything)
            if one not in pending and one.status is not SequenceStatus.DONE:
                play.scheduler.finish(one)
                cancelled.add(one.request.request_id)
        if not play.tick() and play.scheduler.idle and not pending:
            break
    play.scheduler.check_idle()
    for one in everything:
        want = counted(one.prompt, one.request.sampling.max_new_tokens)
        got = play.answers[one.request.request_id]
        assert got == want[: len(got)], seed
        assert one.request.request_id in cancelled or got == want, seed
    return play


@pytest.mark.sized(
    deep=(
        "fcfs",
        "edf",
        "whims",
        "broken",
        "odd",
        "ls_first",
    )
)
@pytest.mark.parametrize("name", [*POLICIES, "whims", "broken", "odd"])
def test_random_traces_lose_nothing_under_any_policy(name):
    makers = {"whims": Whims, "odd": Odd, "broken": lambda rng: Broken()}
    make = makers.get(name, lambda rng: make_policy(name))
    parks = joins = evictions = 0
    for seed in range(120):
        scheduler = random_trace(seed, make).scheduler
        parks += scheduler.num_parks
        joins += scheduler.num_joins
        evictions += sum(scheduler.num_evictions.values())
    assert evictions > 10
    if name in ("ls_first", "qllm", "whims"):
        assert parks > 25
        assert joins > 2


@pytest.mark.exhaustive
def test_many_more_random_traces_lose_nothing():
    for seed in range(1000, 1000 + num_traces(800)):
        random_trace(seed, lambda rng: rng.choice((LsFirst(), Whims(rng), make_policy("qllm"))))
