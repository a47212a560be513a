"""A worker with experts: rows that came wait for their layer, and parts go back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving.pipeline.devices import ExpertDevice
from serving.pipeline.messages import (
    ATTENTION,
    FromExperts,
    RowNumbers,
    ToExperts,
    UseWay,
    WorkerDown,
)
from serving.pipeline.queues import Entry, MicroQueues, bucket, buckets, padded
from serving.scheduling.layers.picker import LayerPicker


class ExpertWorker:
    """Experts of one device. Launches: one for a message that comes, one for a stage, whose parts
    are read once the next one is launched, if any waits.
    """

    def __init__(
        self,
        device: ExpertDevice,
        num_layers: int,
        numbers: RowNumbers,
        number: int,
        send: Callable[[int, FromExperts], None],
        picker: LayerPicker,
        max_visits: int,
    ) -> None:
        """Takes over a device's experts.

        Args:
            device: with the experts.
            num_layers: MoE layers.
            numbers: of the rows that may come.
            number: of this worker.
            send: called with an attention worker's number and parts for it.
            picker: whose layer runs next.
            max_visits: in one stage, unless more came at once.
        """
        self.device, self.numbers, self.number = device, numbers, number
        self.queues = MicroQueues(num_layers, 1, picker)
        self._send = send
        self._under_way: tuple[Any, np.ndarray, np.ndarray] | None = None
        self._max_visits = max_visits
        self.stages = 0
        self.newest = 0, 0  # layer and rows of the newest stage

    def receive(self, visits: ToExperts, now: float) -> None:
        """Queues rows that came, in front of their layer."""
        self.device.keep(visits.h, visits.row)
        what = visits.row[visits.at], visits.pick, visits.expert
        entry = Entry(len(visits.at), int(visits.urgent.sum()), now, what)
        self.queues.put(visits.layer, 0, [entry])

    @property
    def stage_sizes(self) -> list[int]:
        """Visits that a stage may be padded to, ascending."""
        return buckets(self._max_visits)

    def take(self, message: ToExperts | UseWay | WorkerDown, now: float) -> None:
        """Takes any message. Rows of an attention worker that is gone are dropped."""
        match message:
            case ToExperts():
                self.receive(message, now)
            case UseWay(way):
                self.device.use_way(way)
            case WorkerDown(kind, number) if kind == ATTENTION:
                self.forget(lambda row: self.numbers.owner(row) == number)

    def forget(self, unwanted: Callable[[np.ndarray], np.ndarray]) -> None:
        """Drops visits of rows, by their numbers: those that wait, and those under way."""
        self.queues.drop(lambda what: bool(unwanted(what[0]).all()))
        if self._under_way is not None:
            parts, row, pick = self._under_way
            self._under_way = parts, np.where(unwanted(row), -1, row), pick

    def advance(self, now: float) -> bool:
        """Launches a stage if the picker says so, and sends the parts of the one before; returns
        False where there was nothing to do.
        """
        chosen = self.queues.pick(now)
        if chosen is None:
            return self._settle()
        layer, group = chosen
        taken = [entry.what for entry in self.queues.take(layer, group, self._max_visits)]
        row, pick, expert = (np.concatenate(column) for column in zip(*taken, strict=True))
        size = bucket(len(row))
        parts = self.device.compute(layer, padded(row, size), padded(expert, size, -1))
        self.stages += 1
        self.newest = layer, len(row)
        self._settle()
        self._under_way = parts, row, pick
        return True

    def _settle(self) -> bool:
        """Reads the stage that is under way and sends its parts back; returns whether there was
        one.
        """
        if self._under_way is None:
            return False
        (parts, row, pick), self._under_way = self._under_way, None
        found, owner = self.device.read(parts), self.numbers.owner(row)
        for number in np.unique(owner[row >= 0]).tolist():
            own = np.flatnonzero(owner == number)
            self._send(number, FromExperts(self.number, found[own], row[own], pick[own]))
        return True

    def warm(self, row_sizes: Sequence[int]) -> None:
        """Compiles as AttentionWorker does; `row_sizes` are those of rows that come."""
        self.queues.warm()
        for way in reversed(self.device.ways):  # ends with the one to start with
            self.device.use_way(way)
        for size in row_sizes:
            self.device.keep(self.device.blank(size), np.full(size, self.numbers.total, np.int32))
        for size in self.stage_sizes:
            rows, ids = np.zeros(size, np.int32), np.full(size, -1, np.int32)
            for layer in range(len(self.queues.counts)):
                self.device.read(self.device.compute(layer, rows, ids))
