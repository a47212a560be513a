"""Rows that no stand-in may serve, where experts of a family lie in host memory (Multi-MoE, 3.2).

A request that refuses brownout gets each of its tokens from its model's own experts. Which of those
a step needs is known once it has run: a row that met a stand-in runs again over the same positions
when the experts are there (`serving.control.fetcher`). Until then nothing comes after it.
"""

from collections.abc import Iterable

from serving.scheduling.sequence import SequenceState, SequenceStatus


class ExactRows:
    """Which such rows the next step may have; nothing is restricted while all experts are there."""

    def __init__(self) -> None:
        self.models: frozenset[int] = frozenset()  # with experts in host memory
        self.most = 1  # positions of such rows in one step: more may need too many experts
        self._again: list[SequenceState] = []

    def concerns(self, sequence: SequenceState) -> bool:
        """Whether a stand-in could serve it, and must not."""
        request = sequence.request
        return request.model in self.models and not request.allow_brownout

    @property
    def again(self) -> list[SequenceState]:
        """Sequences whose experts are there now; no other of these rows runs before them, or it
        would take the experts away.
        """
        self._again = [s for s in self._again if _runs_again(s)]
        return self._again

    @again.setter
    def again(self, sequences: list[SequenceState]) -> None:
        self._again = sequences

    def may_run(self, sequence: SequenceState) -> bool:
        """Whether it may be in the next step."""
        if not self.concerns(sequence):
            return True
        return not sequence.unread and (not self.again or sequence in self.again)

    def limited(self, decoding: Iterable[SequenceState]) -> list[SequenceState]:
        """Rows of a decode step, without those of these that are too many."""
        found, count = [], 0
        for sequence in decoding:
            count += self.concerns(sequence)
            if count <= self.most or not self.concerns(sequence):
                found.append(sequence)
        return found


def _runs_again(sequence: SequenceState) -> bool:
    """Whether its positions are still to be computed once more, or to be read; not once it ended or
    was evicted.
    """
    if sequence.status in (SequenceStatus.WAITING, SequenceStatus.DONE):
        return False
    return sequence.unread or sequence.status is SequenceStatus.PREFILL
