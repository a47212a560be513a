"""KV pages on the host: reference counts, and the prefix cache.

Full pages are found by their block hash, so a shared prefix is computed once. A page's name is a
hash of its tokens and of the previous page's name, so equal names mean equal tokens from the first
position on. The chain starts from the model and a salt: requests with different salts share no
pages.

A page may have been computed under brownout. Such a page, and every page that follows it, is
reused only by requests that accept at least as much brownout.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


NAME_BYTES = 16
_SECRET = os.urandom(32)
"""Drawn anew by each process, so that nobody can construct two texts with the same name."""


class Brownout(NamedTuple):
    """How much brownout KV values were computed under, or how much a request accepts."""

    percent: int  # the lowest threshold used; 100: every visit went to the expert routed to
    how: tuple[int, int] = (0, 0)  # strategy code, and way of the united experts

    def is_within(self, accepted: "Brownout") -> bool:
        """Returns whether a request that accepts `accepted` may use values computed under this."""
        if self.percent == 100:
            return True
        return self.how == accepted.how and self.percent >= accepted.percent

    def and_then(self, more: "Brownout") -> "Brownout":
        """Returns the brownout of values that depend on both; `NOBODYS` if their kinds differ."""
        if more.percent == 100 or self.percent == 100:
            return more if self.percent == 100 else self
        if self.how != more.how:
            return NOBODYS
        return min(self, more)


EXACT = Brownout(100)
NOBODYS = Brownout(-1, (-1, -1))
"""What no other request accepts: brownout of several kinds, or substitutes for experts that
were not on the device."""


class Kept(NamedTuple):
    """A cached page, and the brownout under which it and the pages before it were computed.

    The pages before it may have been replaced since, by pages of equal tokens and another brownout.
    """

    page: int
    brownout: Brownout


class Found(NamedTuple):
    """The cached pages with which a sequence would start."""

    num_blocks: int  # that need not be computed
    kept: Sequence[list[Kept]]  # by group: of the last of them, as far back as the next row reads


class Names:
    """Names (block hashes) of a sequence's full pages, computed on demand."""

    def __init__(self, model: int, salt: str, page_size: int) -> None:
        """`model` is the model's number in this process.

        The number suffices: weights and a family's expert map do not change while a process
        serves them, and no page outlives the process.
        """
        root = b"%d:" % model + salt.encode("utf-8", "surrogatepass")
        first = hashlib.blake2b(root, key=_SECRET, digest_size=NAME_BYTES)
        self._last, self._page_size = first.digest(), page_size
        self._names: list[bytes] = []

    def upto(self, count: int, tokens: Callable[[], Sequence[int]]) -> list[bytes]:
        """Returns the names of at least the first `count` pages.

        `tokens` returns the sequence's tokens, whose beginning must not have changed since the
        last call.
        """
        size, names = self._page_size, self._names
        if count > len(names):
            written = tokens()
        for block in range(len(names), count):
            own = array("q", written[block * size : (block + 1) * size]).tobytes()
            hashed = hashlib.blake2b(self._last + own, key=_SECRET, digest_size=NAME_BYTES)
            self._last = hashed.digest()
            names.append(self._last)
        return names


@dataclass
class KnownPages:
    """A remembered lookup for a waiting sequence, with the state of the rank's pages then."""

    state: tuple[object, ...]
    num_kept: int
    whole: list[Kept]  # of the first group, where it has no window
    found: Found


@dataclass
class Prefix:
    """What the prefix cache knows of one sequence."""

    names: Names | None = None  # made at the first lookup
    seen: dict[int, "KnownPages"] = field(default_factory=dict)  # by rank
    num_admitted: int = 0
    num_named: int = (
        0  # pages already handled: cached, reused from the cache, or never to be cached
    )
    brownout: Brownout = field(default=EXACT)  # of all its KV values, computed or reused
    coming: range = range(0)  # pages that prefill will fill, whose results were not read yet
    awaits: "tuple[Prefix, int] | None" = None  # whose pages it waited for, and how many it had
    num_mapped: int = 0  # pages that the device's block table has

    def anew(self) -> "Prefix":
        """Makes a fresh record for the same sequence after its pages were taken away."""
        return Prefix(self.names, num_admitted=self.num_admitted)


class PagePool:
    """Pages `[first, first + num_pages)` of one rank and group of layers. Each is free, or held by
    one or more callers; full ones are cached by name.

    A cached page keeps its contents after its last holder has freed it, until no other free page is
    left. Then the least recently used one is evicted first.
    """

    def __init__(self, num_pages: int, first: int = 0) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages, self._first = num_pages, first
        self.num_gone = self.num_kept = 0  # pages removed from the cache, and added to it
        self.num_evicted = 0
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._holders = [0] * num_pages
        self._by_name: dict[bytes, Kept] = {}
        self._names: dict[int, bytes] = {}  # of cached pages
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
            if page in self._names:
                idle.append(page)
            else:
                self._free.append(page)
        self._idle.update(dict.fromkeys(reversed(idle)))

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

    def get(self, name: bytes, accepted: Brownout) -> Kept | None:
        """Returns the page of a name if one is cached whose brownout is within `accepted`."""
        kept = self._by_name.get(name)
        return kept if kept is not None and kept.brownout.is_within(accepted) else None

    def find(self, names: Iterable[bytes], accepted: Brownout) -> list[Kept]:
        """Returns the pages of the longest cached prefix whose brownout is within `accepted`."""
        found = []
        for name in names:
            kept = self.get(name, accepted)
            if kept is None:
                break
            found.append(kept)
        return found

    def keep(self, name: bytes, page: int, brownout: Brownout) -> None:
        """Caches a held page under its name; of two pages with one name, the less degraded stays.

        Raises ValueError for a page that is not held.
        """
        there = self._by_name.get(name)
        if there is not None:
            # One of another kind of brownout is replaced: requests that come now refuse it.
            if there.brownout == EXACT or there.brownout.is_within(brownout):
                return
            self._drop(name)
        if not self._holders[self._at(page)]:
            raise ValueError(f"page {page} is nobody's; there is nothing to keep")
        self._by_name[name], self._names[page] = Kept(page, brownout), name
        self.num_kept += 1

    def drop_all(self) -> None:
        """Forgets every cached page, because the contents of the pages are lost."""
        for name in list(self._by_name):
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        page = self._by_name.pop(name).page
        del self._names[page]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
        self.num_gone += 1

    def _evict(self) -> int:
        """Returns the least recently used page, which is free now."""
        self._drop(self._names[next(iter(self._idle))])
        self.num_evicted += 1
        return self._free.pop()

    def _at(self, page: int) -> int:
        at = page - self._first
        if not 0 <= at < self.num_pages:
            last = self._first + self.num_pages - 1
            raise ValueError(f"page {page} is not one of {self._first} to {last}")
        return at
