"""Latency samples of the last seconds."""

import math
from collections import deque

import numpy as np


class LatencyWindow:
    """Latency samples of the last `window_s` seconds, in batches of one step each."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._batches: deque[tuple[float, float, np.ndarray]] = deque()

    def add(self, began_at: float, ended_at: float, samples_s: np.ndarray) -> None:
        """Adds the samples of one step. `began_at` is when the earliest interval that they measure
        began.
        """
        self._batches.append((began_at, ended_at, samples_s))
        self._forget(ended_at)

    def p90(self, now: float, since: float, min_samples: int) -> float | None:
        """Returns the P90 of samples inside the window that lie wholly after `since`; None for too
        few.
        """
        taken = self._taken(now, since, min_samples)
        return None if taken is None else float(np.percentile(taken, 90))

    def late_share(self, now: float, slo_s: float, min_samples: int) -> float | None:
        """Returns the share of samples inside the window above `slo_s`; None for too few."""
        taken = self._taken(now, -math.inf, min_samples)
        return None if taken is None else float((taken > slo_s).mean())

    def _taken(self, now: float, since: float, min_samples: int) -> np.ndarray | None:
        self._forget(now)
        taken = [samples for began_at, _, samples in self._batches if began_at >= since]
        enough = taken and sum(map(len, taken)) >= min_samples
        return np.concatenate(taken) if enough else None

    def _forget(self, now: float) -> None:
        while self._batches and self._batches[0][1] < now - self.window_s:
            self._batches.popleft()
