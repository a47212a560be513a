"""Workers of one process, with a simulated server."""

from itertools import count, cycle, islice

import jax
import numpy as np

from jmoe.packed_rows import empty_deltas, pack_row
from jmoe.parallel.placement import contiguous
from serving.pipeline.devices import Sizes
from serving.pipeline.local import LocalWorkers
from serving.pipeline.messages import Left, Unit

PAGE, BLOCKS, SLOTS, ROWS = 4, 8, 4, 40


class AnyQueue:
    """A picker that chooses any queue with rows, or none: as unhelpful as a picker may be."""

    def __init__(self, rng):
        self.rng = rng

    def pick(self, counts, oldest, now, *, urgent=None):
        assert ((oldest < np.inf) == (counts > 0)).all()
        assert (urgent <= counts).all()
        found = list(zip(*np.nonzero(counts), strict=True))
        if not found or self.rng.random() < 0.2:
            return None
        return self.rng.choice(found)


def sizes(decode=(2, 8), prefill=(16,)):
    return Sizes(SLOTS, SLOTS * BLOCKS, PAGE, BLOCKS, ROWS, decode, prefill)


class ByHand(LocalWorkers):
    """Workers that a test drives one at a time."""

    @property
    def is_idle(self):
        """Whether no unit, message or visit is anywhere."""
        return not (
            any(worker.num_units for worker in self.attention)
            or any(worker.queues.num_rows for worker in self.workers)
            or any(not inbox.empty() for inbox in self.inboxes)
        )

    def submit(self, worker, unit):
        self.attention[worker].submit(unit, self.clock())

    def deliver(self, number, most=None):
        """Gives a worker the oldest messages that wait for it; returns how many."""
        inbox = self.inboxes[number]
        count = min(most or inbox.qsize(), inbox.qsize())
        for _ in range(count):
            self.workers[number].take(inbox.get_nowait(), self.clock())
        return count

    def advance(self, number):
        """Lets a worker run a stage; returns what it tells the server."""
        worker = self.workers[number]
        worker.advance(self.clock())
        return worker.told() if worker in self.attention else []

    def turn(self, number):
        self.deliver(number)
        return self.advance(number)


class Sequences:
    """Acts as the server: sequences with slots and pages, each with one unit on its way at a
    time.
    """

    def __init__(self, workers, prompts, new_tokens, chunk, exempt=(), control=(100, 0)):
        self.workers, self.new_tokens, self.chunk = workers, new_tokens, chunk
        self.prompts, self.exempt, self.control = prompts, exempt, control
        self.tokens = [[] for _ in prompts]
        self.degraded = [0] * len(prompts)
        self.done = [0] * len(prompts)  # positions
        self.unit_of, self.numbers = {}, count(1)
        for number in range(len(prompts)):
            self.submit(number)

    def submit(self, number):
        per_worker = len(self.workers.attention)
        worker, slot = number % per_worker, number // per_worker
        prompt, done = self.prompts[number], self.done[number]
        part = prompt[done : done + self.chunk]
        length = len(part) or 1
        self.done[number] += length
        deltas = empty_deltas(0)
        if not done:
            pages = np.arange(BLOCKS)
            deltas = np.stack([np.full(BLOCKS, slot), pages, slot * BLOCKS + pages], axis=1)
        unit = Unit(
            pack_row(slot, kv_len=done + length, q_len=length, exempt=2 * (number in self.exempt)),
            np.array(part, np.int32) if part else None,
            slot * (ROWS // SLOTS) + np.arange(length, dtype=np.int32),
            deltas.astype(np.int32),
            urgent=number % 2 == 0,
            ends_prompt=self.done[number] >= len(prompt),
            percent=int(self.control[0]),
            strategy=int(self.control[1]),
            number=next(self.numbers),
        )
        self.unit_of[unit] = number
        self.workers.submit(worker, unit)

    def accept(self, told):
        """Takes units that left; returns what else was told."""
        for left in told:
            if isinstance(left, Left):
                columns = left.numbers, left.tokens, left.logprobs, left.degraded
                for row in zip(*columns, strict=True):
                    self.accept_unit(*row)
        return [message for message in told if not isinstance(message, Left)]

    def accept_unit(self, number, token, logprob, degraded):
        unit = next(unit for unit in self.unit_of if unit.number == number)
        sequence = self.unit_of.pop(unit)
        self.degraded[sequence] += degraded
        assert unit.ends_prompt or (token, logprob) == (0, 0.0)
        if unit.ends_prompt:
            self.tokens[sequence].append(token)
        if len(self.tokens[sequence]) < self.new_tokens:
            self.submit(sequence)

    def play(self, rng):
        """Plays until all is written: each time a random worker gets some of its messages, or runs
        a stage.
        """
        for _ in range(100_000):
            if not self.unit_of:
                assert self.workers.is_idle
                return
            number = rng.randrange(self.workers.num_workers)
            if rng.random() < 0.5:
                self.workers.deliver(number, rng.choice([1, 2, None]))
            else:
                assert not self.accept(self.workers.advance(number))
        raise AssertionError("nothing came of it")


def workers_of(
    model, rng, *, attention=1, experts=2, hosts=None, picker=None, clock=lambda: 0.0, ways=()
):
    devices = cycle(jax.devices())  # one, unless the test says otherwise
    if hosts is None:
        hosts = np.asarray(contiguous(*model.table.slots.shape, experts).hosts)
    return ByHand.of(
        model,
        list(islice(devices, attention)),
        list(islice(devices, experts)),
        sizes(decode=(4,)),
        hosts,
        picker or (lambda: AnyQueue(rng)),
        clock,
        ways=ways,
    )


def some_prompts(model, rng, count):
    return [
        [rng.randrange(1, model.config.vocab_size) for _ in range(rng.randrange(2, 10))]
        for _ in range(count)
    ]
