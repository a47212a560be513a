"""Start times of the latencies (TTFT and ITL) of a step's tokens, by class."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from serving.request import Priority


@dataclass
class Latencies:
    """For the tokens of one step: arrival times of requests that got their first token, and
    previous token times of the others.
    """

    arrived_at: dict[Priority, list[float]] = field(default_factory=lambda: defaultdict(list))
    previous_at: dict[Priority, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, priority: Priority, arrived_at: float, previous_at: float) -> None:
        """Adds a token of a request that arrived at `arrived_at` and got its previous token at
        `previous_at` (NaN: it had none).
        """
        if math.isnan(previous_at):
            self.arrived_at[priority].append(arrived_at)
        else:
            self.previous_at[priority].append(previous_at)

    def first(self, priority: Priority) -> np.ndarray:
        """Returns the arrival times (s) of a class's requests that got their first token."""
        return np.array(self.arrived_at.get(priority, ()))

    def further(self, priority: Priority) -> np.ndarray:
        """Returns the previous token's times (s) of a class's requests that got a further token."""
        return np.array(self.previous_at.get(priority, ()))
