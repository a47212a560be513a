"""Files that are read again when they change: keys and certificates."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

LOOKS_EVERY_S = 1.0

_Seen = tuple[tuple[int, int, int, int] | None, ...]


class Watched[T](ABC):
    """A value read from files, which is replaced when they change."""

    def __init__(self, what: str, paths: Sequence[Path]) -> None:
        """`what` says in the log what the files hold."""
        self.what, self.paths = what, tuple(paths)
        self._seen = self._look()
        self.heard: Callable[[str], object] = lambda what: None  # called when files were read again

    @abstractmethod
    def read(self) -> T:
        """Reads the files, in any thread. Raises OSError or ValueError if they cannot be used."""

    @abstractmethod
    def use(self, found: T) -> None:
        """Puts a new value in force; called in the event loop's thread."""

    def news(self, *, anyway: bool = False) -> T | None:
        """Reads the files if they have changed since the last look, or `anyway`; otherwise None.
        Runs in any thread.

        If the new files cannot be used, an error is logged once, and the old value stays in force
        until they are fixed.
        """
        now = self._look()
        if now == self._seen and not anyway:
            return None
        self._seen = now  # taken before reading, so writes meanwhile are seen next time
        try:
            return self.read()
        except Exception as error:  # whatever failed, keep watching for changes
            log.error(
                "%s stay as they were, since what is there now cannot be used: %s",
                *(self.what, error),
                extra={"event": "reload_failed", "what": self.what},
            )
            return None

    def reload(self) -> bool:
        """Reads changed files and uses the new value; returns whether there is one."""
        return self._use(self.news())

    async def reread(self) -> None:
        """Reads the files now, changed or not; says in the log what was read."""
        self._use(await asyncio.to_thread(self.news, anyway=True))

    def _use(self, found: T | None) -> bool:
        if found is None:
            return False
        self.use(found)
        where = ", ".join(map(str, self.paths))
        extra = {"event": "reloaded", "what": self.what}
        log.info("%s were read again from %s", self.what, where, extra=extra)
        self.heard(f"{self.what} were read again")
        return True

    async def watch(self) -> None:
        """Watches until cancelled; it reads in a thread, since a disk may hang."""
        while self.paths:
            await asyncio.sleep(LOOKS_EVERY_S)
            self._use(await asyncio.to_thread(self.news))

    def _look(self) -> _Seen:
        return tuple(map(_signature, self.paths))


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    """Returns a value that changes when a file is replaced or written; None if there is no file.

    Links are followed, since a mounted secret is a link whose target is replaced.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
