"""Workers over a model in integers computed by hand: thousands of schedules, and nothing is
lost.
"""

import random
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from jmoe.packed_rows import EXEMPT, KV_LEN, Q_LEN, SLOT, SPARED, empty_deltas, pack_row
from jmoe.stages import StageVisits
from serving.execution.executor import LostRows
from serving.pipeline.messages import DECODE, Unit, WorkerDown, WorkerUp
from serving.pipeline.queues import Entry
from serving.scheduling.layers.picker import LayerPicker, Waiting, make_picker
from serving.scheduling.layers.rules import RULES
from tests.serving.execution.aep_sequences import ROWS, AnyQueue, ByHand, Sequences, sizes
from tests.traces import num_traces

PRIME, VOCAB, EXPERTS = 10_007, 97, 6
MOE = (True, False, True, True)  # layers; the second is dense
NUM_SLOTS = 4


def attended(x, before):
    """Returns a row after attention, given what its sequence wrote in this layer before."""
    return (3 * x + sum(before)) % PRIME


def routed(x, layer, picks):
    """Returns the experts of a row, all different, and their weights."""
    first = x + layer
    return [(first + 2 * k) % EXPERTS for k in range(picks)], [k + 1 for k in range(picks)]


def part(x, layer, expert):
    return (x * (expert + 2) + layer) % PRIME


def written(prompt, new_tokens, picks):
    """Returns what one sequence writes, row by row and layer by layer."""
    seen, tokens, inputs = [[] for _ in MOE], [], list(prompt)
    for position in range(len(prompt) + new_tokens - 1):
        x, moe_layer = inputs[position], 0
        for layer, is_moe in enumerate(MOE):
            x, own = attended(x, seen[layer]), x
            seen[layer].append(own)
            if not is_moe:
                x = (5 * x + 1) % PRIME
                continue
            ids, weights = routed(x, moe_layer, picks)
            made = [w * part(x, moe_layer, e) for e, w in zip(ids, weights, strict=True)]
            x, moe_layer = (x + sum(made)) % PRIME, moe_layer + 1
        if position >= len(prompt) - 1:
            tokens.append(x % VOCAB)
            inputs.append(tokens[-1])
    return tokens


class Attention:
    """Integers for rows. A row that is read before all its parts came is read wrong."""

    device = None

    def __init__(self, picks):
        self.picks = picks
        self.x, self.weights = np.zeros(ROWS, int), np.zeros((ROWS, picks), int)
        self.parts = np.zeros((ROWS, picks), int)
        self.seen = [[[] for _ in MOE] for _ in range(NUM_SLOTS)]
        self.newest = [0] * NUM_SLOTS
        self.reachable = None

    def reach(self, reachable):
        self.reachable = reachable

    def merged(self, place):
        return int(self.x[place] + self.weights[place] @ self.parts[place]) % PRIME

    def attend(self, layer, tokens, rows, deltas, control, places):
        size, at = len(places), 0
        h, ids = np.zeros(size, int), np.full((size, self.picks), -1)
        for row in rows[rows[:, SLOT] >= 0]:
            slot, length = row[SLOT], row[Q_LEN]
            for position in range(row[KV_LEN] - length, row[KV_LEN]):
                place, seen = places[at], self.seen[slot][layer]
                del seen[position:]  # of one that ran before, and was lost
                assert len(seen) == position
                given = self.newest[slot] if tokens is None else int(tokens[at])
                own = self.merged(place) if layer else given
                x = attended(own, seen)
                seen.append(own)
                self.weights[place] = self.parts[place] = 0
                if MOE[layer]:
                    ids[at], self.weights[place] = routed(x, sum(MOE[:layer]), self.picks)
                    self.parts[place] = 999  # until it comes
                else:
                    x = (5 * x + 1) % PRIME
                self.x[place] = h[at] = x
                at += 1
        return StageVisits(h, ids, *np.zeros((2, size), int)) if MOE[layer] else None

    def read(self, attended):
        return attended

    def keep(self, parts, places, picks):
        self.parts[places, picks] = parts

    def leave(self, rows, places):
        tokens = [self.merged(place) % VOCAB for place in places]
        for row, token in zip(rows, tokens, strict=True):
            if row[SLOT] >= 0:
                self.newest[row[SLOT]] = token
        return tokens, [0.0] * len(tokens)


