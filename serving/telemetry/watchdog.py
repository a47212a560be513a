"""The watchdog: notices a step that never returns."""

import threading
import time
from collections.abc import Callable

PERIOD_S = 0.25
"""Time between two looks; limits shorter than a few periods are not kept exactly."""


class StuckTimer:
    """Measures time without progress, counting only time in which this process ran.

    After a stop (SIGSTOP, a suspended machine) the clock is far ahead, so at most two periods are
    counted between two looks.
    """

    def __init__(self, limit_s: float, period_s: float, now: float) -> None:
        self._limit_s, self._period_s = limit_s, period_s
        self._looked_at = now
        self._progress = 0
        self._stuck_s = 0.0

    def look(self, now: float, *, pending: bool, progress: int) -> bool:
        """Returns whether work has been pending without progress for longer than the limit."""
        passed = min(now - self._looked_at, 2 * self._period_s)
        self._looked_at = now
        if not pending or progress != self._progress:
            self._progress, self._stuck_s = progress, 0.0
        else:
            self._stuck_s += passed
        return self._stuck_s > self._limit_s


class Watchdog:
    """A thread that watches an engine's steps, which the engine counts here from its event loop."""

    def __init__(self, limit_s: float, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called once, in the watchdog's thread. A limit of 0 watches nothing."""
        self._limit_s, self._on_stuck = limit_s, on_stuck
        self.launched = 0
        self.ended = 0
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        if self._limit_s > 0:
            threading.Thread(target=self._watch, name="jmoe-watchdog", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        period_s = min(PERIOD_S, self._limit_s / 4)
        timer = StuckTimer(self._limit_s, period_s, time.monotonic())
        while not self._closed.wait(period_s):
            pending = self.launched > self.ended
            if timer.look(time.monotonic(), pending=pending, progress=self.ended):
                self._on_stuck()
                return
