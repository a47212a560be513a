"""Rows that need exact experts, when some of a family's experts are in host memory (Multi-MoE,
3.2).

A request that refuses brownout must have each token computed by its model's own experts. Which
experts a step needs is known only after it has run: a row that met a substitute expert runs again
over the same positions once its experts have been fetched (`serving.control.fetcher`). Until then
its sequence cannot advance.
"""

from collections.abc import Iterable

from serving.scheduling.sequence import SequenceState, SequenceStatus


class ExactRows:
    """Decides which of these rows may be in the next step; all, while no expert is in host
    memory.
    """

    def __init__(self) -> None:
        self.models: frozenset[int] = frozenset()  # models with experts in host memory
        self.most = 1  # limit of such positions per step, as each may need experts
        self._again: list[SequenceState] = []

    def concerns(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence could meet a substitute expert, and must not."""
        request = sequence.request
        return request.model in self.models and not request.allow_brownout

    @property
    def again(self) -> list[SequenceState]:
        """Sequences to run again, whose experts have been fetched.

        No other exact row runs before them, since it might replace their experts.
        """
        self._again = [s for s in self._again if _runs_again(s)]
        return self._again

    @again.setter
    def again(self, sequences: list[SequenceState]) -> None:
        self._again = sequences

    def may_run(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence may be in the next step."""
        if not self.concerns(sequence):
            return True
        return not sequence.unread and (not self.again or sequence in self.again)

    def limited(self, decoding: Iterable[SequenceState]) -> list[SequenceState]:
        """Returns the sequences for a decode step, with exact ones limited to `most`."""
        found, count = [], 0
        for sequence in decoding:
            count += self.concerns(sequence)
            if count <= self.most or not self.concerns(sequence):
                found.append(sequence)
        return found


def _runs_again(sequence: SequenceState) -> bool:
    """Returns whether the sequence still has to run again or be read; False once it ended or was
    evicted.
    """
    if sequence.status in (SequenceStatus.WAITING, SequenceStatus.DONE):
        return False
    return sequence.unread or sequence.status is SequenceStatus.PREFILL
