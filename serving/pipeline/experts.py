"""A worker with experts: rows that came wait for their layer, and parts go back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving.pipeline.devices import ExpertDevice, warm_copies
from serving.pipeline.messages import (
    ATTENTION,
    FromExperts,
    Result,
    RowNumbers,
    ToExperts,
    UseWay,
    WorkerDown,
)
from serving.pipeline.queues import Entry, MicroQueues, bucket, buckets, padded
from serving.scheduling.layers.picker import LayerPicker


class ExpertWorker:
    """Experts of one device. Launches: one for a message that comes, one for a stage, and for each
    attention worker that its parts go to a copy, and a gather if there are several.
    """

    def __init__(
        self,
        device: ExpertDevice,
        num_layers: int,
        numbers: RowNumbers,
        number: int,
        attention: Sequence[Any],
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
            attention: where the attention workers are, as `device.sent` has it.
            send: called with an attention worker's number and parts for it.
            picker: whose layer runs next.
            max_visits: in one stage, unless more came at once.
        """
        self.device, self.numbers, self.number = device, numbers, number
        self.queues = MicroQueues(num_layers, 1, picker)
        self._attention, self._send = list(attention), send
        self._max_visits = max_visits
        self.stages = 0
        self.newest = 0, 0  # layer and rows of the newest stage

    def receive(self, visits: ToExperts, now: float) -> None:
        """Queues rows that came, in front of their layer."""
        rows = padded(visits.row, visits.padded, self.numbers.total)  # padding: dropped
        self.device.keep(visits.h, rows)
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
                self.queues.drop(lambda what: self.numbers.owner(what[0][0]) == number)

    def advance(self, now: float) -> list[Result] | None:
        """Runs a stage, if the picker says so. Nothing leaves a model here; None where none ran."""
        chosen = self.queues.pick(now)
        if chosen is None:
            return None
        layer, group = chosen
        taken = [entry.what for entry in self.queues.take(layer, group, self._max_visits)]
        row, pick, expert = (np.concatenate(column) for column in zip(*taken, strict=True))
        size = bucket(len(row))
        parts = self.device.compute(layer, padded(row, size), padded(expert, size, -1))
        self.stages += 1
        self.newest = layer, len(row)
        self._return(parts, size, row, pick)
        return []

    def _return(self, parts: Any, size: int, row: np.ndarray, pick: np.ndarray) -> None:
        owner = self.numbers.owner(row)
        for number in range(len(self._attention)):
            own = np.flatnonzero(owner == number)
            if len(own):
                at = None if len(own) == len(row) else padded(own, bucket(len(own)))
                back = self.device.sent(parts, at, self._attention[number])
                count = size if at is None else len(at)
                self._send(number, FromExperts(self.number, back, count, row[own], pick[own]))

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
                parts = self.device.compute(layer, rows, ids)
            warm_copies(self.device, parts, size, self._attention[0])
