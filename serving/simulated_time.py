"""An event loop whose time is simulated: idle, its clock jumps to the next timer.

What takes seconds by the clock takes none here, and what happens in which order does not depend on
how loaded the machine is.
"""

import asyncio
import selectors


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with a clock of its own, which starts at 0."""

    def __init__(self) -> None:
        """A loop at 0 s."""
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made, as its timers count them."""
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Looks at sockets (and what other threads did) without waiting, unless no timer is set."""
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self._loop.now += timeout
        return ready
