"""Workers of one process, a thread each (AMoE, section 4)."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

from serving.errors import Lost
from serving.execution.compilations import Compilations
from serving.execution.executor import WayChanged, WorkerSeen
from serving.execution.programs import Progress
from serving.pipeline.crew import Crew
from serving.pipeline.local import LocalWorkers
from serving.pipeline.messages import ATTENTION, EXPERTS, Enter, Unit, UseWay
from serving.pipeline.recorder import Recorder
from serving.plan import Limits

IDLE_S = 60.0
"""For how long a worker that has nothing to do waits before it looks again, message or not."""


class LocalCrew(Crew):
    """A Crew. A worker's thread takes what has come, runs a stage, and waits where there is
    neither; a stage of attention waits for its own result, so that others run meanwhile.
    """

    def __init__(self, workers: LocalWorkers, limits: Limits, max_len: int) -> None:
        """`limits` have a rank for each attention worker; sequences have up to `max_len`
        positions.
        """
        self.limits, self.max_len, self._workers = limits, max_len, workers
        self._compilations = Compilations()
        self._failures, self._closed = Lost(), threading.Event()
        self._lock, self._num_changing = threading.Lock(), 0  # workers that have yet to change
        self._names = [f"{ATTENTION}-{n}" for n in range(len(workers.attention))]
        self._names += [f"{EXPERTS}-{n}" for n in range(len(workers.experts))]
        pairs = zip(self._names, workers.workers, strict=True)
        self._recorders = [Recorder(name, worker) for name, worker in pairs]

    @property
    def compilations_since_ready(self) -> int:
        """See Executor."""
        return self._compilations.since_ready

    @property
    def num_programs(self) -> int:
        """See Executor."""
        return self._compilations.before

    def start(self, progress: Progress | None = None) -> None:
        """Compiles what may be needed, and starts the workers."""
        self._workers.warm(progress)
        self._compilations.ready()
        for number in range(self._workers.num_workers):
            name = f"jmoe-worker-{number}"
            threading.Thread(target=self._run, args=(number,), name=name, daemon=True).start()

    def enter(self, units: Sequence[list[Unit]]) -> None:
        """See Crew."""
        for inbox, own in zip(self._workers.inboxes, units, strict=False):
            if own:
                inbox.put(Enter(own))

    def change_way(self, way: int) -> None:
        """See ChangesWay."""
        self._num_changing = self._workers.num_workers
        for inbox in self._workers.inboxes:
            inbox.put(UseWay(way))

    def record(self) -> None:
        """See Crew."""
        for recorder in self._recorders:
            recorder.is_on = True

    def seen(self) -> list[WorkerSeen]:
        """See Crew."""
        now, found = self._workers.clock(), []
        for name, worker in zip(self._names, self._workers.workers, strict=True):
            queues = worker.queues
            waited_s = queues.waited_s(now)
            found.append(WorkerSeen(name, True, worker.stages, queues.num_rows, waited_s))
        return found

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor."""
        self._failures.watch(on_failure)

    def close(self) -> None:
        """See Executor: the threads end."""
        self._closed.set()
        self._compilations.close()
        for inbox in self._workers.inboxes:
            inbox.put(None)

    def _run(self, number: int) -> None:
        worker, recorder = self._workers.workers[number], self._recorders[number]
        ran, clock = True, self._workers.clock
        try:
            while not self._closed.is_set():
                for message in self._messages(number, 0.0 if ran else self._wait_s(worker)):
                    worker.take(message, clock())
                    if isinstance(message, UseWay):
                        self._note_changed(message.way)
                ran = recorder.run_stage(clock, self.report)
        except BaseException as error:
            if not self._closed.is_set():
                self._failures.say(f"worker {number}: {type(error).__name__}: {error}")

    def _note_changed(self, way: int) -> None:
        with self._lock:
            self._num_changing -= 1
            was_last = not self._num_changing
        if was_last:
            self.report(WayChanged(way))

    def _wait_s(self, worker: Any) -> float:
        """Returns the seconds until the worker's picker wants to be asked again if nothing
        comes.
        """
        return max(0.0, min(IDLE_S, worker.queues.wake_at() - self._workers.clock()))

    def _messages(self, number: int, wait_s: float) -> list[Any]:
        """Returns the messages that have come, after waiting for one if necessary."""
        inbox, found = self._workers.inboxes[number], []
        try:
            found.append(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait())
            while True:
                found.append(inbox.get_nowait())
        except Empty:
            return [message for message in found if message is not None]
