"""Collects chunks of prompts for one prefill step, as many as each rank has room for."""

from collections import Counter
from collections.abc import Set

import numpy as np

from jmoe.packed_rows import NUM_DELTA_COLUMNS
from serving.plan import Limits, Phase
from serving.scheduling.exact import ExactRows
from serving.scheduling.sequence import SequenceState, SequenceStatus
from serving.scheduling.step import ScheduledStep


class Chunks:
    """The chunks of a prefill step that is being filled."""

    def __init__(self, limits: Limits, exact: ExactRows, ranks: Set[int]) -> None:
        """`ranks` are those that may have chunks."""
        self._limits, self._exact, self._ranks = limits, exact, ranks
        self._most = limits.max_prefill_tokens  # per rank
        self._taken: list[tuple[SequenceState, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    @property
    def model(self) -> int | None:
        """The model of these prompts; None while there are none."""
        return self._taken[0][0].request.model if self._taken else None

    def ranks(self) -> list[int]:
        """Returns the ranks with room for another token."""
        seqs = Counter(self._limits.rank(sequence.slot) for sequence, _ in self._taken)
        return [
            rank
            for rank, tokens in enumerate(self._tokens())
            if rank in self._ranks
            and tokens < self._most
            and seqs[rank] < self._limits.max_prefill_seqs
        ]

    def may_take(self, sequence: SequenceState) -> bool:
        """Returns whether the step may take a token of the sequence, if its rank has room."""
        return self._exact.may_run(sequence) and self._room_for(sequence) > 0

    def take(self, sequence: SequenceState) -> None:
        """Takes the next chunk of a prompt, as long as its rank has room for."""
        rank, start = self._limits.rank(sequence.slot), sequence.num_computed
        room = min(self._most - self._tokens()[rank], self._room_for(sequence))
        room = min(room, sequence.room - start)
        self._taken.append((sequence, sequence.context[start : start + room]))

    def drop_evicted(self) -> None:
        """Drops chunks of sequences that were evicted to admit another one."""
        self._taken = [c for c in self._taken if c[0].status is not SequenceStatus.WAITING]

    def keep_to_bucket(self) -> None:
        """Limits further chunks to the token bucket that the step already costs."""
        self._most = self._limits.token_bucket(max(self._tokens()))

    def pack(self) -> ScheduledStep:
        """Makes the step, and advances its sequences as if it had run."""
        pages_for = self._limits.pages_for
        rows, sampled, deltas = [], [], []
        for sequence, part in self._taken:
            # If a sequence runs again, its last pages may not be in the device's block table yet.
            mapped = min(sequence.prefix.num_mapped, pages_for(sequence.num_computed))
            sequence.num_computed += len(part)
            deltas += sequence.mapped(mapped, pages_for(sequence.num_computed))
            ends = sequence.num_computed == len(sequence.context)
            rows.append(sequence.packed(len(part)).copy())
            sampled.append(ends)
            if ends:
                sequence.status = SequenceStatus.DECODE
                sequence.num_sampled += 1
        sequences, tokens = zip(*self._taken, strict=True)
        return ScheduledStep(
            Phase.PREFILL,
            np.stack(rows),
            np.array(deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS),
            np.concatenate(tokens, dtype=np.int32),
            model=sequences[0].request.model,
            sequences=list(sequences),
            sampled=sampled,
        )

    def _room_for(self, sequence: SequenceState) -> int:
        """Returns how many tokens the sequence may have, apart from its rank's limit."""
        if not self._exact.concerns(sequence):
            return self._most
        return self._exact.most - sum(len(p) for s, p in self._taken if self._exact.concerns(s))

    def _tokens(self) -> list[int]:
        """Returns the number of tokens taken on each rank."""
        found = [0] * self._limits.num_ranks
        for sequence, part in self._taken:
            found[self._limits.rank(sequence.slot)] += len(part)
        return found
