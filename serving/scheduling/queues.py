"""Who is next: queues of sequences that wait for a slot, one per class, each in the policy's order,
turns of models that share one pool (Multi-MoE), and best effort's share.
"""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import count, islice

import numpy as np
from jaxtyping import Int

from serving.plan import Limits
from serving.request import Priority
from serving.scheduling.policy import BE, LS, GuardedPolicy
from serving.scheduling.sequence import SequenceState

Mixes = Callable[[Int[np.ndarray, "models ranks"]], bool]
"""Whether a decode step with these numbers of rows of several models, by rank, pays."""
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

    def heads(
        self,
        group: Collection[Priority],
        models: Collection[int] | None,
        skips: Callable[[SequenceState], bool],
    ) -> list[SequenceState]:
        """Returns the queues' first sequences for `models` (None: any) whose class is in `group`,
        in the policy's order.

        A sequence whose last token is still in flight cannot be recomputed yet, and is skipped; so
        are those of the first `MOST_SKIPPED` for which `skips` holds.
        """
        own = []
        for queue in self.values():
            asks = (s for s in queue if models is None or s.request.model in models)
            ready = (s for s in asks if not s.in_flight)
            head = next((s for s in islice(ready, MOST_SKIPPED) if not skips(s)), None)
            if head is not None and head.priority in group:
                own.append(head)
        return self._policy.sorted(own)


def of_one_model(waiting: list[SequenceState], most: int) -> list[SequenceState]:
    """Returns the first waiting sequence and others of its model, at most `most`."""
    return [s for s in waiting if s.request.model == waiting[0].request.model][:most]


class RoundRobin:
    """Lets models decode in turn: the one whose last decode step is longest ago goes first.

    A step reads the weights of one model, so rows of different models are in different steps,
    unless one decode step with rows of several takes less time than separate ones.
    """

    def __init__(self, limits: Limits, mixes: Mixes | None = None) -> None:
        """`mixes` None: rows of different models are never in one step."""
        self._limits, self._mixes = limits, mixes
        self._steps = count(1)
        self._last: dict[int, int] = {}  # number of the last decode step, by model

    def take(
        self, groups: Sequence[Sequence[SequenceState]], *, for_all: bool, alone: bool = True
    ) -> list[SequenceState]:
        """Returns the rows of the models whose turn it is, group by group.

        Models with rows in the first nonempty group take turns; with `for_all`, all models do. With
        `alone`, only one model is chosen; otherwise as many together as pay.
        """
        sequences = [sequence for group in groups for sequence in group]
        asked = [sequence.request.model for sequence in sequences]
        if len(set(asked)) < 2:  # nothing to choose, as with one model
            return sequences
        first = next(group for group in groups if group)
        models = set(asked) if for_all else {s.request.model for s in first}
        line = sorted(models, key=lambda model: (self._last.get(model, 0), model))
        chosen = line[:1] if alone else self._together(line, sequences)
        self._last |= {model: next(self._steps) for model in chosen}
        return [s for s in sequences if s.request.model in chosen]

    def _together(self, line: Sequence[int], sequences: Sequence[SequenceState]) -> Sequence[int]:
        """Returns as many models from the front of the line as pay in one step."""
        if self._mixes is None:
            return line[:1]
        places = {model: at for at, model in enumerate(line)}
        counts = np.zeros((len(line), self._limits.num_ranks), np.int32)
        for sequence in sequences:
            if (at := places.get(sequence.request.model)) is not None:
                counts[at, self._limits.rank(sequence.slot)] += 1
        for number in range(len(line), 1, -1):
            if self._mixes(counts[:number]):
                return line[:number]
        return line[:1]


MEMORY_S = 5.0
"""Time constant (s) of the exponentially weighted share: older steps count less and less."""


class Share:
    """Device time of steps that held best-effort rows, over device time of all steps; where rows
    complete singly, best effort's positions over all.
    """

    def __init__(self, claim: float) -> None:
        """`claim` is the share guaranteed to best effort while it has work, 0 to 1."""
        self.claim = claim
        self._best_effort = self._total = 0.0
        self._at = -math.inf

    def observe(self, amount: float, at: float, best_effort: float) -> None:
        """Counts seconds or positions; `best_effort` is the part of them that it had."""
        fade = math.exp(-(at - self._at) / MEMORY_S) if self._at > -math.inf else 0.0
        self._best_effort = self._best_effort * fade + best_effort
        self._total = self._total * fade + amount
        self._at = at

    @property
    def had(self) -> float:
        """The recent share; 1 before the first step."""
        return self._best_effort / self._total if self._total else 1.0

    @property
    def may_park(self) -> bool:
        """Whether best effort may be held back (its step parked, its rows passed), since it has had
        its share.
        """
        return not self.claim or self.had >= self.claim
