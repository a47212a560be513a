"""Rows that complete singly: where attention and experts run on separate devices, rows wait in a
queue before each layer (AMoE, section 3). They enter together as a step, and each leaves the last
layer whenever it gets there, with whichever rows were batched with it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from jmoe.packed_rows import NUM_DELTA_COLUMNS
from serving.plan import Limits, Phase, Singles, StepPlan
from serving.scheduling.batch import Batch, ScheduledStep, joined
from serving.scheduling.policy import LS
from serving.scheduling.sequence import SequenceState
from serving.scheduling.staging import StagingRegions


@dataclass(eq=False)
class Entered:
    """A row of a step, from its first layer until it has left the last one."""

    step: ScheduledStep
    at: int
    entered_at: float

    @property
    def sequence(self) -> SequenceState:
        """The sequence that it belongs to."""
        return self.step.sequences[self.at]

    @property
    def tokens(self) -> list[int]:
        """A prefill chunk's tokens; otherwise empty."""
        batch = self.step.batch
        return batch.tokens[self.at] if batch.phase is Phase.PREFILL else []


class SingleRows:
    """The rows that have entered, by number. A sequence is in its batch until its row is taken."""

    def __init__(self, limits: Limits, staging: StagingRegions) -> None:
        """`staging` gets back what a step has of a rank once none of its rows is left there."""
        self._limits, self._staging = limits, staging
        self._entered: dict[int, Entered] = {}
        self._numbers = count()
        self.num_decoding = 0  # of the rows
        self._rows_left = Counter[tuple[Batch, int]]()

    def __len__(self) -> int:
        """Returns the number of rows (a chunk counts as one) that have not left the last layer."""
        return len(self._entered)

    def __contains__(self, number: int) -> bool:
        """Returns whether a row has entered, and has neither left nor been given up."""
        return number in self._entered

    def enter(self, step: ScheduledStep, now: float, *, all_urgent: bool) -> None:
        """Lets a step's rows enter. Those of latency-sensitive sequences are urgent, or all."""
        batch, numbers = step.batch, []
        for at, sequence in enumerate(step.sequences):
            numbers.append(next(self._numbers))
            self._entered[numbers[-1]] = Entered(step, at, now)
            self._rows_left[batch, self._limits.rank(sequence.slot)] += 1
            sequence.batch = batch
        self.num_decoding += len(numbers) * (batch.phase is Phase.DECODE)
        scored = step.plan.prompt_logprobs
        singles = Singles(
            numbers,
            step.sampled,
            [all_urgent or s.priority is LS for s in step.sequences],
            [
                scored and s.request.sampling.prompt_logprobs and not s.tokens
                for s in step.sequences
            ],
        )
        step.plan = replace(step.plan, singles=singles)

    def take(self, numbers: Sequence[int]) -> list[Entered]:
        """Takes rows out: they have left, are lost, or are given up."""
        rows = [self._entered.pop(number) for number in numbers]
        for row in rows:
            batch, rank = row.step.batch, self._limits.rank(row.sequence.slot)
            self._rows_left[batch, rank] -= 1
            if not self._rows_left[batch, rank]:
                del self._rows_left[batch, rank]
                self._staging.give_back(batch.release_staging(rank))
            row.sequence.batch = None
            self.num_decoding -= batch.phase is Phase.DECODE
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
    newest = max(rows, key=lambda row: row.entered_at).step
    ways = {row.step.way for row in rows}
    plan = StepPlan(
        phase=newest.plan.phase,
        rows=np.stack([row.step.plan.rows[row.at] for row in rows]),
        deltas=np.zeros((0, NUM_DELTA_COLUMNS), np.int32),
        tokens=joined([row.tokens for row in rows]),
        prompt_logprobs=any(row.step.plan.prompt_logprobs for row in rows),
        model=newest.plan.model,
        stop_layer=limits.num_layers,
    )
    return ScheduledStep(
        newest.batch,
        plan,
        [row.sequence for row in rows],
        [row.step.sampled[row.at] for row in rows],
        [row.step.prefixes[row.at] for row in rows],
        way=ways.pop() if len(ways) == 1 else -1,
    )
