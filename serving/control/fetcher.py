"""Which experts lie in the spare slots, where not all of a family's have a slot of their own.

Rows that allow brownout are served by a sibling's expert meanwhile, and that counts as degraded. A
row that refuses it gets its model's own: the step that missed some shows which, they are fetched,
and it runs again over the same positions. Its first layers are exact now, so each pass makes one
MoE layer more exact, and needs no more experts than one row can visit: passes are bounded by the
MoE layers. Where a step's rows need more experts than there are spare slots, the next one has half
as many positions of such rows.

Slots that nobody waits for hold what is visited most, of models that are asked.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from jmoe.family import Family
from jmoe.offloaded import Expert, OffloadedExperts
from serving.execution.executor import FetchesExperts
from serving.plan import StepResult
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step import ScheduledStep

PREFETCH_SHARE = 0.1
"""Of the time, what fetching experts ahead may take."""
KEPT = 0.9
"""Of an average of visits, what the next step of that model leaves."""
GAIN = 1.5
"""How many times the visits of what it takes the place of, for an expert to be fetched ahead."""
CALM_STEPS = 16
"""Steps that had all they needed, after which a step may have half as many positions more."""


class Fetcher:
    """Fetches experts between two steps. Does nothing where all experts have a slot."""

    def __init__(
        self,
        executor: object,
        scheduler: Scheduler,
        family: Family | None,
        clock: Callable[[], float],
    ) -> None:
        """There are as many spare slots as one row can need, or more. Where experts are offloaded,
        the executor must be one that `FetchesExperts`.
        """
        self._executor, self._scheduler, self._clock = executor, scheduler, clock
        self._away = offloaded = None if family is None else family.offloaded
        self._exact = scheduler.exact
        self.fetches = Counter[str]()  # by reason, "miss" and "ahead"
        self.fetched_bytes, self.num_reruns = 0, 0
        self._steps = self._calm = 0
        self._used: dict[Expert, int] = {}  # the step that last needed it
        self._next_ahead_at = -math.inf
        if offloaded is None or family is None:
            return
        per_row = offloaded.needed_by_a_row(family.config.experts_per_token)
        self._exact.models = frozenset(n for n in range(len(family)) if offloaded.offloaded_of(n))
        self._exact.most = len(offloaded.spare) // per_row
        self._visits = VisitMeans(offloaded, len(family))

    def launched(self, step: ScheduledStep) -> None:
        """Holds back what would follow a row that a substitute may have served, until that is
        known.
        """
        if self._exact.models:
            for sequence in step.sequences:
                sequence.unread = self._exact.concerns(sequence)

    def accept(self, step: ScheduledStep, result: StepResult, degraded: Sequence[int]) -> set[int]:
        """Reads which experts a step visited, and fetches those that its exact rows missed:
        `degraded` counts visits to substitutes by row (`ScheduledStep.count_degraded`).

        Returns the rows whose tokens are discarded: they run again.
        """
        if self._away is None:
            return set()
        assert result.needed is not None
        self._steps += 1
        # A mixed step adds up what its models visited.
        if len(step.models) == 1 and step.model in self._exact.models:
            self._visits.observe(step.model, result.expert_rows)
        exact = [at for at, s in enumerate(step.sequences) if self._exact.concerns(s)]
        parts = step.parts
        parts.needed = result.needed if parts.needed is None else parts.needed + result.needed
        if not exact or not step.is_last:
            return set()
        before, again = self._exact.again, set[int]()
        for at in exact:
            step.sequences[at].unread = False
            if degraded[at]:
                again.add(at)
        positions = int(step.q_lens[exact].sum())
        if not again:
            self._exact.again = [s for s in before if s not in step.sequences]
            self._grow(positions)
            return again
        self.num_reruns += len(again)
        rows = [step.sequences[at] for at in sorted(again)]
        for at, sequence in zip(sorted(again), rows, strict=True):
            if not sequence.done:
                sequence.run_again(int(step.q_lens[at]), step.sampled[at])
        if before and not any(s in before for s in rows):
            return again  # launched before those: the slots are theirs
        fits = self._fetch_all(self._experts(step.models, parts.needed))
        self._exact.again = rows if fits else []
        if not fits:
            self._exact.most = max(1, positions // 2)
        self._calm = 0
        return again

    def advance(self, now: float) -> None:
        """Fetches the expert ahead that would be visited most, if it is worth its time."""
        if self._away is None or now < self._next_ahead_at or self._exact.again:
            return
        asked = self._scheduler.models_asked
        fetched, free = self._away.fetched, self._away.free
        best, gain, worst, loss = self._visits.change(sorted(asked), fetched)
        if not gain or not (free or gain > GAIN * loss):
            return
        began = self._clock()
        self._fetch({best: free[0] if free else fetched[worst]}, "ahead")
        took_s = self._clock() - began
        self._next_ahead_at = now + took_s * (1 / PREFETCH_SHARE - 1)

    def _experts(
        self, models: Sequence[int], needed: Int[np.ndarray, "layers columns"]
    ) -> set[Expert]:
        """Returns the experts that were needed by rows of these models, column by column."""
        assert self._away is not None
        count = needed.shape[1] // len(models)
        return {
            self._away.of(models[column // count], layer, column % count)
            for layer, column in np.argwhere(needed).tolist()
        }

    def _grow(self, positions: int) -> None:
        """Raises the number of positions a step may have after many steps without a miss."""
        self._calm += positions >= self._exact.most
        if self._calm >= CALM_STEPS:
            most = self._scheduler.limits.max_prefill_tokens
            self._exact.most = min(most, self._exact.most * 3 // 2 + 1)
            self._calm = 0

    def _fetch_all(self, experts: set[Expert]) -> bool:
        """Fetches experts in place of the least recently used; returns False if they do not all
        fit.
        """
        assert self._away is not None
        if len(experts) > len(self._away.spare):
            return False
        self._used |= dict.fromkeys(experts, self._steps)
        fetched = self._away.fetched
        leaving = [expert for expert in fetched if expert not in experts]
        leaving.sort(key=lambda expert: (self._used.get(expert, 0), expert))
        slots = [*self._away.free, *(fetched[expert] for expert in leaving)]
        self._fetch(dict(zip(sorted(experts - fetched.keys()), slots, strict=False)), "miss")
        return True

    def _fetch(self, experts: Mapping[Expert, int], reason: str) -> None:
        assert self._away is not None
        if not experts:
            return
        assert isinstance(self._executor, FetchesExperts)
        self._executor.fetch_experts(experts)
        self.fetches[reason] += len(experts)
        self.fetched_bytes += len(experts) * self._away.source.fetch_bytes


class VisitMeans:
    """Moving averages of how many rows a step visit each expert that is offloaded."""

    def __init__(self, offloaded: OffloadedExperts, num_models: int) -> None:
        self._experts = list(offloaded.users)
        self._number = {expert: at for at, expert in enumerate(self._experts)}
        self._mean = np.zeros(len(self._experts))
        self._of = np.zeros((num_models, len(self._experts)), bool)
        for at, expert in enumerate(self._experts):
            self._of[list(offloaded.users[expert]), at] = True
        self._layer, self._expert = np.array(self._experts, int).T[1:]

    def observe(self, model: int, expert_rows: Int[np.ndarray, "layers E"]) -> None:
        """Adds the visits of a model's step."""
        own = self._of[model]
        rows = expert_rows[self._layer[own], self._expert[own]]
        self._mean[own] = KEPT * self._mean[own] + (1 - KEPT) * rows

    def change(
        self, asked: Sequence[int], fetched: Collection[Expert]
    ) -> tuple[Expert, float, Expert, float]:
        """Returns the most visited expert that is not fetched, the least visited one that is, and
        the mean visits of each; models that no request asks count as none.
        """
        mean = self._mean * self._of[list(asked)].any(axis=0)
        there = np.zeros(len(mean), bool)
        there[[self._number[expert] for expert in fetched]] = True
        best = int(np.argmax(np.where(there, -1.0, mean)))
        worst = int(np.argmin(np.where(there, mean, np.inf)))
        gain = 0.0 if there[best] else float(mean[best])
        return self._experts[best], gain, self._experts[worst], float(mean[worst])
