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

WINDOWS_S = 1.0, 4.0
"""Short enough to see a burst, and long enough to count arrivals by."""
SIGNIFICANT = 2.0
"""Standard deviations of a Poisson count by which the short window has to differ to be believed."""
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
                self._prefill_tokens.add(step.num_prompt_tokens)
                chunks = slice(step.num_decodes, None)
                prompts = zip(step.sequences[chunks], step.sampled[chunks], strict=True)
                for sequence, ends in prompts:
                    urgent = sequence.request.priority is Priority.LATENCY_SENSITIVE
                    if ends and urgent and not sequence.tokens:
                        self._prompt_tokens.add(len(sequence.prompt) - sequence.cached_tokens)
            self._exempt_share.add(step.refused_share)

    def load(self, now: float, **known: object) -> Load:
        """Returns the load now; `known` are the fields that the caller counts."""
        self._forget(now)
        return Load(
            arrivals_per_s=self._rate(now),
            prompt_tokens=self._prompt_tokens.value,
            new_tokens=self._new_tokens.value,
            prefill_tokens=self._prefill_tokens.value,
            exempt_share=self._exempt_share.value,
            **known,  # type: ignore[arg-type]
        )

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt that had to be computed; 0 before any."""
        return self._prompt_tokens.value

    def _rate(self, now: float) -> float:
        short_s, long_s = WINDOWS_S[0], min(WINDOWS_S[1], now - self._first_at)
        newest = len(self._arrivals) - bisect_right(self._arrivals, now - short_s)
        if long_s >= 2 * short_s:
            expected = (len(self._arrivals) - newest) / (long_s - short_s) * short_s
            if abs(newest - expected) <= SIGNIFICANT * math.sqrt(max(expected, newest)):
                return len(self._arrivals) / long_s
        return newest / short_s

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
