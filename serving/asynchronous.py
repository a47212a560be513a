"""The engine of asynchronous expert parallelism: many rows on their way, and none waits for others.

Admission, callers, operators, and what becomes of a token are an Engine's; its tick is another. A
step is only how rows enter. Each comes back when it has been through all layers, and its next one
goes in at once (`serving.scheduling.units`, `serving.execution.aep`).
"""

import asyncio
from collections import deque
from typing import Any

import numpy as np

from jmoe.brownout import strategy_code
from serving.engine import Engine
from serving.execution.aep.messages import Left, LostUnits, Steer
from serving.plan import Phase, StepControl, StepResult
from serving.scheduling.batch import ScheduledStep
from serving.scheduling.policy import LS
from serving.scheduling.units import UnitScheduler

NOT_COUNTED = np.zeros((0, 0), np.int32)
"""Rows by expert: they are the crew's to count, since stages mix those of many steps."""


class AsynchronousEngine(Engine):
    """Serves one model with a crew of workers."""

    scheduler_type = UnitScheduler
    scheduler: UnitScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As an Engine; the runner is a Crew, too (`serving.execution.aep.crew`)."""
        super().__init__(*args, **kwargs)
        self._crew: Any = self.runner
        self._left = deque[Left | LostUnits]()
        self._crew.listen(self._note_left)

    def _note_left(self, left: Left | LostUnits) -> None:
        """In a thread of the crew's."""
        self._left.append(left)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._work.set)

    async def _tick(self) -> bool:
        """Takes what has left, then lets in all that may enter. False when nothing is there."""
        await asyncio.sleep(0)  # callers get their turn between any two
        self._work.clear()
        now = self._clock()
        while self._left:
            self._take(self._left.popleft(), now)
        self._advance_controllers(now)
        self._steer()
        while (step := self.scheduler.next_step(now=now)) is not None:
            self._enter(step, now)
        if self.scheduler.idle:
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
        """Of its rows, as they enter and as they leave: a controller may act meanwhile."""
        for sequence, exempt in zip(step.sequences, step.plan.exempt.tolist(), strict=True):
            percent = 100 if exempt else control.threshold_percent
            sequence.note_threshold(step.plan.phase, percent)

    def _take(self, left: Left | LostUnits, now: float) -> None:
        """Rows that left together are the step that is read; those that were lost run again."""
        self.watchdog.ended += len(left.numbers)
        if isinstance(left, LostUnits):
            self.scheduler.run_again(left.numbers)
            return
        step, entered_at = self.scheduler.leave(left.numbers)
        step.control = StepControl(left.percent, left.strategy)
        self._note_thresholds(step, step.control)
        scores = left.scores if len(left.scores) else None
        result = StepResult(left.tokens, left.logprobs, left.degraded, NOT_COUNTED, scores)
        self._accept(step, result, entered_at, entered_at, now)
        if self.scheduler.idle:
            self._idle.set()

    def _fail(self, reason: str) -> None:
        self.scheduler.abandon()  # nothing will leave any more
        super()._fail(reason)
