"""Rows that wait, by layer and group, and what a picker is shown of them (AMoE, section 3.2)."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from serving.scheduling.layers.picker import LayerPicker


class Entry(NamedTuple):
    """Rows that came together: how many, how many urgent ones, and what their worker keeps of
    them.
    """

    rows: int
    urgent: int
    came_at: float
    what: Any


class MicroQueues:
    """A queue for each layer and group of a worker; first come, first taken."""

    def __init__(self, num_layers: int, num_groups: int, picker: LayerPicker) -> None:
        """`picker` says whose turn it is."""
        shape, self._picker = (num_layers, num_groups), picker
        self.counts = np.zeros(shape, np.int64)
        self.urgent = np.zeros(shape, np.int64)
        self.oldest = np.full(shape, np.inf)  # seconds of the worker's clock; of an empty one inf
        self._queues: list[list[deque[Entry]]] = [
            [deque() for _ in range(num_groups)] for _ in range(num_layers)
        ]

    @property
    def num_rows(self) -> int:
        """Number of rows in all queues."""
        return int(self.counts.sum())

    def waited_s(self, now: float) -> float:
        """Returns for how long the oldest row has waited; 0 without any."""
        oldest = float(self.oldest.min())
        return max(0.0, now - oldest) if oldest < np.inf else 0.0

    def pick(self, now: float) -> tuple[int, int] | None:
        """Returns the (layer, group) that is next; None: none is yet."""
        if not self.num_rows:
            return None
        return self._picker.pick(self.counts, self.oldest, now, urgent=self.urgent)

    def wake_at(self) -> float:
        """Returns when to pick again after None if nothing comes; seconds of the worker's clock."""
        return self._picker.wake_at(self.counts, self.oldest)

    def warm(self) -> None:
        """Has the picker compiled for the arrays that `pick` passes to it."""
        self._picker.pick(self.counts, self.oldest, 0.0, urgent=self.urgent)

    def put(self, layer: int, group: int, entries: Sequence[Entry]) -> None:
        """Queues rows. Raises ValueError for an entry without any."""
        least = min(entry.rows for entry in entries)
        if least < 1:
            raise ValueError(f"{least} rows were put into a queue; it takes 1 or more")
        queue = self._queues[layer][group]
        if not queue:
            self.oldest[layer, group] = entries[0].came_at
        queue.extend(entries)
        self.counts[layer, group] += sum(entry.rows for entry in entries)
        self.urgent[layer, group] += sum(entry.urgent for entry in entries)

    def take(self, layer: int, group: int, most: int, most_entries: int = 0) -> list[Entry]:
        """Takes the oldest entries with up to `most` rows together, but one at least;
        `most_entries` 0: however many.
        """
        queue, taken, rows = self._queues[layer][group], [], 0
        most_entries = most_entries or len(queue)
        while queue and len(taken) < most_entries and (not taken or rows + queue[0].rows <= most):
            entry = queue.popleft()
            taken.append(entry)
            rows += entry.rows
        self.counts[layer, group] -= rows
        self.urgent[layer, group] -= sum(entry.urgent for entry in taken)
        self.oldest[layer, group] = queue[0].came_at if queue else np.inf
        return taken

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forgets entries, by what their worker keeps."""
        for layer, group in np.argwhere(self.counts > 0).tolist():
            left = [e for e in self._queues[layer][group] if not unwanted(e.what)]
            self._queues[layer][group].clear()
            self.counts[layer, group] = self.urgent[layer, group] = 0
            self.oldest[layer, group] = np.inf
            if left:
                self.put(layer, group, left)


def bucket(count: int) -> int:
    """Returns the next of 8, 32, 128, ...: few shapes, few programs."""
    return max(8, 1 << ((count - 1).bit_length() // 2 * 2 + 1))


def padded(values: Int[np.ndarray, "n"], size: int, padding: int = 0) -> Int[np.ndarray, "size"]:
    """Returns int32 values with padding behind them."""
    found = np.full(size, padding, np.int32)
    found[: len(values)] = values
    return found


def buckets(most: int) -> list[int]:
    """Returns what `bucket` gives for counts of 1 to `most`, ascending."""
    found = [bucket(1)]
    while found[-1] < most:
        found.append(bucket(found[-1] + 1))
    return found
