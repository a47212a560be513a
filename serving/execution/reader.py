"""Reads what the device computes, in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class ResultReader:
    """Waits for results in the order they were asked for.

    Its thread is a daemon: one that waits for a device that hangs keeps no process alive, as a
    `ThreadPoolExecutor`'s would.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="jmoe-read", daemon=True).start()

    def submit[T](self, read: Callable[[], T]) -> "Future[T]":
        """Returns a future of what `read` returns or raises."""
        future: Future[T] = Future()
        self._jobs.put((future, read))
        return future

    def close(self) -> None:
        """Ends the thread once it has read what was asked for."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, read = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(read())
            except BaseException as error:  # whatever it is, it belongs to who asked
                future.set_exception(error)
