"""Sequences over several ranks; whole traces of them are in test_priorities.py."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import LS, sequence_of

from jmoe.packed_rows import KV_LEN, NUM_COLUMNS, Q_LEN, SLOT, pack_row
from serving.execution.ranks import ByRank
from serving.plan import Limits, Phase, StepControl, StepPlan
from serving.scheduling.places import Places
from serving.scheduling.policy import Fcfs
from serving.scheduling.prefixes import OutOfPages
from serving.scheduling.scheduler import Scheduler
from tests.serving.fake_runner import FakeRunner

LIMITS = Limits(
    num_slots=6,
    num_pages=30,
    page_size=4,
    max_prefill_tokens=8,
    max_prefill_seqs=2,
    max_decode_seqs=4,
    num_ranks=2,
)


def test_slots_and_pages_are_numbered_through():
    places, sequences = Places(LIMITS), [sequence_of([1] * 8, 4), sequence_of([1] * 4, 4)]
    for rank, sequence in zip((1, 0), sequences, strict=True):
        places.take(rank, sequence)
    first, second = sequences
    assert (first.slot, first.pages) == (3, [{0: 15, 1: 16}])
    assert (second.slot, second.pages) == (0, [{0: 0}])
    assert places.extend(first)
    assert (first.pages, first.room) == ([{0: 15, 1: 16, 2: 17}], 12)
    assert places.num_free_pages == 26
    with pytest.raises(OutOfPages):
        places.take(1, sequence_of([1] * 52, 4))
    with pytest.raises(AssertionError, match="leaked"):
        places.check_idle()
    for sequence in sequences:
        places.give_back(sequence)
    places.check_idle()


def test_a_request_goes_where_most_pages_are_free():
    places = Places(LIMITS)
    assert places.rank_for(12, (0, 1)) == 0
    places.take(0, sequence_of([1] * 4, 4))
    assert places.rank_for(12, (0, 1)) == 1
    assert places.rank_for(12, (0,)) == 0
    assert places.rank_for(60, (0, 1)) == 1
    assert places.rank_for(61, (0, 1)) is None


def test_each_rank_has_room_for_its_own_prompts():
    scheduler = Scheduler(LIMITS, Fcfs())
    for name in "abcd":
        scheduler.add(sequence_of([1] * 6, 4, name=name))
    step = scheduler.next_step()
    assert step is not None
    # Eight tokens on each rank: six of one prompt, two of the next.
    assert [LIMITS.rank(s.slot) for s in step.sequences] == [0, 1, 0, 1]
    assert step.rows[:, Q_LEN].tolist() == [6, 6, 2, 2]


def test_who_needs_a_page_gets_it_from_its_own_rank():
    """Four pages a rank, two sequences on each, and both want a third page."""
    limits = Limits(4, 8, 4, 16, 4, num_ranks=2)
    scheduler, runner = Scheduler(limits, Fcfs()), FakeRunner(limits)
    sequences = [sequence_of([100 * n] * 7, 9, name=str(n)) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    placed = None
    while not scheduler.num_evictions[LS]:
        before = {s.request.request_id: limits.rank(s.slot) for s in scheduler.running}
        placed = before if len(before) == 4 else placed
        step = scheduler.next_step()
        assert step is not None
        result = runner.launch(step, StepControl(100, 0)).result()
        for sequence, token in zip(step.sequences, result.tokens, strict=True):
            sequence.accept(token, 0.0)
    assert placed is not None
    gone = {s.request.request_id for s in scheduler.queues[LS]}
    left = [rank for name, rank in placed.items() if name not in gone]
    assert sorted(left) == [0, 1]  # each rank gave up one of its own


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), unique_by=lambda row: row[0]))
def test_rows_and_tokens_come_back_in_order(chunks):
    rows = [pack_row(slot, kv_len=9, q_len=q_len) for slot, q_len in chunks]
    tokens = np.arange(sum(q_len for _, q_len in chunks), dtype=np.int32)
    hidden = LIMITS.hidden_per_rank
    ranks = np.repeat([slot // 3 for slot, _ in chunks], [q for _, q in chunks]).astype(np.int32)
    packed = np.stack(rows) if rows else np.zeros((0, NUM_COLUMNS), np.int32)
    places = ranks * hidden + 3 + tokens % 8
    step = ByRank.of(StepPlan(Phase.PREFILL, packed, tokens=tokens, places=places), LIMITS)
    assert step.size == max(np.bincount(ranks), default=0)
    spread, on_ranks, _, places = step.arrays(4, 3, 24)
    for rank in (0, 1):
        own = [(slot, q_len) for slot, q_len in chunks if slot // 3 == rank]
        part = on_ranks[4 * rank : 4 * rank + 4]
        assert part[: len(own), SLOT].tolist() == [slot % 3 for slot, _ in own]
        assert part[: len(own), KV_LEN].tolist() == [9] * len(own)
        assert (part[len(own) :, SLOT] == -1).all()
    np.testing.assert_array_equal(spread[step.token_at(24)], tokens)
    np.testing.assert_array_equal(on_ranks[step.row_at(4)][:, Q_LEN], [q for _, q in chunks])
    np.testing.assert_array_equal(places[step.token_at(24)], 3 + tokens % 8)


def test_a_step_on_one_rank_is_left_as_it_is():
    limits = Limits(3, 9, 4, 8, 3)
    rows = np.stack([pack_row(slot, kv_len=5) for slot in (2, 0)])
    step = ByRank.of(StepPlan(Phase.DECODE, rows), limits)
    np.testing.assert_array_equal(step.arrays(2, 1, 0)[1], rows)
    assert step.row_at(4).tolist() == [0, 1]


def test_each_group_s_pages_are_numbered_anew_on_each_rank():
    limits = replace(LIMITS, num_pages=100, windows=(0, 3))
    assert limits.group_pages == (50, 3 * 3 + 2 * 2)
    deltas = np.array([[0, 6, 49], [0, 7, 12], [4, 8, 50], [4, 9, 13]], np.int32)
    rows = np.stack([pack_row(slot, kv_len=20) for slot in (0, 4)])
    step = ByRank.of(StepPlan(Phase.DECODE, rows, deltas), limits)
    assert step.delta_rank.tolist() == [0, 0, 1, 1]
    assert step.plan.deltas.tolist() == [[0, 6, 49], [0, 7, 12], [1, 8, 0], [1, 9, 0]]
