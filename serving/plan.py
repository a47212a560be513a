"""The interface between scheduler and executor: size limits, a step's plan, and its result.

It consists of numbers and arrays that refer to slots, pages and positions, not to requests, since
an executor may be in another process.
"""

import enum
import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jmoe.packed_rows import EXEMPT, NUM_SHAPE_COLUMNS, Q_LEN, SPARED, empty_deltas

NUM_STAGING_REGIONS = 2
"""How many prefill steps can be under way: one, and one that is parked for it."""


class Phase(enum.StrEnum):
    """What a step computes: chunks of prompts, or one token for each row."""

    PREFILL = "prefill"
    DECODE = "decode"


class StepControl(NamedTuple):
    """Brownout of one step, on the host; `jmoe.brownout.Control` is its counterpart in programs."""

    threshold_percent: int
    strategy: int  # code of `jmoe.brownout.strategy_code`; 0 is zero brownout
    least_percent: int = 0  # which no row's threshold goes below


@dataclass(frozen=True)
class Limits:
    """Sizes that a schedule must keep to.

    On a mesh, a sequence lives on one of the devices, its rank. Slots, pages and hidden rows are
    numbered consecutively over all ranks, starting with the first.
    """

    num_slots: int  # of all ranks
    num_pages: int  # of all ranks
    page_size: int
    max_prefill_tokens: int  # per prefill step and rank
    max_prefill_seqs: int  # likewise
    max_decode_seqs: int = 0  # rows per decode step, on all ranks; 0: one per slot
    num_layers: int = 1  # of the model; a step can be split between any two
    prefill_buckets: tuple[int, ...] = ()  # tokens per rank that programs are compiled for
    num_ranks: int = 1
    windows: tuple[int, ...] = (0,)
    """Positions that a row reads, its own included, of each group of layers whose pages live
    equally long, the longest first; 0: all. `num_pages` are the first group's."""
    recurrent: bool = False  # whether a position is computed again from the first one on

    @property
    def decode_rows(self) -> int:
        """Rows that a decode step may have, on all ranks."""
        return self.max_decode_seqs or self.num_slots

    @property
    def slots_per_rank(self) -> int:
        """The number of slots of each rank."""
        return self.num_slots // self.num_ranks

    @property
    def pages_per_rank(self) -> int:
        """The number of pages of each rank."""
        return self.num_pages // self.num_ranks

    @property
    def group_pages(self) -> tuple[int, ...]:
        """The number of pages of each rank, by group: of further ones, no more than all slots need,
        so that the first one runs out before them.
        """
        most, seqs = self.pages_per_rank, self.slots_per_rank
        needed = (self._over(window, seqs) if window else most for window in self.windows[1:])
        return most, *(min(most, count) for count in needed)

    @property
    def most_positions(self) -> int:
        """The positions that a sequence may have; no limit where pages behind windows suffice."""
        held = len(self.blocks(0, 0, sys.maxsize))
        return sys.maxsize if held <= self.pages_per_rank else self.pages_per_rank * self.page_size

    @property
    def hidden_per_rank(self) -> int:
        """The number of hidden rows of each rank: one per slot for decode steps, then those for
        prefill.
        """
        return self.slots_per_rank + NUM_STAGING_REGIONS * self.max_prefill_tokens

    def rank(self, slot: int) -> int:
        """Returns the rank of a slot."""
        return slot // self.slots_per_rank

    def token_bucket(self, num_tokens: int) -> int:
        """Returns the token bucket of a prefill step with `num_tokens` on its fullest rank."""
        at = bisect_left(self.prefill_buckets, num_tokens)
        return self.prefill_buckets[at] if at < len(self.prefill_buckets) else num_tokens

    def staging_row(self, region: int, rank: int = 0) -> int:
        """Returns the first hidden row of a staging region, which holds a prefill step's tokens on
        a rank.
        """
        own = self.slots_per_rank + region * self.max_prefill_tokens
        return rank * self.hidden_per_rank + own

    def pages_for(self, positions: int) -> int:
        """Returns how many pages `positions` need."""
        return -(-positions // self.page_size)

    def most_pages(self, length: int, num_seqs: int) -> int:
        """Returns how many pages of the first group sequences of `length` hold at most."""
        window, most = self.windows[0], num_seqs * self.pages_for(length)
        return min(most, self._over(window, num_seqs)) if window else most

    def _over(self, window: int, num_seqs: int) -> int:
        """Returns how many pages sequences need of a group with a window: what each decodes over,
        and what two prefill steps write.
        """
        written = NUM_STAGING_REGIONS * self.pages_for(self.max_prefill_tokens)
        return num_seqs * (self.pages_for(window - 1) + 2) + written

    def first_block(self, group: int, position: int) -> int:
        """Returns the first block of a sequence that its row at `position` reads."""
        window = self.windows[group]
        return max(0, position - window + 1) // self.page_size if window else 0

    def blocks(self, group: int, start: int, end: int) -> range:
        """Returns the blocks for which a sequence that goes on at position `start` needs pages, if
        it has `end` positions; over a window, those that one prefill step reads and writes.
        """
        window, stop = self.windows[group], -(-end // self.page_size)
        if not window:
            return range(stop)
        first = self.first_block(group, start)
        most = self.pages_for(window + self.max_prefill_tokens - 2) + 1
        return range(first, min(stop, first + most))


class Seat(NamedTuple):
    """A slot whose sequence samples its first token, or the first one after an eviction."""

    slot: int
    prompt: Sequence[int]
    output: Sequence[int]
    biases: Sequence[tuple[int, float]]  # (token, what is added to its logit)


@dataclass(frozen=True)
class Shapes:
    """How a step changes rows' logits before it samples tokens."""

    rows: Int[np.ndarray, "B NUM_SHAPE_COLUMNS"]  # by jmoe.packed_rows; zeros: unchanged
    seats: Sequence[Seat]
    waits: bool  # for `Draws.draw` to say which tokens rows may have
    allowed: Int[np.ndarray, "B W"] | None = None
    """A bit a token, the lowest first, that rows may have, where it is known already."""

    def __post_init__(self) -> None:
        """Checks the number of columns."""
        assert self.rows.shape[1] == NUM_SHAPE_COLUMNS


class Singles(NamedTuple):
    """What rows take with them where they complete singly; a list has one value a row."""

    numbers: list[int]  # by which an executor names them
    ends_prompt: list[bool]  # or decodes: a token comes of its last position
    urgent: list[bool]  # whether it goes first where it waits
    scores: list[bool]  # whether the prompt's tokens get log-probabilities


def _none() -> Int[np.ndarray, "0"]:
    return np.zeros(0, np.int32)


@dataclass(eq=False)
class StepPlan:
    """Layers of one step to run, as executors see them: the phase, and packed arrays that describe
    the rows. The scheduler's know their sequences, too (`serving.scheduling.step`).
    """

    phase: Phase
    rows: Int[np.ndarray, "B NUM_COLUMNS"]  # by jmoe.packed_rows
    deltas: Int[np.ndarray, "N NUM_DELTA_COLUMNS"] = field(default_factory=lambda: empty_deltas(0))
    tokens: Int[np.ndarray, "T"] = field(default_factory=_none)  # of a prefill step; else empty
    prompt_logprobs: bool = False  # whether the prompts' tokens are scored
    places: Int[np.ndarray, "T"] = field(default_factory=_none)
    """Hidden rows of a prefill step's tokens; otherwise empty."""
    model: int = 0  # of a family, whose weights all rows need; of a mixed step, the first row's
    row_models: Int[np.ndarray, "B"] = field(default_factory=_none)
    """Each row's model in a mixed decode step; otherwise empty."""
    first_layer: int = 0
    stop_layer: int = 1
    is_last: bool = True  # whether it includes the model's last layer, and yields tokens
    shapes: Shapes | None = None  # in a last part, if some row's logits are changed
    singles: Singles | None = None  # where rows complete singly; the step has all layers
    num_decodes: int = 0
    """Rows of a hybrid step that decode: the first ones of a prefill step, with a token of -1 each.
    It runs whole."""

    @property
    def size(self) -> int:
        """The number of positions that it computes: one for each row of a decode step."""
        return len(self.rows) if self.phase is Phase.DECODE else int(self.q_lens.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """The number of positions of prompts' chunks; of a decode step, of all rows."""
        return self.size - self.num_decodes

    @property
    def models(self) -> tuple[int, ...]:
        """The numbers of the models whose weights it needs."""
        if not len(self.row_models):
            return (self.model,)
        return tuple(np.unique(self.row_models).tolist())

    @property
    def is_first(self) -> bool:
        """Whether these are the step's first layers."""
        return self.first_layer == 0

    @property
    def waits(self) -> bool:
        """Whether sampling waits until the previous step's tokens have been read."""
        return self.shapes is not None and self.shapes.waits

    @property
    def num_layers(self) -> int:
        """The number of layers that it runs."""
        return self.stop_layer - self.first_layer

    @property
    def q_lens(self) -> Int[np.ndarray, "B"]:
        """The number of positions that each row computes."""
        return self.rows[:, Q_LEN]

    @property
    def exempt(self) -> Bool[np.ndarray, "B"]:
        """Whether each row is exempt from brownout."""
        return self.rows[:, EXEMPT] > 0

    @property
    def num_exempt(self) -> int:
        """The number of positions of exempt rows."""
        return int(self.q_lens[self.exempt].sum())


def spare_latency_sensitive(
    rows: Int[np.ndarray, "B C"], urgent: Bool[np.ndarray, "B"], control: StepControl
) -> int:
    """Exempts latency-sensitive rows if best effort alone can absorb the brownout.

    The control's threshold (t) is the share of all visits to keep exact. If the other rows alone
    can give up what that asks for, `urgent` rows are marked exempt in `rows`, and the threshold of
    the others is returned: with N visits, L of them exempt, (t N - 100 L) / (N - L) percent. If
    that would be below `least_percent`, `rows` stay as they are and t is returned for all rows.
    """
    threshold_percent = control.threshold_percent
    q_lens = rows[:, Q_LEN]
    degradable = ~urgent & (rows[:, EXEMPT] == 0)
    total, left = int(q_lens.sum()), int(q_lens[degradable].sum())
    kept = threshold_percent * total - 100 * (total - left)
    if not left or not urgent.any() or kept < control.least_percent * left:
        return threshold_percent
    rows[urgent, EXEMPT] = np.maximum(rows[urgent, EXEMPT], SPARED)
    return -(-kept // left)


class Copies(NamedTuple):
    """Statistics of experts copied while a step ran, for each MoE layer."""

    right: Int[np.ndarray, "layers"]  # visits to the predicted (device, expert) that occurred
    copied: Int[np.ndarray, "layers"]  # experts sent


@dataclass(frozen=True)
class StepResult:
    """Results of a step's layers on the host; arrays are cut to the step's real rows.

    Tokens and log-probabilities are meaningful only after the last layer; counts are of these
    layers.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    degraded: Sequence[int]  # degraded expert visits of each row
    expert_rows: Int[np.ndarray, "layers E"]
    """Rows that each logical expert computed: of a mixed step, those of all its models added up."""
    prompt_logprobs: Float[np.ndarray, "T 2"] | None
    """Of the next token of the prompt, and of the likeliest one there."""
    device_rows: Int[np.ndarray, "layers D"] | None = None  # of `expert_rows`, by device of a mesh
    copies: Copies | None = None  # of a step that copied experts
    needed: Int[np.ndarray, "layers columns"] | None = None
    """Visits of rows that need exact experts to experts that are not permanently on the device: of
    a mixed step, those of each of its models one after another."""
    padded_share: float = 0.0  # share of padding in the rows that devices computed
    top_ids: Int[np.ndarray, "B TOP"] | None = None  # likeliest tokens, where rows are shaped
    top_logprobs: Float[np.ndarray, "B TOP"] | None = None
    called_at: float = math.nan
    """When the call that launched the step returned, where a thread of its own makes such calls
    (monotonic seconds)."""
    prompt_top: tuple[Int[np.ndarray, "T n"], Float[np.ndarray, "T n"]] | None = None
    """Ids and log-probabilities of the likeliest tokens where `prompt_logprobs` has the next."""
    rows_by_model: Int[np.ndarray, "N layers E"] | None = None
    """`expert_rows` of each model of a mixed step; of an expert that several share, all of them are
    the first one's."""

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """Returns the `count` likeliest tokens of a row, with their log-probabilities."""
        if not count or self.top_ids is None or self.top_logprobs is None:
            return ()
        ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
        return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
