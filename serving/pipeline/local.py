"""All workers in one process, on its devices (AMoE, section 4): driven one at a time, or as a crew
with a thread each.
"""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from jaxtyping import Bool

from jmoe.api import Model
from serving.errors import Lost
from serving.execution.compilations import Compilations
from serving.execution.executor import WayChanged, WorkerSeen
from serving.execution.programs import Progress
from serving.pipeline.attention import AttentionWorker
from serving.pipeline.crew import Crew
from serving.pipeline.devices import AttentionDevice, ExpertDevice, Sizes
from serving.pipeline.experts import ExpertWorker
from serving.pipeline.messages import ATTENTION, EXPERTS, Enter, RowNumbers, Unit, UseWay
from serving.pipeline.recorder import Recorder
from serving.plan import Limits
from serving.scheduling.layers.picker import LayerPicker

IDLE_S = 60.0
"""For how long a worker that has nothing to do waits before it looks again, message or not."""


class LocalWorkers:
    """Attention workers and expert workers on devices of this process.

    Nothing runs by itself: whoever drives a worker gives it what is in its inbox, and lets it run a
    stage.
    """

    def __init__(
        self,
        attention: Sequence[AttentionDevice],
        experts: Sequence[ExpertDevice],
        moe_layers: Sequence[bool],
        hosts: Bool[np.ndarray, "layers E W"],
        sizes: Sizes,
        picker: Callable[[], LayerPicker],
        clock: Callable[[], float],
        max_visits: int = 1 << 12,
    ) -> None:
        """Makes a worker for each device.

        Args:
            attention: of the attention workers.
            experts: of the expert workers.
            moe_layers: of each layer, whether it has experts.
            hosts: which expert worker has which logical expert of each MoE layer.
            sizes: of an attention worker.
            picker: makes one for each worker.
            clock: in seconds.
            max_visits: as of ExpertWorker.
        """
        numbers, self.clock = RowNumbers(len(attention), sizes.num_rows), clock
        self._sizes = sizes
        self.inboxes = [SimpleQueue[Any]() for _ in (*attention, *experts)]

        def to_attention(number: int, message: Any) -> None:
            self.inboxes[number].put(message)

        def to_experts(number: int, message: Any) -> None:
            self.inboxes[len(attention) + number].put(message)

        self.experts = [
            ExpertWorker(device, len(hosts), numbers, at, to_attention, picker(), max_visits)
            for at, device in enumerate(experts)
        ]
        self.attention = [
            AttentionWorker(device, moe_layers, hosts, numbers, at, to_experts, picker(), sizes)
            for at, device in enumerate(attention)
        ]

    @classmethod
    def of(
        cls,
        model: Model,
        attention: Sequence[Any],
        experts: Sequence[Any],
        sizes: Sizes,
        hosts: Bool[np.ndarray, "layers E W"],
        picker: Callable[[], LayerPicker],
        clock: Callable[[], float],
        *,
        ways: Sequence[int] = (),
    ) -> "LocalWorkers":
        """Gives jax devices their parts of a model.

        Args:
            model: on one device; workers start with the united experts of the way that it uses.
            attention: devices of attention workers, one or more; one may be named more than once.
            experts: devices of expert workers, likewise.
            sizes: of an attention worker.
            hosts: as of LocalWorkers.
            picker: makes one for each worker.
            clock: in seconds.
            ways: that may be used later, the one that the model uses first.

        Raises ValueError for a model over a mesh or with experts that are offloaded.
        """
        if model.home is not None:
            raise ValueError(f"{model.name} is spread over a mesh; load it without one")
        if model.table.offloaded is not None:
            raise ValueError(
                f"{model.name} has offloaded experts, and these workers fetch none: load "
                "it with resident_experts 0 and a map without differences"
            )
        num_rows = len(attention) * sizes.num_rows
        return cls(
            [AttentionDevice(model, ways, sizes, device) for device in attention],
            [
                ExpertDevice(model, ways, hosts[:, :, number], num_rows, device)
                for number, device in enumerate(experts)
            ],
            model.config.moe_layers,
            hosts,
            sizes,
            picker,
            clock,
            sizes.max_visits(model.config.experts_per_token),
        )

    @property
    def num_workers(self) -> int:
        """Number of workers of both kinds."""
        return len(self.inboxes)

    @property
    def workers(self) -> list[AttentionWorker | ExpertWorker]:
        """Attention workers first, then expert workers; they are numbered so."""
        return [*self.attention, *self.experts]

    def warm(self, progress: Progress | None = None) -> None:
        """Compiles all that may be needed, and runs it once."""
        parts = self.experts[0].stage_sizes
        rows = self._sizes.row_sizes
        for number, worker in enumerate(self.workers):
            if progress is not None:
                progress("compiling", number, self.num_workers)
            worker.warm(parts if isinstance(worker, AttentionWorker) else rows)


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
                # Until the picker wants to be asked again, if nothing comes.
                wait_s = 0.0 if ran else min(IDLE_S, worker.queues.wake_at() - clock())
                for message in self._messages(number, max(0.0, wait_s)):
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

    def _messages(self, number: int, wait_s: float) -> list[Any]:
        """Returns the messages that have come, after waiting for one if necessary."""
        inbox, found = self._workers.inboxes[number], []
        try:
            found.append(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait())
            while True:
                found.append(inbox.get_nowait())
        except Empty:
            return [message for message in found if message is not None]
