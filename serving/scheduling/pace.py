"""How long steps take, so that the next one is planned as late as the device allows."""

import math

from serving.plan import Phase, StepPlan
from serving.scheduling.policy import Company

SHARE, MARGIN_S, WEIGHT = 0.8, 0.001, 0.2


class Pace:
    """Typical duration of whole steps, by phase and size, and when sequences last got a token.

    A step launched the moment the one before it starts would queue on the device for nothing, and a
    request that arrives meanwhile would wait for both. So the host sits still for most of a step:
    long enough to take late arrivals along, short enough that the device never waits.
    """

    def __init__(self, num_layers: int = 1, *, waits: bool = True) -> None:
        """`num_layers` of the model: what is launched at once may be some of them. `waits`: prompts
        may wait for company.
        """
        self._num_layers, self._waits = num_layers, waits
        self._typical_s: dict[tuple[Phase, int], float] = {}
        self._decoded_at = -math.inf

    def observe(self, plan: StepPlan, started_at: float, ended_at: float) -> None:
        """A step ran on the device from `started_at` to `ended_at`."""
        key = _key(plan.phase, plan.size)
        duration_s = (ended_at - started_at) / self._share(plan)
        before = self._typical_s.get(key, duration_s)
        # A fast step counts at once: waiting too long costs throughput, too short only latency.
        blended = before + WEIGHT * (duration_s - before)
        self._typical_s[key] = min(duration_s, blended)
        if plan.phase is Phase.DECODE and plan.is_last:
            self._decoded_at = ended_at

    def best_effort_wait_s(self, max_wait_s: float) -> float:
        """Seconds within which a best-effort request that runs gets a token, by the longest steps
        so far; infinite before the first, and where waiting too long (`max_wait_s`) means nothing.

        After that time it waits for the step under way, two prefill steps and its own
        (docs/priorities.md), as long as older requests leave it a row.
        """
        return (max_wait_s or math.inf) + 4 * max(self._typical_s.values(), default=math.inf)

    def company(self, ttft_slo_s: float, num_decoding: int) -> Company | None:
        """What a prompt had better wait for beside so many rows that decode; None: for nothing.

        A prefill step of n tokens takes a + b n: at a / b of them its fixed cost is half of it.
        Waiting may take half of what the objective leaves beside the prefill step and the decode
        steps before and after it.
        """
        sizes = sorted(size for phase, size in self._typical_s if phase is Phase.PREFILL)
        decode_s = self._typical_s.get(_key(Phase.DECODE, num_decoding))
        if not self._waits or len(sizes) < 2 or decode_s is None:
            return None
        small, large = (self._typical_s[Phase.PREFILL, size] for size in (sizes[0], sizes[-1]))
        per_token = (large - small) / (2.0 ** sizes[-1] - 2.0 ** sizes[0])
        fixed = max(0.0, small - per_token * 2.0 ** sizes[0])
        tokens = fixed / per_token if per_token > 0 else math.inf
        left_s = ttft_slo_s - 2 * decode_s - fixed - per_token * min(tokens, 2.0 ** sizes[-1])
        return Company(tokens, max(0.0, 0.5 * left_s))

    def idle_s(self, plan: StepPlan) -> float:
        """Seconds from a step's start before the next one has to be planned; 0 if unknown."""
        return max(0.0, SHARE * self._expected_s(plan, 0.0) - MARGIN_S)

    def itl_slack_s(
        self, budget_s: float, ends_at: float, *, num_decoding: int, num_prefill_tokens: int
    ) -> float:
        """What is left of an ITL of `budget_s` if a prefill, then a decode step follow `ends_at`.

        `ends_at` is when the prefill step under way ends. -inf where a duration is not known yet.
        """
        prefill_s = self._typical_s.get(_key(Phase.PREFILL, num_prefill_tokens), math.inf)
        decode_s = self._typical_s.get(_key(Phase.DECODE, num_decoding), math.inf)
        return budget_s - (ends_at - self._decoded_at) - prefill_s - decode_s

    def ends_at(self, plan: StepPlan, started_at: float) -> float:
        """When a step that began at `started_at` is likely to end."""
        return started_at + self._expected_s(plan, math.inf)

    def _share(self, plan: StepPlan) -> float:
        """Of the model's layers."""
        return plan.num_layers / self._num_layers

    def _expected_s(self, plan: StepPlan, unknown_s: float) -> float:
        return self._share(plan) * self._typical_s.get(_key(plan.phase, plan.size), unknown_s)


def _key(phase: Phase, size: int) -> tuple[Phase, int]:
    return phase, max(0, size - 1).bit_length()  # the next power of two, as programs come
