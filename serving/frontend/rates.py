"""Rate limits per minute: a token bucket that tells exactly when it will have a token again.

Written here since it takes a dozen lines, and libraries for it bring storage, threads or blocking
waits, which do not suit an event loop.
"""

MINUTE_NS = 60_000_000_000


class Bucket:
    """A token bucket that holds one minute's worth, so a burst may use that much; full at first.

    Times are whole nanoseconds of the caller's clock, so that a client which returns exactly when
    told to, and no earlier, is admitted.
    """

    def __init__(self, per_minute: int) -> None:
        """`per_minute`: 0 sets no limit."""
        self.per_minute = per_minute
        self._full_at_ns = 0  # when the bucket will be full again

    def wait_ns(self, now_ns: int) -> int:
        """Returns how long until one token can be taken; 0: now."""
        if not self.per_minute:
            return 0
        return max(0, self._from(now_ns) + self._cost_ns(1) - MINUTE_NS - now_ns)

    def take(self, count: int, now_ns: int) -> None:
        """Takes `count` tokens, even more than there are; later calls wait until the debt is
        repaid.
        """
        if self.per_minute:
            self._full_at_ns = self._from(now_ns) + self._cost_ns(count)

    def change(self, per_minute: int, now_ns: int) -> None:
        """Changes the rate from now on; the number of tokens missing from the bucket is kept."""
        missing_ns = max(0, self._full_at_ns - now_ns)
        missing = missing_ns * self.per_minute // MINUTE_NS
        self.per_minute, self._full_at_ns = per_minute, 0
        self.take(missing, now_ns)

    def _from(self, now_ns: int) -> int:
        return max(now_ns, self._full_at_ns)

    def _cost_ns(self, count: int) -> int:
        return -(-count * MINUTE_NS // self.per_minute)
