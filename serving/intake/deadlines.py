"""Request timeouts: a request's own, and the limit on waiting for its first step."""

import asyncio
import math
from collections.abc import Callable

from serving.errors import DeadlineExceeded, QueuedTooLong
from serving.scheduling.sequence import SequenceState


class Deadlines:
    """Ends late requests with event loop timers; requests without a timeout have none."""

    def __init__(
        self,
        queue_timeout_s: float,
        clock: Callable[[], float],
        end: Callable[[SequenceState, DeadlineExceeded], None],
    ) -> None:
        """`end` is called with a late sequence and the error.

        Timeouts start at a request's arrival, by `clock`. `queue_timeout_s` 0: requests may wait in
        the queue without limit.
        """
        self._queue_timeout_s = queue_timeout_s or math.inf
        self._clock, self._end = clock, end

    def watch(self, sequence: SequenceState) -> None:
        """Starts a sequence's timer; `forget` cancels it."""
        until = _until(sequence)
        if math.isnan(sequence.started_at):
            until = min(until, sequence.arrived_at + self._queue_timeout_s)
        if until < math.inf:
            left_s = max(0.0, until - self._clock())
            loop = asyncio.get_running_loop()
            sequence.deadline = loop.call_later(left_s, self._late, sequence, until)

    def forget(self, sequence: SequenceState) -> None:
        """Cancels a sequence's timer when its client disconnects or it has ended."""
        if sequence.deadline is not None:
            sequence.deadline.cancel()

    def _late(self, sequence: SequenceState, until: float) -> None:
        if until == _until(sequence):
            self._end(sequence, DeadlineExceeded(_why(sequence)))
        elif math.isnan(sequence.started_at):
            limit = f"{self._queue_timeout_s:g} s (engine.queue_timeout_s)"
            why = f"not begun after {limit}: the server is busy; try again later"
            self._end(sequence, QueuedTooLong(why))
        else:
            self.watch(sequence)  # it began in time; its own timeout remains


def _until(sequence: SequenceState) -> float:
    timeout_s = sequence.request.timeout_s
    return math.inf if timeout_s is None else sequence.arrived_at + timeout_s


def _why(sequence: SequenceState) -> str:
    request = sequence.request
    of = " (request_timeout_s: this request named no time of its own)"
    return f"not finished after {request.timeout_s:g} s{of if request.timeout_is_servers else ''}"
