"""Start times of the latencies (TTFT and ITL) of a step's tokens, by class and model."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serving.request import Priority, Request

Of = tuple[Priority, int, str]
"""A class, and a model's number and name."""


@dataclass
class Latencies:
    """For the tokens of one step: arrival times of requests that got their first token, and
    previous token times of the others.
    """

    arrived_at: dict[Of, list[float]] = field(default_factory=lambda: defaultdict(list))
    previous_at: dict[Of, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, request: Request, arrived_at: float, previous_at: float) -> None:
        """Adds a token of a request that arrived at `arrived_at` and got its previous token at
        `previous_at` (NaN: it had none).
        """
        into = self.arrived_at if math.isnan(previous_at) else self.previous_at
        of = request.priority, request.model, request.model_name
        into[of].append(arrived_at if math.isnan(previous_at) else previous_at)

    def __iter__(self) -> Iterator[tuple[Of, np.ndarray, np.ndarray]]:
        """Yields each class and model with the arrival times (s) of its requests that got their
        first token, and the previous token's (s) of those that got a further one.
        """
        for of in {**self.arrived_at, **self.previous_at}:
            yield of, np.array(self.arrived_at.get(of, ())), np.array(self.previous_at.get(of, ()))
