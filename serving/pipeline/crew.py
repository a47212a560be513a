"""Asynchronous workers as an executor: rows enter as units, and complete when they are through."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmoe.packed_rows import DELTA_SLOT, Q_LEN, SHAPED, SLOT, pack_seat
from serving.execution.executor import Completed, RankDown, RankUp
from serving.execution.ranks import ByRank
from serving.pipeline.messages import ATTENTION, Left, Unit, WorkerDown, WorkerUp
from serving.plan import Limits, Phase, StepControl, StepPlan, StepResult


class Crew:
    """Base of executors that consist of workers (`HasWorkers`); a subclass moves the messages. Its
    `limits` have a rank for each attention worker.
    """

    in_order = False
    limits: Limits
    max_len: int  # positions that a sequence may have
    unreachable = ""
    retry_after_s = 0.0
    _tell: Callable[[Any], None]

    def listen(self, tell: Callable[[Any], None]) -> None:
        """See Executor."""
        self._tell = tell

    def submit(self, plan: StepPlan, control: StepControl) -> None:
        """See Executor: hands rows to the workers that have their sequences."""
        self.enter(units_of(plan, control, self.limits, self.max_len))

    def enter(self, units: Sequence[list[Unit]]) -> None:
        """Lets units enter, given by attention worker. Returns at once."""
        raise NotImplementedError

    def report(self, message: Any) -> None:
        """Tells the listener of a worker's message, or of a worker that is gone or back."""
        match message:
            case Left():
                self._tell(completed(message))
            case WorkerDown(kind, number):
                if kind == ATTENTION:
                    self._tell(RankDown(number, f"worker attention-{number} is gone"))
            case WorkerUp(kind, number):
                if kind == ATTENTION:
                    self._tell(RankUp(number))
            case _:
                self._tell(message)


def completed(left: Left) -> Completed:
    """Returns what units that left together are to an engine."""
    scores = left.scores if len(left.scores) else None
    result = StepResult(
        left.tokens,
        left.logprobs,
        left.degraded,
        left.expert_rows,
        scores,
        top_ids=left.top_ids if len(left.top_ids) else None,
        top_logprobs=left.top_logprobs if len(left.top_logprobs) else None,
        prompt_top=(left.prompt_top_ids, left.prompt_top_logprobs)
        if len(left.prompt_top_ids)
        else None,
    )
    return Completed(result, left.numbers, left.strategy, left.least_percent, left.most_percent)


def units_of(
    plan: StepPlan, control: StepControl, limits: Limits, max_len: int
) -> list[list[Unit]]:
    """Splits a step's rows by the attention worker that has their sequence, numbered as on it."""
    step = ByRank.of(plan, limits)
    plan, found = step.plan, [list[Unit]() for _ in range(limits.num_ranks)]
    assert plan.singles is not None
    seats = {} if plan.shapes is None else {seat.slot: seat for seat in plan.shapes.seats}
    ends = np.cumsum(plan.q_lens)
    marks = zip(*plan.singles, strict=True)
    for at, (row, (number, ends_prompt, urgent, scores)) in enumerate(
        zip(plan.rows, marks, strict=True)
    ):
        slot, rank, tokens = int(row[SLOT]), int(step.rank[at]), None
        places = np.array([slot], np.int32)
        if plan.phase is Phase.PREFILL:
            own = slice(int(ends[at] - row[Q_LEN]), int(ends[at]))
            tokens, places = plan.tokens[own], plan.places[own]
        mine = (step.delta_rank == rank) & (plan.deltas[:, DELTA_SLOT] == slot)
        unit = Unit(
            row.copy(),
            tokens,
            places,
            plan.deltas[mine],
            urgent,
            ends_prompt,
            scores,
            number,
            percent=control.threshold_percent,
            strategy=control.strategy,
            floor_percent=control.least_percent,
        )
        if plan.shapes is not None and plan.shapes.rows[at, SHAPED]:
            unit.shape = plan.shapes.rows[at].copy()
            unit.allowed = None if plan.shapes.allowed is None else plan.shapes.allowed[at].copy()
            if (seat := seats.get(slot + rank * limits.slots_per_rank)) is not None:
                told = pack_seat(slot, seat.prompt, seat.output, seat.biases, max_len)
                unit.seat = told[0]
        found[rank].append(unit)
    return found
