"""Counts steps and requests, and reports them to observers."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import NOT_OURS, RequestFailed, ServingError
from serving.plan import Phase, StepResult
from serving.request import AuditState, Counters, EngineStats, Output, Priority, Refused
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep
from serving.telemetry.latencies import Latencies
from serving.telemetry.observer import Observer

if TYPE_CHECKING:
    from serving.execution.executor import Stages
    from serving.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


MAX_KEYS = 1000
"""API keys whose refusals are counted apart; those of further ones count together."""


class Accounts:
    """Counts events and passes them on to observers; an observer's exceptions are only logged."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.counters = Counters()
        self._refused = Counter[tuple[str, str]]()  # by API key and class
        self._observers = tuple(observers)
        self._num_faults = 0

    def step_launched(self, step: ScheduledStep, began_at: float, now: float) -> None:
        """Reports that a step's layers were launched."""
        self._tell(Observer.step_launched, step, began_at, now)

    def step_read(
        self,
        step: ScheduledStep,
        result: StepResult,
        started_at: float,
        now: float,
        visits_per_token: int,
        degraded_visits: int,
    ) -> None:
        """Counts and reports a step's layers that were read.

        `visits_per_token` is experts per token times MoE layers; `degraded_visits` are those of the
        whole step, with its last layers.
        """
        counters = self.counters
        if step.is_last:
            if step.phase is Phase.PREFILL:
                counters.steps_prefill += 1
            else:
                counters.steps_decode += 1
            counters.expert_visits += step.size * visits_per_token
            counters.degraded_visits += degraded_visits
        if step.is_first and step.phase is Phase.PREFILL:
            self._note_begun(step, started_at)
        self._tell(Observer.step_read, step, result, started_at, now)

    @property
    def wants_stages(self) -> bool:
        """Whether an observer wants to know which stages asynchronous workers run."""
        return any(type(o).stages_ran is not Observer.stages_ran for o in self._observers)

    def stages_ran(self, stages: "Stages") -> None:
        """Reports the stages that a worker ran."""
        self._tell(Observer.stages_ran, stages)

    def _note_begun(self, step: ScheduledStep, started_at: float) -> None:
        new = [s for s in step.sequences if math.isnan(s.began_at) and not s.request.is_audit]
        for sequence in new:
            sequence.began_at = started_at
        for priority in Priority:
            if of_class := [s for s in new if s.request.priority is priority]:
                queue_s = np.array([started_at - s.arrived_at for s in of_class])
                wait_s = np.array([max(0.0, started_at - s.ready_at) for s in of_class])
                self._tell(Observer.requests_began, queue_s, wait_s, priority)

    def tokens(
        self,
        latencies: Latencies,
        objectives: Callable[[Priority, int], tuple[float, float]],
        now: float,
    ) -> None:
        """Reports the latencies of one step's tokens; `objectives` returns the (TTFT, ITL) SLO of a
        class's requests to a model.
        """
        for (priority, number, model), arrived_at, previous_at in latencies:
            ttft_slo_s, itl_slo_s = objectives(priority, number)
            if arrived_at.size:
                self._tell(Observer.first_tokens, now - arrived_at, ttft_slo_s, priority, model)
            if previous_at.size:
                self._tell(Observer.further_tokens, now - previous_at, itl_slo_s, priority, model)

    def request_admitted(self, sequence: SequenceState, now: float) -> None:
        """Reports that a request was admitted."""
        if not sequence.request.is_audit:
            self._tell(Observer.request_admitted, sequence, now)

    def request_refused(self, key: str, priority: Priority | None) -> None:
        """Counts a request of an API key that was refused for load; `priority` None: no class had
        room, and its own was not read.
        """
        self.counters.requests_rejected += 1
        of = key, "any" if priority is None else priority.value
        known = of in self._refused or len(self._refused) < MAX_KEYS * (len(Priority) + 1)
        self._refused[of if known else ("other keys", of[1])] += 1

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """Counts and reports a request that got its last token."""
        if sequence.request.is_audit:
            return
        self.counters.requests_finished += 1
        self._tell(Observer.request_finished, sequence, output, now)

    def request_ended(self, sequence: SequenceState, error: ServingError | None) -> None:
        """Counts and reports a request that ended early; `error` None: its client disconnected."""
        if sequence.request.is_audit:
            return
        if isinstance(error, RequestFailed):
            self.counters.requests_failed += 1
        else:
            self.counters.requests_aborted += 1
        self._tell(Observer.request_ended, sequence, error)

    def stats(
        self,
        scheduler: "Scheduler",
        compilations: int,
        uptime_s: float,
        full_decode_step_s: float,
        audits: tuple[AuditState, ...],
    ) -> EngineStats:
        """Returns the counters, the scheduler's gauges, and what the engine adds."""
        places, num_pages = scheduler.places, scheduler.limits.num_pages
        return EngineStats(
            **asdict(self.counters),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_pages_used=num_pages - places.num_free_pages,
            kv_pages_total=num_pages,
            compilations_since_ready=compilations,
            uptime_s=uptime_s,
            parks=scheduler.num_parks,
            joins=scheduler.num_joins,
            evictions=sum(scheduler.num_evictions.values()),
            reused_tokens=scheduler.reuse.num_reused,
            prefix_queries=scheduler.reuse.num_asked,
            kv_pages_kept=places.num_idle_pages,
            kept_pages_evicted=places.num_evicted_pages,
            full_decode_step_s=full_decode_step_s,
            audits=audits,
            refused=tuple(Refused(*of, count) for of, count in list(self._refused.items())),
        )

    def _tell(self, event: Callable[..., None], *args: Any) -> None:
        for observer in self._observers:
            heard = getattr(observer, event.__name__)
            try:
                heard(*args)
            except NOT_OURS:
                raise
            except BaseException:
                self._num_faults += 1
                if self._num_faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    log.exception("%s failed (%d so far)", heard.__qualname__, self._num_faults)
