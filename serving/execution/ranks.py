"""Where a step's rows, tokens and deltas go on its ranks: each has some, and numbers of its own.

A mixed decode step has a segment of the same form for each of its models, on every rank.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import DELTA_BLOCK, DELTA_PAGE, DELTA_SLOT, SLOT, empty_deltas, empty_rows
from serving.plan import Limits, StepPlan

NOTHING = np.zeros(0, np.int32)


class ByRank(NamedTuple):
    """A plan whose slots, pages and hidden rows are numbered from 0 on each rank, and the rank of
    each row, token and delta. The order within a rank is the step's.

    Of a mixed step, segments count as ranks: with N models, segment i of rank r is r N + i.
    """

    plan: StepPlan
    num_ranks: int
    rank: Int[np.ndarray, "B"]
    token_rank: Int[np.ndarray, "T"]  # of a prefill step; else empty
    delta_rank: Int[np.ndarray, "N"]

    @classmethod
    def of(cls, plan: StepPlan, limits: Limits) -> "ByRank":
        """Splits a plan by rank, and each rank of a mixed step in a segment for each model, by
        number.
        """
        rows, deltas, count = plan.rows, plan.deltas, len(plan.models)
        if limits.num_ranks == 1:  # nothing to take apart
            own, parts = plan, (rows, plan.tokens, deltas)
            rank, token_rank, delta_rank = (np.zeros(len(part), np.int32) for part in parts)
        else:
            rows, deltas = rows.copy(), deltas.copy()
            slots = limits.slots_per_rank
            rank, rows[:, SLOT] = np.divmod(rows[:, SLOT], slots)
            delta_rank, deltas[:, DELTA_SLOT] = np.divmod(deltas[:, DELTA_SLOT], slots)
            group = deltas[:, DELTA_BLOCK] % len(limits.windows)
            deltas[:, DELTA_PAGE] %= np.array(limits.group_pages, np.int32)[group]
            token_rank = np.repeat(rank, plan.q_lens) if len(plan.tokens) else NOTHING
            places = plan.places % limits.hidden_per_rank
            own = replace(plan, rows=rows, deltas=deltas, places=places)
        if count > 1:
            _, segment = np.unique(plan.row_models, return_inverse=True)
            rank = rank * count + segment.astype(np.int32)
            # Any segment of a rank takes a delta of it.
            delta_rank = delta_rank * count + _at(delta_rank, 0) % count
        return cls(own, limits.num_ranks * count, rank, token_rank, delta_rank)

    @property
    def size(self) -> int:
        """Size of the fullest rank: tokens of a prefill step, rows of a decode step."""
        ranks = self.token_rank if len(self.token_rank) else self.rank
        if self.num_ranks == 1:
            return len(ranks)
        return int(np.bincount(ranks, minlength=1).max())

    def row_at(self, num_rows: int) -> Int[np.ndarray, "B"]:
        """Returns where each row is among `num_rows` a rank: of a hybrid step, first those that
        decode, and last the chunks.
        """
        at = _at(self.rank, num_rows)
        if self.plan.num_decodes:
            at[self.plan.num_decodes :] += num_rows - len(at)
        return at

    def token_at(self, num_tokens: int) -> Int[np.ndarray, "T"]:
        """Returns where each token is among `num_tokens` a rank."""
        return _at(self.token_rank, num_tokens)

    def arrays(self, num_rows: int, num_deltas: int, num_tokens: int) -> list[Any]:
        """Returns tokens, rows, deltas and places of all ranks, each padded to its own size."""
        rows = empty_rows(self.num_ranks * num_rows)
        rows[self.row_at(num_rows)] = self.plan.rows
        deltas = empty_deltas(self.num_ranks * num_deltas)
        deltas[_at(self.delta_rank, num_deltas)] = self.plan.deltas
        at = self.token_at(num_tokens)
        tokens, places = np.zeros((2, self.num_ranks * num_tokens), np.int32)
        tokens[at] = self.plan.tokens
        places[at[: len(self.plan.places)]] = self.plan.places
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
