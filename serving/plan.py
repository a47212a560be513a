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

from jmoe.packed_rows import EXEMPT, Q_LEN, SPARED
from jmoe.shape_rows import NUM_SHAPE_COLUMNS

NUM_EXTENTS = 2
"""Prefill steps that can be under way at once: one, and one that was parked for it."""


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
    """Sizes a schedule has to keep.

    Over a mesh a sequence lives on one of its devices, its rank. Slots, pages and hidden rows are
    numbered through, the first rank's first.
    """

    num_slots: int  # of all ranks
    num_pages: int  # of all ranks
    page_size: int
    max_prefill_tokens: int  # a prefill step, on each rank
    max_prefill_seqs: int  # likewise
    max_decode_seqs: int = 0  # rows a decode step, of all ranks; 0: a row a slot
    num_layers: int = 1  # of the model; a step can be cut between any two
    prefill_buckets: tuple[int, ...] = ()  # tokens a rank that programs are compiled for
    num_ranks: int = 1

    @property
    def decode_rows(self) -> int:
        """Rows that a decode step may have, on all ranks."""
        return self.max_decode_seqs or self.num_slots

    @property
    def slots_per_rank(self) -> int:
        """Slots of each rank."""
        return self.num_slots // self.num_ranks

    @property
    def pages_per_rank(self) -> int:
        """Pages of each rank."""
        return self.num_pages // self.num_ranks

    @property
    def hidden_per_rank(self) -> int:
        """Hidden rows of each rank: of decode steps, by slot, and then of prefill steps."""
        return self.slots_per_rank + NUM_EXTENTS * self.max_prefill_tokens

    def rank(self, slot: int) -> int:
        """On which rank a slot is."""
        return slot // self.slots_per_rank

    def token_bucket(self, num_tokens: int) -> int:
        """Tokens that a prefill step costs which has `num_tokens` on its fullest rank."""
        at = bisect_left(self.prefill_buckets, num_tokens)
        return self.prefill_buckets[at] if at < len(self.prefill_buckets) else num_tokens

    def hidden_row(self, slot: int) -> int:
        """Where a decode row waits between two parts of its step."""
        return self.rank(slot) * self.hidden_per_rank + slot % self.slots_per_rank

    def extent(self, index: int, rank: int = 0) -> int:
        """First hidden row of a prefill step under way, of its tokens on a rank."""
        own = self.slots_per_rank + index * self.max_prefill_tokens
        return rank * self.hidden_per_rank + own

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)


class Seat(NamedTuple):
    """A slot whose sequence draws a first token, or the first one after an eviction."""

    slot: int
    prompt: Sequence[int]
    output: Sequence[int]
    biases: Sequence[tuple[int, float]]  # (token, what is added to its logit)


@dataclass(frozen=True)
class Shapes:
    """Of a step that draws tokens: how rows' logits are changed first."""

    rows: Int[np.ndarray, "B NUM_SHAPE_COLUMNS"]  # by jmoe.shape_rows; zeros: they are not
    seats: Sequence[Seat]
    waits: bool  # until `Runner.draw` says what rows may draw

    def __post_init__(self) -> None:
        """Checks the columns."""
        assert self.rows.shape[1] == NUM_SHAPE_COLUMNS


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
    model: int = 0  # of a family, whose weights all rows need; of a mixed step, the first row's
    row_models: Int[np.ndarray, "B"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Of a mixed decode step, each row's model; else empty."""
    first_layer: int = 0
    stop_layer: int = 1
    is_last: bool = True  # whether tokens come of it: the model's last layer is among them
    shapes: Shapes | None = None  # of a last part in which some row is shaped

    @property
    def size(self) -> int:
        """Tokens of a prefill step, rows of a decode step: what programs are chosen by."""
        return len(self.tokens) if self.phase is Phase.PREFILL else len(self.rows)

    @property
    def models(self) -> tuple[int, ...]:
        """Whose weights it needs, by number."""
        return tuple(np.unique(self.row_models).tolist()) or (self.model,)

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


def spare_latency_sensitive(
    rows: Int[np.ndarray, "B C"], urgent: Bool[np.ndarray, "B"], threshold_percent: int
) -> int:
    """The threshold of layers' other rows, if all their visits were to keep `threshold_percent`.

    While the others alone can give up what that asks for, latency-sensitive (`urgent`) rows are
    exempt, and the others keep what is left: with N visits, L of them exempt, (t N - 100 L) /
    (N - L) percent of their own. Where that would be less than nothing, the threshold is
    everybody's, and `rows` are left as they are.
    """
    q_lens = rows[:, Q_LEN]
    degradable = ~urgent & (rows[:, EXEMPT] == 0)
    total, left = int(q_lens.sum()), int(q_lens[degradable].sum())
    kept = threshold_percent * total - 100 * (total - left)
    if not left or not urgent.any() or kept < 0:
        return threshold_percent
    rows[urgent, EXEMPT] = np.maximum(rows[urgent, EXEMPT], SPARED)
    return -(-kept // left)


class Copies(NamedTuple):
    """What became of experts copied while a step ran; a row for each MoE layer."""

    right: Int[np.ndarray, "layers"]  # visits that were expected, by device and expert, and made
    copied: Int[np.ndarray, "layers"]  # experts sent


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
    device_rows: Int[np.ndarray, "layers D"] | None = None  # of `expert_rows`, by device of a mesh
    copies: Copies | None = None  # of a step that copied experts
    needed: Int[np.ndarray, "layers m"] | None = None
    """Visits of rows that no stand-in may serve, to experts that are not on the device for good."""
    padded_share: float = 0.0  # of the rows that the devices computed
    top_ids: Int[np.ndarray, "B TOP"] | None = None  # likeliest tokens, where rows are shaped
    top_logprobs: Float[np.ndarray, "B TOP"] | None = None

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens of a row, and their log-probabilities."""
        if not count or self.top_ids is None or self.top_logprobs is None:
            return ()
        ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
        return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
