"""Rows that complete singly: where attention and experts run on separate devices, rows wait in a
queue before each layer (AMoE, section 3). They enter together as a step, and each leaves the last
layer whenever it gets there, with whichever rows were batched with it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from serving.plan import Limits, Phase, Singles
from serving.scheduling.policy import LS
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep, StagingRegions


@dataclass(eq=False)
class Entered:
    """A row of a step, from its first layer until it has left the last one."""

    step: ScheduledStep
    at: int

    @property
    def sequence(self) -> SequenceState:
        """The sequence that it belongs to."""
        return self.step.sequences[self.at]


class SingleRows:
    """The rows that have entered, by number. A sequence is in its step until its row is taken."""

    def __init__(self, limits: Limits, staging: StagingRegions) -> None:
        """`staging` gets back what a step has of a rank once none of its rows is left there."""
        self._limits, self._staging = limits, staging
        self._entered: dict[int, Entered] = {}
        self._numbers = count()
        self.num_decoding = 0  # of the rows
        self._rows_left = Counter[tuple[ScheduledStep, int]]()

    def __len__(self) -> int:
        """Returns the number of rows (a chunk counts as one) that have not left the last layer."""
        return len(self._entered)

    def __contains__(self, number: int) -> bool:
        """Returns whether a row has entered, and has neither left nor been given up."""
        return number in self._entered

    def enter(self, step: ScheduledStep, now: float, *, all_urgent: bool) -> None:
        """Lets a step's rows enter. Those of latency-sensitive sequences are urgent, or all."""
        numbers = []
        step.launched_at = step.started_at = now
        for at, sequence in enumerate(step.sequences):
            numbers.append(next(self._numbers))
            self._entered[numbers[-1]] = Entered(step, at)
            self._rows_left[step, self._limits.rank(sequence.slot)] += 1
            sequence.step = step
        self.num_decoding += len(numbers) * (step.phase is Phase.DECODE)
        step.singles = Singles(
            numbers,
            step.sampled,
            [all_urgent or s.priority is LS for s in step.sequences],
            [step.prompt_logprobs and s.scores_prompt for s in step.sequences],
        )

    def take(self, numbers: Sequence[int]) -> list[Entered]:
        """Takes rows out: they have left, are lost, or are given up."""
        rows = [self._entered.pop(number) for number in numbers]
        for row in rows:
            step, rank = row.step, self._limits.rank(row.sequence.slot)
            self._rows_left[step, rank] -= 1
            if not self._rows_left[step, rank]:
                del self._rows_left[step, rank]
                self._staging.give_back(step.release_staging(rank))
            row.sequence.step = None
            self.num_decoding -= step.phase is Phase.DECODE
        return rows

    def on_rank(self, rank: int) -> list[int]:
        """Returns the numbers of a rank's rows."""
        ranks = {n: self._limits.rank(row.sequence.slot) for n, row in self._entered.items()}
        return [number for number, own in ranks.items() if own == rank]

    def all(self) -> list[int]:
        """Returns the numbers of all rows."""
        return list(self._entered)

    def check_idle(self) -> None:
        """Raises AssertionError if a row is on its way."""
        if self._entered or self._rows_left or self.num_decoding:
            raise AssertionError(f"{len(self._entered)} rows never left the last layer")


def gathered(rows: Sequence[Entered], limits: Limits) -> ScheduledStep:
    """Returns the step that rows of one phase form which left the last layer together."""
    newest = max((row.step for row in rows), key=lambda step: step.launched_at)
    entered_at = min(row.step.launched_at for row in rows)
    ways = {row.step.way for row in rows}
    return ScheduledStep(
        newest.phase,
        np.stack([row.step.rows[row.at] for row in rows]),
        prompt_logprobs=any(row.step.prompt_logprobs for row in rows),
        model=newest.model,
        stop_layer=limits.num_layers,
        sequences=[row.sequence for row in rows],
        sampled=[row.step.sampled[row.at] for row in rows],
        parts=newest.parts,
        prefixes=[row.step.prefixes[row.at] for row in rows],
        way=ways.pop() if len(ways) == 1 else -1,
        launched_at=entered_at,
        started_at=entered_at,
    )
