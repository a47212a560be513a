"""Events that an engine reports about steps and requests; `frontend.metrics` makes metrics
of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from serving.errors import ServingError
    from serving.execution.executor import Stages
    from serving.plan import StepResult
    from serving.request import Output, Priority
    from serving.scheduling.sequence import SequenceState
    from serving.scheduling.step import ScheduledStep


class Observer:
    """Base class of observers, which ignores all events; subclass it.

    Calls come from the engine's event loop and must be cheap. Exceptions are logged and go no
    further.
    """

    def step_launched(self, step: ScheduledStep, began_at: float, now: float) -> None:
        """Called when the host has planned and launched a step's layers, from `began_at` to
        `now`.
        """

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """Called when the results of a step's layers are on the host.

        The device began at `started_at` at the earliest. A step may come in parts; `step.is_last`
        marks the last. Times are seconds of `time.monotonic`.
        """

    def stages_ran(self, stages: Stages) -> None:
        """Called with the stages that an asynchronous worker ran, up to a second later."""

    def request_admitted(self, sequence: SequenceState, now: float) -> None:
        """Called when a request was admitted to its queue."""

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """Called when the device began with requests of a class.

        `queue_s` is the time since they arrived, and `wait_s` the time since a slot and pages were
        available for them.
        """

    def first_tokens(
        self, ttft_s: np.ndarray, slo_s: float, priority: Priority, model: str
    ) -> None:
        """Called with the times to first token of a class and a model in one step, including
        queueing; inf: no SLO.
        """

    def further_tokens(
        self, itl_s: np.ndarray, slo_s: float, priority: Priority, model: str
    ) -> None:
        """Called with the inter-token latencies of a class and a model in one step."""

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """Called when a request got its last token."""

    def request_ended(self, sequence: SequenceState, error: ServingError | None) -> None:
        """Called when an admitted request ended early; `error` None: its client disconnected."""
