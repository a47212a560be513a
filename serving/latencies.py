"""When the tokens of a step began to be waited for, by class: what latencies are reckoned from."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from serving.request import Priority


@dataclass
class Latencies:
    """Of the tokens of one step: arrivals of the first ones, and when others had the one before."""

    arrived_at: dict[Priority, list[float]] = field(default_factory=lambda: defaultdict(list))
    previous_at: dict[Priority, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, priority: Priority, arrived_at: float, previous_at: float) -> None:
        """A request got a token; it arrived then, and has the one before since (NaN: none)."""
        if math.isnan(previous_at):
            self.arrived_at[priority].append(arrived_at)
        else:
            self.previous_at[priority].append(previous_at)

    def first(self, priority: Priority) -> np.ndarray:
        """Arrivals of requests of a class that got their first token; seconds."""
        return np.array(self.arrived_at.get(priority, ()))

    def further(self, priority: Priority) -> np.ndarray:
        """When requests of a class that got another token had the one before; seconds."""
        return np.array(self.previous_at.get(priority, ()))
