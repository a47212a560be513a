"""Which µ-queue runs next: the paper's rules held to its text, and that no queue starves."""

import logging
import math
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from serving.scheduling.layers import compiled
from serving.scheduling.layers.picker import LayerPicker, Waiting, make_picker
from serving.scheduling.layers.rules import Defragging, FirstLayerFirst, MostTokensFirst

NEVER_AGED = Waiting(max_age_s=math.inf)
RULES = (MostTokensFirst(), FirstLayerFirst(), Defragging(), Defragging(7, 0.3), Defragging(0))
WAYS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not compiled.AVAILABLE, reason="no numba")),
]


def queues(most=5):
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 4))
    return shapes.flatmap(lambda shape: arrays(np.int64, shape, elements=st.integers(0, most)))


def ages(counts, seed):
    return np.random.default_rng(seed).integers(0, 8, counts.shape).astype(float)


def at_once(rule, counts, **more):
    oldest = np.zeros(np.shape(counts))
    return LayerPicker(rule, NEVER_AGED, **more).pick(np.array(counts), oldest, 0.0)


def algorithm_1(q, lookahead, decay):
    """Returns all scores by Algorithm 1 of the paper, line by line, in exact arithmetic."""
    nb, ne = len(q), len(q[0])
    scores = [[Fraction(0)] * ne for _ in range(nb)]
    for b in range(nb):
        lscore = Fraction(0)
        for k in range(1, lookahead + 1):
            ahead = (b + k) % nb
            total_tokens = sum(int(q[ahead][e]) for e in range(ne))
            lscore = lscore + Fraction(total_tokens, ne) * Fraction(decay) ** k
        for e in range(ne):
            if q[b][e] > 0:
                scores[b][e] = lscore + int(q[b][e])
    return scores


@pytest.mark.parametrize("use_numba", WAYS)
@given(
    counts=queues(),
    lookahead=st.integers(0, 8),
    decay=st.sampled_from([0.0, 0.5, 0.75, 1.0, 0.8, 1 / 3]),
)
def test_defragging_is_algorithm_1(use_numba, counts, lookahead, decay):
    picked = at_once(Defragging(lookahead, decay), counts, use_numba=use_numba)
    if not counts.any():
        assert picked is None
        return
    scores = algorithm_1(counts, lookahead, decay)
    best = max(map(max, scores))
    tied = [(b, e) for b, row in enumerate(scores) for e, s in enumerate(row) if s == best]
    exact = (decay * 4).is_integer() and counts.shape[1] in (1, 2, 4)  # dyadic: floats are exact
    if exact:
        assert picked == tied[0]
    else:
        assert scores[picked[0]][picked[1]] >= best - Fraction(1, 10**9)


@pytest.mark.parametrize("use_numba", WAYS)
def test_small_cases_by_hand(use_numba):
    """One group a layer; K = 2, decay 1/2.

    Scores of [4, 0, 3, 6]: 4 + 0/2 + 3/4 = 4.75; empty; 3 + 6/2 + 4/4 = 7; 6 + 4/2 + 0/4 = 8.
    Of [4, 0, 5, 6]: 5.25, empty, 9, 8: what stands before the dense layer goes after it.
    """
    cases = [
        (MostTokensFirst(), [4, 0, 3, 6], 3),
        (FirstLayerFirst(), [0, 1, 3, 6], 1),
        (Defragging(2, 0.5), [4, 0, 3, 6], 3),
        (Defragging(2, 0.5), [4, 0, 5, 6], 2),
        (Defragging(0), [4, 0, 5, 6], 3),
        # Round the end: rows of the last layer are before those of the first.
        (Defragging(1, 1.0), [8, 0, 0, 1], 3),
        (Defragging(1, 0.5), [8, 0, 0, 1], 0),
        (MostTokensFirst(), [2, 2, 2, 2], 0),
    ]
    for rule, counts, layer in cases:
        column = [[count] for count in counts]
        assert at_once(rule, column, use_numba=use_numba) == (layer, 0), (rule, counts)
    two = [[0, 0], [1, 4], [9, 0]]
    assert at_once(MostTokensFirst(), two, use_numba=use_numba) == (2, 0)
    assert at_once(FirstLayerFirst(), two, use_numba=use_numba) == (1, 1)


@pytest.mark.skipif(not compiled.AVAILABLE, reason="no numba")
@settings(max_examples=300)
@given(
    counts=queues(),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 99),
    now=st.sampled_from([0.0, 3.0, 7.0]),
    waiting=st.builds(
        Waiting, st.integers(1, 4), st.sampled_from([0.0, 2.0]), st.sampled_from([2.5, 5, math.inf])
    ),
    classes=st.booleans(),
)
def test_compiled_and_plain_agree(counts, rule, seed, now, waiting, classes):
    oldest = ages(counts, seed)
    urgent = None
    if classes:
        urgent = np.random.default_rng(seed).integers(0, counts + 1)
    picked = [
        LayerPicker(rule, waiting, use_numba=way).pick(counts, oldest, now, urgent=urgent)
        for way in (True, False)
    ]
    assert picked[0] == picked[1]


@given(
    counts=queues(),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 99),
    least=st.integers(1, 4),
)
def test_an_empty_queue_is_never_picked_and_wake_at_keeps_its_word(counts, rule, seed, least):
    oldest = ages(counts, seed)
    picker = LayerPicker(rule, Waiting(least, max_wait_s=0.1, max_age_s=50.0))
    now = 7.05
    picked = picker.pick(counts, oldest, now)
    if picked is not None:
        assert counts[picked] > 0
        old = oldest[picked] + 0.1 <= now
        assert counts[picked] >= least or old
        return
    at = picker.wake_at(counts, oldest)
    assert at > now
    if at < math.inf:
        assert picker.pick(counts, oldest, at) is not None
        assert picker.pick(counts, oldest, np.nextafter(at, 0)) is None
    else:
        assert not counts.any()


