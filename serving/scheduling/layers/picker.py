"""Picks the µ-queue that a worker runs next, by a rule, such that no queue starves.

Letters: L layers, G groups of a layer; rows in one queue are of one layer and group.

**No queue starves.** Let a worker ask `pick` whenever it is free, and when `wake_at` says so while
it is idle; let a stage take E seconds at most and drain its queue. A row that comes at t is then
in a stage that starts by t + max_age_s + L G E, whatever the rule and the classes. For from
t + max_age_s on its queue has come of age, and `pick` returns only queues that have, the one with
the oldest row first. At most one stage is under way. Another queue goes before only with a row
that is as old; its stage drains it, and what comes later is younger. So each of the L G - 1 others
goes before at most once. Where a stage takes at most B rows, the oldest first, and N rows wait, it
is max_age_s + (L G + N / B) E.
"""

import math
import operator
from dataclasses import dataclass

import numpy as np

from serving.scheduling.layers.rules import RULES, Defragging, MayRun, Rows, Rule, Since
from serving.settings import plugins


@dataclass(frozen=True)
class Waiting:
    """How long rows may wait for others."""

    min_batch: int = 1  # rows below which a queue is left alone for a while
    max_wait_s: float = 0.0  # that while, from its oldest row on
    max_age_s: float = 0.25  # from which on a queue goes before all that are younger


class LayerPicker:
    """One worker's, or several workers' with the same settings: it keeps no state of queues."""

    def __init__(
        self, rule: Rule, waiting: Waiting | None = None, *, use_numba: bool | None = None
    ) -> None:
        """Picks by `rule`.

        Args:
            rule: one of `rules.py`, or a user's own.
            waiting: how long rows may wait; None: not for a batch.
            use_numba: None: where it is installed. A rule of a user's own is never compiled.
        """
        self.rule, self.waiting = rule, waiting or Waiting()
        self._number = getattr(rule, "number", None) if type(rule) in RULES.values() else None
        self._decide = None
        if self._number is not None and use_numba is not False:
            from serving.scheduling.layers import compiled  # numba is 0.3 s and 50 MB

            if use_numba or compiled.AVAILABLE:
                self._decide = compiled.decide
        # Of one type each, whatever was given: numba compiles anew for others.
        w = self.waiting
        self._limits = int(w.min_batch), float(w.max_wait_s), float(w.max_age_s)
        self._fallback = Defragging()
        self._guard = plugins.Guard(f"layer rule {type(rule).__qualname__}", "defragging")

    def pick(
        self,
        counts: Rows,
        oldest: Since,
        now: float,
        *,
        urgent: Rows | None = None,
    ) -> tuple[int, int] | None:
        """Returns the (layer, group) whose queue is to run now; None: none is, before `wake_at`.

        A queue whose oldest row is `max_age_s` old goes first, the oldest of several. Otherwise the
        rule chooses among queues that may run: with `min_batch` rows, or a row that is `max_wait_s`
        old. Where one of these has urgent rows, it chooses among those that have, and by their
        urgent rows; the others of the queue run along.

        Args:
            counts: rows in each queue, int64.
            oldest: float64, seconds of the worker's clock at which the oldest row in each queue
                came; of an empty one it means nothing.
            now: seconds of that clock.
            urgent: latency-sensitive rows in each queue, a part of `counts`; None: no classes.
        """
        if self._decide is None:
            return self._pick(counts, oldest, now, urgent)
        flat = self._decide(
            self._number,
            self.rule.weights,  # pyright: ignore[reportAttributeAccessIssue]
            counts,
            counts if urgent is None else urgent,
            urgent is not None,
            oldest,
            float(now),
            *self._limits,
        )
        return None if flat < 0 else divmod(flat, counts.shape[1])

    def wake_at(self, counts: Rows, oldest: Since) -> float:
        """Returns when to ask `pick` again after None if nothing comes; seconds of the clock.

        Infinite where all queues are empty. At this very time `pick` gives a queue: both add up
        the same numbers.
        """
        waits = oldest[counts > 0]
        if not waits.size:
            return math.inf
        return float(waits.min()) + min(self.waiting.max_wait_s, self.waiting.max_age_s)

    def _pick(
        self,
        counts: Rows,
        oldest: Since,
        now: float,
        urgent: Rows | None,
    ) -> tuple[int, int] | None:
        filled = counts > 0
        since = np.where(filled, oldest, math.inf)
        first = int(since.argmin())
        if since.flat[first] + self.waiting.max_age_s <= now:
            return divmod(first, counts.shape[1])
        is_full = counts >= self.waiting.min_batch
        may_run = filled & (is_full | (since + self.waiting.max_wait_s <= now))
        if not may_run.any():
            return None
        if urgent is not None and (may_run & (urgent > 0)).any():
            counts, may_run = urgent, may_run & (urgent > 0)
        return self._choose(counts, may_run, now)

    def _choose(self, counts: Rows, may_run: MayRun, now: float) -> tuple[int, int]:
        # A rule gets views that it cannot write, and is believed only what can be.
        seen = counts.view(), may_run.view()
        for array in seen:
            array.flags.writeable = False

        def choose() -> tuple[int, int]:
            chosen = self.rule.choose(*seen, now)
            if chosen is None:
                return self._fallback.choose(counts, may_run, now)
            return _checked(chosen, may_run)

        return self._guard.call(
            "choose", choose, lambda: self._fallback.choose(counts, may_run, now)
        )


def _checked(chosen: tuple[int, int], may_run: MayRun) -> tuple[int, int]:
    layer, group = map(operator.index, chosen)
    if not (0 <= layer < may_run.shape[0] and 0 <= group < may_run.shape[1]):
        raise ValueError(f"it chose {chosen!r} of {may_run.shape[0]} layers x {may_run.shape[1]}")
    if not may_run[layer, group]:
        raise ValueError(f"it chose {chosen!r}, which may not run")
    return layer, group


def make_picker(name: str, waiting: Waiting | None = None) -> LayerPicker:
    """Makes a picker by a rule's name (`mtfs`, `flfs`, `defrag`), or by `module:Class` of a user's
    own.

    Raises ValueError for one that is not there, cannot be made, or has no `choose`.
    """
    return LayerPicker(plugins.make("layer rule", name, RULES, ["choose"]), waiting)
