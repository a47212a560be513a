"""The SLO analyser: recent latencies of both phases, their P90, and the two controllers."""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jmoe.brownout import check_threshold, strategy_code
from serving.config import BrownoutConfig, SalcConfig
from serving.control.salc import Salc
from serving.errors import InvalidRequest
from serving.latencies import Latencies
from serving.plan import Phase, StepControl
from serving.request import BrownoutChange, BrownoutState, Priority
from serving.settings import SettingsError


class LatencyWindow:
    """Latency samples of the last `window_s` seconds, in batches of one step each."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._batches: deque[tuple[float, float, np.ndarray]] = deque()

    def add(self, began_at: float, ended_at: float, samples_s: np.ndarray) -> None:
        """Samples of one step. `began_at` is when the earliest of what they measure began."""
        self._batches.append((began_at, ended_at, samples_s))
        self._forget(ended_at)

    def p90(self, now: float, since: float, min_samples: int) -> float | None:
        """P90 of samples inside the window that lie wholly after `since`; None for too few."""
        self._forget(now)
        taken = [samples for began_at, _, samples in self._batches if began_at >= since]
        if sum(map(len, taken)) < min_samples:
            return None
        return float(np.percentile(np.concatenate(taken), 90))

    def _forget(self, now: float) -> None:
        while self._batches and self._batches[0][1] < now - self.window_s:
            self._batches.popleft()


class PhaseControl:
    """One phase's samples, controller, and the moment its threshold last changed."""

    def __init__(self, salc: SalcConfig, threshold_percent: float) -> None:
        self.window = LatencyWindow(salc.window_s)
        self.salc = Salc(salc, threshold_percent)
        self.changed_at = -math.inf
        self.p90_s = math.nan  # of the last update that had data

    def set_threshold(self, percent: float, now: float) -> None:
        """Fixes the threshold; samples from before do not count any more."""
        self.salc.threshold_percent = float(percent)
        self.changed_at = now

    def update(self, now: float, slo_s: float, waiting_age_s: float, *, control: bool) -> None:
        """Reads the P90 and lets the controller act on it.

        Latency that is still growing counts too: `waiting_age_s`, the age of the oldest request
        that waits for its first token, is a lower bound of what it will report.
        """
        config = self.salc.config
        p90_s = self.window.p90(now, self.changed_at, config.min_samples)
        if p90_s is not None:
            self.p90_s = p90_s
        if waiting_age_s > slo_s or (p90_s is not None and waiting_age_s > p90_s):
            p90_s = waiting_age_s
            self.p90_s = p90_s if math.isfinite(p90_s) else self.p90_s
        if control and self.salc.update(p90_s, slo_s):
            self.changed_at = now


def starting_strategy(wanted: str, way: int) -> str:
    """The strategy to start with: `auto` is partial where united experts of a way are loaded.

    Raises SettingsError for partial brownout without them.
    """
    if wanted == "partial" and not way:
        raise SettingsError(
            "engine.brownout.strategy is 'partial', and the model has no united experts; make them "
            "with `jmoe distill --model DIR --data FILE --out DIR`, or set it to auto, full or zero"
        )
    if wanted == "auto":
        return "partial" if way else "zero"
    return wanted


