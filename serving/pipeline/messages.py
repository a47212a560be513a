"""What workers send each other: rows, and where they belong.

A row is known everywhere by one number: its place in its attention worker's store, counted on
through all attention workers. It is in one layer at a time, so that an expert worker that keeps a
row for each number never runs out of room, and nobody has to free any.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

DECODE, PREFILL = range(2)
"""Groups of a layer's queue with attention: they are different programs."""
ATTENTION, EXPERTS = "attention", "experts"
"""Kinds of workers."""


@dataclass(eq=False)
class Unit:
    """Rows of one sequence on their way through the layers: one that decodes, or a chunk."""

    row: Int[np.ndarray, "C"]  # packed
    tokens: Int[np.ndarray, "n"] | None  # of a chunk; None: the newest token of its slot
    places: Int[np.ndarray, "n"]  # of its rows in the worker's store
    deltas: Int[np.ndarray, "D 3"]  # of the block table
    urgent: bool = False
    ends_prompt: bool = True  # or decodes: a token comes of its last row
    scores: bool = False  # whether the prompt's tokens get log-probabilities
    number: int = 0  # by which who sent it knows it
    layer: int = 0  # before which it waits, or that it is in
    percent: int = 100  # the threshold that it entered with
    strategy: int = 0  # likewise; 0 is zero brownout
    shape: Int[np.ndarray, "columns"] | None = None  # how its logits change (jmoe.packed_rows)
    allowed: Int[np.ndarray, "words"] | None = None  # tokens that it may draw; None: any
    seat: Int[np.ndarray, "told"] | None = None  # of its slot, where it draws there first
    least_percent: int = 100  # of the stages that it has been in
    most_percent: int = 0
    degraded: int = 0
    lost: bool = False  # an expert worker is gone that has visits of it
    floor_percent: int = 0  # which its threshold does not go below

    def note_threshold(self, percent: int) -> None:
        """Widens the span of thresholds that its rows have had."""
        self.least_percent = min(self.least_percent, percent)
        self.most_percent = max(self.most_percent, percent)

    @property
    def group(self) -> int:
        """Group of its layers' queues."""
        return DECODE if self.tokens is None else PREFILL


class Enter(NamedTuple):
    """Units for an attention worker."""

    units: list[Unit]


class Left(NamedTuple):
    """Units of one group that left the last layer of an attention worker together."""

    numbers: list[int]
    tokens: list[int]  # 0 where a unit ends no prompt
    logprobs: list[float]
    degraded: list[int]
    scores: Float[np.ndarray, "T 2"]  # of the units' tokens, where any asked; else empty
    strategy: int  # of the last one to enter
    least_percent: list[int]  # the lowest threshold on each one's way
    most_percent: list[int]
    top_ids: Int[np.ndarray, "n top"]  # likeliest tokens, where a unit is shaped; else empty
    top_logprobs: Float[np.ndarray, "n top"]
    expert_rows: Int[np.ndarray, "layers E"]
    """Rows that its stages have sent to each logical expert since it told last; empty: later."""
    prompt_top_ids: Int[np.ndarray, "T n"] = np.zeros((0, 0), np.int32)  # as `scores`
    prompt_top_logprobs: Float[np.ndarray, "T n"] = np.zeros((0, 0), np.float32)


class WorkerDown(NamedTuple):
    """A worker is gone, and what it had: nothing comes from it any more."""

    kind: str
    number: int  # of its kind


class WorkerUp(NamedTuple):
    """A worker is there (again), and empty."""

    kind: str
    number: int


class UseWay(NamedTuple):
    """Asks a worker for the united experts of a way, from now on; none of its rows is under way."""

    way: int
    change: int = 0  # its number, by which changes to one way are told apart


class HasWay(NamedTuple):
    """A worker has made a change of way, and all before it."""

    change: int


class ToExperts(NamedTuple):
    """Rows on their way to experts of one MoE layer, to one worker."""

    layer: int
    h: Any  # [n, d], each row once
    row: Int[np.ndarray, "n"]  # their numbers
    at: Int[np.ndarray, "V"]  # of each visit: which of the rows
    pick: Int[np.ndarray, "V"]  # which of its picks
    expert: Int[np.ndarray, "V"]  # logical one
    urgent: Bool[np.ndarray, "V"]


class FromExperts(NamedTuple):
    """What experts made of visits, on its way back to the rows' attention worker."""

    worker: int  # that computed them
    part: Any  # [V, d]
    row: Int[np.ndarray, "V"]
    pick: Int[np.ndarray, "V"]


@dataclass(frozen=True)
class RowNumbers:
    """Rows of all attention workers, `per_worker` each."""

    num_workers: int
    per_worker: int

    @property
    def total(self) -> int:
        """Number of rows of all workers."""
        return self.num_workers * self.per_worker

    def owner(self, row: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Returns the attention worker of each row."""
        return row // self.per_worker

    def place(self, row: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Returns the place of each row in its worker's store."""
        return row % self.per_worker

    def of(self, worker: int, place: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Returns the numbers of a worker's rows."""
        return worker * self.per_worker + place
