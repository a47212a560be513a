"""Pages of layers with a window: freed as it slides, beside an oracle of what a row reads."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import sequence_of

from serving.plan import Limits, Phase, StepControl
from serving.scheduling.policy import Fcfs
from serving.scheduling.prefixes import EXACT
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceStatus
from tests.serving.fake_runner import FakeRunner

FULL = StepControl(100, 0)
CHUNK, PAGE = 8, 4
LIMITS = Limits(4, 24, PAGE, CHUNK, 3)


class Play:
    """Ticks as the engine does: plan and launch a step, then read the one before.

    The runner compares the tokens that pages hold within each window with the sequence's own, so
    that a page which was freed too early, and written by another, is noticed.
    """

    def __init__(self, limits, *, reuses=False):
        self.limits, self.runner = limits, FakeRunner(limits, checks_context=True)
        self.reuses = reuses
        accepted = (lambda sequence: EXACT) if reuses else None
        self.scheduler = Scheduler(limits, Fcfs(), accepted=accepted)
        self.outputs, self.previous = {}, None

    def tick(self):
        """Returns whether there was something to do."""
        step = self.scheduler.next_step()
        if step is not None:
            self.check_conserved()
            for sequence, row in zip(step.sequences, step.rows, strict=True):
                self.check_resident(sequence, int(row[1]), int(row[2]))
        launched = step and (step, self.runner.launch(step, FULL).result())
        if self.previous is not None:
            self.read(*self.previous)
        busy, self.previous = bool(step or self.previous), launched
        return busy

    def read(self, step, result):
        self.scheduler.note_read(step, result.degraded, EXACT, set())
        for sequence, sampled, token in zip(
            step.sequences, step.sampled, result.tokens, strict=True
        ):
            if sampled and not sequence.done:
                output = sequence.accept(token, 0.0)
                self.outputs.setdefault(sequence, []).append(token)
                if output.finish_reason:
                    self.scheduler.finish(sequence)
        self.check_conserved()

    def check_resident(self, sequence, kv_len, q_len):
        """Checks that a step's row has pages of all that it reads and writes, and how many."""
        start = kv_len - q_len
        for window, held in zip(self.limits.windows, sequence.pages, strict=True):
            first = max(0, start - window + 1) if window else 0
            needed = {position // PAGE for position in range(first, kv_len)}
            assert needed <= set(held)
            assert list(held) == list(range(min(held), max(held) + 1))
            if window:
                assert self.reuses or len(held) <= -(-(window + CHUNK) // PAGE) + 2

    def check_conserved(self):
        """Checks that each page is free, or held by those sequences that the allocator counts."""
        for rank, groups in enumerate(self.scheduler.places._pages):
            own = [s for s in self.scheduler.running if self.limits.rank(s.slot) == rank]
            for group, pool in enumerate(groups):
                holders = [p for s in own for p in s.pages[group].values()]
                assert pool.num_free == self.limits.group_pages[group] - len(set(holders))
                for page in set(holders):
                    assert pool.num_holders(page) == holders.count(page)


GROUPS = [(6,), (1,), (9,), (0, 6), (9, 2), (0, 5, 3), (4,), (0, 4), (0, 0), (0, 100)]


TRACES = st.tuples(
    st.sampled_from(GROUPS),
    st.lists(
        st.tuples(
            st.integers(0, 30),  # arrival step
            st.integers(1, 40),  # prompt length
            st.integers(1, 20),  # new tokens
            st.integers(-1, 60),  # steps after which it is cancelled
            st.integers(0, 2),  # whose beginning it shares
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(15, 40),  # pages of a rank
    st.booleans(),  # whether prefixes are reused
    st.integers(1, 2),  # ranks
)


@settings(max_examples=60, derandomize=True)
@given(TRACES)
def test_whatever_slides_everyone_gets_their_tokens(trace):
    check_trace(*trace)


@pytest.mark.exhaustive
@settings(max_examples=1000, database=None)
@given(TRACES)
def test_many_more_traces(trace):
    check_trace(*trace)


def check_trace(windows, requests, pages, reuses, ranks):
    limits = replace(
        LIMITS, num_pages=ranks * pages, num_slots=ranks * 4, windows=windows, num_ranks=ranks
    )
    play, arrivals, cancels = Play(limits, reuses=reuses), [], []
    for number, (arrival, length, new, cancel, shared) in enumerate(requests):
        prompt = [(100 * shared + p) % 1000 for p in range(length)]
        sequence = sequence_of(prompt, new, name=str(number), arrived_at=arrival + number / 100)
        arrivals.append((arrival, sequence))
        if cancel >= 0:
            cancels.append((arrival + cancel, sequence))
    last = max(when for when, _ in [*arrivals, *cancels])
    for step in range(5000):
        for when, sequence in arrivals:
            if when == step:
                play.scheduler.add(sequence)
        for when, sequence in cancels:
            if when == step and not sequence.done:
                play.scheduler.finish(sequence)
        if not play.tick() and step > last:
            break
    else:
        raise AssertionError("not done after 5000 steps")
    cancelled = {sequence for _, sequence in cancels}
    for (_, sequence), (_, length, new, _, shared) in zip(arrivals, requests, strict=True):
        want = [(100 * shared + length + n) % 1000 for n in range(new)]
        got = play.outputs.get(sequence, [])
        assert got == want[: len(got)]
        assert sequence in cancelled or got == want
    play.scheduler.check_idle()


@pytest.mark.parametrize("windows", [(6,), (0, 6), (13, 3)])
def test_a_long_sequence_holds_no_more_than_a_window_and_a_chunk(windows):
    length, window = 20 * windows[-1], windows[-1]
    limits = replace(LIMITS, num_pages=100, windows=windows)
    play, sequence = Play(limits), sequence_of([1] * length, length)
    play.scheduler.add(sequence)
    held, decoding = [], []
    while play.tick():
        if not sequence.done:
            held.append(len(sequence.pages[-1]))
        if sequence.status is SequenceStatus.DECODE and play.previous[0].phase is Phase.DECODE:
            decoding.append(held[-1])
    assert len(play.outputs[sequence]) == length
    assert max(held) <= -(-(window + CHUNK) // PAGE) + 2
    assert max(decoding[1:]) <= -(-window // PAGE) + 1
    play.scheduler.check_idle()


def test_as_many_more_sequences_fit_as_their_windows_are_shorter():
    """24 pages are four sequences of 24 positions without a window: of 96 with one of 6, too."""

    def running(windows, length):
        play = Play(replace(LIMITS, num_slots=8, windows=windows))
        for number in range(8):
            play.scheduler.add(sequence_of([1] * length, 30, name=str(number)))
        most = 0
        while play.tick():
            most = max(most, len(play.scheduler.running))
        return most, play.scheduler.num_evictions

    assert running((0,), 40)[0] == 2
    most, evictions = running((6,), 40)
    assert most >= 5
    assert not any(evictions.values())


def test_a_sequence_longer_than_all_pages_is_served():
    limits = replace(LIMITS, num_pages=6, windows=(5,))
    assert limits.most_positions > 10**9
    assert replace(limits, windows=(0,)).most_positions == 24
    assert replace(limits, num_pages=3).most_positions == 12  # a chunk needs more
    play, sequence = Play(limits), sequence_of(list(range(50)), 30)
    play.scheduler.add(sequence)
    while play.tick():
        pass
    assert play.outputs[sequence] == list(range(50, 80))
    assert not any(play.scheduler.num_evictions.values())


class TestPrefixes:
    """What a sequence begins with, where layers have a window of 6 positions: two pages or less."""

    @pytest.mark.parametrize("windows", [(6,), (0, 6)])
    def test_a_beginning_needs_what_its_first_row_reads(self, windows):
        limits = replace(LIMITS, num_pages=40, windows=windows)
        play = Play(limits, reuses=True)
        first = sequence_of(list(range(33)), 2)
        play.scheduler.add(first)
        while play.tick():
            pass
        again = sequence_of(list(range(33)), 2)
        pools = play.scheduler.places.pages(0)
        found = play.scheduler.reuse.found(again, 0)
        assert found.num_blocks == 8
        assert [len(kept) for kept in found.kept] == [2 if window else 8 for window in windows]
        self.forget(pools[-1], found.kept[-1][0].page)  # of block 6
        assert play.scheduler.reuse.found(again, 0).num_blocks == 6  # whose row reads blocks 4, 5
        play.scheduler.add(again)
        while play.tick():
            pass
        assert again.cached_tokens == 24
        assert play.outputs[again] == play.outputs[first] == [33, 34]
        play.scheduler.check_idle()

    def forget(self, pool, page):
        pool._drop(pool._names[page])

    def test_a_page_without_a_window_that_is_gone_ends_it(self):
        play = Play(replace(LIMITS, num_pages=40, windows=(0, 6)), reuses=True)
        play.scheduler.add(sequence_of(list(range(33)), 2))
        while play.tick():
            pass
        again = sequence_of(list(range(33)), 2)
        whole, _ = play.scheduler.places.pages(0)
        self.forget(whole, play.scheduler.reuse.found(again, 0).kept[0][3].page)
        found = play.scheduler.reuse.found(again, 0)
        assert (found.num_blocks, [len(kept) for kept in found.kept]) == (3, [3, 2])

    def test_a_long_prompt_s_pages_stay_until_they_are_read(self):
        """So that whoever shares its first half only begins with that."""
        play = Play(replace(LIMITS, num_pages=40, windows=(6,)), reuses=True)
        play.scheduler.add(sequence_of(list(range(60)), 2))
        while play.tick():
            pass
        other = sequence_of([*range(30), *[7] * 10], 2)
        assert play.scheduler.reuse.found(other, 0).num_blocks == 7
        play.scheduler.add(other)
        while play.tick():
            pass
        assert other.cached_tokens == 28
        play.scheduler.check_idle()


def test_of_several_groups_the_first_one_s_pages_run_out_before_the_others():
    limits = Limits(8, 512, PAGE, CHUNK, 4, windows=(0, 6), num_ranks=2)
    whole, window = limits.group_pages
    assert whole == 256
    assert window == 4 * (2 + 2) + 2 * 2  # what four sequences read, and two steps' chunks
    assert replace(limits, num_pages=20).group_pages == (10, 10)
