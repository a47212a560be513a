"""The host's account of KV pages: who owns which."""

from collections.abc import Iterable


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


class PageAllocator:
    """Free list of pages `[first, first + num_pages)`, each free or owned by exactly one caller."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages, self._first = num_pages, first
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._owned = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, all or none. Raises OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page - self._first] = True
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError for one that is not owned."""
        for page in pages:
            first, at = self._first, page - self._first
            if not 0 <= at < self.num_pages:
                last = first + self.num_pages - 1
                raise ValueError(f"page {page} is not one of {first} to {last}")
            if not self._owned[at]:
                raise ValueError(f"page {page} is freed twice")
            self._owned[at] = False
            self._free.append(page)

    def check_idle(self) -> None:
        """Raises AssertionError unless every page is back: the conservation check when idle."""
        if len(self._free) != self.num_pages or any(self._owned):
            lost = [self._first + at for at, owned in enumerate(self._owned) if owned]
            raise AssertionError(f"{len(lost)} pages leaked: {lost[:10]}")
