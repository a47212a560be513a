"""Best effort's share of device time: how much is guaranteed, and how much it has had."""

import math

MEMORY_S = 5.0
"""Time constant (s) of the exponentially weighted share: older steps count less and less."""


class Share:
    """Device time of steps that held best-effort rows, over device time of all steps."""

    def __init__(self, claim: float) -> None:
        """`claim` is the share guaranteed to best effort while it has work, 0 to 1."""
        self.claim = claim
        self._best_effort_s = self._total_s = 0.0
        self._at = -math.inf

    def observe(self, began_at: float, ended_at: float, best_effort: bool) -> None:
        """Counts a step's device time; `best_effort`: whether one of its rows was best effort."""
        fade = math.exp(-(ended_at - self._at) / MEMORY_S) if self._at > -math.inf else 0.0
        self._best_effort_s *= fade
        self._total_s = self._total_s * fade + (ended_at - began_at)
        self._best_effort_s += (ended_at - began_at) * best_effort
        self._at = ended_at

    @property
    def had(self) -> float:
        """The recent share; 1 before the first step."""
        return self._best_effort_s / self._total_s if self._total_s else 1.0

    @property
    def may_park(self) -> bool:
        """Whether a best-effort step may be parked, since best effort has had its share."""
        return not self.claim or self.had >= self.claim
