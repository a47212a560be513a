"""A summary of the waiting and running requests of a class."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from serving.scheduling.sequence import SequenceState, SequenceStatus


class QueuedClass(NamedTuple):
    """Waiting and running requests of a class.

    If more requests wait than slots are free (`slots_taken`), first tokens depend on decode steps
    that free slots: a wait longer than the TTFT SLO then means that decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest request without a first token
    slots_taken: bool = False
    num_queued: int = 0  # without a slot
    num_running: int = 0  # with one
    num_prefilling: int = 0  # of these, without a first token

    @classmethod
    def of(
        cls,
        queue: Sequence[SequenceState],
        running: Sequence[SequenceState],
        num_free_slots: int,
        now: float,
    ) -> Self:
        """Summarizes a class whose sequences wait in `queue` or have a slot (`running`)."""
        begun = [s for s in running if s.status is SequenceStatus.PREFILL and not s.tokens]
        arrived_at = [s.arrived_at for s in (*queue, *begun) if not s.tokens]
        oldest_s = max((now - at for at in arrived_at), default=0.0)
        return cls(oldest_s, len(queue) > num_free_slots, len(queue), len(running), len(begun))
