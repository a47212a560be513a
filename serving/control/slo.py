"""The SLO analyser: recent latencies by class and phase, and the controllers that act on them."""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from jmoe.brownout import check_threshold, strategy_code
from serving.config import BrownoutConfig, SalcConfig
from serving.control.controller import Decision, Load, Loss, PhaseSeen, Seen, StepSeen
from serving.control.guarded import CONTROLLERS, GuardedController, make_controller
from serving.control.load import LoadMeter
from serving.control.losses import Curve, CurvesOf, LossBound, Losses
from serving.control.window import LatencyWindow
from serving.errors import InvalidRequest, SettingsError, shown
from serving.plan import Phase, StepControl
from serving.request import (
    BrownoutChange,
    BrownoutState,
    Expected,
    ModelBrownout,
    Priority,
    number_of,
)
from serving.scheduling.pace import Pace
from serving.scheduling.prefixes import EXACT, NOBODYS, Brownout
from serving.scheduling.scheduler import FEW_DECODING
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep
from serving.scheduling.waiting import WHOLE, QueuedClass, Shares
from serving.telemetry.latencies import Latencies

log = logging.getLogger(__name__)

REST_S = 10.0
"""After the last late token, thresholds are back at the ceiling within this time, if the load is
light."""
SHOWN_S = 1.0
"""Of steps over which thresholds of their own are shown as a mean."""
REUSE_S = 2.0
"""Cached pages are as good as new if steps had as much brownout within this time: thresholds go up
and down within a burst, and its pages would be computed again and again."""
LATE_TAKEN = 0.05
"""Share of late first tokens beyond which fewer requests are taken, where late ones are refused."""
SHRINK, GROW, LEAST_ROOM = 0.8, 1.03, 0.15
SPENT = 5.0
"""Points above the floor from which on brownout counts as exhausted."""
CONFIRMED = 3
"""So many decisions in a row have to find brownout in vain before it stops."""
CONFIRMED_S = 5.0
"""And for so long that it saves nothing: where a machine changes its speed, times of thresholds
that were not in use lately are still those of before."""
LEAST_SAVING = 0.03
"""Share of a step's time that all of the brownout has to save."""
TRY_AGAIN_S = 30.0
"""After which brownout that saves nothing is tried again, since a host may have hidden what it
saves; and every time after twice as long."""
MANY_ROWS = 8
"""In smaller steps, brownout saves next to nothing anyway."""


class Steps(NamedTuple):
    """Steps with thresholds of their own, within an interval of the controller."""

    rows: int = 0
    percent_by_rows: float = 0.0  # their sum
    lowest_percent: float = math.inf