class Experts:
    """Experts that `hosted [layers, E]` says; others are asked of it by mistake."""

    device = None

    def __init__(self, hosted, num_rows):
        self.hosted, self.rows = hosted, np.zeros(num_rows, int)

    def keep(self, h, rows):
        self.rows[rows] = h

    def compute(self, layer, rows, expert_ids):
        assert self.hosted[layer, expert_ids[expert_ids >= 0]].all()
        return np.array([part(self.rows[r], layer, e) for r, e in zip(rows, expert_ids)])  # noqa: B905

    def read(self, parts):
        return parts


def play(seed):
    rng = random.Random(seed)
    attention, experts, picks = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3)
    draw = np.random.default_rng(seed)
    hosts = draw.random((sum(MOE), EXPERTS, experts)) < rng.choice([0.0, 0.4])
    hosts |= np.eye(experts, dtype=bool)[draw.integers(0, experts, hosts.shape[:2])]
    rule = rng.choice(["any", "mtfs", "flfs", "defrag"])
    waiting = Waiting(rng.choice([1, 4]), 20.0, 500.0)
    turns = iter(range(1_000_000))
    workers = ByHand(
        [Attention(picks) for _ in range(attention)],
        [Experts(hosts[..., n], attention * ROWS) for n in range(experts)],
        MOE,
        hosts,
        sizes(),
        picker=lambda: (
            AnyQueue(rng) if rule == "any" else LayerPicker(RULES[rule](), waiting, use_numba=False)
        ),
        clock=lambda: next(turns),
    )
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        for _ in range(rng.randint(1, NUM_SLOTS * attention))
    ]
    new_tokens = rng.randint(1, 5)
    played = Sequences(workers, prompts, new_tokens, rng.choice([2, 5, 10]))
    played.play(rng)
    assert played.tokens == [written(prompt, new_tokens, picks) for prompt in prompts]
    assert not any(worker.num_units for worker in workers.attention)
    return rule


@pytest.mark.sized(exhaustive=("more",), deep=("some",))
@pytest.mark.parametrize(
    "seeds", [range(100), range(100, 100 + num_traces(400))], ids=["some", "more"]
)
def test_any_schedule_writes_what_is_reckoned_by_hand(seeds):
    """Workers, replicas, groups, picks, chunks and rules are drawn; nothing is left in the end."""
    assert {play(seed) for seed in seeds} == {"any", "mtfs", "flfs", "defrag"}


class Restarted(Sequences):
    """Sequences whose lost units are computed once more, as a chunk."""

    num_lost = 0

    def run_again(self, numbers):
        units = {unit.number: unit for unit in self.unit_of}
        for unit in (units[number] for number in numbers):
            number = self.unit_of.pop(unit)
            end = self.done[number]
            context = self.prompts[number] + self.tokens[number]
            again = replace(
                unit,
                tokens=np.array(context[end - len(unit.places) : end], np.int32),
                layer=0,
                lost=False,
                number=next(self.numbers),
            )
            self.num_lost += 1
            self.unit_of[again] = number
            self.workers.submit(number % len(self.workers.attention), again)


