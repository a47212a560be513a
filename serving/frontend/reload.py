"""Files that are read again when they change: keys and certificates."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

LOOKS_EVERY_S = 1.0

_Seen = tuple[tuple[int, int, int, int] | None, ...]


class Watched[T](ABC):
    """What was read of some files, and is in use."""

    def __init__(self, what: str, paths: Sequence[Path]) -> None:
        """`what` they hold, for the log."""
        self.what, self.paths = what, tuple(paths)
        self._seen = self._look()

    @abstractmethod
    def read(self) -> T:
        """Reads the files, in any thread. Raises OSError or ValueError where it cannot."""

    @abstractmethod
    def use(self, found: T) -> None:
        """Has it in force from now on; in the thread of the event loop."""

    def news(self) -> T | None:
        """What files say that are others than when they were last looked at; in any thread.

        Files that cannot be used are an error of the log, once: what was read before stays in
        force until they are mended.
        """
        now = self._look()
        if now == self._seen:
            return None
        self._seen = now  # of before reading: what is written meanwhile is seen the next time
        try:
            return self.read()
        except Exception as error:  # whatever is in them, the next change is looked at
            log.error(
                "%s stay as they were, since what is there now cannot be used: %s",
                *(self.what, error),
                extra={"event": "reload_failed", "what": self.what},
            )
            return None

    def reload(self) -> bool:
        """Uses what is new; whether something is."""
        return self._use(self.news())

    def _use(self, found: T | None) -> bool:
        if found is None:
            return False
        self.use(found)
        where = ", ".join(map(str, self.paths))
        extra = {"event": "reloaded", "what": self.what}
        log.info("%s were read again from %s", self.what, where, extra=extra)
        return True

    async def watch(self, every_s: float = LOOKS_EVERY_S) -> None:
        """Looks until it is cancelled; in a thread, since files may be on a disk that hangs."""
        while self.paths:
            await asyncio.sleep(every_s)
            self._use(await asyncio.to_thread(self.news))

    def _look(self) -> _Seen:
        return tuple(map(_signature, self.paths))


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    """What differs when a file was replaced or written; None: there is none.

    Links are followed: a mounted secret is one, whose target is replaced.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
