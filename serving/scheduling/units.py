"""Scheduling where every row of a step goes through the layers by itself (AMoE, section 3).

Attention and experts are on devices of their own, and rows wait in queues before each layer. So a
step is only how rows enter: each leaves the last layer when it has come there, with whichever rows
were beside it. Until then nobody else may have its pages, which it still writes to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Int

from serving.scheduling.batch import Batch, ScheduledStep
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceState


@dataclass(eq=False)
class Entered:
    """A row of a step, from its first layer until it has left the last one."""

    batch: Batch
    sequence: SequenceState
    row: Int[np.ndarray, "C"]
    tokens: list[int]  # of a chunk; else empty
    sampled: bool
    entered_at: float


class UnitScheduler(Scheduler):
    """Every sequence that is in no step may begin one, whatever others do.

    Steps run whole: no step waits for another between two layers, so that there is none to park.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entered: dict[int, Entered] = {}
        self._numbers = count()
        self._rows_left = Counter[tuple[Batch, int]]()  # by step and rank

    @property
    def num_entered(self) -> int:
        """Rows of steps, chunks counted as one, that have not left the last layer."""
        return len(self._entered)

    def enter(self, step: ScheduledStep, now: float) -> list[int]:
        """A step's rows go in; returns a number for each."""
        batch, numbers = step.batch, []
        for at, sequence in enumerate(step.sequences):
            tokens = batch.tokens[at] if batch.tokens else []
            unit = Entered(batch, sequence, batch.rows[at], tokens, batch.sampled[at], now)
            numbers.append(next(self._numbers))
            self._entered[numbers[-1]] = unit
        return numbers

    def leave(self, numbers: Sequence[int]) -> tuple[ScheduledStep, float]:
        """Rows of one phase have left the last layer: the step that they are now, in this order,
        and when the first of them entered. Their sequences are free.
        """
        units = self._taken(numbers)
        phase, tokens = units[0].batch.phase, [u.tokens for u in units if u.tokens]
        rows = np.stack([u.row for u in units])
        sequences, sampled = [u.sequence for u in units], [u.sampled for u in units]
        batch = Batch(phase, sequences, rows, sampled, [], tokens)
        step = batch.take_layers(self.limits.num_layers, self.limits.num_layers)
        self._free_done(units)
        return step, min(u.entered_at for u in units)

    def run_again(self, numbers: Sequence[int]) -> None:
        """Rows were lost on their way: their positions are computed once more, as chunks."""
        units = self._taken(numbers)
        for unit in units:
            unit.sequence.batch = None
            if not unit.sequence.done:
                unit.sequence.run_again(len(unit.tokens) or 1, unit.sampled)
        self._free_done(units)

    def give_up(self, numbers: Sequence[int]) -> list[SequenceState]:
        """Rows will not leave, nor run again. Returns the requests that are to end with them."""
        units = self._taken(numbers)
        for unit in units:
            unit.sequence.batch = None
        self._free_done(units)
        return [unit.sequence for unit in units if not unit.sequence.done]

    def close_rank(self, rank: int) -> list[SequenceState]:
        """A worker with attention is gone. Returns the requests that it had: they are to end."""
        self.places.close(rank)
        ranks = {n: self.limits.rank(u.sequence.slot) for n, u in self._entered.items()}
        self.give_up([number for number, own in ranks.items() if own == rank])
        return self._on_rank(rank)

    def open_rank(self, rank: int) -> None:
        """It is back, and empty."""
        self.places.open(rank)

    def knows(self, number: int) -> bool:
        """Whether a row has entered, and nothing has been heard of it."""
        return number in self._entered

    def abandon(self) -> None:
        """Nothing will ever leave: what entered is forgotten."""
        self.run_again(list(self._entered))

    def check_idle(self) -> None:
        """As of Scheduler; and nothing is on its way."""
        super().check_idle()
        if self._entered or self._rows_left:
            raise AssertionError(f"{len(self._entered)} rows never left the last layer")

    def _taken(self, numbers: Sequence[int]) -> list[Entered]:
        units = [self._entered.pop(number) for number in numbers]
        for unit in units:
            rank = self.limits.rank(unit.sequence.slot)
            self._rows_left[unit.batch, rank] -= 1
            if not self._rows_left[unit.batch, rank]:
                del self._rows_left[unit.batch, rank]
                self.extents.give_back(unit.batch.give_up_extents(rank))
        return units

    def _free_done(self, units: Sequence[Entered]) -> None:
        """What requests have that ended while they were on their way."""
        for unit in units:
            if unit.sequence.done:
                super()._release(unit.sequence)

    # ---- where a Scheduler is another ---------------------------------------------------------

    def _take_layers(self, batch: Batch) -> ScheduledStep:
        """All of them."""
        step = batch.take_layers(self.limits.num_layers, self.limits.num_layers)
        for sequence in step.sequences:
            sequence.batch = batch  # until it leaves
        self.under_way.remove(batch)
        self._rows_left.update((batch, self.limits.rank(s.slot)) for s in step.sequences)
        self._last_phase = batch.phase
        return step

    def _release(self, sequence: SequenceState) -> None:
        if sequence.batch is None:  # else it is, once it has left
            super()._release(sequence)

    def _giving_way(self, rank: int) -> list[SequenceState]:
        return [s for s in super()._giving_way(rank) if s.batch is None]

    def _victim_for(self, sequence: SequenceState) -> SequenceState | None:
        victim = super()._victim_for(sequence)
        return victim if victim is None or victim.batch is None else None
