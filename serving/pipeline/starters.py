"""Who starts the processes of workers, sees them end, and starts them again."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from serving.pipeline.worker_process import Assignment

Ended = Callable[[str], None]
"""Called with why its process has ended, in any thread."""


class Starter(Protocol):
    """Starts and ends a crew's processes."""

    @property
    def host(self) -> str:
        """Address of this machine at which the workers reach the server."""
        ...

    def start(self, assignment: Assignment, ended: Ended) -> None:
        """Starts a worker that does not run. Returns at once."""
        ...

    def kill(self, name: str) -> None:
        """Ends a process that may not hear any more; `ended` is told. Nothing, where none runs."""
        ...

    def close(self) -> None:
        """Ends all that are left."""
        ...


class ProcessStarter:
    """A Starter on this machine. What its processes write to stderr goes to the server's."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()

    def start(self, assignment: Assignment, ended: Ended) -> None:
        """See Starter."""
        number, key, env = assignment.index, "CUDA_VISIBLE_DEVICES", dict(os.environ)
        given = env.get(key)
        if given not in ("", "-1") and env.get("JAX_PLATFORMS") != "cpu":  # else a CPU has them all
            devices = [str(number)] if given is None else given.split(",")[number : number + 1]
            if not devices:
                ended(f"{key} is {given!r}, and each worker needs a device of its own")
                return
            env[key] = devices[0]
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.startup.worker", assignment.name],  # for `ps`
            stdin=subprocess.PIPE,
            stdout=2,  # what libraries print
            text=True,
            env=env,
        )
        with self._lock:
            self._running[assignment.name] = process
        args = assignment, process, ended
        threading.Thread(target=_watch, args=args, daemon=True).start()

    def kill(self, name: str) -> None:
        """See Starter."""
        with self._lock:
            process = self._running.get(name)
        if process is not None:
            process.kill()

    def close(self) -> None:
        """See Starter."""
        with self._lock:
            running = list(self._running.values())
        for process in running:
            process.kill()
            process.wait()


def _watch(assignment: Assignment, process: "subprocess.Popen[str]", ended: Ended) -> None:
    inbox = process.stdin
    assert inbox is not None
    with suppress(OSError):  # it has ended already
        print(assignment.to_json(), file=inbox, flush=True)
    code = process.wait()  # its input stays open until then: it ends with it
    ended(f"its process ended with {'signal' if code < 0 else 'status'} {abs(code)}")
