"""Workers of one process, a thread each (AMoE, section 4)."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

from serving.execution.aep.attention import AttentionWorker
from serving.execution.aep.crew import OneModel, units_of
from serving.execution.aep.local import LocalWorkers
from serving.execution.aep.messages import Enter, Steer
from serving.execution.compilations import Compilations
from serving.execution.followers import Lost
from serving.execution.programs import Progress
from serving.plan import Limits, StepPlan

IDLE_S = 60.0
"""For how long a worker that has nothing to do waits before it looks again, message or not."""


class LocalCrew(OneModel):
    """A Crew. A worker's thread takes what has come, runs a stage, and waits where there is
    neither; a stage of attention waits for its own result, so that others run meanwhile.
    """

    def __init__(self, workers: LocalWorkers, limits: Limits) -> None:
        """`limits` have a rank for each attention worker."""
        self.limits, self._workers = limits, workers
        self._compilations = Compilations()
        self._tell: Callable[[Any], None] = lambda told: None
        self._failures, self._closed = Lost(), threading.Event()
        self._steer: Steer | None = None

    @property
    def compilations_since_ready(self) -> int:
        """See Runner."""
        return self._compilations.since_ready

    @property
    def num_programs(self) -> int:
        """See Runner."""
        return self._compilations.before

    def start(self, progress: Progress | None = None) -> None:
        """Compiles what may be needed; the workers begin."""
        self._workers.warm(progress)
        self._compilations.ready()
        for number in range(self._workers.num_workers):
            name = f"jmoe-worker-{number}"
            threading.Thread(target=self._run, args=(number,), name=name, daemon=True).start()

    def listen(self, tell: Callable[[Any], None]) -> None:
        """See Crew."""
        self._tell = tell

    def enter(self, plan: StepPlan, numbers: Sequence[int], **of_rows: Sequence[bool]) -> None:
        """See Crew."""
        units = units_of(plan, self.limits, numbers, **of_rows)
        for inbox, own in zip(self._workers.inboxes, units, strict=False):
            if own:
                inbox.put(Enter(own))

    def steer(self, steer: Steer) -> None:
        """See Crew."""
        if steer != self._steer:
            self._steer = steer
            for inbox in self._workers.inboxes[: len(self._workers.attention)]:
                inbox.put(steer)

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Runner."""
        self._failures.watch(on_failure)

    def close(self) -> None:
        """See Runner: the threads end."""
        self._closed.set()
        self._compilations.close()
        for inbox in self._workers.inboxes:
            inbox.put(None)

    def _run(self, number: int) -> None:
        worker, ran = self._workers.workers[number], True
        try:
            while not self._closed.is_set():
                for message in self._messages(number, 0.0 if ran else self._wait_s(worker)):
                    worker.take(message, self._workers.clock())
                results = worker.advance(self._workers.clock())
                ran = results is not None
                if results and isinstance(worker, AttentionWorker):
                    self._tell(worker.left(results))
        except BaseException as error:
            if not self._closed.is_set():
                self._failures.say(f"worker {number}: {type(error).__name__}: {error}")

    def _wait_s(self, worker: Any) -> float:
        """Until its picker wants to be asked again, if nothing comes."""
        return max(0.0, min(IDLE_S, worker.wake_at() - self._workers.clock()))

    def _messages(self, number: int, wait_s: float) -> list[Any]:
        """What has come, if need be after a while."""
        inbox, found = self._workers.inboxes[number], []
        try:
            found.append(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait())
            while True:
                found.append(inbox.get_nowait())
        except Empty:
            return [message for message in found if message is not None]
