"""The engine of asynchronous expert parallelism, where rows pass the layers independently.

It shares everything with Engine but the tick. Rows only enter as a step; each comes back when it
has passed all layers, and its sequence's next row enters at once (`serving.pipeline.units`,
`serving.pipeline`).
"""

import asyncio
from collections import deque
from typing import Any

import numpy as np

from jmoe.brownout import strategy_code
from serving.engine import Engine
from serving.errors import WorkerLost
from serving.pipeline.messages import (
    ATTENTION,
    FailedUnits,
    Left,
    LostUnits,
    Steer,
    WorkerDown,
    WorkerUp,
)
from serving.pipeline.recorder import Stages
from serving.pipeline.units import UnitScheduler
from serving.plan import Phase, StepControl, StepResult
from serving.request import Request
from serving.scheduling.batch import ScheduledStep
from serving.scheduling.policy import LS
from serving.scheduling.sequence import SequenceState

NOBODY = "no worker with attention is there"
Told = Left | LostUnits | FailedUnits | WorkerDown | WorkerUp | Stages
NOT_COUNTED = np.zeros((0, 0), np.int32)
"""Empty rows by expert: workers count them, since a stage mixes rows of many steps."""


class AsynchronousEngine(Engine):
    """Serves one model with a crew of workers."""

    scheduler_type = UnitScheduler
    scheduler: UnitScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the same arguments as Engine; the runner must be a Crew
        (`serving.pipeline.crew`).
        """
        super().__init__(*args, **kwargs)
        self._crew: Any = self.runner
        self._told = deque[Told]()
        self._crew.listen(self._note)
        if self.accounts.wants_stages:
            self._crew.record()

    def _note(self, told: Told) -> None:
        """Queues a message from the crew; called in a thread of the crew."""
        self._told.append(told)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._work.set)

    async def _tick(self) -> bool:
        """Handles the crew's messages, then lets all rows enter that may. False if there is no
        work.
        """
        await asyncio.sleep(0)  # lets other tasks run between ticks
        self._work.clear()
        now = self._clock()
        while self._told:
            self._take(self._told.popleft(), now)
        self._advance_controllers(now)
        self._steer()
        while (step := self.scheduler.next_step(now=now)) is not None:
            self._enter(step, now)
        if self.scheduler.idle:
            self._idle.set()
            return False
        await self._work.wait()
        return True

    def _steer(self) -> None:
        prefill, decode = (self._control(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        steer = Steer(prefill.strategy, prefill.threshold_percent, decode.threshold_percent)
        self._crew.steer(steer)

    def _control(self, phase: Phase) -> StepControl:
        return StepControl(self.slo.ls.of(phase).percent, strategy_code(self.slo.strategy))

    def _enter(self, step: ScheduledStep, planned_at: float) -> None:
        now, plan = self._clock(), step.plan
        numbers = self.scheduler.enter(step, now)
        step.batch.control = step.control = control = self._control(plan.phase)
        self._note_thresholds(step, control)
        for sequence in step.sequences:
            sequence.note_start(now)
        self._crew.enter(
            plan,
            numbers,
            ends_prompt=step.batch.sampled,
            urgent=[s.priority is LS for s in step.sequences],
            scores=[
                plan.prompt_logprobs and s.request.sampling.prompt_logprobs and not s.tokens
                for s in step.sequences
            ],
        )
        self.watchdog.launched += len(numbers)
        self.accounts.step_launched(step, planned_at, self._clock())

    def _note_thresholds(self, step: ScheduledStep, control: StepControl) -> None:
        """Notes the rows' thresholds, both on entering and leaving: a controller may act
        meanwhile.
        """
        for sequence, exempt in zip(step.sequences, step.plan.exempt.tolist(), strict=True):
            percent = 100 if exempt else control.threshold_percent
            sequence.note_threshold(step.plan.phase, percent)

    def _take(self, told: Told, now: float) -> None:
        """Handles a message of the crew; rows that were given up already are ignored."""
        match told:
            case WorkerDown(kind, number):
                if kind == ATTENTION:
                    self._lose(number)
                return
            case WorkerUp(kind, number):
                if kind == ATTENTION:
                    self.scheduler.open_rank(number)
                return
            case Stages():
                self.accounts.stages_ran(told)
                return
            case _:
                pass
        known = [self.scheduler.knows(number) for number in told.numbers]
        self.watchdog.ended += sum(known)
        numbers = [n for n, is_known in zip(told.numbers, known, strict=True) if is_known]
        match told:
            case LostUnits():
                self.scheduler.run_again(numbers)
            case FailedUnits(_, reason):
                for sequence in self.scheduler.give_up(numbers):
                    self._end(sequence, self._lost(reason))
            case Left() if numbers:
                self._take_left(told, now)

    def _lose(self, rank: int) -> None:
        """Ends the requests of a lost attention worker, whose keys and values are lost."""
        before = self.scheduler.num_entered
        for sequence in self.scheduler.close_rank(rank):
            self._end(sequence, self._lost(f"worker attention-{rank} is gone"))
        if not self.scheduler.places.any_open:
            for sequence in list(self.scheduler.waiting):
                self._end(sequence, self._lost(NOBODY))
        self.watchdog.ended += before - self.scheduler.num_entered

    def _lost(self, why: str) -> WorkerLost:
        return WorkerLost(f"{why}; send the request again", self._crew.retry_after_s)

    async def _admit(self, request: Request) -> SequenceState:
        """Admits a request. Raises WorkerLost if workers it needs are gone, and as Engine does."""
        if not self.scheduler.places.any_open:
            raise self._lost(NOBODY)
        exact = not request.allow_brownout or self.slo.strategy == "zero"
        if exact and (missing := self._crew.unreachable):
            raise self._lost(f"{missing}, and nothing may stand in for it")
        return await super()._admit(request)

    def _take_left(self, left: Left, now: float) -> None:
        """Accepts rows that left together as the result of a step."""
        step, entered_at = self.scheduler.leave(left.numbers)
        step.control = StepControl(left.percent, left.strategy)
        self._note_thresholds(step, step.control)
        scores = left.scores if len(left.scores) else None
        result = StepResult(left.tokens, left.logprobs, left.degraded, NOT_COUNTED, scores)
        self._accept(step, result, entered_at, entered_at, now)

    def _fail(self, reason: str) -> None:
        self.scheduler.abandon()  # nothing will leave any more
        super()._fail(reason)
