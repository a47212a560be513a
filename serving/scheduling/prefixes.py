"""Pages by what is in them: beginnings that requests share are computed once.

A page is named by a hash of its tokens and of the name of the page before it, so that equal names
mean equal tokens from the first one on. The first name comes of the model, and of a salt: requests
with different salts share nothing.

What a page holds may have been computed under brownout. One that was, or that comes after such a
one, is for requests alone that accept as much (DESIGN, section 4, rule 5).
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.scheduling.pages import PageAllocator

NAME_BYTES = 16
_SECRET = os.urandom(32)
"""Of this process: nobody can make two texts of one name."""


class Brownout(NamedTuple):
    """How far visits were, or may be, served by other experts than the router chose."""

    percent: int  # the lowest threshold; 100: none was
    how: tuple[int, int] = (0, 0)  # code of the strategy, and way of united experts

    def is_within(self, accepted: "Brownout") -> bool:
        """Whether who accepts that much gets no more than that."""
        if self.percent == 100:
            return True
        return self.how == accepted.how and self.percent >= accepted.percent

    def and_then(self, more: "Brownout") -> "Brownout":
        """Both, one after the other; of two kinds, what nobody accepts."""
        if more.percent == 100 or self.percent == 100:
            return more if self.percent == 100 else self
        if self.how != more.how:
            return NOBODYS
        return min(self, more)


EXACT = Brownout(100)
NOBODYS = Brownout(-1, (-1, -1))
"""What no other request accepts: brownout of several kinds, or others' experts for want of own."""


class Kept(NamedTuple):
    """A page, and the brownout that it was computed under, after those that were before it then.

    Others may be before it now: of equal tokens, and perhaps of more brownout.
    """

    page: int
    brownout: Brownout


class Names:
    """Names of a sequence's full pages, made as they are asked for."""

    def __init__(self, model: int, salt: str, page_size: int) -> None:
        """`model` by its number: weights, and the experts that a family's models share, stay as
        they are for as long as a process serves them, and pages live no longer.
        """
        root = b"%d:" % model + salt.encode("utf-8", "surrogatepass")
        first = hashlib.blake2b(root, key=_SECRET, digest_size=NAME_BYTES)
        self._last, self._page_size = first.digest(), page_size
        self._names: list[bytes] = []

    def upto(self, count: int, tokens: Callable[[], Sequence[int]]) -> list[bytes]:
        """Of the first `count` pages, or of more; `tokens` begin as they did before."""
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
class Seen:
    """What was found for a waiting sequence, and in which state of a rank's pages."""

    state: tuple[object, ...]
    num_kept: int
    found: list[Kept]


@dataclass
class Prefix:
    """What is known of a sequence's pages, from its first one on."""

    names: Names | None = None  # made when they are first asked for
    seen: dict[int, "Seen"] = field(default_factory=dict)  # by rank
    num_admitted: int = 0
    num_named: int = 0  # pages that are kept, or were another's, or are not to be kept
    brownout: Brownout = field(default=EXACT)  # of what it has computed, or has of others
    num_mapped: int = 0  # pages that the device's block table has

    def anew(self) -> "Prefix":
        """Of the same sequence, whose pages were taken away."""
        return Prefix(self.names, num_admitted=self.num_admitted)


class PrefixPages:
    """The named pages of one rank."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self.pages = PageAllocator(num_pages, first, self._evicted)
        self.num_gone = self.num_kept = 0  # names that were taken away, and given
        self.num_evicted = 0
        self._by_name: dict[bytes, Kept] = {}
        self._names: dict[int, bytes] = {}

    def find(self, names: Iterable[bytes], accepted: Brownout) -> list[Kept]:
        """The longest beginning that is there and within what is accepted."""
        found = []
        for name in names:
            kept = self._by_name.get(name)
            if kept is None or not kept.brownout.is_within(accepted):
                break
            found.append(kept)
        return found

    def keep(self, name: bytes, page: int, brownout: Brownout) -> None:
        """A held page is what `name` says; where another one is, too, the less degraded is kept."""
        there = self._by_name.get(name)
        if there is not None:
            # Of another kind of brownout, it is for nobody who comes now.
            if there.brownout == EXACT or there.brownout.is_within(brownout):
                return
            self._drop(name)
        self.pages.keep(page)
        self._by_name[name], self._names[page] = Kept(page, brownout), name
        self.num_kept += 1

    def drop_all(self) -> None:
        """What pages hold is lost."""
        for name in list(self._by_name):
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        page = self._by_name.pop(name).page
        del self._names[page]
        self.pages.forget(page)
        self.num_gone += 1

    def _evicted(self, page: int) -> None:
        del self._by_name[self._names.pop(page)]
        self.num_evicted += 1
        self.num_gone += 1
