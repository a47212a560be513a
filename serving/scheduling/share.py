"""Best effort's share of the device's time: what it may claim, and what it has had."""

import math

MEMORY_S = 5.0
"""Time over which shares are reckoned: older steps count less and less."""


class Share:
    """Device time of steps that held best-effort rows, over device time of all steps."""

    def __init__(self, claim: float) -> None:
        """`claim` is the share that best effort may have while it has work, 0 to 1."""
        self.claim = claim
        self._best_effort_s = self._total_s = 0.0
        self._at = -math.inf

    def observe(self, began_at: float, ended_at: float, best_effort: bool) -> None:
        """A step ran on the device; whether one of its rows was best effort."""
        fade = math.exp(-(ended_at - self._at) / MEMORY_S) if self._at > -math.inf else 0.0
        self._best_effort_s *= fade
        self._total_s = self._total_s * fade + (ended_at - began_at)
        self._best_effort_s += (ended_at - began_at) * best_effort
        self._at = ended_at

    @property
    def had(self) -> float:
        """The share of late; 1 before the first step."""
        return self._best_effort_s / self._total_s if self._total_s else 1.0

    @property
    def may_park(self) -> bool:
        """Whether a best-effort step may be parked: it has had what it may claim."""
        return not self.claim or self.had >= self.claim
