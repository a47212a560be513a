"""The recent load of an engine."""

import math
from bisect import bisect_right
from collections import deque

from serving.control.controller import Load
from serving.plan import Phase, StepResult
from serving.request import Output, Priority
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep
from serving.telemetry.observer import Observer

WINDOWS_S = 1.0, 16.0
"""Short enough to see a burst, and long enough to count arrivals by."""
SIGNIFICANT = 3.0
"""Standard deviations of a Poisson count by which a window has to differ from the one before it to
be believed."""
WEIGHT = 0.05  # of the newest step or request in a mean


class LoadMeter(Observer):
    """Rates and means of the latency-sensitive class, and of the steps that serve it."""

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque()
        self._first_at = math.inf
        self._prompt_tokens = _Mean()
        self._new_tokens = _Mean()
        self._prefill_tokens = _Mean()
        self._exempt_share = _Mean()

    def request_admitted(self, sequence: SequenceState, now: float) -> None:
        """See Observer."""
        if sequence.request.priority is Priority.LATENCY_SENSITIVE:
            self._first_at = min(self._first_at, now)
            self._arrivals.append(now)
            self._forget(now)
            if not self._prompt_tokens.value:
                self._prompt_tokens.add(len(sequence.prompt))  # until some are computed

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """See Observer."""
        if sequence.request.priority is Priority.LATENCY_SENSITIVE:
            self._new_tokens.add(len(sequence.tokens))

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """See Observer."""
        if step.is_last and step.has_ls:
            if step.phase is Phase.PREFILL:
                self._prefill_tokens.add(step.size)
                for sequence, ends in zip(step.sequences, step.sampled, strict=True):
                    urgent = sequence.request.priority is Priority.LATENCY_SENSITIVE
                    if ends and urgent and not sequence.tokens:
                        self._prompt_tokens.add(len(sequence.prompt) - sequence.cached_tokens)
            self._exempt_share.add(step.refused_share)

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt that had to be computed; 0 before any."""
        return self._prompt_tokens.value

    def load(self, now: float, **known: object) -> Load:
        """Returns the load now; `known` are the fields that the caller counts."""
        self._forget(now)
        per_s, steady_s = self._rate(now)
        return Load(
            arrivals_per_s=per_s,
            steady_s=steady_s,
            prompt_tokens=self._prompt_tokens.value,
            new_tokens=self._new_tokens.value,
            prefill_tokens=self._prefill_tokens.value,
            exempt_share=self._exempt_share.value,
            **known,  # type: ignore[arg-type]
        )

    def _rate(self, now: float) -> tuple[float, float]:
        """Returns arrivals a second, and the seconds that they are counted over: as many as came at
        one rate. A window is doubled while the time before it had as many, but for chance.
        """
        length_s, arrivals = WINDOWS_S[0], list(self._arrivals)
        count = len(arrivals) - bisect_right(arrivals, now - length_s)
        while 2 * length_s <= min(WINDOWS_S[1], now - self._first_at):
            before = len(arrivals) - bisect_right(arrivals, now - 2 * length_s) - count
            if abs(count - before) > SIGNIFICANT * math.sqrt(count + before):
                break
            count, length_s = count + before, 2 * length_s
        return count / length_s, length_s

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now - WINDOWS_S[-1]:
            self._arrivals.popleft()


class _Mean:
    """A plain mean of few values, and an exponentially weighted one of more."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(WEIGHT, 1 / self._count) * (value - self.value)