def play_with_faults(seed):
    """Plays while expert workers end and come back, one at a time; each expert is on two of
    them.
    """
    rng = random.Random(seed)
    attention, experts, picks = rng.randint(1, 3), rng.randint(2, 4), rng.randint(1, 3)
    hosts = np.zeros((sum(MOE), EXPERTS, experts), bool)
    for copy in range(2):
        hosts[:, np.arange(EXPERTS), (np.arange(EXPERTS) + copy) % experts] = True
    workers = ByHand(
        [Attention(picks) for _ in range(attention)],
        [Experts(hosts[..., n], attention * ROWS) for n in range(experts)],
        MOE,
        hosts,
        sizes(),
        picker=lambda: AnyQueue(rng),
        clock=lambda: 0.0,
    )
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(attention)]
    played, down, num_deaths = Restarted(workers, prompts, 6, 5), None, 0
    for _ in range(100_000):
        if not played.unit_of:
            break
        number = rng.randrange(workers.num_workers)
        if number >= attention:
            if number - attention != down:
                workers.deliver(number, rng.choice([1, 2, None]))
                workers.advance(number)
        else:
            workers.deliver(number, rng.choice([1, 2, None]))
            for lost in played.accept(workers.advance(number)):
                played.run_again(lost.rows)
        if rng.random() < 0.02 and num_deaths < 20:
            down, ended = (rng.randrange(experts), False) if down is None else (None, down)
            num_deaths += down is not None
            tell_of(workers, down, ended, rng)
    assert played.tokens == [written(prompt, 6, picks) for prompt in prompts]
    assert not any(worker.num_units for worker in workers.attention)
    return played.num_lost


def tell_of(workers, down, ended, rng):
    """Delivers news of workers as a worker's loop does: what one sent before its end is not taken
    after it.
    """
    gone = ended if down is None else down
    for at, attention in enumerate(workers.attention):
        if down is None:
            while workers.deliver(at):
                pass
            workers.inboxes[at].put(WorkerUp("experts", gone))
            continue
        left = [workers.inboxes[at].get() for _ in range(workers.inboxes[at].qsize())]
        for message in left:
            came = rng.random() < 0.5 or getattr(message, "worker", None) != gone
            if came:
                workers.inboxes[at].put(message)
        workers.inboxes[at].put(WorkerDown("experts", gone))
        assert attention.number == at
    number = len(workers.attention) + gone
    workers.inboxes[number] = fresh = SimpleQueue()
    assert fresh.empty()
    workers.experts[gone].forget(lambda row: row >= 0)


@pytest.mark.deep
def test_what_a_worker_that_ends_takes_with_it_is_computed_once_more():
    assert sum(play_with_faults(seed) for seed in range(60)) > 20


def stages_of(*given):
    """Returns workers that decoding units enter, each (urgent, percent, strategy) and
    perhaps the threshold that it may not go below, and a list of
    what their stages of attention will have: threshold, strategy, each row's exemption.
    """
    hosts, seen = np.ones((sum(MOE), EXPERTS, 1), bool), []
    device = Attention(len(given))
    attend = device.attend

    def attend_and_note(layer, tokens, rows, deltas, control, places):
        seen.append((*control[:2], rows[: len(given), EXEMPT].tolist()))
        return attend(layer, tokens, rows, deltas, control, places)

    device.attend = attend_and_note
    workers = ByHand(
        [device],
        [Experts(hosts[..., 0], ROWS)],
        MOE,
        hosts,
        sizes(),
        lambda: make_picker("mtfs"),
        lambda: 0.0,
    )
    for slot, (urgent, percent, strategy, *floor) in enumerate(given):
        row, at = pack_row(slot, kv_len=1), np.array([slot], np.int32)
        unit = Unit(row, None, at, empty_deltas(0), urgent, number=slot)
        unit.percent, unit.strategy, unit.floor_percent = percent, strategy, sum(floor)
        workers.submit(0, unit)
    return workers, seen


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        # Half the visits of two rows: one keeps all, the other none.
        ([(True, 50, 2), (False, 50, 2)], (0, 2, [SPARED, 0])),
        # More than one can give up.
        ([(True, 20, 2), (False, 20, 2)], (20, 2, [0, 0])),
        # Each row's own threshold: of all visits, the mean of what they are to keep.
        ([(True, 90, 1), (True, 40, 1), (True, 40, 1)], (57, 1, [0, 0, 0])),
        # Best effort's own threshold is lower, and it gives up what it can for the other.
        ([(True, 80, 2), (False, 40, 2)], (20, 2, [SPARED, 0])),
        # But not below what its expected loss allows: then all give up alike.
        ([(True, 80, 2, 30), (False, 40, 2, 30)], (60, 2, [0, 0])),
        ([(True, 80, 2, 20), (False, 40, 2, 20)], (20, 2, [SPARED, 0])),
        # The bound was tightened after a row had entered.
        ([(True, 20, 2, 20), (True, 50, 2, 50)], (50, 2, [0, 0])),
        # Who entered under zero brownout is spared, whatever the others have.
        ([(True, 100, 0), (True, 30, 2)], (30, 2, [SPARED, 0])),
        ([(True, 70, 0), (True, 100, 0)], (70, 0, [SPARED, SPARED])),
        # Of two strategies, that of the newest row.
        ([(True, 30, 2), (True, 30, 1)], (30, 1, [0, 0])),
    ],
)
def test_a_stage_keeps_the_share_of_visits_that_its_rows_are_to_keep(given, stage):
    workers, seen = stages_of(*given)
    workers.turn(0)
    assert seen == [stage]


