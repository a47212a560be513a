"""How much a minute: a bucket that fills evenly, and says exactly when there is enough in it again.

Written here since it is a dozen lines, and libraries for it bring storage, threads or waiting that
an event loop has no use for.
"""

MINUTE_NS = 60_000_000_000


class Bucket:
    """Holds a minute's worth, and is full at first: so much may be taken at once.

    In whole nanoseconds, so that who comes back when told to, and not a moment before, is let in.
    The clock is the caller's.
    """

    def __init__(self, per_minute: int) -> None:
        """`per_minute`: 0 sets no limit."""
        self.per_minute = per_minute
        self._full_at_ns = 0  # by when what was taken has come back

    def wait_ns(self, now_ns: int) -> int:
        """How long until one can be taken; 0: now."""
        if not self.per_minute:
            return 0
        return max(0, self._from(now_ns) + self._cost_ns(1) - MINUTE_NS - now_ns)

    def take(self, count: int, now_ns: int) -> None:
        """Takes what there is, and what there is not as well: a debt, which is waited for later."""
        if self.per_minute:
            self._full_at_ns = self._from(now_ns) + self._cost_ns(count)

    def change(self, per_minute: int, now_ns: int) -> None:
        """Another rate from now on. What is missing stays missing, in numbers."""
        missing_ns = max(0, self._full_at_ns - now_ns)
        missing = missing_ns * self.per_minute // MINUTE_NS
        self.per_minute, self._full_at_ns = per_minute, 0
        self.take(missing, now_ns)

    def _from(self, now_ns: int) -> int:
        return max(now_ns, self._full_at_ns)

    def _cost_ns(self, count: int) -> int:
        return -(-count * MINUTE_NS // self.per_minute)
