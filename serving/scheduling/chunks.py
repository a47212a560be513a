"""Chunks of prompts for one prefill step, as many as each rank has room for."""

from collections import Counter
from collections.abc import Set

import numpy as np

from serving.plan import Limits, Phase
from serving.scheduling.batch import Batch
from serving.scheduling.exact import ExactRows
from serving.scheduling.sequence import SequenceState, SequenceStatus


class Chunks:
    """What a prefill step is made of while it is filled."""

    def __init__(self, limits: Limits, exact: ExactRows, ranks: Set[int]) -> None:
        """`ranks`: those that may have some."""
        self._limits, self._exact, self._ranks = limits, exact, ranks
        self._most = limits.max_prefill_tokens  # of a rank
        self._taken: list[tuple[SequenceState, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    @property
    def model(self) -> int | None:
        """Whose prompts these are; None: anybody's yet."""
        return self._taken[0][0].request.model if self._taken else None

    def ranks(self) -> list[int]:
        """Those with room for a token more."""
        seqs = Counter(self._limits.rank(sequence.slot) for sequence, _ in self._taken)
        return [
            rank
            for rank, tokens in enumerate(self._tokens())
            if rank in self._ranks
            and tokens < self._most
            and seqs[rank] < self._limits.max_prefill_seqs
        ]

    def may_take(self, sequence: SequenceState) -> bool:
        """Whether the step may have a token of it, on a rank that has room."""
        return self._exact.may_run(sequence) and self._room_for(sequence) > 0

    def take(self, sequence: SequenceState) -> None:
        """The next chunk of a prompt, as long as its rank has room for."""
        rank, start = self._limits.rank(sequence.slot), sequence.num_computed
        room = min(self._most - self._tokens()[rank], self._room_for(sequence))
        self._taken.append((sequence, sequence.context[start : start + room]))

    def drop_evicted(self) -> None:
        """Those that gave way to a sequence that was admitted."""
        self._taken = [c for c in self._taken if c[0].status is not SequenceStatus.WAITING]

    def keep_to_bucket(self) -> None:
        """From here on there is room for what makes the step no dearer."""
        self._most = self._limits.token_bucket(max(self._tokens()))

    def pack(self) -> Batch:
        """The step; its sequences are as far as if it had run."""
        pages_for = self._limits.pages_for
        rows, sampled, deltas = [], [], []
        for sequence, part in self._taken:
            # Of one that runs again the last pages may not have come to the device.
            mapped = min(sequence.prefix.num_mapped, pages_for(sequence.num_computed))
            sequence.num_computed += len(part)
            reached = pages_for(sequence.num_computed)
            deltas += [(sequence.slot, b, sequence.pages[b]) for b in range(mapped, reached)]
            sequence.prefix.num_mapped = reached
            ends = sequence.num_computed == len(sequence.context)
            rows.append(sequence.packed(len(part)).copy())
            sampled.append(ends)
            if ends:
                sequence.status = SequenceStatus.DECODE
                sequence.num_sampled += 1
        sequences, tokens = [s for s, _ in self._taken], [part for _, part in self._taken]
        return Batch(Phase.PREFILL, sequences, np.stack(rows), sampled, deltas, tokens)

    def _room_for(self, sequence: SequenceState) -> int:
        """Tokens that it may have, ranks aside."""
        if not self._exact.concerns(sequence):
            return self._most
        return self._exact.most - sum(len(p) for s, p in self._taken if self._exact.concerns(s))

    def _tokens(self) -> list[int]:
        """Of each rank."""
        found = [0] * self._limits.num_ranks
        for sequence, part in self._taken:
            found[self._limits.rank(sequence.slot)] += len(part)
        return found