def test_a_unit_leaves_with_the_span_of_thresholds_that_it_has_had():
    workers, seen = stages_of((True, 50, 2), (False, 50, 2))
    units = [entry.what for entry in workers.attention[0].queues.take(0, DECODE, 2)]
    workers.attention[0].queues.put(0, DECODE, [Entry(1, 0, 0.0, unit) for unit in units])
    for _ in range(100):
        workers.turn(0)
        workers.turn(1)
    assert {percent for percent, *_ in seen} == {0}
    assert [(u.least_percent, u.most_percent) for u in units] == [(100, 100), (0, 0)]


def launched_twice():
    """Returns workers with two units in layers 0 and 2, whose stages may run one after another, and
    what their devices are asked to do.
    """
    workers, _ = stages_of((True, 100, 0), (True, 100, 0))
    asked, device = [], workers.attention[0].device
    attend, read = device.attend, device.read

    def attend_and_note(layer, *args):
        asked.append(("attend", layer))
        found = attend(layer, *args)
        return None if found is None else (layer, found)

    def read_and_note(attended):
        asked.append(("read", attended[0]))
        return read(attended[1])

    device.attend, device.read = attend_and_note, read_and_note
    queues = workers.attention[0].queues
    first, second = queues.take(0, DECODE, 2)
    second.what.layer = 2
    queues.put(0, DECODE, [first])
    queues.put(2, DECODE, [second])
    return workers, asked


def test_a_stage_is_read_once_the_next_is_launched_or_none_waits():
    workers, asked = launched_twice()
    assert workers.attention[0].advance(0.0)
    assert len(asked) == 1
    assert workers.inboxes[1].empty()
    workers.advance(0)
    first, second = asked[0][1], asked[1][1]
    assert asked == [("attend", first), ("attend", second), ("read", first)]
    assert not workers.inboxes[1].empty()
    workers.advance(0)
    assert asked[3:] == [("read", second)]
    assert not workers.attention[0].advance(0.0)


def test_who_asks_for_a_worker_that_went_after_the_launch_is_lost_not_failed():
    workers, _ = launched_twice()
    worker = workers.attention[0]
    worker.advance(0.0)
    worker.take(WorkerDown("experts", 0), 0.0)
    worker.advance(0.0)
    [told] = worker.told()
    assert isinstance(told, LostRows)
    assert len(told.rows) == 1
    worker.advance(0.0)
    assert not worker._missing.any()
    assert not worker.num_units
    assert workers.inboxes[1].empty()


def test_an_expert_without_a_host_is_named():
    hosts = np.ones((sum(MOE), EXPERTS, 2), bool)
    hosts[1, 4] = False
    with pytest.raises(ValueError, match="expert 4 of MoE layer 1 is on no expert worker"):
        ByHand(
            [Attention(2)],
            [Experts(hosts[..., 0], ROWS)] * 2,
            MOE,
            hosts,
            sizes(),
            lambda: None,
            lambda: 0.0,
        )
