"""Who waits for a slot: a queue a class, each in the policy's order."""

from bisect import insort
from collections.abc import Collection

from serving.request import Priority
from serving.scheduling.guarded import GuardedPolicy
from serving.scheduling.policy import BE, LS
from serving.scheduling.sequence import SequenceState


class Queues(dict[Priority, list[SequenceState]]):
    """A list a class, by `Policy.rank`."""

    def __init__(self, policy: GuardedPolicy) -> None:
        super().__init__({LS: [], BE: []})
        self._policy = policy

    def add(self, sequence: SequenceState) -> bool:
        """Takes a sequence in, in its place; whether it is the first of its class."""
        queue = self[sequence.request.priority]
        insort(queue, sequence, key=self._policy.rank)
        return queue[0] is sequence

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out. Raises ValueError where it does not wait."""
        self[sequence.request.priority].remove(sequence)

    def all(self) -> list[SequenceState]:
        """All that wait, class by class."""
        return [*self[LS], *self[BE]]

    def head(
        self, group: Collection[Priority], models: Collection[int] | None = None
    ) -> SequenceState | None:
        """The first of those that count as one of `group` and ask one of `models`; None: any.

        A sequence whose last token is still in flight cannot be recomputed yet, and is passed over.
        """
        heads = (
            next((s for s in queue if not s.in_flight and _asks(s, models)), None)
            for queue in self.values()
        )
        own = [s for s in heads if s is not None and s.priority in group]
        return min(own, key=self._policy.rank, default=None)


def _asks(sequence: SequenceState, models: Collection[int] | None) -> bool:
    return models is None or sequence.request.model in models


def of_one_model(waiting: list[SequenceState], most: int) -> list[SequenceState]:
    """Of those that wait, the first and others of its model, `most` at most: a step by number."""
    return [s for s in waiting if s.request.model == waiting[0].request.model][:most]
