"""The scheduler against a runner that counts up and remembers what every page holds."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import decode_step, prefill_step

from serving.plan import Limits, StepControl
from serving.request import Request, SamplingParams
from serving.scheduling.pace import Pace
from serving.scheduling.policy import Fcfs
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceState, SequenceStatus
from tests.serving.fake_runner import FakeRunner

FULL = StepControl(100, 0)


def make_sequence(name, prompt, max_new, arrived_at=0.0, **sampling):
    return SequenceState(
        Request(name, prompt, SamplingParams(max_new_tokens=max_new, **sampling)),
        list(prompt),
        seed=0,
        arrived_at=arrived_at,
        stop_token_ids=frozenset(),
        tokenizer=None,
    )


def accept(step, result):
    for at, sequence in enumerate(step.sequences):
        if step.sampled[at] and not sequence.done:
            yield sequence, sequence.accept(result.tokens[at], 0.0)


def play(scheduler, runner, arrivals, cancel_at=(), max_steps=5000):
    """Ticks as the engine does: launch a step, then read the one before. Returns outputs."""
    outputs = {sequence.request.request_id: [] for _, sequence in arrivals}
    pending, previous = sorted(arrivals, key=lambda a: a[0]), None
    for step in range(max_steps):
        while pending and pending[0][0] <= step:
            scheduler.add(pending.pop(0)[1])
        for when, sequence in cancel_at:
            if when == step and not sequence.done:
                if sequence.status is not SequenceStatus.WAITING or sequence in scheduler.waiting:
                    scheduler.finish(sequence)
                else:
                    sequence.status = SequenceStatus.DONE
                    pending = [p for p in pending if p[1] is not sequence]
        planned = scheduler.next_step()
        launched = planned and (planned, runner.launch(planned, FULL))
        if previous is not None:
            result = previous[1].result()
            for sequence, output in accept(previous[0], result):
                outputs[sequence.request.request_id] += output.token_ids
                if output.finish_reason:
                    scheduler.finish(sequence)
        if planned is None and previous is None and not pending:
            return outputs
        previous = launched
    raise AssertionError(f"not done after {max_steps} steps")


LIMITS = Limits(num_slots=4, num_pages=24, page_size=4, max_prefill_tokens=8, max_prefill_seqs=3)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),  # arrival step
            st.integers(1, 30),  # prompt length
            st.integers(1, 20),  # new tokens
            st.integers(-1, 60),  # step at which it is cancelled
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(13, 40),
)
def test_everyone_gets_exactly_their_tokens_and_no_page_leaks(requests, num_pages):
    limits = Limits(4, num_pages, 4, 8, 3)
    scheduler, runner = Scheduler(limits, Fcfs()), FakeRunner(limits)
    arrivals, cancels = [], []
    for i, (arrival, length, new, cancel) in enumerate(requests):
        prompt = [(100 * i + p) % 1000 for p in range(length)]
        sequence = make_sequence(str(i), prompt, new, arrived_at=arrival + i / 100)
        arrivals.append((arrival, sequence))
        if cancel >= 0:
            cancels.append((arrival + cancel, sequence))
    outputs = play(scheduler, runner, arrivals, cancels)
    cancelled = {sequence.request.request_id for _, sequence in cancels}
    for i, (_, length, new, _) in enumerate(requests):
        want = [(100 * i + length + n) % 1000 for n in range(new)]
        got = outputs[str(i)]
        assert got == want[: len(got)]
        assert str(i) in cancelled or got == want
    scheduler.check_idle()


def test_pages_hold_the_context_that_attention_reads():
    scheduler, runner = Scheduler(LIMITS, Fcfs()), FakeRunner(LIMITS)
    sequence = make_sequence("a", [5, 6, 7, 8, 9, 10], 7)
    scheduler.add(sequence)
    slot = None
    while not sequence.exhausted or sequence.in_flight:
        step = scheduler.next_step()
        if step is None:
            break
        result = runner.launch(step, FULL).result()
        list(accept(step, result))
        slot = sequence.slot
        assert sequence.room >= sequence.num_computed
    assert runner.history(slot, 12) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_first_come_first_served_and_nobody_overtakes_a_long_prompt():
    limits = Limits(2, 16, 4, 8, 4)
    scheduler = Scheduler(limits, Fcfs())
    runner = FakeRunner(limits)
    for i, length in enumerate([20, 30, 1]):  # the second needs more pages than are left
        scheduler.add(make_sequence(str(i), [7] * length, 20, arrived_at=i))
    order = []
    while scheduler.waiting:
        step = scheduler.next_step()
        order += [s.request.request_id for s in step.sequences if s.request.request_id not in order]
        result = runner.launch(step, FULL).result()
        for sequence, output in accept(step, result):
            if output.finish_reason:
                scheduler.finish(sequence)
    assert order == ["0", "1", "2"]


def test_prefill_and_decode_take_turns_under_load():
    scheduler, runner = Scheduler(LIMITS, Fcfs()), FakeRunner(LIMITS)
    for i in range(4):
        scheduler.add(make_sequence(str(i), [1] * 8, 6, arrived_at=i))
    phases = []
    for _ in range(8):
        step = scheduler.next_step()
        phases.append(step.phase)
        list(accept(step, runner.launch(step, FULL).result()))
    assert phases == ["prefill", "decode"] * 4


def test_a_long_prompt_is_cut_into_chunks():
    scheduler, runner = Scheduler(LIMITS, Fcfs()), FakeRunner(LIMITS)
    sequence = make_sequence("a", list(range(19)), 1)
    scheduler.add(sequence)
    sizes = []
    while sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREFILL):
        step = scheduler.next_step()
        sizes.append(len(step.tokens))
        runner.launch(step, FULL)
    assert sizes == [8, 8, 3]


def test_the_last_to_come_gives_way_and_still_gets_every_token():
    limits = Limits(3, 8, 4, 16, 3)  # 8 pages: two sequences of 5 cannot both finish
    scheduler, runner = Scheduler(limits, Fcfs()), FakeRunner(limits)
    arrivals = [(0, make_sequence(str(i), [100 * i] * 8, 12, arrived_at=i)) for i in range(2)]
    outputs = play(scheduler, runner, arrivals)
    assert outputs["0"] == list(range(1, 13))
    assert outputs["1"] == list(range(101, 113))
    prefills = [rows for phase, rows, _ in runner.launches if phase == "prefill"]
    assert len(prefills) > 1  # the second one was computed again
    scheduler.check_idle()


def test_the_integrity_check_notices_a_leak():
    scheduler = Scheduler(LIMITS, Fcfs())
    scheduler.check_idle()
    scheduler.places.take(0, make_sequence("lost", [1], 1))
    with pytest.raises(AssertionError, match="1 pages leaked"):
        scheduler.check_idle()


def test_scheduling_a_full_batch_is_cheap():
    """Not a timed test: a bound so loose that only a quadratic slip can break it."""
    limits = Limits(64, 64 * 8, 16, 256, 16)
    scheduler, runner = Scheduler(limits, Fcfs()), FakeRunner(limits)
    for i in range(64):
        scheduler.add(make_sequence(str(i), [i] * 10, 100, arrived_at=i))
    start = time.perf_counter()
    for _ in range(100):
        step = scheduler.next_step()
        list(accept(step, runner.launch(step, FULL).result()))
    assert time.perf_counter() - start < 5


# ---- company ----


def company_of(times_s, num_decoding=8, ttft_slo_s=1.0, **options):
    """Returns what prompts wait for after a pace has seen prefill steps of these tokens and
    times.
    """
    pace = Pace(**options)
    for tokens, seconds in times_s.items():
        pace.observe(replace(prefill_step(tokens), started_at=0.0), seconds)
    pace.observe(replace(decode_step(num_decoding), started_at=0.0), 0.01)
    return pace.company(ttft_slo_s, num_decoding)


def test_a_prompt_waits_until_a_step_is_worth_its_fixed_cost():
    """Steps of n tokens take 10 ms and 0.25 ms each: at 40 the fixed cost is half."""
    tokens, wait_s, total_s = company_of({32: 0.018, 128: 0.042})
    assert tokens == pytest.approx(40)
    assert total_s == pytest.approx(8 * 0.010)  # of eight rows
    assert wait_s == pytest.approx(0.8 * (1.0 - 2 * 0.01 - 0.020))
    assert company_of({32: 0.018, 128: 0.042}, ttft_slo_s=0.03).wait_s == 0.0
    assert company_of({32: 0.018}) is None  # not known yet
    assert company_of({32: 0.018, 128: 0.042}, waits=False) is None


def test_a_step_that_costs_the_same_whatever_is_in_it_is_worth_waiting_for():
    assert company_of({32: 0.018, 128: 0.018}).tokens == float("inf")
