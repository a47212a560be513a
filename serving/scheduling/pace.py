"""Predicts step times, so that each step is planned as late as possible without an idle device."""

import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Sequence

from serving.plan import Phase
from serving.scheduling.policy import Company
from serving.scheduling.step import ScheduledStep
from serving.scheduling.step_time import StepTimeModel

SHARE, MARGIN_S = 0.8, 0.001
TRY_EVERY, TRIES = 4, 8  # of how many pairs one tries more lead, and tries until it is judged
TRY_S, TRY_SHARE = 0.00025, 0.25  # how much more is tried, at least, and of what there is
LEAST_GAIN, DECAY = 0.005, 0.97
WEIGHT = 0.1  # of the newest launch, and of the newest time of other tasks, in their means
WAIT = 0.8  # share of a TTFT objective's slack that waiting may use


class Lead:
    """Learns how much earlier than predicted steps must be planned so that the device never waits.

    From its plan to the device's start a step passes the tick, the thread that launches and the
    driver, which no one clock reads. So of every four pairs of steps one, drawn at random, tries a
    little more lead. Where those take less time than the others, the device had waited for the
    others, and the lead is kept; otherwise it shrinks slowly. Pairs, since what one step is late
    the next often makes up for.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._draw, self._num_planned, self._trying = random.Random(0), 0, False
        self._first: tuple[bool, float] | None = None  # of a pair, as `observe` has it
        self._took = self._nothing()  # over expected: usual pairs, and those that tried

    @property
    def tried_s(self) -> float:
        """The lead (s) of steps that try more of it."""
        return self.seconds + max(TRY_S, TRY_SHARE * self.seconds)

    def tries(self) -> bool:
        """Returns whether the next step is to try more lead."""
        if self._num_planned % 2 == 0:
            self._trying = self._draw.random() < 1 / TRY_EVERY
        self._num_planned += 1
        return self._trying

    @staticmethod
    def _nothing() -> tuple[deque[float], deque[float]]:
        most = TRY_EVERY * TRIES  # where no step tries, the others are still bounded
        return deque(maxlen=most), deque(maxlen=most)

    def observe(self, tried: bool, ratio: float) -> None:
        """Learns from a step that took `ratio` of what was expected."""
        ratio, first = min(max(ratio, 0.5), 1.5), self._first
        if first is None or first[0] != tried:
            self._first = tried, ratio
            return
        self._first = None
        self._took[tried].append((first[1] + ratio) / 2)
        if len(self._took[True]) < TRIES or len(self._took[False]) < TRIES:
            return
        gain = statistics.fmean(self._took[False]) - statistics.fmean(self._took[True])
        noise = math.sqrt(sum(statistics.variance(took) / len(took) for took in self._took))
        tried_s, self._took = self.tried_s, self._nothing()
        self.seconds = tried_s if gain > LEAST_GAIN + 2 * noise else DECAY * self.seconds


class Pace:
    """Decides when to plan steps and what to wait for, using a model of step times.

    A step launched as soon as the previous one starts would only queue on the device, and a request
    that arrives meanwhile would wait for both. So the host waits for most of a step: long enough to
    include late arrivals, short enough that the device never idles. Thresholds are in percent, and
    means over the rows of a step.
    """

    def __init__(self, num_layers: int = 1, *, waits: bool = True) -> None:
        """`num_layers` is the model's; a launch may cover only some of them. `waits`: whether
        prompts may wait for more prompts.
        """
        self.times = StepTimeModel()
        self.waits = waits
        self._num_layers = num_layers
        self._decoded_at = -math.inf
        self.launch_s = self.others_s = 0.0
        """Recent means: of a launch in a thread of its own, and of other tasks after a step."""
        self._lead = Lead()
        self._behind: tuple[ScheduledStep | None, bool] = None, False
        self._before: tuple[bool, float] = False, -math.inf
        """Behind which step the next is planned, and of the last that ended, its end: each with
        whether the step behind it tries more lead."""

    def observe(self, step: ScheduledStep, ended_at: float, size: int = 0) -> None:
        """Learns from a step that ran on the device until `ended_at`.

        Of rows that complete singly it learns how long they pass the layers, with `size` rows of
        their phase under way.
        """
        seconds = (ended_at - step.started_at) / self._share(step)
        if not size:
            self._observe_lead(step, ended_at)
        percent = step.mean_threshold_percent
        if step.num_decodes:
            sizes = step.num_prompt_tokens, step.num_decodes
            self.times.observe_hybrid(*sizes, percent, seconds)
        else:
            self.times.observe(step.phase, size or step.size, percent, seconds)
        if step.decodes and step.is_last:
            self._decoded_at = ended_at

    def _observe_lead(self, step: ScheduledStep, ended_at: float) -> None:
        """Learns from a step that was planned behind another, which ended when it could begin."""
        (tried, before_at), expected_s = self._before, self._expected_s(step, math.nan)
        behind, trying = self._behind
        self._before = behind is step and trying, ended_at
        if behind is step:
            self._behind = None, False  # of a server at rest nothing stays
        if step.launched_at - before_at < expected_s / 2:  # else there was nothing to run
            self._lead.observe(tried, (ended_at - before_at) / expected_s)

    def observe_launch(self, seconds: float) -> None:
        """Learns what a launch takes, from the tick that submits a step until the device has it;
        NaN: nobody knows, as it is made in the tick.
        """
        if not math.isnan(seconds):
            self.launch_s += WEIGHT * (seconds - self.launch_s)

    def observe_others(self, seconds: float) -> None:
        """Learns for how long other tasks keep the event loop after a step, such as those that
        write its tokens.
        """
        self.others_s += WEIGHT * (seconds - self.others_s)

    def best_effort_wait_s(self, max_wait_s: float) -> float:
        """Returns the longest time (s) that a running best-effort request should wait for a token.

        After `max_wait_s` it still waits for the running step, two prefill steps and its own
        (docs/priorities.md), if older requests leave it a row. So that is 4 of the longest steps
        seen; infinite before the first step, or if `max_wait_s` is 0 (never promoted).
        """
        return (max_wait_s or math.inf) + 4 * self.times.longest_s

    def company(
        self, ttft_slo_s: float, num_decoding: int, *, beside: bool = False
    ) -> Company | None:
        """Returns what a prompt should wait for while `num_decoding` rows decode; None: nothing.

        A prefill step of n tokens takes a + b n, so with a / b tokens its fixed cost is half of it.
        Where rows decode `beside` them, it takes the place of their own step, and costs that less.
        Prompts wait no longer together than the fixed cost makes the decoding rows wait together:
        whatever comes, all wait at most twice as long as if arrivals had been known (Dooly,
        Goldman and Scott 2001, of acknowledgements). And waiting may use four fifths of what the
        TTFT objective leaves after the prefill step and the decode steps before and after it.
        """
        line = self.times.line(Phase.PREFILL)
        if not self.waits or line is None or not self.times.knows(Phase.DECODE):
            return None
        fixed_s, per_token_s = line
        decode_s = self.times.expected_s(Phase.DECODE, num_decoding)
        if beside:
            alike = fixed_s / per_token_s if per_token_s > 0 else 1
            ratio = self.times.hybrid_ratio(alike, num_decoding)
            fixed_s = max(0.0, ratio * (fixed_s + decode_s) - decode_s)
        tokens = fixed_s / per_token_s if per_token_s > 0 else math.inf
        prefill_s = self.times.expected_s(Phase.PREFILL, tokens)
        wait_s = max(0.0, WAIT * (ttft_slo_s - 2 * decode_s - prefill_s))
        return Company(tokens, wait_s, fixed_s * num_decoding)

    def prefill_tokens(self, budget_s: float, num_decoding: int, sizes: Sequence[int]) -> int:
        """Returns how many prompt tokens a step may have so that rows which decode wait at most
        `budget_s` for their next token: one of the programs' `sizes`, which ascend; any number
        while step times are unknown.

        Not fewer than those that take as long as the step's fixed cost: smaller chunks would be
        paid for with more time than they leave.
        """
        line = self.times.line(Phase.PREFILL)
        if not sizes or line is None or not self.times.knows(Phase.DECODE) or line[1] <= 0:
            return sys.maxsize
        left_s = budget_s - self.times.expected_s(Phase.DECODE, num_decoding)
        least = next((n for n in sizes if n >= line[0] / line[1]), sizes[-1])
        fitting = (n for n in sizes if self.times.expected_s(Phase.PREFILL, n) <= left_s)
        return max(least, *fitting, least)

    def idle_s(self, step: ScheduledStep) -> float:
        """Returns how long (s) after a step's start the next one must be planned; 0 if unknown.

        The mean prediction error is subtracted, since a step may be faster than expected, what a
        launch takes, and the lead that was learnt.
        """
        if self._behind[0] is not step:
            self._behind = step, self._lead.tries()
        lead_s = self._lead.tried_s if self._behind[1] else self._lead.seconds
        share = SHARE * max(0.0, 1 - self.times.error)
        return max(0.0, share * self._expected_s(step, 0.0) - MARGIN_S - self.launch_s - lead_s)

    def itl_slack_s(
        self, budget_s: float, before: ScheduledStep, steps: Sequence[tuple[Phase, int, float]]
    ) -> float:
        """Returns what is left of an ITL of `budget_s` if `steps` (phase, size, threshold) run
        after the one `before`, which runs.

        -inf if a duration is unknown, such as of a step more than twice as large as any seen.
        """
        if any(size > 2 * self.times.largest(phase) for phase, size, _ in steps):
            return -math.inf
        steps_s = sum(self.times.expected_s(*step) for step in steps)
        ends_at = before.started_at + self._expected_s(before, math.inf)
        slack_s = budget_s - (ends_at - self._decoded_at) - steps_s
        return -math.inf if math.isnan(slack_s) else slack_s

    def since_tokens_s(self, step: ScheduledStep, tokens_at: float) -> float:
        """Returns how long (s) sequences will have waited for a token at a step's expected end.

        They had their last token at `tokens_at` (NaN: no sequence has one). 0 if the step itself
        yields their tokens.
        """
        if math.isnan(tokens_at) or (step.decodes and step.is_last):
            return 0.0
        return max(0.0, step.started_at + self._expected_s(step, 0.0) - tokens_at)

    def _share(self, step: ScheduledStep) -> float:
        """Returns the share of the model's layers that a step runs."""
        return step.num_layers / self._num_layers

    def _expected_s(self, step: ScheduledStep, unknown_s: float) -> float:
        percent = step.mean_threshold_percent
        if step.num_decodes:
            expected_s = self.times.hybrid_s(step.num_prompt_tokens, step.num_decodes, percent)
        else:
            expected_s = self.times.expected_s(step.phase, step.size, percent)
        return unknown_s if math.isnan(expected_s) else self._share(step) * expected_s