class PhaseControl:
    """One phase's samples and threshold, and the moment that last changed."""

    def __init__(self, salc: SalcConfig, threshold_percent: float) -> None:
        self.window = LatencyWindow(salc.window_s)
        self.threshold_percent = float(threshold_percent)
        self.changed_at = -math.inf
        self.p90_s = math.nan  # of the last update that had data
        self.predicted_p90_s = math.nan  # by the controller's last decision
        self._min_samples = salc.min_samples
        self._steps = Steps()  # since the last update
        self._before = deque[Steps](maxlen=max(1, math.ceil(REUSE_S / salc.interval_s)))
        self._num_shown = max(1, math.ceil(SHOWN_S / salc.interval_s))  # of those before
        self.in_vain = ""  # why brownout cannot keep the objective; empty: it may
        self.least_s = math.nan  # the shortest objective that it could keep, if this one is shorter
        self._num_in_vain, self._in_vain_since = 0, math.nan
        self._try_again_s, self._try_again_at = TRY_AGAIN_S, math.inf

    def tries_again(self, now: float) -> bool:
        """Returns whether brownout that saved nothing is to be tried again from now on."""
        if now < self._try_again_at:
            return False
        log.info("brownout is tried again; until now %s", self.in_vain)
        self.in_vain, self._num_in_vain = "", 0
        self._try_again_s, self._try_again_at = 2 * self._try_again_s, math.inf
        return True

    def judge(self, in_vain: str, least_s: float, now: float) -> None:
        """Notes what a decision found: why brownout is in vain, or nothing. Without `least_s` it
        saves nothing.
        """
        self._num_in_vain = self._num_in_vain + 1 if in_vain else 0
        if self._num_in_vain <= 1:
            self._in_vain_since = now
        for_s = CONFIRMED_S if math.isnan(least_s) else 0.0
        is_sure = self._num_in_vain >= CONFIRMED and now - self._in_vain_since >= for_s
        before = self.in_vain
        if not in_vain:
            self.in_vain, self.least_s = "", math.nan
            self._try_again_s, self._try_again_at = TRY_AGAIN_S, math.inf
        elif self.in_vain or is_sure:
            self.in_vain, self.least_s = in_vain, least_s
            if math.isnan(least_s):
                self._try_again_at = min(self._try_again_at, now + self._try_again_s)
        if self.in_vain and not before:
            first = self._try_again_s == TRY_AGAIN_S
            log.log(logging.WARNING if first else logging.INFO, "%s", self.in_vain)
        elif before and not self.in_vain:
            log.info("no more: %s", before)

    @property
    def percent(self) -> int:
        """The threshold in whole percent, rounded up: a step never degrades more than it allows."""
        return math.ceil(self.threshold_percent)

    def set_threshold(self, percent: float, now: float) -> None:
        """Samples from before a change count no more for the P90 that Algorithm 2 goes by."""
        if percent != self.threshold_percent:
            self.changed_at = now
        self.threshold_percent = float(percent)

    def stop(self) -> None:
        """Stops the controller: nothing is expected any more, nor in vain, and every step has the
        threshold.
        """
        self.judge("", math.nan, math.nan)
        self.predicted_p90_s = math.nan
        self._steps = Steps()
        self._before.clear()

    def note_step(self, percent: float, rows: int) -> None:
        """Records that a step was launched under a threshold of its own."""
        count, total, lowest = self._steps
        self._steps = Steps(count + rows, total + percent * rows, min(lowest, percent))

    @property
    def lowest_percent(self) -> int:
        """The lowest threshold, now or of a step within `REUSE_S`, in whole percent, rounded up."""
        lowest = (one.lowest_percent for one in (*self._before, self._steps))
        return math.ceil(min(self.threshold_percent, *lowest))

    @property
    def shown_percent(self) -> float:
        """What an operator reads: the mean of steps with thresholds of their own, where there were
        any in the last second, or the last interval if that is longer; else the threshold.
        """
        shown = list(self._before)[-self._num_shown :]
        count = sum(one.rows for one in shown)
        total = sum(one.percent_by_rows for one in shown)
        return total / count if count else self.threshold_percent

    def seen(
        self,
        now: float,
        slo_s: float,
        waiting_age_s: float,
        share: float = 1.0,
        *,
        by_step: bool = False,
    ) -> PhaseSeen:
        """Returns what a controller sees, with that share of the objective and of latencies in its
        seconds; `by_step`: steps have thresholds of their own, and an operator reads the P90 of all
        samples in the window.

        Latency that is still growing counts too: `waiting_age_s`, the age of the oldest request
        that waits for its first token, is a lower bound of what it will report.
        """
        lowest = min(self._steps.lowest_percent, self.threshold_percent)
        self._before.append(self._steps._replace(lowest_percent=lowest))
        self._steps = Steps()
        p90_s = self.window.p90(now, self.changed_at, self._min_samples)
        shown_s = self.window.p90(now, -math.inf, self._min_samples) if by_step else p90_s
        self.p90_s = self.p90_s if shown_s is None else shown_s
        if waiting_age_s > slo_s or (p90_s is not None and waiting_age_s > p90_s):
            p90_s = waiting_age_s
            self.p90_s = p90_s if math.isfinite(p90_s) else self.p90_s
        late_share = self.window.late_share(now, slo_s, self._min_samples)
        p90_s = None if p90_s is None else share * p90_s
        return PhaseSeen(self.threshold_percent, share * slo_s, p90_s, late_share)


@dataclass
class ClassControl:
    """A class's phases, and the controller of both."""

    prefill: PhaseControl
    decode: PhaseControl
    controller: GuardedController
    strained_at: float = math.nan
    """When a token was late last, a request waited or no slot was free; at first, the first
    decision.
    """
    room: float = 1.0
    """Share of the time that is left for waiting up to which requests are taken, where late ones
    are refused.
    """

    @classmethod
    def make(
        cls, salc: SalcConfig, controller: str, percents: tuple[int, int], slow_s: float
    ) -> "ClassControl":
        """Makes the control of a class. Raises ValueError for a controller that cannot be made."""
        prefill, decode = (PhaseControl(salc, percent) for percent in percents)
        return cls(prefill, decode, make_controller(salc, controller, slow_s))

    def of(self, phase: Phase) -> PhaseControl:
        """Returns the control of one phase."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    def set_room(self, late_share: float | None) -> None:
        """Takes fewer requests where of those that were taken too many came late, and more again
        otherwise.
        """
        grows = late_share is None or late_share <= LATE_TAKEN
        self.room = min(max(self.room * (GROW if grows else SHRINK), LEAST_ROOM), 1.0)

    def stop(self) -> None:
        """Stops both controllers."""
        self.prefill.stop()
        self.decode.stop()

    def take(self, decision: Decision, seen: Seen, least_percent: float) -> None:
        """Applies what the controller decided for phases that have an objective, down to the least
        threshold that there may be.
        """
        if seen.prefill.slo_s < math.inf:
            self.prefill.set_threshold(max(decision.prefill_percent, least_percent), seen.now)
            self.prefill.predicted_p90_s = decision.ttft_p90_s
        if seen.decode.slo_s < math.inf:
            self.decode.set_threshold(max(decision.decode_percent, least_percent), seen.now)
            self.decode.predicted_p90_s = decision.itl_p90_s


def starting_strategy(wanted: str, way: int) -> str:
    """Returns the strategy to start with: `auto` is partial where united experts of a way are
    loaded.

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


def _read(curve: Curve | None, percent: float) -> float:
    return math.nan if curve is None else curve[round(percent)]


