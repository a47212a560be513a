"""The host's account of KV pages: who owns which."""

from collections.abc import Iterable


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


class PageAllocator:
    """Free list of pages `[0, num_pages)`. Every page is free or owned by exactly one caller."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
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
            self._owned[page] = True
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError for one that is not owned."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not one of 0 to {self.num_pages - 1}")
            if not self._owned[page]:
                raise ValueError(f"page {page} is freed twice")
            self._owned[page] = False
            self._free.append(page)

    def check_idle(self) -> None:
        """Raises AssertionError unless every page is back: the conservation check when idle."""
        if len(self._free) != self.num_pages or any(self._owned):
            lost = [page for page, owned in enumerate(self._owned) if owned]
            raise AssertionError(f"{len(lost)} pages leaked: {lost[:10]}")
