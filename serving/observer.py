"""What an engine tells the world about its steps; `frontend.metrics` turns it into metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from serving.errors import ServingError
    from serving.execution.aep.recorder import Stages
    from serving.plan import StepResult
    from serving.request import Output, Priority
    from serving.scheduling.batch import ScheduledStep
    from serving.scheduling.sequence import SequenceState


class Observer:
    """Sees nothing; subclass it. Calls come from the engine's loop and must be cheap.

    What one raises is logged and goes no further.
    """

    def step_launched(self, step: ScheduledStep, began_at: float, now: float) -> None:
        """The host planned a step's layers and launched them, from `began_at` until `now`."""

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """Results of a step's layers are on the host; the device began at `started_at`, at the
        earliest. A step may come in parts, of which `step.is_last` is one.

        Times are seconds of `time.monotonic`.
        """

    def stages_ran(self, stages: Stages) -> None:
        """What an asynchronous worker ran, up to a second ago."""

    def request_admitted(self, sequence: SequenceState, now: float) -> None:
        """A request was taken and stands in its queue."""

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """The device began with requests of a class, so long after they arrived, and after slot and
        pages were there for them.
        """

    def first_tokens(self, ttft_s: np.ndarray, slo_s: float, priority: Priority) -> None:
        """Times to first token of a class in one step, queueing included; inf: no SLO."""

    def further_tokens(self, itl_s: np.ndarray, slo_s: float, priority: Priority) -> None:
        """Inter-token latencies of a class in one step."""

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """A request got its last token."""

    def request_ended(self, sequence: SequenceState, error: ServingError | None) -> None:
        """A request that was taken ended without its last token; None: its caller went away."""
