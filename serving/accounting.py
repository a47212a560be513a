"""What is counted and told of steps and requests."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from serving.errors import NOT_OURS, RequestFailed, ServingError
from serving.observer import Observer
from serving.plan import Phase, StepResult
from serving.request import EngineStats, Output
from serving.scheduling.scheduler import ScheduledStep
from serving.scheduling.sequence import SequenceState

log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Events since start."""

    requests_finished: int = 0
    requests_aborted: int = 0
    requests_rejected: int = 0
    requests_failed: int = 0  # alone, by a fault that was not their caller's
    steps_prefill: int = 0
    steps_decode: int = 0
    expert_visits: int = 0
    degraded_visits: int = 0


class Accounts:
    """Counts events and passes them on to an observer, whose faults are its own."""

    def __init__(self, observer: Observer) -> None:
        self.counters = Counters()
        self._observer = observer
        self._num_faults = 0

    def step_read(
        self,
        step: ScheduledStep,
        result: StepResult,
        started_at: float,
        now: float,
        visits_per_token: int,
    ) -> None:
        """A step's results are on the host; `visits_per_token` is picks times MoE layers."""
        counters = self.counters
        if step.plan.phase is Phase.PREFILL:
            counters.steps_prefill += 1
        else:
            counters.steps_decode += 1
        counters.expert_visits += int(step.plan.q_lens.sum()) * visits_per_token
        counters.degraded_visits += sum(result.degraded)
        self._tell(self._observer.step_read, step, result, started_at, now)

    def first_tokens(self, ttft_s: Float[np.ndarray, "N"], slo_s: float) -> None:
        """Times to first token of one step."""
        self._tell(self._observer.first_tokens, ttft_s, slo_s)

    def further_tokens(self, itl_s: Float[np.ndarray, "N"], slo_s: float) -> None:
        """Inter-token latencies of one step."""
        self._tell(self._observer.further_tokens, itl_s, slo_s)

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """A request got its last token."""
        self.counters.requests_finished += 1
        self._tell(self._observer.request_finished, sequence, output, now)

    def request_ended(self, error: ServingError | None) -> None:
        """A request ended without its last token; None: its caller went away."""
        if isinstance(error, RequestFailed):
            self.counters.requests_failed += 1
        else:
            self.counters.requests_aborted += 1

    def stats(self, **gauges: Any) -> EngineStats:
        """Counters, and the other fields of EngineStats as they are given."""
        return EngineStats(**asdict(self.counters), **gauges)

    def _tell(self, event: Callable[..., None], *args: Any) -> None:
        try:
            event(*args)
        except NOT_OURS:
            raise
        except BaseException:
            self._num_faults += 1
            if self._num_faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                log.exception("%s failed, for the %dth time", event.__qualname__, self._num_faults)
