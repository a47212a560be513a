"""The watchdog: notices a step that never returns."""

import threading
import time
from collections.abc import Callable

PERIOD_S = 0.25
"""Between two looks; limits shorter than a few of them are not kept exactly."""


class StuckTimer:
    """Time without progress, counting only time in which this process ran.

    A process that was stopped (SIGSTOP, a suspended machine) wakes up to a clock far ahead. From
    one look to the next no more than two periods count.
    """

    def __init__(self, limit_s: float, period_s: float, now: float) -> None:
        self._limit_s, self._period_s = limit_s, period_s
        self._looked_at = now
        self._progress = 0
        self._stuck_s = 0.0

    def look(self, now: float, *, pending: bool, progress: int) -> bool:
        """Whether work has been pending, with the same `progress`, for longer than the limit."""
        passed = min(now - self._looked_at, 2 * self._period_s)
        self._looked_at = now
        if not pending or progress != self._progress:
            self._progress, self._stuck_s = progress, 0.0
        else:
            self._stuck_s += passed
        return self._stuck_s > self._limit_s


class Watchdog:
    """A thread that looks at an engine's steps. The engine counts them here from its loop."""

    def __init__(self, limit_s: float, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called once, in the watchdog's thread. A limit of 0 watches nothing."""
        self._limit_s, self._on_stuck = limit_s, on_stuck
        self.launched = 0
        self.ended = 0
        self._closed = threading.Event()

    def note_end(self, _: object) -> None:
        """A step has ended, as a future's callback says it."""
        self.ended += 1

    def start(self) -> None:
        """Begins to watch."""
        if self._limit_s > 0:
            threading.Thread(target=self._watch, name="jmoe-watchdog", daemon=True).start()

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()

    def _watch(self) -> None:
        period_s = min(PERIOD_S, self._limit_s / 4)
        timer = StuckTimer(self._limit_s, period_s, time.monotonic())
        while not self._closed.wait(period_s):
            pending = self.launched > self.ended
            if timer.look(time.monotonic(), pending=pending, progress=self.ended):
                self._on_stuck()
                return
