"""Chooses which models' rows the next decode step has, if several share one pool (Multi-MoE).

A prefill step reads the weights of one model, so rows of different models are in different steps.
The same holds for decode steps, unless one step with rows of several models takes less time than
separate steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from serving.scheduling.sequence import SequenceState


class RoundRobin:
    """Lets models decode in turn: the one whose last decode step is longest ago goes first."""

    def __init__(self, mixes: Callable[[Sequence[int]], bool] | None = None) -> None:
        """`mixes` returns whether a step with these row counts of several models pays;
        None: never.
        """
        self._mixes = mixes or (lambda counts: False)
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
        rows = Counter(asked)
        first = next(group for group in groups if group)
        models = rows.keys() if for_all else {s.request.model for s in first}
        line = sorted(models, key=lambda model: (self._last.get(model, 0), model))
        chosen = line[:1] if alone else self._together(line, rows)
        self._last |= {model: next(self._steps) for model in chosen}
        return [s for s in sequences if s.request.model in chosen]

    def _together(self, line: Sequence[int], rows: Counter[int]) -> Sequence[int]:
        """Returns as many models from the front of the line as pay in one step."""
        for number in range(len(line), 1, -1):
            if self._mixes([rows[model] for model in line[:number]]):
                return line[:number]
        return line[:1]
