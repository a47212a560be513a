"""A step between scheduler and runner: the sizes it keeps, its plan, and what comes of it.

All of it is numbers and arrays that name slots, pages and positions, nothing of requests: a runner
may sit in another process.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

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

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)


@dataclass(frozen=True)
class StepPlan:
    """One step, for a runner: its phase, and the packed arrays that describe it."""

    phase: Phase
    rows: Int[np.ndarray, "B NUM_COLUMNS"]  # by jmoe.packed_rows
    deltas: Int[np.ndarray, "N NUM_DELTA_COLUMNS"]
    tokens: Int[np.ndarray, "T"]  # of a prefill step; else empty
    prompt_logprobs: bool  # whether the prompts' tokens are scored

    @property
    def size(self) -> int:
        """Tokens of a prefill step, rows of a decode step: what programs are chosen by."""
        return len(self.tokens) if self.phase is Phase.PREFILL else len(self.rows)

    @property
    def q_lens(self) -> Int[np.ndarray, "B"]:
        """Positions that each row computes."""
        return self.rows[:, Q_LEN]

    @property
    def any_exempt(self) -> bool:
        """Whether a row refuses brownout: only the full-capacity program serves it then."""
        return bool(self.rows[:, EXEMPT].any())


@dataclass(frozen=True)
class StepResult:
    """What the host learns of a step; arrays are cut to the step's real rows."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    degraded: Sequence[int]  # degraded expert visits of each row
    expert_rows: Int[np.ndarray, "layers E"]  # rows that each logical expert computed
    prompt_logprobs: Float[np.ndarray, "T"] | None
