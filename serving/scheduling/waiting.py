"""A summary of the waiting and running requests of a class."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from serving.scheduling.sequence import SequenceState, SequenceStatus

Shares = tuple[float, float]
"""A model's SLO of first tokens and of the others, each over that of its class."""
WHOLE: Shares = (1.0, 1.0)


class QueuedClass(NamedTuple):
    """Waiting and running requests of a class.

    If more requests wait than slots are free (`slots_taken`), first tokens depend on decode steps
    that free slots: a wait longer than the TTFT SLO then means that decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest request without a first token, in shares of its SLO
    slots_taken: bool = False
    num_queued: int = 0  # without a slot
    num_running: int = 0  # with one
    num_prefilling: int = 0  # of these, without a first token
    shares: Shares = WHOLE  # the least of their models

    @classmethod
    def of(
        cls,
        queue: Sequence[SequenceState],
        running: Sequence[SequenceState],
        num_free_slots: int,
        now: float,
        shares: Mapping[int, Shares],
    ) -> Self:
        """Summarizes a class whose sequences wait in `queue` or have a slot (`running`). `shares`
        are those of models with objectives of their own; ages are over them.
        """
        begun = [s for s in running if s.status is SequenceStatus.PREFILL and not s.tokens]
        ages = (
            (now - s.arrived_at) / shares.get(s.request.model, WHOLE)[0]
            for s in (*queue, *begun)
            if not s.tokens
        )
        oldest_s, counts = max(ages, default=0.0), (len(queue), len(running), len(begun))
        there = {s.request.model for s in (*queue, *running)} if shares else ()
        least = zip(*(shares.get(model, WHOLE) for model in there), strict=True)
        first, further = map(min, least) if there else WHOLE
        return cls(oldest_s, len(queue) > num_free_slots, *counts, (first, further))
