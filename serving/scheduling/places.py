"""Allocates slots and KV pages on the ranks to sequences."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from serving.plan import Limits
from serving.request import Priority
from serving.scheduling.policy import BE, LS
from serving.scheduling.prefixes import PrefixPages
from serving.scheduling.sequence import SequenceState


class Places:
    """The slots and pages of all ranks. A page may be shared; a sequence's slot and pages are on
    one rank.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        slots, pages = limits.slots_per_rank, limits.pages_per_rank
        self._slots = [
            list(range((rank + 1) * slots - 1, rank * slots - 1, -1))
            for rank in range(limits.num_ranks)
        ]
        self._closed: set[int] = set()  # ranks that admit no sequences
        self._named = [PrefixPages(pages, rank * pages) for rank in range(limits.num_ranks)]
        self._pages = [named.pages for named in self._named]

    @property
    def num_pages(self) -> int:
        """The number of pages on all ranks."""
        return self._limits.num_pages

    @property
    def num_free_pages(self) -> int:
        """The number of pages without holders on all ranks, including cached ones."""
        return sum(pages.num_free for pages in self._pages)

    @property
    def num_idle_pages(self) -> int:
        """The number of cached pages without holders on all ranks."""
        return sum(pages.num_idle for pages in self._pages)

    @property
    def num_evicted_pages(self) -> int:
        """The number of cached pages evicted on all ranks since the start."""
        return sum(named.num_evicted for named in self._named)

    def named(self, rank: int) -> PrefixPages:
        """Returns the prefix cache of a rank."""
        return self._named[rank]

    def admissible(self, running: Iterable[SequenceState], priority: Priority) -> list[int]:
        """Returns how many more sequences of a class each rank could admit, apart from pages.

        Slots held by best-effort sequences count as free for latency-sensitive ones.
        """
        limits = self._limits
        taken = [0] * limits.num_ranks
        for sequence in running:
            if priority is BE or sequence.request.priority is LS:
                taken[limits.rank(sequence.slot)] += 1
        rows = limits.decode_rows // limits.num_ranks
        free = [max(0, rows - count) for count in taken]
        for rank in self._closed:
            free[rank] = 0
        if priority is BE:
            free = [min(self.free_slots(rank), n) for rank, n in enumerate(free)]
        return free

    @property
    def any_open(self) -> bool:
        """Whether some rank admits sequences."""
        return len(self._closed) < self._limits.num_ranks

    def close(self, rank: int) -> None:
        """Stops admission on a rank until it is opened again, and drops its prefix cache."""
        self._closed.add(rank)
        self._named[rank].drop_all()

    def open(self, rank: int) -> None:
        """Resumes admission on a rank. Does nothing if it is open."""
        self._closed.discard(rank)

    def free_slots(self, rank: int) -> int:
        """Returns the number of free slots of a rank."""
        return len(self._slots[rank])

    def free_pages(self, rank: int) -> int:
        """Returns the number of free pages of a rank, including cached ones without holders."""
        return self._pages[rank].num_free

    def num_needed(self, rank: int, num_pages: int, found: Iterable[int] = ()) -> int:
        """Returns how many free pages a sequence of `num_pages` takes if `found` ones are
        cached.
        """
        pages = self._pages[rank]
        return num_pages - sum(not pages.is_idle(page) for page in found)

    def num_freed(self, rank: int, holders: Iterable[SequenceState], but: Container[int]) -> int:
        """Returns how many pages become free if `holders` are evicted, not counting those
        in `but`.
        """
        counts = Counter(page for holder in holders for page in holder.pages)
        held = self._pages[rank].num_holders
        return sum(held(page) == count and page not in but for page, count in counts.items())

    def rank_for(
        self,
        num_pages: int,
        ranks: Container[int],
        found: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> int | None:
        """Returns the rank, among `ranks` with a slot and pages for a sequence of `num_pages`, with
        the most cached pages of it (`found`, by rank).

        Ties go to the rank with the most free pages. None if no rank has room.
        """
        fitting = [
            rank
            for rank in range(self._limits.num_ranks)
            if rank in ranks
            and self._slots[rank]
            and self.num_needed(rank, num_pages, found.get(rank, ())) <= self.free_pages(rank)
        ]
        return max(
            fitting,
            key=lambda rank: (len(found.get(rank, ())), self.free_pages(rank)),
            default=None,
        )

    def take(self, rank: int, num_pages: int, found: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Allocates a slot and `num_pages` pages, of which the first are the shared ones in
        `found`.

        Raises OutOfPages, and IndexError if there is no free slot.
        """
        self._pages[rank].share(found)  # first, so that allocating the others cannot evict these
        pages = self._pages[rank].allocate(num_pages - len(found))
        return self._slots[rank].pop(), [*found, *pages]

    def page_for(self, slot: int) -> int | None:
        """Allocates another page for a slot's sequence; None if its rank has none free."""
        pages = self._pages[self._limits.rank(slot)]
        return pages.allocate(1)[0] if pages.num_free else None

    def give_back(self, slot: int, pages: list[int]) -> None:
        """Frees a sequence's slot and pages. Raises ValueError for a page that is free already."""
        rank = self._limits.rank(slot)
        self._pages[rank].free(pages)
        self._slots[rank].append(slot)

    def check_idle(self) -> None:
        """Raises AssertionError unless all slots and pages are free."""
        for pages in self._pages:
            pages.check_idle()
        if lost := self._limits.num_slots - sum(map(len, self._slots)):
            raise AssertionError(f"{lost} slots leaked")
