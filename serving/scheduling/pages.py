"""The host's allocator of KV pages: reference counts, and pages cached for prefix reuse."""

from collections.abc import Callable, Collection, Iterable


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


class PageAllocator:
    """Allocates pages `[first, first + num_pages)`; each is free, or held by one or more callers.

    A cached ("kept") page keeps its contents after its last holder has freed it, until no other
    free page is left. Then the least recently used one is evicted first.
    """

    def __init__(
        self, num_pages: int, first: int = 0, on_evict: Callable[[int], None] = lambda page: None
    ) -> None:
        """`on_evict` is called with a cached page that is about to be reallocated."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages, self._first, self._on_evict = num_pages, first, on_evict
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._holders = [0] * num_pages
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # cached without holders, least recently used first

    @property
    def num_free(self) -> int:
        """The number of pages without holders, including cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """The number of cached pages without holders."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages, all or none. Raises OutOfPages."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page - self._first] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page. Raises ValueError for one that is neither held nor cached."""
        for page in pages:
            at = self._at(page)
            if not self._holders[at] and page not in self._idle:
                raise ValueError(f"page {page} has nothing to share")
            self._idle.pop(page, None)
            self._holders[at] += 1

    def free(self, pages: Collection[int]) -> None:
        """Removes a holder from each page. Raises ValueError for one that is not held.

        Cached pages are queued for eviction from the end of the sequence, because a later page is
        useless without the earlier ones.
        """
        idle = []
        for page in pages:
            at = self._at(page)
            if not self._holders[at]:
                raise ValueError(f"page {page} is freed twice")
            self._holders[at] -= 1
            if self._holders[at]:
                continue
            if page in self._kept:
                idle.append(page)
            else:
                self._free.append(page)
        self._idle.update(dict.fromkeys(reversed(idle)))

    def keep(self, page: int) -> None:
        """Marks a held page as cached. Raises ValueError for one that is not held."""
        if not self._holders[self._at(page)]:
            raise ValueError(f"page {page} is nobody's; there is nothing to keep")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Removes a page from the cache."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def is_idle(self, page: int) -> bool:
        """Returns whether a page is cached and has no holder."""
        return page in self._idle

    def num_holders(self, page: int) -> int:
        """Returns the number of a page's holders."""
        return self._holders[self._at(page)]

    def check_idle(self) -> None:
        """Raises AssertionError unless all pages were freed: the leak check when idle."""
        held = [self._first + at for at, holders in enumerate(self._holders) if holders]
        if held or self.num_free != self.num_pages:
            raise AssertionError(f"{len(held)} pages leaked: {held[:10]}")

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        self._kept.discard(page)
        self._on_evict(page)
        return page

    def _at(self, page: int) -> int:
        at = page - self._first
        if not 0 <= at < self.num_pages:
            last = self._first + self.num_pages - 1
            raise ValueError(f"page {page} is not one of {self._first} to {last}")
        return at
