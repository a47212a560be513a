"""What waits in a class of requests, and what does not."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from serving.scheduling.sequence import SequenceState, SequenceStatus


class Waiting(NamedTuple):
    """Requests of a class.

    Where more requests wait than slots are free (`slots_taken`), a first token waits for decode
    steps: once it has waited longer than the TTFT SLO, decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest that waits for its first token
    slots_taken: bool = False
    num_queued: int = 0  # without a slot
    num_running: int = 0  # with one

    @classmethod
    def of(
        cls,
        queue: Sequence[SequenceState],
        running: Sequence[SequenceState],
        num_free_slots: int,
        now: float,
    ) -> Self:
        """A class whose sequences wait in `queue`, or have a slot already."""
        begun = (s for s in running if s.status is SequenceStatus.PREFILL)
        arrived_at = [s.arrived_at for s in (*queue, *begun) if not s.tokens]
        oldest_s = max((now - at for at in arrived_at), default=0.0)
        return cls(oldest_s, len(queue) > num_free_slots, len(queue), len(running))