@pytest.mark.parametrize("use_numba", WAYS)
def test_the_oldest_goes_first_once_it_has_come_of_age(use_numba):
    counts, oldest = np.array([[9, 1], [1, 9]]), np.array([[5.0, 1.0], [2.0, 0.0]])
    picker = LayerPicker(FirstLayerFirst(), Waiting(max_age_s=10.0), use_numba=use_numba)
    assert picker.pick(counts, oldest, 9.9) == (0, 0)
    assert picker.pick(counts, oldest, 10.0) == (1, 1)
    counts[1, 1] = 0  # of an empty queue the age means nothing
    assert picker.pick(counts, oldest, 10.9) == (0, 0)
    assert picker.pick(counts, oldest, 12.0) == (0, 1)


@pytest.mark.parametrize("use_numba", WAYS)
def test_urgent_rows_go_first_and_the_rest_of_their_queue_with_them(use_numba):
    counts, oldest = np.array([[9], [5], [6]]), np.array([[0.0], [0.0], [0.0]])
    urgent = np.array([[0], [2], [1]])
    picker = LayerPicker(MostTokensFirst(), Waiting(max_age_s=4.0), use_numba=use_numba)
    assert picker.pick(counts, oldest, 1.0) == (0, 0)
    assert picker.pick(counts, oldest, 1.0, urgent=urgent) == (1, 0)
    assert picker.pick(counts, oldest, 1.0, urgent=np.zeros_like(counts)) == (0, 0)
    few = LayerPicker(MostTokensFirst(), Waiting(6, max_wait_s=3.0), use_numba=use_numba)
    assert few.pick(counts, oldest, 0.0, urgent=urgent) == (2, 0)  # five rows wait for a sixth
    assert picker.pick(counts, oldest, 4.0, urgent=urgent) == (0, 0)  # none starves


class Contrary:
    """The rule that a queue should be most afraid of: the youngest, and never the last cell."""

    def choose(self, counts, may_run, now):
        cells = [tuple(cell) for cell in np.argwhere(may_run).tolist()]
        return cells[0]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), rule=st.sampled_from([*RULES, Contrary()]))
def test_no_queue_starves(seed, rule):
    """A worker is always overloaded, and runs its urgent rows first."""
    rng = np.random.default_rng(seed)
    layers, groups = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    longest, age = 1.0, float(rng.uniform(0.5, 20))
    waiting = Waiting(int(rng.integers(1, 5)), float(rng.uniform(0, 3)), age)
    bound = age + layers * groups * longest
    picker = LayerPicker(rule, waiting)
    counts, urgent = np.zeros((2, layers, groups), np.int64)
    oldest = np.full((layers, groups), math.inf)
    now = 0.0
    for _ in range(150):
        flood = rng.random((layers, groups)) < 0.7
        flood[-1, -1] = rng.random() < 0.1
        counts += flood
        urgent += flood & (rng.random((layers, groups)) < 0.5)
        urgent[-1, -1] = 0
        oldest = np.where(flood & (oldest == math.inf), now, oldest)
        picked = picker.pick(counts, oldest, now, urgent=urgent)
        if picked is None:
            now = min(now + 0.5, picker.wake_at(counts, oldest))
            continue
        assert now - oldest[picked] <= bound
        counts[picked] = urgent[picked] = 0
        oldest[picked] = math.inf
        now += float(rng.uniform(0.01, longest))
    assert (now - oldest[counts > 0] <= bound).all()


class Faulty:
    """A rule whose answers are each wrong in another way."""

    answers = iter(())

    def choose(self, counts, may_run, now):
        answer = next(Faulty.answers)
        if isinstance(answer, Exception):
            raise answer
        if answer == "write":
            counts[0, 0] = 99
        return answer


def test_a_rule_of_ones_own_and_its_faults(monkeypatch, caplog):
    module = types.ModuleType("own_rules")
    module.Faulty, module.Contrary = Faulty, Contrary  # pyright: ignore
    monkeypatch.setitem(sys.modules, "own_rules", module)
    counts, oldest = np.array([[1, 0], [2, 7]]), np.zeros((2, 2))
    assert make_picker("own_rules:Contrary").pick(counts, oldest, 0.0) == (0, 0)
    picker = make_picker("own_rules:Faulty")
    wrong = [KeyError("x"), (0, 1), (2, 0), (-1, 0), "write", (0.5, 0), 3, (1, 1, 1)]
    Faulty.answers = iter([*wrong, None, (1, 0)])
    with caplog.at_level(logging.ERROR):
        for _ in wrong:
            assert picker.pick(counts, oldest, 0.0) == (1, 1)  # what defragging says
    assert len(caplog.records) == 4  # the 1st, 2nd, 4th and 8th
    assert "layer rule Faulty: choose failed (1 so far)" in caplog.messages[0]
    assert picker.pick(counts, oldest, 0.0) == (1, 1)
    assert picker.pick(counts, oldest, 0.0) == (1, 0)
    assert counts.tolist() == [[1, 0], [2, 7]]


def test_a_rule_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="mtfs, flfs, defrag, or module:Class"):
        make_picker("lifo")


def test_without_numba_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "AVAILABLE", False)
    monkeypatch.setattr(compiled, "decide", None)
    assert at_once(Defragging(1, 1.0), [[8], [0], [0], [1]]) == (3, 0)
