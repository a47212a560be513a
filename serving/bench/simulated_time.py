"""An event loop with simulated time: when it is idle, its clock jumps to the next timer.

Waiting takes no real time, and the order of events does not depend on the machine's load.
"""

import asyncio
import selectors


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop with its own clock, which starts at 0."""

    def __init__(self) -> None:
        """Makes a loop at time 0 s."""
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Returns the simulated seconds since the loop was made."""
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Polls sockets and wake-ups of other threads; waits only if no timer is set."""
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self._loop.now += timeout
        return ready
