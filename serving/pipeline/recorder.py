"""What a worker ran and what waited meanwhile, for a timeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from serving.execution.executor import Stages
from serving.pipeline.attention import AttentionWorker
from serving.pipeline.experts import ExpertWorker

MOST, EVERY_S = 256, 1.0
"""Stages, and seconds, after which they are told of."""


class Record(NamedTuple):
    """Asks a worker to report its stages from now on."""


class Recorder:
    """The recorder of one worker."""

    def __init__(self, name: str, worker: AttentionWorker | ExpertWorker) -> None:
        self._name, self._worker = name, worker
        self.is_on = False
        self._waiting = worker.queues.counts.sum(axis=1)
        self._found: list[tuple[int, int, float, float, np.ndarray]] = []

    def begin(self) -> None:
        """Records that a stage may run."""
        if self.is_on:
            self._waiting = self._worker.queues.counts.sum(axis=1)

    def end(self, began_at: float, ended_at: float) -> None:
        """Records that the stage ended."""
        if self.is_on:
            layer, rows = self._worker.newest
            self._found.append((layer, rows, began_at, ended_at, self._waiting))

    def take(self, now: float) -> Stages | None:
        """Returns the records that are due."""
        found = self._found
        if not found or (len(found) < MOST and now - found[0][2] < EVERY_S):
            return None
        self._found = []
        layers, rows, began_at, ended_at, waiting = (
            np.array(column) for column in zip(*found, strict=True)
        )
        return Stages(self._name, layers, rows, began_at, ended_at, waiting)


def run_stage(
    worker: AttentionWorker | ExpertWorker,
    recorder: Recorder,
    clock: Callable[[], float],
    tell: Callable[[Any], None],
) -> bool:
    """Lets a worker run a stage and reports its results; returns False where nothing was to be
    run.
    """
    began_at, before = clock(), worker.stages
    recorder.begin()
    results = worker.advance(began_at)
    if worker.stages > before:
        recorder.end(began_at, clock())
    if isinstance(worker, AttentionWorker):
        if results:
            tell(worker.left(results))
        for told in worker.told():
            tell(told)
    if (stages := recorder.take(began_at)) is not None:
        tell(stages)
    return results is not None
