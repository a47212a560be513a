"""Where sequences live on the device: slots and KV pages, by rank."""

from collections.abc import Container, Iterable

from serving.plan import Limits
from serving.request import Priority
from serving.scheduling.pages import PageAllocator
from serving.scheduling.policy import BE, LS
from serving.scheduling.sequence import SequenceState


class Places:
    """Slots and pages, each free or one sequence's; what a sequence has is all of one rank."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        slots, pages = limits.slots_per_rank, limits.pages_per_rank
        self._slots = [
            list(range((rank + 1) * slots - 1, rank * slots - 1, -1))
            for rank in range(limits.num_ranks)
        ]
        self._closed: set[int] = set()  # ranks that take nobody
        self._pages = [PageAllocator(pages, rank * pages) for rank in range(limits.num_ranks)]

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return self._limits.num_pages

    @property
    def num_free_pages(self) -> int:
        """Of all ranks."""
        return sum(pages.num_free for pages in self._pages)

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
        """A rank takes nobody, until it is opened again."""
        self._closed.add(rank)

    def open(self, rank: int) -> None:
        """A rank takes sequences again; nothing, where it does."""
        self._closed.discard(rank)

    def free_slots(self, rank: int) -> int:
        """Slots of a rank that nobody has."""
        return len(self._slots[rank])

    def free_pages(self, rank: int) -> int:
        """Pages of a rank that nobody has."""
        return self._pages[rank].num_free

    def rank_for(self, num_pages: int, ranks: Container[int]) -> int | None:
        """Of those of `ranks` with a slot and so many pages, the one with most free pages."""
        fitting = [
            rank
            for rank in range(self._limits.num_ranks)
            if rank in ranks and self._slots[rank] and num_pages <= self._pages[rank].num_free
        ]
        return max(fitting, key=self.free_pages, default=None)

    def take(self, rank: int, num_pages: int) -> tuple[int, list[int]]:
        """A slot and so many pages. Raises OutOfPages, IndexError without a slot."""
        pages = self._pages[rank].allocate(num_pages)
        return self._slots[rank].pop(), pages

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
