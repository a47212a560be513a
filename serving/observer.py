"""What an engine tells the world about its steps; `frontend.metrics` turns it into metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from serving.plan import StepResult
    from serving.request import Output
    from serving.scheduling.scheduler import ScheduledStep
    from serving.scheduling.sequence import SequenceState


class Observer:
    """Sees nothing; subclass it. Calls come from the engine's loop and must be cheap.

    What one raises is logged and goes no further.
    """

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """A step's results are on the host; the device began it at `started_at`, at the earliest.

        Times are seconds of `time.monotonic`.
        """

    def first_tokens(self, ttft_s: np.ndarray, slo_s: float) -> None:
        """Times to first token of one step, queueing included."""

    def further_tokens(self, itl_s: np.ndarray, slo_s: float) -> None:
        """Inter-token latencies of one step."""

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """A request got its last token."""
