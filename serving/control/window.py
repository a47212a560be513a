"""Latency samples of the last seconds."""

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
        self._forget(now)
        taken = [samples for began_at, _, samples in self._batches if began_at >= since]
        if sum(map(len, taken)) < min_samples:
            return None
        return float(np.percentile(np.concatenate(taken), 90))

    def late_share(self, now: float, slo_s: float, min_samples: int) -> float | None:
        """Returns the share of samples inside the window above `slo_s`; None for too few."""
        self._forget(now)
        taken = [samples for _, _, samples in self._batches]
        if not taken or sum(map(len, taken)) < min_samples:
            return None
        return float((np.concatenate(taken) > slo_s).mean())

    def _forget(self, now: float) -> None:
        while self._batches and self._batches[0][1] < now - self.window_s:
            self._batches.popleft()
