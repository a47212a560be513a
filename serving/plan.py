"""A step between scheduler and runner: the sizes it keeps, its plan, and what comes of it.

All of it is numbers and arrays that name slots, pages and positions, nothing of requests: a runner
may sit in another process.
"""

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jmoe.packed_rows import EXEMPT, Q_LEN


class Phase(enum.StrEnum):
    """What a step computes: chunks of prompts, or one token for each row."""

    PREFILL = "prefill"
    DECODE = "decode"


class StepControl(NamedTuple):
    """Brownout of one step, as the host says it; `jmoe.brownout.Control` is it in a program."""

    threshold_percent: int
    strategy: int  # code of `jmoe.brownout.strategy_code`; 0 is zero brownout


@dataclass(frozen=True)
class Limits:
    """Sizes a schedule has to keep."""

    num_slots: int
    num_pages: int
    page_size: int
    max_prefill_tokens: int
    max_prefill_seqs: int
    max_decode_seqs: int = 0  # rows a decode step; 0: a row a slot
    num_layers: int = 1  # of the model; a step can be cut between any two
    prefill_buckets: tuple[int, ...] = ()  # tokens that programs are compiled for

    @property
    def decode_rows(self) -> int:
        """Rows that a decode step may have."""
        return self.max_decode_seqs or self.num_slots

    def token_bucket(self, num_tokens: int) -> int:
        """Tokens that a prefill step of `num_tokens` costs."""
        at = bisect_left(self.prefill_buckets, num_tokens)
        return self.prefill_buckets[at] if at < len(self.prefill_buckets) else num_tokens

    def extent(self, index: int) -> int:
        """First hidden row of a prefill step under way: rows of decode steps lie before."""
        return self.num_slots + index * self.max_prefill_tokens

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)


NUM_EXTENTS = 2
"""Prefill steps that can be under way at once: one, and one that was parked for it."""


@dataclass(frozen=True)
class StepPlan:
    """Layers of one step, for a runner: its phase, and the packed arrays that describe it."""

    phase: Phase
    rows: Int[np.ndarray, "B NUM_COLUMNS"]  # by jmoe.packed_rows
    deltas: Int[np.ndarray, "N NUM_DELTA_COLUMNS"]
    tokens: Int[np.ndarray, "T"]  # of a prefill step; else empty
    prompt_logprobs: bool  # whether the prompts' tokens are scored
    places: Int[np.ndarray, "T"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Hidden rows of a prefill step's tokens; else empty."""
    first_layer: int = 0
    stop_layer: int = 1
    is_last: bool = True  # whether tokens come of it: the model's last layer is among them

    @property
    def size(self) -> int:
        """Tokens of a prefill step, rows of a decode step: what programs are chosen by."""
        return len(self.tokens) if self.phase is Phase.PREFILL else len(self.rows)

    @property
    def num_layers(self) -> int:
        """Layers that it runs."""
        return self.stop_layer - self.first_layer

    @property
    def q_lens(self) -> Int[np.ndarray, "B"]:
        """Positions that each row computes."""
        return self.rows[:, Q_LEN]

    @property
    def exempt(self) -> Bool[np.ndarray, "B"]:
        """Rows that are not degraded."""
        return self.rows[:, EXEMPT] > 0

    @property
    def num_exempt(self) -> int:
        """Positions of rows that are not degraded."""
        return int(self.q_lens[self.exempt].sum())


@dataclass(frozen=True)
class StepResult:
    """What the host learns of a step's layers; arrays are cut to the step's real rows.

    Tokens and log-probabilities mean something after the last layers only; counts are of these
    layers.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    degraded: Sequence[int]  # degraded expert visits of each row
    expert_rows: Int[np.ndarray, "layers E"]  # rows that each logical expert computed
    prompt_logprobs: Float[np.ndarray, "T"] | None