class Waiting(NamedTuple):
    """What waits in a class.

    Where more requests wait than slots are free (`slots_taken`), a first token waits for decode
    steps: once it has waited longer than the TTFT SLO, decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest that waits for its first token
    slots_taken: bool = False


class SloAnalyser:
    """Settings of brownout, samples of TTFT and ITL, and the controllers between them."""

    def __init__(self, brownout: BrownoutConfig, salc: SalcConfig, *, way: int) -> None:
        """`way` is the one that is loaded, 0 for none. Raises SettingsError as
        `starting_strategy`.
        """
        self.strategy = starting_strategy(brownout.strategy, way)
        self.way = way
        self.salc_enabled = brownout.salc
        self.ttft_slo_s, self.itl_slo_s = brownout.ttft_slo_s, brownout.itl_slo_s
        self.config = salc
        self.prefill = PhaseControl(salc, brownout.prefill_threshold_percent)
        self.decode = PhaseControl(salc, brownout.decode_threshold_percent)
        # Best effort without an objective has nothing to control, and moves nothing.
        self._best_effort = {
            Phase.PREFILL: PhaseControl(salc, 100), Phase.DECODE: PhaseControl(salc, 100)
        }  # fmt: skip
        self._best_effort_slo_s = tuple(
            slo_s or math.inf
            for slo_s in (brownout.best_effort_ttft_slo_s, brownout.best_effort_itl_slo_s)
        )
        self._next_update = -math.inf

    def objectives(self, priority: Priority) -> tuple[float, float]:
        """SLO of a class's first tokens and of the others, in seconds; infinite without one."""
        if priority is Priority.LATENCY_SENSITIVE:
            return self.ttft_slo_s, self.itl_slo_s
        first_s, further_s = self._best_effort_slo_s
        return first_s, further_s

    def control(self, phase: Phase, *, ls: bool = True) -> StepControl:
        """Brownout of a step of `phase` that is launched now; `ls`: whether it has such a row.

        The latency-sensitive class sets the threshold of every step, since all of them hold it up;
        best effort with an objective of its own may lower that of steps which are all its own.
        """
        controller = self._of(Priority.LATENCY_SENSITIVE)[phase]
        percent = controller.salc.percent
        if not ls:
            percent = min(percent, self._best_effort[phase].salc.percent)
        return StepControl(percent, strategy_code(self.strategy))

    def _of(self, priority: Priority) -> dict[Phase, PhaseControl]:
        if priority is Priority.BEST_EFFORT:
            return self._best_effort
        return {Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}

    def observe(
        self, priority: Priority, latencies: Latencies, launched_at: float, now: float
    ) -> None:
        """Tokens of a class came at `now`, of a step launched then."""
        of, arrived_at = self._of(priority), latencies.first(priority)
        if arrived_at.size:
            of[Phase.PREFILL].window.add(float(arrived_at.min()), now, now - arrived_at)
        previous_at = latencies.further(priority)
        if previous_at.size:
            began_at = min(float(previous_at.min()), launched_at)
            of[Phase.DECODE].window.add(began_at, now, now - previous_at)

    def maybe_update(self, now: float, waiting: Mapping[Priority, Waiting]) -> None:
        """Once an interval: every controller with an objective takes a step."""
        if now < self._next_update:
            return
        self._next_update = now + self.config.interval_s
        control = self.salc_enabled and self.strategy != "zero"
        for priority, of_class in waiting.items():
            of, (ttft_slo_s, itl_slo_s) = self._of(priority), self.objectives(priority)
            of[Phase.PREFILL].update(
                now, ttft_slo_s, of_class.oldest_s, control=control and ttft_slo_s < math.inf
            )
            starved = of_class.slots_taken and of_class.oldest_s > ttft_slo_s
            of[Phase.DECODE].update(
                now,
                itl_slo_s,
                math.inf if starved else 0.0,
                control=control and itl_slo_s < math.inf,
            )

    def check(self, change: BrownoutChange) -> None:
        """Raises InvalidRequest for a value out of range; nothing is changed."""
        try:
            if change.strategy is not None:
                strategy_code(change.strategy)
            for percent in (change.prefill_threshold_percent, change.decode_threshold_percent):
                if percent is not None:
                    check_threshold(percent)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        for name in ("ttft_slo_s", "itl_slo_s"):
            value = getattr(change, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} is {value}; it must be a positive number of seconds")

    def use_way(self, way: int, now: float) -> None:
        """Every layer has the united experts of `way` now; samples from before count no more."""
        if way != self.way:
            self.way = way
            for controller in self._all():
                controller.changed_at = now

    def apply(self, change: BrownoutChange, now: float) -> None:
        """Takes over a checked change; `way` is the experts loader's to do.

        Samples of before count on unless steps are others now: a caller who sets nothing, or the
        same again, holds up no controller.
        """
        steps_differ = change.strategy not in (None, self.strategy)
        self.strategy = change.strategy or self.strategy
        self.ttft_slo_s = change.ttft_slo_s or self.ttft_slo_s
        self.itl_slo_s = change.itl_slo_s or self.itl_slo_s
        fixed = {
            self.prefill: change.prefill_threshold_percent,
            self.decode: change.decode_threshold_percent,
        }
        for phase, percent in fixed.items():
            if percent is not None:
                self.salc_enabled = False
                phase.set_threshold(percent, now)
        if steps_differ:
            for controller in self._all():
                controller.changed_at = now
        if change.salc_enabled is not None:
            self.salc_enabled = change.salc_enabled

    def _all(self) -> list[PhaseControl]:
        return [self.prefill, self.decode, *self._best_effort.values()]

    def state(self) -> BrownoutState:
        """Settings and latencies as an operator reads them."""
        return BrownoutState(
            strategy=self.strategy,
            way=self.way,
            prefill_threshold_percent=self.prefill.salc.threshold_percent,
            decode_threshold_percent=self.decode.salc.threshold_percent,
            salc_enabled=self.salc_enabled,
            ttft_slo_s=self.ttft_slo_s,
            itl_slo_s=self.itl_slo_s,
            warning_factor=self.config.warning_factor,
            ttft_p90_s=self.prefill.p90_s,
            itl_p90_s=self.decode.p90_s,
        )