class SloAnalyser:
    """Settings of brownout, samples of TTFT and ITL, and the controllers between them."""

    def __init__(
        self,
        brownout: BrownoutConfig,
        salc: SalcConfig,
        *,
        way: int,
        pace: Pace | None = None,
        slow_s: float = math.inf,
        losses: Losses | None = None,
        models: Sequence[ModelBrownout] = (ModelBrownout(""),),
    ) -> None:
        """`way` is the one that is loaded, 0 for none; `pace` knows what steps take. Calls of a
        controller that take longer than `slow_s` are logged. `losses`: what thresholds are expected
        to cost; None: not known. `models`: what each has of its own, by place.

        Raises SettingsError as `starting_strategy`, and ValueError for a controller that cannot be
        made.
        """
        self.strategy = starting_strategy(brownout.strategy, way)
        self._configured = brownout.strategy  # a user's own is part of every program
        self.keep = brownout.keep
        self.way = way
        self.way_changes = False  # some layers have the next one already
        self.max_expected_loss = brownout.max_expected_loss
        self.losses = losses or Losses([""], levels=brownout.levels)
        self.salc_enabled = brownout.salc
        self.ttft_slo_s, self.itl_slo_s = brownout.ttft_slo_s, brownout.itl_slo_s
        self.models = list(models)
        self.is_own_objective = any(one.ttft_slo_s for one in models)
        """Whether a model has its own of first tokens, or somebody set one while serving."""
        self.shares, self._objectives = self._own_shares(), self._of_models()
        self._shares_in_force = WHOLE
        self.config, self._slow_s = salc, slow_s
        self.load = LoadMeter()
        self._pace = pace or Pace()
        given = brownout.prefill_threshold_percent, brownout.decode_threshold_percent
        self.ls = ClassControl.make(salc, salc.controller, given, slow_s)
        # Best effort without an objective has nothing to control, and moves nothing.
        self.best_effort = ClassControl.make(salc, "algorithm2", (100, 100), slow_s)
        first_s, further_s = brownout.best_effort_ttft_slo_s, brownout.best_effort_itl_slo_s
        self._best_effort_slo_s = first_s or math.inf, further_s or math.inf
        self._next_update = -math.inf
        self._load = Load()  # of latency-sensitive requests; counts are now's
        self._learnt = self.strategy, self.way  # of what kind of brownout step times are

    def room(self, priority: Priority) -> float:
        """Returns what share of the time that the TTFT SLO leaves for waiting requests may expect
        to wait, so that hardly any that is taken comes late after all.
        """
        return self._of(priority).room

    def objectives(self, priority: Priority, model: int) -> tuple[float, float]:
        """Returns the SLO of first tokens and of the others of a class's requests to a model, in
        seconds; infinite without one.
        """
        if priority is Priority.BEST_EFFORT:
            return self._best_effort_slo_s
        own = self.models[model]
        return own.ttft_slo_s or self.ttft_slo_s, own.itl_slo_s or self.itl_slo_s

    def _own_shares(self) -> dict[int, Shares]:
        """Returns the shares of latency-sensitive requests to models with objectives of their own.

        Windows have latencies over these shares, and so in seconds of the class's objectives: a
        token that took all of its model's counts as one that took all of the class's.
        """
        return {
            model: ((own.ttft_slo_s or ttft) / ttft, (own.itl_slo_s or itl) / itl)
            for ttft, itl in [(self.ttft_slo_s, self.itl_slo_s)]
            for model, own in enumerate(self.models)
            if own.ttft_slo_s or own.itl_slo_s
        }

    def _of_models(self) -> list[tuple[float, float]]:
        return [self.objectives(Priority.LATENCY_SENSITIVE, one) for one in range(len(self.models))]

    def _renew_objectives(self) -> None:
        """Takes over objectives that were set; what cannot keep others does not count any more."""
        before, self._objectives = self._objectives, self._of_models()
        self.shares = self._own_shares()
        each = zip(zip(*before, strict=True), zip(*self._objectives, strict=True), strict=True)
        for of, (was, now_s) in zip((self.ls.prefill, self.ls.decode), each, strict=True):
            if was != now_s and not math.isnan(of.least_s):
                of.judge("", math.nan, math.nan)

    def put(self, place: int, name: str, curves: CurvesOf | None) -> None:
        """Takes in a model that is new in a place, with its expected loss. An empty name, and None:
        the place is vacant.
        """
        self.losses.put(place, curves)
        self.models[place] = ModelBrownout(name)
        self._renew_objectives()

    @property
    def in_force(self) -> tuple[float, float]:
        """The shortest SLOs of latency-sensitive requests that are there, of first tokens and of
        the others, in seconds. All steps hold them up, whichever model's they are.
        """
        ttft_share, itl_share = self._shares_in_force
        return ttft_share * self.ttft_slo_s, itl_share * self.itl_slo_s

    def control(
        self, step: ScheduledStep, since_s: float, num_decoding: int, now: float
    ) -> StepControl:
        """Returns the brownout of a step that is launched now; running requests will have waited
        `since_s` for a token as it begins.

        The latency-sensitive class sets the threshold of every step, since all of them hold it up;
        best effort with an objective of its own may lower that of steps which are all its own. A
        model's own bounds hold for its rows: of a mixed step, those that shall have a higher
        threshold than others are exempt. A hybrid step has the higher one of its phases: of
        neither, more is degraded than it may be.
        """
        waits_s = {step.phase: since_s}
        if step.num_decodes:
            times, sizes = self._pace.times, (step.num_prompt_tokens, step.num_decodes)
            more_s = times.hybrid_s(*sizes) - times.expected_s(Phase.DECODE, step.num_decodes)
            waits_s[Phase.DECODE] = since_s + more_s
            num_decoding += step.num_decodes
        percent = max(
            self._percent(step, phase, waited_s, num_decoding, now)
            for phase, waited_s in waits_s.items()
        )
        for phase in waits_s:
            if self._decides_by_step(step, phase):
                self.ls.of(phase).note_step(percent, self._size(step, phase))
        percents = {model: self._bounded(percent, model) for model in step.models}
        lowest = min(percents.values())
        if spared := [model for model in percents if percents[model] > lowest]:
            step.spare(spared)
        floors = (self.models[model].floor_percent for model in percents.keys() - spared)
        return StepControl(lowest, self.code, max(self.least_percent, *floors))

    def _decides_by_step(self, step: ScheduledStep, phase: Phase) -> bool:
        """Returns whether a controller decides this step's threshold of a phase by itself."""
        by_step = self.controls and self.ls.controller.by_step
        return step.has_ls and by_step and not self.ls.of(phase).in_vain

    @staticmethod
    def _size(step: ScheduledStep, phase: Phase) -> int:
        return step.num_prompt_tokens if step.phase is phase else step.num_decodes

    def _percent(
        self, step: ScheduledStep, phase: Phase, since_s: float, num_decoding: int, now: float
    ) -> int:
        """Returns the threshold of those of a step's rows that are in this phase."""
        of = self.ls.of(phase)
        if not step.has_ls:
            return min(of.percent, self.best_effort.of(phase).percent)
        if not self._decides_by_step(step, phase):
            return of.percent
        # A row that completes singly has the company of all that decode.
        by_itself = step.singles is not None and phase is Phase.DECODE
        seen = StepSeen(
            now=now,
            phase=phase,
            size=num_decoding if by_itself else self._size(step, phase),
            num_decoding=num_decoding,
            since_s=since_s,
            exempt_share=step.exempt_share,
            percent=of.threshold_percent,
            itl_slo_s=self.in_force[1],
            times=self._pace.times,
            load=self._load,
        )
        return max(self.ls.controller.of_step(seen), self.least_percent)

    def _bounded(self, percent: int, model: int) -> int:
        if self.strategy == "zero":
            return 100
        own = self.models[model]
        bounded = min(max(percent, own.floor_percent), own.ceiling_percent)
        return max(bounded, self.least_percent)

    def accepted(self, sequence: SequenceState) -> Brownout:
        """Returns the brownout under which a request's prompt would be computed if it were now, or
        would have been a moment ago.
        """
        request = sequence.request
        if self.strategy == "zero" or self.way_in_force < 0 or not request.allow_brownout:
            return EXACT
        percent = self.ls.prefill.lowest_percent
        if sequence.priority is Priority.BEST_EFFORT:
            percent = min(percent, self.best_effort.prefill.lowest_percent)
        return Brownout(self._bounded(percent, request.model), (self.code, self.way))

    def suffered(self, step: ScheduledStep) -> Brownout:
        """Returns the brownout of those of a step's rows that were degraded. Without a threshold it
        was for lack of experts; and layers may have had united experts of two ways.
        """
        control = step.control
        if control is None or not control.strategy or step.way < 0:
            return NOBODYS
        if control.threshold_percent == 100:
            return NOBODYS
        return Brownout(control.threshold_percent, (control.strategy, step.way))

    @property
    def code(self) -> int:
        """The traced code of the strategy, and of which experts it keeps."""
        return strategy_code(self.strategy, self.keep)

    @property
    def least_percent(self) -> int:
        """The lowest threshold whose expected loss is within the bound."""
        if not self.max_expected_loss or self.strategy == "zero":
            return 0
        return self.losses.least_percent(self.code, self.way_in_force, self.max_expected_loss)

    @property
    def floor_percent(self) -> float:
        """The lowest threshold that there may be, by that bound and by the settings."""
        return max(self.config.floor_percent, self.least_percent)

    def loss_curves(self, step: ScheduledStep) -> tuple[Curve | None, ...]:
        """Returns what the thresholds of a step's kind of brownout are expected to cost each model;
        None where that is not known.
        """
        assert step.control is not None
        return self.losses.curves(step.control.strategy, self.way if step.way < 0 else step.way)

    @property
    def _loss(self) -> Loss | None:
        """What a token is expected to cost that is served now. Tables know no phase: as much in
        either.
        """
        curve = self.losses.highest(self.code, self.way_in_force)
        return None if curve is None else lambda phase: curve

    @property
    def way_in_force(self) -> int:
        """The way of every layer; -1 while they change."""
        return -1 if self.way_changes else self.way

    @property
    def is_exact(self) -> bool:
        """Whether nothing of the latency-sensitive class is to be degraded now, nor was a moment
        ago.
        """
        of_phases = self.ls.prefill.lowest_percent, self.ls.decode.lowest_percent
        ceilings = (own.ceiling_percent for own in self.models)
        return self.strategy == "zero" or min(*of_phases, *ceilings) == 100

    @property
    def controls(self) -> bool:
        """Whether controllers move thresholds."""
        return self.salc_enabled and self.strategy != "zero"

    def decides_in_s(self, now: float) -> float | None:
        """Returns how long it is to the next decision; None if nothing would move on an idle
        engine.
        """
        return max(0.0, self._next_update - now) if self.is_moved else None

    @property
    def is_moved(self) -> bool:
        """Whether a controller has a threshold below its ceiling."""
        shown = [
            of.of(phase).shown_percent for of in (self.ls, self.best_effort) for phase in Phase
        ]
        return self.controls and min(shown) < self.config.ceiling_percent

    def itl_slack_s(self, before: ScheduledStep, prefill_tokens: int, num_decoding: int) -> float:
        """Returns the ITL in seconds that running requests have left for a prefill step after the
        one `before`, which runs.
        """
        if before.phase is Phase.DECODE:
            return -math.inf  # a prefill step's turn anyway
        steps = [
            (phase, size, 100.0 if self.strategy == "zero" else self.ls.of(phase).threshold_percent)
            for phase, size in ((Phase.PREFILL, prefill_tokens), (Phase.DECODE, num_decoding))
        ]
        return self._pace.itl_slack_s(self.in_force[1], before, steps)

    def _of(self, priority: Priority) -> ClassControl:
        return self.best_effort if priority is Priority.BEST_EFFORT else self.ls

    def observe(self, latencies: Latencies, launched_at: float, now: float) -> None:
        """Records tokens that came at `now`, of a step launched then."""
        for (priority, model, _), arrived_at, previous_at in latencies:
            of, (ttft_slo_s, itl_slo_s) = self._of(priority), self.objectives(priority, model)
            is_ls = priority is Priority.LATENCY_SENSITIVE
            first, further = self.shares.get(model, WHOLE) if is_ls else WHOLE
            if arrived_at.size:
                began_at = float(arrived_at.min())
                of.strained_at = now if now - began_at > ttft_slo_s else of.strained_at
                of.prefill.window.add(began_at, now, (now - arrived_at) / first)
            if previous_at.size:
                began_at = float(previous_at.min())
                of.strained_at = now if now - began_at > itl_slo_s else of.strained_at
                of.decode.window.add(min(began_at, launched_at), now, (now - previous_at) / further)

    def maybe_update(
        self, now: float, waiting: Mapping[Priority, QueuedClass], max_running: int = 1
    ) -> None:
        """Lets every controller with an objective decide, once an interval."""
        urgent = waiting[Priority.LATENCY_SENSITIVE]
        self._shares_in_force = urgent.shares
        self._load = self._load._replace(
            num_running=urgent.num_running,
            num_waiting=urgent.num_queued,
            num_prefilling=urgent.num_prefilling,
        )
        if now < self._next_update:
            return
        self._next_update = now + self.config.interval_s
        for priority, of_class in waiting.items():
            of, ttft_slo_s, itl_slo_s = self._of(priority), *self._best_effort_slo_s
            if priority is Priority.LATENCY_SENSITIVE:
                ttft_slo_s, itl_slo_s = self.ttft_slo_s, self.itl_slo_s
            (first, further), oldest_s = of_class.shares, of_class.oldest_s
            starved = of_class.slots_taken and oldest_s > ttft_slo_s
            by_step, late_s = of.controller.by_step, math.inf if starved else 0.0
            prefill = of.prefill.seen(now, ttft_slo_s, oldest_s, first, by_step=by_step)
            decode = of.decode.seen(now, itl_slo_s, late_s, further, by_step=by_step)
            of.set_room(prefill.late_share)
            if not self.controls:
                of.stop()
                continue
            running = of_class.num_running
            in_company = running >= FEW_DECODING * max_running
            load = self.load.load(
                now,
                num_running=running,
                num_waiting=of_class.num_queued,
                num_prefilling=of_class.num_prefilling,
                max_running=max_running,
                company=self._pace.company(self.in_force[0], running) if in_company else None,
            )
            bounds = self.floor_percent, max(self.floor_percent, self.config.ceiling_percent)
            seen = Seen(now, prefill, decode, load, self._pace.times, self._loss, bounds)
            decision = of.controller.decide(seen)
            is_full = of_class.slots_taken or running >= max_running
            if is_full or oldest_s > ttft_slo_s or math.isnan(of.strained_at):
                of.strained_at = now
            if priority is Priority.LATENCY_SENSITIVE:
                self._load = load
                self._judge(load, now)
            released = self._released(of, seen, of_class.slots_taken)
            decision = decision._replace(
                ttft_p90_s=decision.ttft_p90_s / first,
                itl_p90_s=decision.itl_p90_s / further,
                **released,
            )
            of.take(decision, seen, self.least_percent)

    def _released(self, of: ClassControl, seen: Seen, is_queue: bool) -> dict[str, float]:
        """Returns the ceiling, as fields of a Decision, for the phases that need no brownout or
        gain nothing by it.

        A phase needs none if the load has been light for `REST_S`, less the time until the next
        decision: every token was in time, nobody waited, a slot was free, and there are too few
        samples to go by, or steps without brownout would be in time too. An objective that cannot
        be kept is no reason for brownout either, unless that shortens a queue.
        """
        rest_s = max(self.config.interval_s, REST_S - self.config.interval_s)
        is_calm = seen.now - of.strained_at >= rest_s
        found = {}
        slos_s = seen.prefill.slo_s, seen.decode.slo_s
        for phase, slo_s in zip(Phase, slos_s, strict=True):
            control = of.of(phase)
            few = control.window.late_share(seen.now, slo_s, self.config.min_samples) is None
            in_vain = control.in_vain and not (is_queue and not math.isnan(control.least_s))
            if in_vain or (is_calm and (few or self._fits(phase, slo_s, seen.load))):
                percent = max(self.config.ceiling_percent, control.threshold_percent)
                found[f"{phase}_percent"] = percent
        return found

    def _fits(self, phase: Phase, slo_s: float, load: Load) -> bool:
        """Returns whether a prefill step and decode steps at the ceiling are expected within the
        warning line.
        """
        times, percent = self._pace.times, self.config.ceiling_percent
        prefill_s = times.expected_s(Phase.PREFILL, max(load.prompt_tokens, 1), percent)
        decode_s = times.expected_s(Phase.DECODE, max(load.num_running, 1), percent)
        steps_s = prefill_s + decode_s * (2 if phase is Phase.PREFILL else 1)
        return steps_s <= slo_s * self.config.warning_factor

    def _judge(self, load: Load, now: float) -> None:
        """Judges, by what steps are known to take, whether brownout can keep the objectives of
        latency-sensitive requests, and whether it saves time at all. What it takes where it saved
        nothing is forgotten from time to time, since only a step with brownout could teach better.
        """
        times = self._pace.times
        floor, ceiling = self.floor_percent, self.config.ceiling_percent
        for phase, name, slo_s, size, words in (
            (Phase.PREFILL, "TTFT", self.in_force[0], load.prompt_tokens, "a prompt alone"),
            (Phase.DECODE, "ITL", self.in_force[1], load.num_running, "the present batch"),
        ):
            if self.ls.of(phase).tries_again(now):
                times.forget_brownout(phase)
            if not (size and times.has_seen(phase, floor) and times.has_seen(phase, ceiling)):
                continue
            largest, in_vain = times.largest(phase), ""
            least_s = times.expected_s(phase, size, floor)
            floor_s, ceiling_s = (times.expected_s(phase, largest, at) for at in (floor, ceiling))
            if least_s > slo_s:
                in_vain = (
                    f"the {name} objective of {1e3 * slo_s:.4g} ms cannot be kept; the least that "
                    f"can is {1e3 * least_s:.4g} ms, what {words} takes under all of the brownout"
                )
            elif largest >= MANY_ROWS and floor_s > (1 - LEAST_SAVING) * ceiling_s:
                least_s = math.nan
                in_vain = (
                    f"brownout saves nothing in {phase} steps: under all of it they take "
                    f"{100 * floor_s / ceiling_s:.0f} % of their time"
                )
            self.ls.of(phase).judge(in_vain, least_s, now)

    def check(self, change: BrownoutChange, bound: LossBound | None = None) -> None:
        """Raises InvalidRequest for a value out of range, and NotFound for a model that is not
        served; nothing is changed. `bound` is the one that is to be in force; None: as the change
        alone leaves it.
        """
        if change.model is not None:
            self._of_model(change)
            return
        for name in ("floor_percent", "ceiling_percent"):
            if (value := getattr(change, name)) is not None:
                raise InvalidRequest(
                    f"{name} is {value}, of no model; name one as model, or set engine.salc.{name}"
                )
        try:
            strategy = change.strategy or self.strategy
            if ":" in strategy and strategy != self._configured:  # as with controllers
                raise ValueError(
                    f"strategy is {shown(strategy)}; it must be zero, partial, full, or that of "
                    f"the settings, {self._configured}"
                )
            strategy_code(strategy, change.keep or self.keep)
            for phase, percent in _fixed(change).items():
                if percent is not None:
                    check_threshold(percent, f"{phase}_threshold_percent")
            if change.controller not in (None, self.config.controller, *CONTROLLERS):
                # What a caller names is not imported; what the settings name is.
                raise ValueError(
                    f"controller is {shown(change.controller)}; it must be one of "
                    f"{', '.join({**dict.fromkeys(CONTROLLERS), self.config.controller: None})}"
                )
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        for name in ("ttft_slo_s", "itl_slo_s"):
            value = getattr(change, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} is {value}; it must be a positive number of seconds")
        bound = bound or self.bound([change], change.way or self.way)
        if strategy == "partial" and not bound.way:
            raise InvalidRequest(
                "partial brownout needs united experts; this model has none (`jmoe distill` makes "
                "them)"
            )
        most = change.max_expected_loss
        if most is not None and not 0 <= most < math.inf:
            raise InvalidRequest(
                f"max_expected_loss is {most}; it must be 0 (no bound) or more, in nats a token"
            )
        bound.check(self.losses)

    def _of_model(self, change: BrownoutChange) -> tuple[int, ModelBrownout]:
        """Returns a model's place, and what it has of its own after a change. Raises as `check`."""
        own = {field.name for field in fields(ModelBrownout)}
        given = {name: value for name, value in vars(change).items() if value is not None}
        model = given.pop("model")
        for name, value in given.items():
            if name not in own:
                raise InvalidRequest(
                    f"{name} is {shown(value)} of model {shown(model)}; it is the same for all "
                    "models: leave out model"
                )
        if not model:
            raise InvalidRequest("model is empty; name one, or leave it out for all")
        number = number_of(model, [one.name for one in self.models])
        return number, replace(self.models[number], **given)

    def bound(self, changes: Sequence[BrownoutChange], way: int) -> LossBound:
        """Returns the bound on expected loss, and the brownout that has to keep it, once changes
        are made in turn and every layer has `way`.
        """
        found = LossBound(self.max_expected_loss, self.strategy, self.keep, way)
        for change in changes:
            most, strategy = change.max_expected_loss, change.strategy or found.strategy
            most = found.most if most is None else most
            found = LossBound(most, strategy, change.keep or found.keep, way)
        return found

    def what_if(
        self, change: BrownoutChange, bound: LossBound | None = None
    ) -> dict[Phase, Expected]:
        """Returns what a change lets expect at the present load, by the times that steps are known
        to take; nothing is changed. Of a model that is named, it is of steps of its requests alone.
        `bound` is as in `check`, which says what this raises.

        Step times under another strategy or way are not known before steps have run under it.
        """
        self.check(change, bound)
        bound = bound or self.bound([change], change.way or self.way)
        was = own = ModelBrownout("")
        if change.model is not None:
            number, own = self._of_model(change)
            was = self.models[number]
            change = BrownoutChange(
                ttft_slo_s=own.ttft_slo_s or self.ttft_slo_s,
                itl_slo_s=own.itl_slo_s or self.itl_slo_s,
            )
        strategy, way, most = bound.strategy, bound.way, bound.most
        code = strategy_code(strategy, bound.keep)
        least = self.losses.least_percent(code, way, most) if most and strategy != "zero" else 0
        fixed, salc = _fixed(change), change.salc_enabled
        if salc is None:
            salc = self.salc_enabled and not any(one is not None for one in fixed.values())
        is_same = strategy == "zero" or (strategy, way) == self._learnt
        slos_s = change.ttft_slo_s or self.in_force[0], change.itl_slo_s or self.in_force[1]
        slo_s = dict(zip(Phase, slos_s, strict=True))
        sizes = max(self._load.prompt_tokens, 1), max(self._load.num_running, 1)
        size = dict(zip(Phase, sizes, strict=True))
        curve, curve_now = (self.losses.highest(*of) for of in ((code, way), (self.code, self.way)))
        found, before_s = dict[Phase, Expected](), 0.0  # a first token waits for a decode step
        for phase in (Phase.DECODE, Phase.PREFILL):
            shown_percent = 100.0 if self.strategy == "zero" else self.ls.of(phase).shown_percent
            present = _within(shown_percent, was, self.least_percent, self.strategy)
            steps_s = self._pace.times.curve(phase, size[phase], np.arange(101.0))
            by_hand = fixed[phase]
            percent = shown_percent if by_hand is None else float(by_hand)
            if salc and not np.isnan(steps_s).any():
                room_s = slo_s[phase] * self.config.warning_factor - before_s
                fits = np.flatnonzero(steps_s <= room_s)[-1:].tolist()
                percent = min(max(self.config.floor_percent, *fits, 0), self.config.ceiling_percent)
            percent = _within(percent, own, least, strategy)
            step_s = float(steps_s[round(percent)]) if is_same else math.nan
            found[phase] = Expected(
                percent,
                present,
                step_s,
                float(steps_s[round(present)]),
                _read(curve, percent),
                _read(curve_now, present),
                None if math.isnan(step_s) else step_s + before_s <= slo_s[phase],
            )
            before_s = 0.0 if math.isnan(step_s) else step_s
        return {phase: found[phase] for phase in Phase}

    def use_way(self, way: int, now: float) -> None:
        """Records that every layer has the united experts of `way`; earlier samples no longer
        count.
        """
        self.way_changes = False
        if way != self.way:
            self.way = way
            self._start_anew(now)

    def apply(self, change: BrownoutChange, now: float) -> None:
        """Takes over a checked change; `way` is the experts loader's to do.

        Raises InvalidRequest for a controller that cannot be made, and changes nothing then.

        Samples of before count on unless steps are others now: a caller who sets nothing, or the
        same again, holds up no controller.
        """
        if change.model is not None:
            number, own = self._of_model(change)
            self.models[number] = own
            self._renew_objectives()
            self.is_own_objective = self.is_own_objective or bool(change.ttft_slo_s)
            return
        controller = self.ls.controller
        if change.controller not in (None, controller.name):
            try:
                controller = make_controller(self.config, change.controller or "", self._slow_s)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        steps_differ = change.strategy not in (None, self.strategy)
        self.strategy = change.strategy or self.strategy
        self.keep = change.keep or self.keep
        if change.max_expected_loss is not None:
            self.max_expected_loss = change.max_expected_loss
        self.is_own_objective = self.is_own_objective or change.ttft_slo_s is not None
        self.ttft_slo_s = change.ttft_slo_s or self.ttft_slo_s
        self.itl_slo_s = change.itl_slo_s or self.itl_slo_s
        self._renew_objectives()
        self.ls.controller = controller
        if change.prefill_company is not None:
            self._pace.waits = change.prefill_company
        for phase, percent in _fixed(change).items():
            if percent is not None:
                self.salc_enabled = False
                self.ls.of(phase).threshold_percent = float(percent)
                self.ls.of(phase).changed_at = now
        if steps_differ:
            self._start_anew(now)
        if change.salc_enabled is not None:
            self.salc_enabled = change.salc_enabled
        if not self.controls:
            self.ls.stop()

    def _start_anew(self, now: float) -> None:
        kind = self.strategy, self.way
        if self.strategy != "zero" and kind != self._learnt:
            self._learnt = kind
            self._pace.times.forget_brownout()
            for phase in Phase:
                self.ls.of(phase).judge("", math.nan, now)
        for of_class in (self.ls, self.best_effort):
            of_class.prefill.changed_at = of_class.decode.changed_at = now

    def first_token_s(self, num_prompts: int) -> tuple[float, float]:
        """Returns what so many prompts take at least, in full steps under all brownout, and what
        the decode step and the prefill step before a first token take; 0 while nothing is known.
        """
        times, percent = self._pace.times, self.floor_percent if self.controls else 100.0
        if not all(map(times.knows, Phase)):
            return 0.0, 0.0
        full_s, decode_s = (times.expected_s(of, times.largest(of), percent) for of in Phase)
        steps = num_prompts * self.load.prompt_tokens / times.largest(Phase.PREFILL)
        return steps * full_s, full_s + decode_s

    def state(self, refused_per_s: float = 0.0) -> BrownoutState:
        """Returns settings and latencies as an operator reads them."""
        prefill, decode = self.ls.prefill, self.ls.decode
        bounds = ModelBrownout(""), self.least_percent, self.strategy
        shown_percents = [_within(of.shown_percent, *bounds) for of in (prefill, decode)]
        spent = min(shown_percents) <= self.floor_percent + SPENT
        spent = "brownout is exhausted, " if spent else ""
        overloaded = f"overloaded: {spent}refusing {refused_per_s:.3g}/s" if refused_per_s else ""
        if spent and not overloaded and self.controls:
            late = [
                f"{name} P90 of {1e3 * of.p90_s:.4g} ms over its objective of {1e3 * slo_s:.4g} ms"
                for name, of, slo_s in (
                    ("TTFT", prefill, self.ttft_slo_s),
                    ("ITL", decode, self.itl_slo_s),
                )
                if of.p90_s > slo_s and of.shown_percent <= self.floor_percent + SPENT
            ]
            if late:
                overloaded = f"overloaded: brownout is exhausted, {' and '.join(late)}"
        return BrownoutState(
            strategy=self.strategy,
            way=self.way,
            prefill_threshold_percent=shown_percents[0],
            decode_threshold_percent=shown_percents[1],
            salc_enabled=self.salc_enabled,
            ttft_slo_s=self.ttft_slo_s,
            itl_slo_s=self.itl_slo_s,
            warning_factor=self.config.warning_factor,
            ttft_p90_s=prefill.p90_s,
            itl_p90_s=decode.p90_s,
            controller=self.ls.controller.name,
            prefill_company=self._pace.waits,
            keep=self.keep,
            max_expected_loss=self.max_expected_loss,
            least_threshold_percent=self.least_percent,
            objective_state="; ".join(filter(None, (overloaded, prefill.in_vain, decode.in_vain))),
            least_ttft_s=prefill.least_s,
            least_itl_s=decode.least_s,
            predicted_ttft_p90_s=prefill.predicted_p90_s,
            predicted_itl_p90_s=decode.predicted_p90_s,
            models=tuple(own for own in self.models if own.name),
        )


def _fixed(change: BrownoutChange) -> dict[Phase, int | None]:
    """Returns the thresholds that a change sets by hand; None: none."""
    return {phase: getattr(change, f"{phase}_threshold_percent") for phase in Phase}


def _within(percent: float, own: ModelBrownout, least: int, strategy: str) -> float:
    """Returns the threshold of a model's steps, within its own bounds and that of expected loss."""
    if strategy == "zero":
        return 100.0
    return float(max(np.clip(percent, own.floor_percent, own.ceiling_percent), least))
