"""How long steps take, so that the next one is planned as late as the device allows."""

from serving.scheduler import StepPlan

SHARE, MARGIN_S, WEIGHT = 0.75, 0.001, 0.2


class Pace:
    """Typical duration of steps, by phase and size.

    A step launched the moment the one before it starts would queue on the device for nothing, and a
    request that arrives meanwhile would wait for both. So the host sits still for most of a step:
    long enough to take late arrivals along, short enough that the device never waits.
    """

    def __init__(self) -> None:
        self._typical_s: dict[tuple[str, int], float] = {}

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """A step took so long on the device."""
        key = _key(plan)
        before = self._typical_s.get(key, duration_s)
        # A fast step counts at once: waiting too long costs throughput, too short only latency.
        blended = before + WEIGHT * (duration_s - before)
        self._typical_s[key] = min(duration_s, blended)

    def idle_s(self, plan: StepPlan) -> float:
        """Seconds from a step's start before the next one has to be planned; 0 if unknown."""
        return max(0.0, SHARE * self._typical_s.get(_key(plan), 0.0) - MARGIN_S)


def _key(plan: StepPlan) -> tuple[str, int]:
    size = len(plan.rows) if plan.phase == "decode" else len(plan.tokens)
    return plan.phase, size.bit_length()
