"""How long steps take, so that the next one is planned as late as the device allows."""

import math
from collections.abc import Iterable

from serving.plan import Phase, StepPlan
from serving.scheduling.batch import ScheduledStep
from serving.scheduling.policy import Company
from serving.scheduling.step_time import StepTimeModel

SHARE, MARGIN_S = 0.8, 0.001
WAIT = 0.8  # of what a TTFT objective leaves


class Pace:
    """When to plan and what to wait for, by a model of step times; when sequences last got a token.

    A step launched the moment the one before it starts would queue on the device for nothing, and a
    request that arrives meanwhile would wait for both. So the host sits still for most of a step:
    long enough to take late arrivals along, short enough that the device never waits.

    Thresholds are in percent, and means over the rows of a step.
    """

    def __init__(self, num_layers: int = 1, *, waits: bool = True) -> None:
        """`num_layers` of the model: what is launched at once may be some of them. `waits`: prompts
        may wait for company.
        """
        self.times = StepTimeModel()
        self.waits = waits
        self._num_layers = num_layers
        self._decoded_at = -math.inf

    def observe(self, step: ScheduledStep, started_at: float, ended_at: float) -> None:
        """A step ran on the device from `started_at` to `ended_at`."""
        plan = step.plan
        seconds = (ended_at - started_at) / self._share(plan)
        self.times.observe(plan.phase, plan.size, step.mean_threshold_percent, seconds)
        if plan.phase is Phase.DECODE and plan.is_last:
            self._decoded_at = ended_at

    def best_effort_wait_s(self, max_wait_s: float) -> float:
        """Seconds within which a best-effort request that runs gets a token, by the longest steps
        so far; infinite before the first, and where waiting too long (`max_wait_s`) means nothing.

        After that time it waits for the step under way, two prefill steps and its own
        (docs/priorities.md), as long as older requests leave it a row.
        """
        return (max_wait_s or math.inf) + 4 * self.times.longest_s

    def company(self, ttft_slo_s: float, num_decoding: int) -> Company | None:
        """What a prompt had better wait for beside so many rows that decode; None: for nothing.

        A prefill step of n tokens takes a + b n: at a / b of them its fixed cost is half of it.
        Waiting may take four fifths of what the objective leaves beside the prefill step and the
        decode steps before and after it.
        """
        line = self.times.line(Phase.PREFILL)
        if not self.waits or line is None or not self.times.knows(Phase.DECODE):
            return None
        fixed_s, per_token_s = line
        tokens = fixed_s / per_token_s if per_token_s > 0 else math.inf
        prefill_s = self.times.expected_s(Phase.PREFILL, tokens)
        decode_s = self.times.expected_s(Phase.DECODE, num_decoding)
        return Company(tokens, max(0.0, WAIT * (ttft_slo_s - 2 * decode_s - prefill_s)))

    def idle_s(self, step: ScheduledStep) -> float:
        """Seconds from a step's start before the next one has to be planned; 0 if unknown.

        A step may well be faster than expected, by as much as they err.
        """
        share = SHARE * max(0.0, 1 - self.times.error)
        return max(0.0, share * self._expected_s(step, 0.0) - MARGIN_S)

    def itl_slack_s(
        self, budget_s: float, ends_at: float, steps: Iterable[tuple[Phase, int, float]]
    ) -> float:
        """What is left of an ITL of `budget_s` if steps follow `ends_at`, the end of the prefill
        step under way: each has phase, size and threshold. -inf where a duration is not known yet,
        of a size that is twice the largest so far for one.
        """
        steps = list(steps)
        if any(size > 2 * self.times.largest(phase) for phase, size, _ in steps):
            return -math.inf
        steps_s = sum(self.times.expected_s(*step) for step in steps)
        return (
            -math.inf if math.isnan(steps_s) else budget_s - (ends_at - self._decoded_at) - steps_s
        )

    def since_tokens_s(self, step: ScheduledStep, started_at: float, tokens_at: float) -> float:
        """Seconds that sequences will have waited for a token as a step is likely to end, which had
        the one before at `tokens_at` (NaN: none has one); 0 where they get one of it.
        """
        if math.isnan(tokens_at) or (step.plan.phase is Phase.DECODE and step.is_last):
            return 0.0
        return max(0.0, started_at + self._expected_s(step, 0.0) - tokens_at)

    def ends_at(self, step: ScheduledStep, started_at: float) -> float:
        """When a step that began at `started_at` is likely to end."""
        return started_at + self._expected_s(step, math.inf)

    def _share(self, plan: StepPlan) -> float:
        """Of the model's layers."""
        return plan.num_layers / self._num_layers

    def _expected_s(self, step: ScheduledStep, unknown_s: float) -> float:
        plan = step.plan
        expected_s = self.times.expected_s(plan.phase, plan.size, step.mean_threshold_percent)
        return unknown_s if math.isnan(expected_s) else self._share(plan) * expected_s
