"""A step's arrays as its ranks take them: each has rows, tokens and numbers of its own.

A mixed decode step has a segment of the same form for each of its models, on one device.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import DELTA_PAGE, DELTA_SLOT, Q_LEN, SLOT, empty_deltas, empty_rows
from serving.plan import Limits, StepPlan

NOTHING = np.zeros(0, np.int32)


class ByRank(NamedTuple):
    """A step whose rows, deltas and tokens know their rank, and where each goes on it.

    Slots, pages and hidden rows are numbered from 0 on each rank; the order within a rank is the
    step's.
    """

    num_ranks: int
    rows: Int[np.ndarray, "B C"]
    rank: Int[np.ndarray, "B"]
    deltas: Int[np.ndarray, "N 3"]
    delta_rank: Int[np.ndarray, "N"]
    tokens: Int[np.ndarray, "T"]  # of a prefill step; else empty, as the next two
    token_rank: Int[np.ndarray, "T"]
    places: Int[np.ndarray, "T"]

    @classmethod
    def of(cls, plan: StepPlan, limits: Limits) -> "ByRank":
        """Splits a plan by rank, or by model."""
        if len(plan.models) > 1:
            return cls.by_model(plan.row_models, plan.rows, plan.deltas)
        return cls.of_arrays(limits, plan.rows, plan.deltas, plan.tokens, plan.places)

    @classmethod
    def of_arrays(
        cls,
        limits: Limits,
        rows: Int[np.ndarray, "B C"],
        deltas: Int[np.ndarray, "N 3"] | None = None,
        tokens: Int[np.ndarray, "T"] = NOTHING,
        places: Int[np.ndarray, "T"] = NOTHING,
    ) -> "ByRank":
        """Splits arrays by rank; without `tokens`, those of a decode step or one of padding."""
        deltas = empty_deltas(0) if deltas is None else deltas
        if limits.num_ranks == 1:  # nothing to take apart
            ranks = (np.zeros(len(part), np.int32) for part in (rows, deltas, tokens))
            rank, delta_rank, token_rank = ranks
            return cls(1, rows, rank, deltas, delta_rank, tokens, token_rank, places)
        rows, deltas = rows.copy(), deltas.copy()
        rank, rows[:, SLOT] = np.divmod(rows[:, SLOT], limits.slots_per_rank)
        delta_rank, deltas[:, DELTA_SLOT] = np.divmod(deltas[:, DELTA_SLOT], limits.slots_per_rank)
        deltas[:, DELTA_PAGE] %= limits.pages_per_rank
        token_rank = np.repeat(rank, rows[:, Q_LEN]) if len(tokens) else NOTHING
        places = places % limits.hidden_per_rank
        return cls(limits.num_ranks, rows, rank, deltas, delta_rank, tokens, token_rank, places)

    @classmethod
    def by_model(
        cls,
        row_models: Int[np.ndarray, "B"],
        rows: Int[np.ndarray, "B C"],
        deltas: Int[np.ndarray, "N 3"],
    ) -> "ByRank":
        """Splits a mixed decode step: a segment for each model, by number, where ranks would be.

        Slots and pages are numbered through; which segment a delta is in does not matter.
        """
        models, segment = np.unique(row_models, return_inverse=True)
        count, none = len(models), (NOTHING, NOTHING, NOTHING)
        spread = np.arange(len(deltas), dtype=np.int32) % count
        return cls(count, rows, segment.astype(np.int32), deltas, spread, *none)

    @property
    def size(self) -> int:
        """Size of the fullest rank: tokens of a prefill step, rows of a decode step."""
        ranks = self.token_rank if len(self.tokens) else self.rank
        if self.num_ranks == 1:
            return len(ranks)
        return int(np.bincount(ranks, minlength=1).max())

    @property
    def num_positions(self) -> int:
        """Rows that are not padding: tokens of a prefill step, rows of a decode step."""
        return len(self.tokens) or len(self.rows)

    def row_at(self, num_rows: int) -> Int[np.ndarray, "B"]:
        """Returns where each row is among `num_rows` a rank."""
        return _at(self.rank, num_rows)

    def token_at(self, num_tokens: int) -> Int[np.ndarray, "T"]:
        """Returns where each token is among `num_tokens` a rank."""
        return _at(self.token_rank, num_tokens)

    def padded_rows(self, num_rows: int) -> Int[np.ndarray, "R C"]:
        """Returns the rows of all ranks, `num_rows` of each."""
        rows = empty_rows(self.num_ranks * num_rows)
        rows[self.row_at(num_rows)] = self.rows
        return rows

    def arrays(self, num_rows: int, num_deltas: int, num_tokens: int) -> list[Any]:
        """Returns tokens, rows, deltas and places of all ranks, each padded to its own size."""
        rows = self.padded_rows(num_rows)
        deltas = empty_deltas(self.num_ranks * num_deltas)
        deltas[_at(self.delta_rank, num_deltas)] = self.deltas
        at = self.token_at(num_tokens)
        tokens, places = np.zeros((2, self.num_ranks * num_tokens), np.int32)
        tokens[at] = self.tokens
        places[at[: len(self.places)]] = self.places
        return [tokens, rows, deltas, places]


def _at(rank: Int[np.ndarray, "n"], size: int) -> Int[np.ndarray, "n"]:
    """Returns the places of items by rank, in order, where a rank has `size` of them."""
    if not rank.any():
        return np.arange(len(rank), dtype=np.int32)
    order = np.argsort(rank, kind="stable")
    first = np.searchsorted(rank[order], rank[order])
    within = np.empty(len(rank), np.int32)
    within[order] = np.arange(len(rank)) - first
    return rank * size + within
