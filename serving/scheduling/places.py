"""Where sequences live on the device: slots and KV pages, by rank."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from serving.plan import Limits
from serving.request import Priority
from serving.scheduling.policy import BE, LS
from serving.scheduling.prefixes import PrefixPages
from serving.scheduling.sequence import SequenceState


class Places:
    """Slots, each free or one sequence's, and pages, which several may have; what a sequence has is
    all of one rank.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        slots, pages = limits.slots_per_rank, limits.pages_per_rank
        self._slots = [
            list(range((rank + 1) * slots - 1, rank * slots - 1, -1))
            for rank in range(limits.num_ranks)
        ]
        self._closed: set[int] = set()  # ranks that take nobody
        self._named = [PrefixPages(pages, rank * pages) for rank in range(limits.num_ranks)]
        self._pages = [named.pages for named in self._named]

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return self._limits.num_pages

    @property
    def num_free_pages(self) -> int:
        """Of all ranks; nobody has them, and some are kept for what is in them."""
        return sum(pages.num_free for pages in self._pages)

    @property
    def num_idle_pages(self) -> int:
        """Of all ranks: those that are kept for what is in them, and nobody has."""
        return sum(pages.num_idle for pages in self._pages)

    @property
    def num_evicted_pages(self) -> int:
        """Of all ranks, since the start: kept ones that were somebody's own again."""
        return sum(named.num_evicted for named in self._named)

    def named(self, rank: int) -> PrefixPages:
        """Pages of a rank, by what is in them."""
        return self._named[rank]

    def admissible(self, running: Iterable[SequenceState], priority: Priority) -> list[int]:
        """Sequences of a class that each rank could still take, pages aside; latency-sensitive ones
        get those of best effort, too.
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
        """Whether some rank takes sequences."""
        return len(self._closed) < self._limits.num_ranks

    def close(self, rank: int) -> None:
        """A rank takes nobody, until it is opened again; what its pages held is lost."""
        self._closed.add(rank)
        self._named[rank].drop_all()

    def open(self, rank: int) -> None:
        """A rank takes sequences again; nothing, where it does."""
        self._closed.discard(rank)

    def free_slots(self, rank: int) -> int:
        """Slots of a rank that nobody has."""
        return len(self._slots[rank])

    def free_pages(self, rank: int) -> int:
        """Pages of a rank that nobody has."""
        return self._pages[rank].num_free

    def num_needed(self, rank: int, num_pages: int, found: Iterable[int] = ()) -> int:
        """Free pages that a sequence of `num_pages` takes, of which `found` are there already."""
        pages = self._pages[rank]
        return num_pages - sum(not pages.is_idle(page) for page in found)

    def num_freed(self, rank: int, holders: Iterable[SequenceState], but: Container[int]) -> int:
        """Pages that nobody has once these sequences are gone, without those of `but`."""
        counts = Counter(page for holder in holders for page in holder.pages)
        held = self._pages[rank].num_holders
        return sum(held(page) == count and page not in but for page, count in counts.items())

    def rank_for(
        self,
        num_pages: int,
        ranks: Container[int],
        found: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> int | None:
        """Of those of `ranks` with a slot and pages for a sequence of `num_pages`, the one that has
        `found` most of it; of several, the one with most free pages.
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
        """A slot and so many pages, the first of them `found`. Raises OutOfPages, IndexError
        without a slot.
        """
        self._pages[rank].share(found)  # before others are taken, which may be kept ones, too
        pages = self._pages[rank].allocate(num_pages - len(found))
        return self._slots[rank].pop(), [*found, *pages]

    def page_for(self, slot: int) -> int | None:
        """One page more for a slot's sequence; None: its rank has none."""
        pages = self._pages[self._limits.rank(slot)]
        return pages.allocate(1)[0] if pages.num_free else None

    def give_back(self, slot: int, pages: list[int]) -> None:
        """What a sequence had. Raises ValueError for a page that is free already."""
        rank = self._limits.rank(slot)
        self._pages[rank].free(pages)
        self._slots[rank].append(slot)

    def check_idle(self) -> None:
        """Raises AssertionError unless all is free."""
        for pages in self._pages:
            pages.check_idle()
        if lost := self._limits.num_slots - sum(map(len, self._slots)):
            raise AssertionError(f"{lost} slots leaked")
