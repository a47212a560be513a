"""Allocates slots and KV pages on the ranks to sequences."""

import math
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from serving.plan import Limits
from serving.request import Priority
from serving.scheduling.policy import BE, LS
from serving.scheduling.prefixes import Found, PagePool
from serving.scheduling.sequence import SequenceState


class Places:
    """The slots and pages of all ranks, pages by group of layers (`Limits.windows`). A page may be
    shared; a sequence's slot and pages are on one rank.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        slots = limits.slots_per_rank
        self._slots = [
            list(range((rank + 1) * slots - 1, rank * slots - 1, -1))
            for rank in range(limits.num_ranks)
        ]
        self._closed: set[int] = set()  # ranks that admit no sequences
        self._pages = [
            [PagePool(pages, rank * pages) for pages in limits.group_pages]
            for rank in range(limits.num_ranks)
        ]
        self.nothing = Found(0, [[] for _ in limits.windows])

    @property
    def num_free_pages(self) -> int:
        """The number of the first group's pages without holders on all ranks, including cached
        ones.
        """
        return sum(groups[0].num_free for groups in self._pages)

    @property
    def num_idle_pages(self) -> int:
        """The number of the first group's cached pages without holders on all ranks."""
        return sum(groups[0].num_idle for groups in self._pages)

    @property
    def num_evicted_pages(self) -> int:
        """The number of the first group's cached pages evicted on all ranks since the start."""
        return sum(groups[0].num_evicted for groups in self._pages)

    def pages(self, rank: int) -> list[PagePool]:
        """Returns the pages of a rank, by group."""
        return self._pages[rank]

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
        for pages in self._pages[rank]:
            pages.drop_all()

    def open(self, rank: int) -> None:
        """Resumes admission on a rank. Does nothing if it is open."""
        self._closed.discard(rank)

    def free_slots(self, rank: int) -> int:
        """Returns the number of free slots of a rank."""
        return len(self._slots[rank])

    def num_left(
        self, rank: int, end: int, found: Found, giving: Sequence[SequenceState] = ()
    ) -> int:
        """Returns how many pages a rank has left once it has a sequence of `end` positions that
        starts with `found`, in the group with the fewest; below 0 if they do not suffice. Those of
        `giving` are evicted before.
        """
        start, least = found.num_blocks * self._limits.page_size, sys.maxsize
        for group, pages in enumerate(self._pages[rank]):
            left = pages.num_free - len(self._limits.blocks(group, start, end))
            if kept := found.kept[group]:
                left += sum(not pages.is_idle(one.page) for one in kept)
            if giving:
                there = {one.page for one in kept}
                held = Counter(page for holder in giving for page in holder.pages[group].values())
                freed = (pages.num_holders(p) == n and p not in there for p, n in held.items())
                left += sum(freed)
            if left < least:
                least = left
        return least

    def rank_for(
        self,
        end: int,
        ranks: Container[int],
        found: Mapping[int, Found] = MappingProxyType({}),
    ) -> int | None:
        """Returns the rank, among `ranks` with a slot and pages for a sequence of `end` positions,
        with the most cached pages of it (`found`, by rank).

        Ties go to the rank with the most free pages. None if no rank has room.
        """
        fitting = [
            rank
            for rank in range(self._limits.num_ranks)
            if rank in ranks
            and self._slots[rank]
            and self.num_left(rank, end, found.get(rank, self.nothing)) >= 0
        ]
        return max(
            fitting,
            key=lambda rank: (
                found.get(rank, self.nothing).num_blocks,
                self._pages[rank][0].num_free,
            ),
            default=None,
        )

    def take(self, rank: int, sequence: SequenceState, found: Found | None = None) -> None:
        """Allocates a slot for a sequence that starts with `found`, which it shares, and pages for
        its context; over a window, as many as it will have at once.

        Raises OutOfPages, and IndexError if there is no free slot.
        """
        end, found = len(sequence.prompt) + len(sequence.tokens), found or self.nothing
        start, stop = found.num_blocks * self._limits.page_size, sys.maxsize
        for group, (pages, kept) in enumerate(zip(self._pages[rank], found.kept, strict=True)):
            shared = [one.page for one in kept]
            pages.share(shared)  # first, so that allocating the others cannot evict these
            blocks = self._limits.blocks(group, start, end)
            own = pages.allocate(len(blocks) - len(shared))
            sequence.pages.append(dict(zip(blocks, [*shared, *own], strict=True)))
            stop = min(stop, blocks.stop)
        sequence.slot, sequence.room = self._slots[rank].pop(), stop * self._limits.page_size

    def extend(self, sequence: SequenceState) -> bool:
        """Allocates a decoding sequence's next page in each group; False if one has none free."""
        groups = self._pages[self._limits.rank(sequence.slot)]
        for pages in groups:
            if not pages.num_free:
                return False
        block = sequence.room // self._limits.page_size
        for pages, held in zip(groups, sequence.pages, strict=True):
            (held[block],) = pages.allocate(1)
        sequence.room += self._limits.page_size
        return True

    def refill(self, sequence: SequenceState) -> bool:
        """Allocates pages for a prompt's next chunk, and those that it will have over a window, as
        far as there are any; False if they do not suffice for the chunk.
        """
        end, ends = len(sequence.prompt) + len(sequence.tokens), []
        for group, pages in enumerate(self._pages[self._limits.rank(sequence.slot)]):
            held = sequence.pages[group]
            blocks = self._limits.blocks(group, sequence.num_computed, end)
            new = range(next(reversed(held), blocks.start - 1) + 1, blocks.stop)[: pages.num_free]
            held.update(zip(new, pages.allocate(len(new)), strict=True))
            ends.append(next(reversed(held), -1) + 1)
        sequence.room = self._limits.page_size * min(ends)
        return sequence.room >= min(end, sequence.num_computed + self._limits.max_prefill_tokens)

    def slide(self, sequence: SequenceState, settled: float = math.inf) -> None:
        """Frees a sequence's pages behind the windows of its next row, of its first `settled`
        blocks.
        """
        groups = self._pages[self._limits.rank(sequence.slot)]
        for group, (pages, held) in enumerate(zip(groups, sequence.pages, strict=True)):
            stop = int(min(self._limits.first_block(group, sequence.num_computed), settled))
            pages.free([held.pop(block) for block in range(next(iter(held), stop), stop)])

    def give_back(self, sequence: SequenceState) -> None:
        """Frees a sequence's slot and pages. Raises ValueError for a page that is free already."""
        rank = self._limits.rank(sequence.slot)
        for pages, held in zip(self._pages[rank], sequence.pages, strict=True):
            pages.free(held.values())
        self._slots[rank].append(sequence.slot)
        sequence.pages = []

    def check_idle(self) -> None:
        """Raises AssertionError unless all slots and pages are free."""
        for groups in self._pages:
            for pages in groups:
                pages.check_idle()
        if lost := self._limits.num_slots - sum(map(len, self._slots)):
            raise AssertionError(f"{lost} slots leaked")
