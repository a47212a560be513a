"""Guards against faulty policies: if one fails, `Fcfs` decides, and no request is lost."""

import math
import operator
from bisect import insort
from collections.abc import Sequence
from typing import Any

from serving.errors import shown
from serving.plan import Phase
from serving.request import Priority
from serving.scheduling.policy import Choice, Fcfs, Policy, RequestView, RequestViews, View
from serving.scheduling.sequence import SequenceState
from serving.settings.plugins import Guard


class GuardedPolicy:
    """Wraps a policy; whatever it returns, does or raises, a valid choice results."""

    def __init__(self, policy: Policy, slow_s: float = math.inf) -> None:
        """Calls that take longer than `slow_s` are logged."""
        self.policy = policy
        self.parks = bool(getattr(policy, "parks", True))
        name = f"policy {type(policy).__qualname__}"
        self._guard = Guard(name, "first come first served", slow_s)

    def insert(self, queue: list[SequenceState], sequence: SequenceState) -> None:
        """Inserts a sequence into a queue by the policy's rank; by arrival if that fails."""
        self._guard.call(
            "rank",
            lambda: insort(queue, sequence, key=self._rank),
            lambda: insort(queue, sequence, key=_arrived_at),
        )

    def sorted(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Returns the sequences by the policy's rank; by arrival if that fails."""
        if len(sequences) < 2:
            return sequences
        return self._guard.call(
            "rank",
            lambda: sorted(sequences, key=self._rank),
            lambda: sorted(sequences, key=_arrived_at),
        )

    def choose(self, view: View) -> Choice:
        """Returns what runs next; chosen by `Fcfs` if the policy fails or makes an invalid
        choice.
        """
        return self._guard.call(
            "choose",
            lambda: _checked(self.policy.choose(view) or Fcfs().choose(view), view),
            lambda: Fcfs().choose(view),
        )

    def victim(self, running: list[SequenceState]) -> SequenceState:
        """Returns the sequence to evict; the one that arrived last if the policy fails."""
        return self._guard.call(
            "victim", lambda: self._victim(running), lambda: max(running, key=_arrived_at)
        )

    def _rank(self, sequence: SequenceState) -> Any:
        rank = self.policy.rank(RequestView(sequence))
        if _has_nan(rank):
            raise ValueError(f"rank is {shown(rank)}; NaN has no place in an order")
        return rank

    def _victim(self, running: list[SequenceState]) -> SequenceState:
        chosen = self.policy.victim(RequestViews(running))
        for sequence in running:
            if RequestView(sequence).same_as(chosen):
                return sequence
        raise ValueError(f"victim is {shown(chosen)}, which is not one of those it may be")


def _arrived_at(sequence: SequenceState) -> float:
    return sequence.arrived_at


def _has_nan(rank: Any) -> bool:
    if isinstance(rank, tuple | list):
        return any(map(_has_nan, rank))
    return bool(rank != rank)


def _checked(choice: Choice, view: View) -> Choice:
    """Returns the choice in its own types. Raises ValueError or TypeError for an invalid one."""
    if choice.resume is not None:
        index, count = operator.index(choice.resume), len(view.under_way)
        if isinstance(choice.resume, bool) or not 0 <= index < count:
            raise ValueError(f"resume is {shown(choice.resume)}; {count} steps are under way")
        return Choice(resume=index)
    if not isinstance(choice.phase, Phase):
        raise ValueError(f"phase is {shown(choice.phase)}; it must be a Phase")
    if not isinstance(choice.order, Sequence):
        raise ValueError(f"order is {shown(choice.order)}; it must be a sequence of groups")
    order = tuple(map(tuple, choice.order))
    classes = [one for group in order for one in group]
    if unknown := [one for one in classes if not isinstance(one, Priority)]:
        raise ValueError(f"order has {shown(unknown[0])}; it must hold groups of Priority")
    if len(set(classes)) < len(classes):
        raise ValueError(f"order is {shown(order)}; a class may be in one group only")
    return Choice(choice.phase, order)
