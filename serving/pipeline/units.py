"""Scheduling for mode aep, where each row passes the layers independently (AMoE, section 3).

Attention and experts run on separate devices, and rows wait in a queue before each layer. So rows
only enter together as a step: each leaves the last layer whenever it gets there, with whichever
rows were batched with it. Until then its pages cannot be freed, since it still writes to them.
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
    tokens: list[int]  # a prefill chunk's tokens; otherwise empty
    sampled: bool
    entered_at: float


class UnitScheduler(Scheduler):
    """A scheduler in which every sequence that is in no step may begin one at any time.

    Steps are launched whole and never parked between two layers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entered: dict[int, Entered] = {}
        self._numbers = count()
        self._rows_left = Counter[tuple[Batch, int]]()  # by step and rank

    @property
    def num_entered(self) -> int:
        """The number of rows (a chunk counts as one) that have not left the last layer."""
        return len(self._entered)

    def enter(self, step: ScheduledStep, now: float) -> list[int]:
        """Registers a step's rows as entered; returns a number for each."""
        batch, numbers = step.batch, []
        for at, sequence in enumerate(step.sequences):
            tokens = batch.tokens[at] if batch.tokens else []
            unit = Entered(batch, sequence, batch.rows[at], tokens, batch.sampled[at], now)
            numbers.append(next(self._numbers))
            self._entered[numbers[-1]] = unit
        return numbers

    def leave(self, numbers: Sequence[int]) -> tuple[ScheduledStep, float]:
        """Takes rows of one phase that left the last layer, and frees their sequences for new
        steps.

        Returns the step that they form, in this order, and when the first of them entered.
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
        """Restarts rows that were lost on their way: their positions are computed again, as
        chunks.
        """
        units = self._taken(numbers)
        for unit in units:
            unit.sequence.batch = None
            if not unit.sequence.done:
                unit.sequence.run_again(len(unit.tokens) or 1, unit.sampled)
        self._free_done(units)

    def give_up(self, numbers: Sequence[int]) -> list[SequenceState]:
        """Gives up rows that will neither leave nor run again. Returns the requests to end."""
        units = self._taken(numbers)
        for unit in units:
            unit.sequence.batch = None
        self._free_done(units)
        return [unit.sequence for unit in units if not unit.sequence.done]

    def close_rank(self, rank: int) -> list[SequenceState]:
        """Closes the rank of a lost attention worker. Returns its requests, which are to be
        ended.
        """
        self.places.close(rank)
        ranks = {n: self.limits.rank(u.sequence.slot) for n, u in self._entered.items()}
        self.give_up([number for number, own in ranks.items() if own == rank])
        return self._on_rank(rank)

    def open_rank(self, rank: int) -> None:
        """Opens the rank of an attention worker that is back, and empty."""
        self.places.open(rank)

    def knows(self, number: int) -> bool:
        """Returns whether a row has entered, and has neither left nor been given up."""
        return number in self._entered

    def abandon(self) -> None:
        """Forgets all rows that entered, since none will ever leave."""
        self.run_again(list(self._entered))

    def check_idle(self) -> None:
        """Checks as Scheduler does, and that no row is on its way."""
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
                self.staging.give_back(unit.batch.release_staging(rank))
        return units

    def _free_done(self, units: Sequence[Entered]) -> None:
        """Frees what requests hold that ended while their rows were on their way."""
        for unit in units:
            if unit.sequence.done:
                super()._release(unit.sequence)

    # ---- overrides of Scheduler ---------------------------------------------------------------

    def _take_layers(self, batch: Batch) -> ScheduledStep:
        """Takes all layers at once."""
        step = batch.take_layers(self.limits.num_layers, self.limits.num_layers)
        for sequence in step.sequences:
            sequence.batch = batch  # until it leaves
        self.under_way.remove(batch)
        self._rows_left.update((batch, self.limits.rank(s.slot)) for s in step.sequences)
        self._last_phase = batch.phase
        return step

    def _release(self, sequence: SequenceState) -> None:
        if sequence.batch is None:  # otherwise it is released once its row has left
            super()._release(sequence)

    def _giving_way(self, rank: int) -> list[SequenceState]:
        return [s for s in super()._giving_way(rank) if s.batch is None]

    def _victim_for(self, sequence: SequenceState) -> SequenceState | None:
        victim = super()._victim_for(sequence)
        return victim if victim is None or victim.batch is None else None
