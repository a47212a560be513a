"""Runs a worker's stages, and records what ran and what waited meanwhile, for a timeline."""

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
    """Runs one worker's stages; records them once it `is_on`."""

    def __init__(self, name: str, worker: AttentionWorker | ExpertWorker) -> None:
        self._name, self._worker = name, worker
        self.is_on = False
        self._found: list[tuple[int, int, float, float, np.ndarray]] = []

    def run_stage(self, clock: Callable[[], float], tell: Callable[[Any], None]) -> bool:
        """Lets the worker run a stage and reports what it tells, and the records that are due;
        returns False where nothing was to be run.
        """
        worker, began_at = self._worker, clock()
        before, waiting = worker.stages, worker.queues.counts.sum(axis=1) if self.is_on else None
        ran = worker.advance(began_at)
        if waiting is not None and worker.stages > before:
            layer, rows = worker.newest
            self._found.append((layer, rows, began_at, clock(), waiting))
        if isinstance(worker, AttentionWorker):
            for told in worker.told():
                tell(told)
        found = self._found
        if found and (len(found) >= MOST or began_at - found[0][2] >= EVERY_S):
            self._found = []
            tell(Stages(self._name, *map(np.array, zip(*found, strict=True))))
        return ran
