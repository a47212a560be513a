"""Queues of sequences that wait for a slot, one per class, each in the policy's order."""

from collections.abc import Callable, Collection
from itertools import islice

from serving.request import Priority
from serving.scheduling.guarded import GuardedPolicy
from serving.scheduling.policy import BE, LS
from serving.scheduling.sequence import SequenceState

MOST_SKIPPED = 32
"""Of a queue, which bounds what a plan costs where many wait for the same pages."""


class Queues(dict[Priority, list[SequenceState]]):
    """A list of waiting sequences for each class, sorted by `Policy.rank`."""

    def __init__(self, policy: GuardedPolicy) -> None:
        super().__init__({LS: [], BE: []})
        self._policy = policy

    def add(self, sequence: SequenceState) -> bool:
        """Inserts a sequence in order; returns whether it is now the first of its class."""
        queue = self[sequence.request.priority]
        self._policy.insert(queue, sequence)
        return queue[0] is sequence

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence. Raises ValueError if it is not waiting."""
        self[sequence.request.priority].remove(sequence)

    def all(self) -> list[SequenceState]:
        """Returns all waiting sequences, class by class."""
        return [*self[LS], *self[BE]]

    def heads(
        self,
        group: Collection[Priority],
        models: Collection[int] | None = None,
        skips: Callable[[SequenceState], bool] = lambda sequence: False,
    ) -> list[SequenceState]:
        """Returns the queues' first sequences for `models` (None: any) whose class is in `group`,
        in the policy's order.

        A sequence whose last token is still in flight cannot be recomputed yet, and is skipped; so
        are those of the first `MOST_SKIPPED` for which `skips` holds.
        """
        own = []
        for queue in self.values():
            ready = (s for s in queue if not s.in_flight and _asks(s, models))
            head = next((s for s in islice(ready, MOST_SKIPPED) if not skips(s)), None)
            if head is not None and head.priority in group:
                own.append(head)
        return self._policy.sorted(own)


def _asks(sequence: SequenceState, models: Collection[int] | None) -> bool:
    return models is None or sequence.request.model in models


def of_one_model(waiting: list[SequenceState], most: int) -> list[SequenceState]:
    """Returns the first waiting sequence and others of its model, at most `most`."""
    return [s for s in waiting if s.request.model == waiting[0].request.model][:most]
