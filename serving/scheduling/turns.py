"""Which model's rows the next step has, where several are served from one pool (Multi-MoE).

A step reads the weights of one model, so rows of different models are in different steps.
"""

from collections.abc import Sequence
from itertools import count

from serving.scheduling.sequence import SequenceState


class Turns:
    """Models decode in turn: the one whose last decode step is longest ago goes first."""

    def __init__(self) -> None:
        self._steps = count(1)
        self._last: dict[int, int] = {}  # by model; none: it has not decoded yet

    def take(
        self, groups: Sequence[Sequence[SequenceState]], *, for_all: bool
    ) -> list[SequenceState]:
        """Of rows that could decode, those of the model whose turn it is, group by group.

        Models with rows in the first group that has any take turns; `for_all`: all of them.
        """
        all_models = {s.request.model for group in groups for s in group}
        if len(all_models) < 2:  # nothing to choose, as with one model
            return [sequence for group in groups for sequence in group]
        first = next(group for group in groups if group)
        models = all_models if for_all else {s.request.model for s in first}
        chosen = min(models, key=lambda model: (self._last.get(model, 0), model))
        self._last[chosen] = next(self._steps)
        return [s for group in groups for s in group if s.request.model == chosen]
