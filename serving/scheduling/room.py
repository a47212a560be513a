"""Chooses the rank that can admit a waiting sequence.

Slots and pages that best-effort sequences would give up for it are counted as free.
"""

from collections.abc import Callable, Sequence

from serving.plan import Limits
from serving.scheduling.places import Places
from serving.scheduling.policy import BE
from serving.scheduling.reuse import Reuse
from serving.scheduling.sequence import SequenceState


class Room:
    """Combines free places, cached prefixes, and what best-effort sequences would give up."""

    def __init__(
        self,
        limits: Limits,
        places: Places,
        reuse: Reuse,
        running: Callable[[], Sequence[SequenceState]],
        giving_way: Callable[[int], list[SequenceState]],
    ) -> None:
        """`giving_way` returns the sequences of a rank that give up slot and pages for a
        latency-sensitive one.
        """
        self._limits, self._places, self._reuse = limits, places, reuse
        self._running, self._giving_way = running, giving_way

    def rank_for(self, head: SequenceState, ranks: Sequence[int] | None = None) -> int | None:
        """Returns the rank, among `ranks` or all, with the longest cached prefix of the sequence.

        Ties go to the rank with the most free pages. If no rank has room as it is, a
        latency-sensitive sequence gets the one where best effort would give up most. None if that
        does not make room either.
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
        """Returns whether the sequence fits on a rank as things are."""
        there = {rank: self._pages_there(head, rank)}
        return self._places.rank_for(self._pages_for(head), (rank,), there) is not None

    def take(self, head: SequenceState, rank: int) -> None:
        """Gives the sequence a slot and pages for its whole context.

        All at once, so that no decoding sequence can take pages that a later chunk will need.
        """
        found = self._reuse.found(head, rank)
        num_pages = self._limits.pages_for(len(head.context))
        pages = [kept.page for kept in found]
        head.slot, head.pages = self._places.take(rank, num_pages, pages)
        self._reuse.begin(head, found)

    def _pages_there(self, head: SequenceState, rank: int) -> list[int]:
        return [kept.page for kept in self._reuse.found(head, rank)]

    def _pages_for(self, head: SequenceState) -> int:
        """Returns the pages for its context and one position more, lest it be evicted once
        admitted.
        """
        return self._limits.pages_for(len(head.context) + 1)
