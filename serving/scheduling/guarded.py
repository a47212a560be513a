"""Guards against faulty policies: if one fails, `Fcfs` decides, and no request is lost."""

import logging
from typing import Any

from serving.plan import Phase
from serving.request import Priority
from serving.scheduling.policy import Choice, Fcfs, Policy, RequestView, RequestViews, View
from serving.scheduling.sequence import SequenceState

log = logging.getLogger(__name__)


class GuardedPolicy:
    """Wraps a policy, and logs its 1st, 2nd, 4th, 8th, ... failure."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.parks = getattr(policy, "parks", True)
        self._num_faults = 0

    def rank(self, sequence: SequenceState) -> tuple[Any]:
        """Returns the sort key in the queue; the arrival time if the policy fails."""
        try:
            return (self.policy.rank(RequestView(sequence)),)
        except Exception as error:
            self._fault("rank", error)
            return (sequence.arrived_at,)

    def choose(self, view: View) -> Choice:
        """Returns what runs next; chosen by `Fcfs` if the policy fails or makes an invalid
        choice.
        """
        try:
            choice = self.policy.choose(view) or Fcfs().choose(view)
            _check(choice, view)
            return choice
        except Exception as error:
            self._fault("choose", error)
            return Fcfs().choose(view)

    def victim(self, running: list[SequenceState]) -> SequenceState:
        """Returns the sequence to evict; the one that arrived last if the policy fails."""
        try:
            chosen = self.policy.victim(RequestViews(running))
            for sequence in running:
                if RequestView(sequence).same_as(chosen):
                    return sequence
            raise ValueError(f"victim is {chosen!r}, which is not one of those it may be")
        except Exception as error:
            self._fault("victim", error)
            return max(running, key=lambda sequence: sequence.arrived_at)

    def _fault(self, method: str, error: Exception) -> None:
        self._num_faults += 1
        if self._num_faults.bit_count() == 1:
            log.error(
                "policy %s: %s failed, for the %dth time; first come first served goes on: %s",
                type(self.policy).__qualname__,
                method,
                self._num_faults,
                f"{type(error).__name__}: {error}",
            )


def _check(choice: Choice, view: View) -> None:
    if choice.resume is not None:
        if choice.resume not in range(len(view.under_way)):
            raise ValueError(f"resume is {choice.resume!r}; {len(view.under_way)} are under way")
        return
    if not isinstance(choice.phase, Phase):
        raise ValueError(f"phase is {choice.phase!r}; it must be a Phase")
    unknown = {c for group in choice.order for c in group} - set(Priority)
    if unknown:
        raise ValueError(f"order has {unknown}; it must hold groups of Priority")
