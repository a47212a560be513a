"""Where a waiting sequence would be admitted: slot and pages for its context, those included that
best effort would give up for it.
"""

from collections.abc import Callable, Sequence

from serving.plan import Limits
from serving.scheduling.places import Places
from serving.scheduling.policy import BE
from serving.scheduling.reuse import Reuse
from serving.scheduling.sequence import SequenceState


class Room:
    """Asks places, reuse, and who would give way."""

    def __init__(
        self,
        limits: Limits,
        places: Places,
        reuse: Reuse,
        running: Callable[[], Sequence[SequenceState]],
        giving_way: Callable[[int], list[SequenceState]],
    ) -> None:
        """`giving_way`: sequences of a rank that give up slot and pages for a latency-sensitive
        one.
        """
        self._limits, self._places, self._reuse = limits, places, reuse
        self._running, self._giving_way = running, giving_way

    def rank_for(self, head: SequenceState, ranks: Sequence[int] | None = None) -> int | None:
        """Of `ranks`, None: of all, the one that has most of what the sequence begins with; of
        several, the one with most free pages, or with most that best effort would give up. None:
        none has room.
        """
        own, wanted = head.request.priority, self._pages_for(head)
        free = self._places.admissible(self._running(), own)
        ranks = [rank for rank in (range(len(free)) if ranks is None else ranks) if free[rank]]
        there = {rank: self._pages_there(head, rank) for rank in ranks}
        found = self._places.rank_for(wanted, ranks, there)
        if found is not None or own is BE:
            # Also one that has waited too long: two of best effort would evict each other.
            return found
        room = {}
        for rank in ranks:
            giving = self._giving_way(rank)
            if giving or self._places.free_slots(rank):
                room[rank] = (
                    self._places.free_pages(rank)
                    + self._places.num_freed(rank, giving, there[rank])
                    - self._places.num_needed(rank, wanted, there[rank])
                )
        fitting = [rank for rank, left in room.items() if left >= 0]
        return max(fitting, key=lambda rank: (len(there[rank]), room[rank]), default=None)

    def has_place(self, head: SequenceState, rank: int) -> bool:
        """Whether it fits on a rank as things are."""
        there = {rank: self._pages_there(head, rank)}
        return self._places.rank_for(self._pages_for(head), (rank,), there) is not None

    def take(self, head: SequenceState, rank: int) -> None:
        """The sequence gets a slot, and pages for its context: all at once, so that no decoding
        sequence can take what a later chunk will need.
        """
        found = self._reuse.found(head, rank)
        num_pages = self._limits.pages_for(len(head.context))
        pages = [kept.page for kept in found]
        head.slot, head.pages = self._places.take(rank, num_pages, pages)
        self._reuse.begin(head, found)

    def _pages_there(self, head: SequenceState, rank: int) -> list[int]:
        return [kept.page for kept in self._reuse.found(head, rank)]

    def _pages_for(self, head: SequenceState) -> int:
        """One position more than it needs now, or it might be evicted as soon as it is admitted."""
        return self._limits.pages_for(len(head.context) + 1)
