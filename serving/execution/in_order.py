"""Runs jobs one after another, in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class InOrder:
    """Runs jobs in the order they were given: reads what the device computes, or launches steps.

    Its thread is a daemon: one that waits for a device that hangs keeps no process alive, as a
    `ThreadPoolExecutor`'s would.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit[T](self, job: Callable[[], T]) -> "Future[T]":
        """Returns a future of what `job` returns or raises."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the thread once it has run what it was given."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            future, job = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is, it belongs to who asked
                future.set_exception(error)
