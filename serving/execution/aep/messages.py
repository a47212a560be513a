"""What workers send each other: rows, which stay on devices, and where they belong.

A row is known everywhere by one number: its place in its attention worker's store, counted on
through all attention workers. It is in one layer at a time, so that an expert worker that keeps a
row for each number never runs out of room, and nobody has to free any.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class ToExperts(NamedTuple):
    """Rows on their way to experts of one MoE layer, to one worker."""

    layer: int
    h: Any  # [padded, d], on the worker's device: each row once
    padded: int
    row: Int[np.ndarray, "n"]  # their numbers
    at: Int[np.ndarray, "V"]  # of each visit: which of the rows
    pick: Int[np.ndarray, "V"]  # which of its picks
    expert: Int[np.ndarray, "V"]  # logical one
    urgent: Bool[np.ndarray, "V"]


class FromExperts(NamedTuple):
    """What experts made of visits, on its way back to the rows' attention worker."""

    part: Any  # [padded, d], on the worker's device
    padded: int
    row: Int[np.ndarray, "V"]
    pick: Int[np.ndarray, "V"]


@dataclass(frozen=True)
class RowNumbers:
    """Rows of all attention workers, `per_worker` each."""

    num_workers: int
    per_worker: int

    @property
    def total(self) -> int:
        """Of all workers."""
        return self.num_workers * self.per_worker

    def owner(self, row: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """The attention worker of each."""
        return row // self.per_worker

    def place(self, row: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Where each is in its worker's store."""
        return row % self.per_worker

    def of(self, worker: int, place: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Numbers of a worker's rows."""
        return worker * self.per_worker + place
