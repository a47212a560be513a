"""Captures what a server is asked and answers, as data for the distillation of its united experts.

United experts are only as good as the match of their data and the traffic (docs/distillation.md).
Token ids are kept rather than hidden rows: a row is as telling, a hundred times as large, and that
of a degraded step is not what the exact model sees. `Capture` is an observer like any other: `jmoe
serve --capture FILE` has one, and so may a notebook: `Engine.start(config, observer=capture)`.
"""

import atexit
import errno
import json
import logging
import os
import queue
import random
import threading
from pathlib import Path

from serving.errors import SettingsError
from serving.request import Output
from serving.scheduling.sequence import SequenceState
from serving.telemetry.observer import Observer

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Requests whose line is yet to be written; while a disk hangs, further ones are not captured."""
CLOSE_S = 5.0
"""How long the end waits for a disk."""


class Capture(Observer):
    """Appends the token ids of requests, drawn at random, to a file that `jmoe distill --data`
    reads.
    """

    def __init__(self, path: Path, share: float, max_mib: float) -> None:
        """Draws `share` of the requests that finish, until the file has `max_mib`. Those that may
        not be audited (`allow_audit`) are left out.

        Raises SettingsError for a file that cannot be written.
        """
        super().__init__()
        self.path, self._share, self._max_bytes = path, share, int(max_mib * 2**20)
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._why = ""  # nothing is written, as it was logged
        try:
            self._append(b"")
        except OSError as error:
            raise SettingsError(
                f"capture is {str(path)!r}: {error.strerror}; name a file in a folder that is there"
            ) from None
        # The process may end while it hangs.
        self._writer = threading.Thread(target=self._write_all, name="jmoe-capture", daemon=True)
        self._writer.start()
        atexit.register(self.close)  # a notebook may not call it

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """See Observer."""
        is_drawn = sequence.request.allow_audit and random.random() < self._share
        if is_drawn and not self._lines.full():
            ids = {"prompt_token_ids": sequence.prompt, "token_ids": sequence.tokens}
            self._lines.put_nowait(json.dumps(ids, separators=(",", ":")))

    def close(self) -> None:
        """Returns once all is written, or after `CLOSE_S` seconds, and logs then how many requests
        are lost.
        """
        atexit.unregister(self.close)
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, CLOSE_S)
            lost = lines.unfinished_tasks
        if lost:
            why = "%d captured requests are lost: %s did not take them within %g s"
            log.warning(why, lost, self.path, CLOSE_S)
        elif self._writer.is_alive():
            lines.put_nowait(None)
            self._writer.join()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            self._lines.task_done()
        self._lines.task_done()

    def _write(self, line: str) -> None:
        try:
            why = ""
            if not self._append(f"{line}\n".encode()):
                why = f"it has the {self._max_bytes / 2**20:.3g} MiB of capture_max_mib"
        except OSError as error:
            why = error.strerror or str(error)
        if why and why != self._why:
            log.warning("no requests are captured to %s: %s", self.path, why)
        self._why = why

    def _append(self, line: bytes) -> bool:
        """Adds a line, and returns whether there was room. The file may be moved at any time."""
        # Without waiting for a FIFO's reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        number = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(number).st_size
            if size + len(line) > self._max_bytes:
                return False
            if os.write(number, line) < len(line):  # no half lines
                os.ftruncate(number, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return True
        finally:
            os.close(number)
