"""Which of the µ-queues of a worker runs next: the rules alone, in NumPy.

Letters: L layers, G groups of a layer. A µ-queue (AMoE, section 3.2) holds the rows that wait on
one worker for one layer and one group of what that worker holds of it: a set of experts that are
launched together, or the layer's attention, which is one group.

A rule chooses among queues that may run. Who may run, who has waited too long and whose class goes
first is `LayerPicker`'s business, so that it holds for every rule.
"""

from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

MTFS, FLFS, DEFRAG = range(3)
"""Numbers of the built-in rules, by which compiled code knows them."""


Rows = Int[np.ndarray, "layers groups"]
"""In each queue."""
Since = Float[np.ndarray, "layers groups"]
"""Seconds of the worker's clock at which the oldest row in each queue came."""
MayRun = Bool[np.ndarray, "layers groups"]


class Rule(Protocol):
    """What a picker calls. A user's own rule is a class without arguments that has this method."""

    def choose(self, counts: Rows, may_run: MayRun, now: float) -> tuple[int, int] | None:
        """Returns the (layer, group) to run, one of those that may; None leaves it to the picker.

        Args:
            counts: int64, rows in each queue; of the urgent class alone where any of it may run.
            may_run: at least one is True. Read-only, as `counts`.
            now: seconds of the worker's clock.
        """
        ...


class MostTokensFirst:
    """MTFS (AMoE, section 3.4): the fullest queue; of several the lowest layer, then group."""

    number = MTFS
    weights = np.zeros(0)

    def choose(self, counts: Rows, may_run: MayRun, now: float) -> tuple[int, int]:
        """See Rule."""
        return _cell(int(np.where(may_run, counts, -1).argmax()), counts)


class FirstLayerFirst:
    """FLFS (AMoE, section 3.4): the lowest layer, whatever waits above; there the fullest queue.

    With requests that keep coming it may leave its highest layers alone: the live lock that the
    paper describes, which a picker's `max_age_s` bounds.
    """

    number = FLFS
    weights = np.zeros(0)

    def choose(self, counts: Rows, may_run: MayRun, now: float) -> tuple[int, int]:
        """See Rule."""
        layer = int(may_run.any(axis=1).argmax())
        return layer, int(np.where(may_run[layer], counts[layer], -1).argmax())


class Defragging:
    """The defragging scheduler (AMoE, Algorithm 1): queues that a dense wave is about to follow.

    A queue's score is its rows and, for each of the next K layers, counted round from the last to
    the first, the mean rows a group there, times decay^k. So rows are sent after those that went
    ahead, and rows of new requests wait for the wave to come by. The highest score runs; of several
    the lowest layer, then group.

    The paper prints neither K nor the decay. Its public code has a decay of 0.8; K is ours.
    """

    number = DEFRAG

    def __init__(self, lookahead: int = 4, decay: float = 0.8) -> None:
        """K is 0 or more, the decay between 0 and 1."""
        self.weights: Float[np.ndarray, "K"] = np.array(
            [decay**k for k in range(1, lookahead + 1)], np.float64
        )

    def choose(self, counts: Rows, may_run: MayRun, now: float) -> tuple[int, int]:
        """See Rule."""
        # One term after another, as in compiled code: sums in another order could break ties
        # differently.
        mean, ahead = counts.sum(axis=1) / counts.shape[1], np.zeros(len(counts))
        for k, weight in enumerate(self.weights, start=1):
            ahead += np.roll(mean, -k) * weight
        scores = np.where(may_run, ahead[:, None] + counts, -1.0)
        return _cell(int(scores.argmax()), counts)


def _cell(flat: int, counts: Rows) -> tuple[int, int]:
    return divmod(flat, counts.shape[1])


RULES: dict[str, type[Rule]] = {
    "mtfs": MostTokensFirst,
    "flfs": FirstLayerFirst,
    "defrag": Defragging,
}
