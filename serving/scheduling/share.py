"""Best effort's share of device time: how much is guaranteed, and how much it has had."""

import math

MEMORY_S = 5.0
"""Time constant (s) of the exponentially weighted share: older steps count less and less."""


class Share:
    """Device time of steps that held best-effort rows, over device time of all steps; where rows
    complete singly, best effort's positions over all.
    """

    def __init__(self, claim: float) -> None:
        """`claim` is the share guaranteed to best effort while it has work, 0 to 1."""
        self.claim = claim
        self._best_effort = self._total = 0.0
        self._at = -math.inf

    def observe(self, amount: float, at: float, best_effort: float) -> None:
        """Counts seconds or positions; `best_effort` is the part of them that it had."""
        fade = math.exp(-(at - self._at) / MEMORY_S) if self._at > -math.inf else 0.0
        self._best_effort = self._best_effort * fade + best_effort
        self._total = self._total * fade + amount
        self._at = at

    @property
    def had(self) -> float:
        """The recent share; 1 before the first step."""
        return self._best_effort / self._total if self._total else 1.0

    @property
    def may_park(self) -> bool:
        """Whether best effort may be held back (its step parked, its rows passed), since it has had
        its share.
        """
        return not self.claim or self.had >= self.claim
