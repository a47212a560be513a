"""Scheduling policies: who waits in front, which phase runs next, who is preempted.

A policy only chooses. The scheduler holds the queues and the pages, and a policy cannot lose a
request. Write your own by implementing `Policy` and adding it to `POLICIES`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from serving.plan import Phase
from serving.scheduling.sequence import SequenceState


class Policy(Protocol):
    """What a scheduler asks. All methods are pure: they get states and change nothing."""

    def rank(self, sequence: SequenceState) -> Any:
        """Sort key of a waiting sequence; the smallest is served first."""
        ...

    def prefill_next(
        self, *, ready: bool, running: int, last_phase: Phase, itl_slack_s: float
    ) -> bool:
        """Whether a prefill step is next.

        Args:
            ready: a prompt could run now.
            running: sequences that could decode.
            last_phase: of the step before.
            itl_slack_s: what would be left of the running sequences' ITL SLO if a prefill step went
                first; negative: their next token would come late.
        """
        ...

    def victim(self, running: Sequence[SequenceState]) -> SequenceState:
        """Who is recomputed later when pages run out; `running` is not empty."""
        ...


class Fcfs:
    """First come, first served (the paper's scheduler).

    Prefill goes first, since a first token is what a new caller waits for; but between two prefill
    steps the running sequences get a decode step, so that a burst cannot stall them, unless their
    ITL SLO has room for one prefill step more.
    """

    def rank(self, sequence: SequenceState) -> Any:
        """By arrival; a preempted sequence keeps its place."""
        return sequence.arrived_at

    def prefill_next(
        self, *, ready: bool, running: int, last_phase: Phase, itl_slack_s: float
    ) -> bool:
        """Prefill and decode take turns when there is both and no time to spare."""
        return ready and (running == 0 or last_phase is Phase.DECODE or itl_slack_s >= 0)

    def victim(self, running: Sequence[SequenceState]) -> SequenceState:
        """The one that came last."""
        return max(running, key=lambda sequence: sequence.arrived_at)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs}
