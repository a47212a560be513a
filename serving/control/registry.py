"""Which models' non-expert weights are on the device, where not all of a family's fit (Multi-MoE).

A requested model whose set is not there gets the place of another's, while steps of the others run.
Requests of a model that loses its place keep their KV pages and go on when it is back. A set that
is used keeps its place for a while, so that two busy models do not spend their time taking turns:
with the default, at most a tenth of it goes into copies.

**How long a model waits.** Whoever waits longest is next. A set may be taken from a model that is
busy once it has been there for `stay_s`, so that with N models and R places a model's set is there
after at most (N - R) * (stay_s + swap_s) + swap_s, whatever is asked of the others, but for steps
under way that run in parts.
"""

import logging
import math
from asyncio import Future, wrap_future
from collections.abc import Callable

from serving.execution.executor import Executor, SwapsModels
from serving.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

SHARE_OF_COPIES = 0.1
"""Of the time that sets are changed in, by default."""


class Registry:
    """Changes the sets between two steps. Not needed where all of them are on the device."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        stay_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`stay_s` 0 is derived from what a change takes. `wake` is called when one is done."""
        self._scheduler, self._wake = scheduler, wake
        self._executor = executor if isinstance(executor, SwapsModels) else None
        resident = self._executor and self._executor.resident_models
        self._since = dict.fromkeys(resident or (), 0.0)  # resident models; since when
        self._used: dict[int, float] = {}  # when a model last had a request
        self._wanted: dict[int, float] = {}  # models that are waited for; since when
        self._leaving: int | None = None
        self._coming: int | None = None
        self._done: Future[None] | None = None
        self._began_at = 0.0
        self._stay_s, self.swap_s = stay_s, 0.0
        self.num_swaps = 0
        scheduler.models = None if resident is None else set(resident)

    @property
    def stay_s(self) -> float:
        """The least time for which a busy model keeps its place."""
        return self._stay_s or self.swap_s * (1 / SHARE_OF_COPIES - 1)

    @property
    def swapping(self) -> bool:
        """Whether a set is on its way."""
        return self._done is not None

    def advance(self, now: float, *, idle: bool = False) -> None:
        """Notes a set that has arrived, and begins with the next one that is due. The tick calls it
        between two steps; `idle`: no resident model has anything to run.

        Raises what copying raised.
        """
        models = self._scheduler.models
        if models is None:
            return
        if self._done is not None:
            if not self._done.done():
                return
            self._finish(now, models)
        self._look(now, models)
        if not self._wanted:
            return
        if self._leaving is None:
            self._leaving = self._victim(now, idle=idle)
            if self._leaving is None:
                return
            models.discard(self._leaving)  # what has begun ends
        if not self._scheduler.has_begun(self._leaving):
            self._begin(now)

    def _look(self, now: float, models: set[int]) -> None:
        """Finds out which models have requests, and which of those are not resident."""
        asked = self._scheduler.models_asked
        for model in asked:
            self._used[model] = now
        absent = asked - self._since.keys()
        self._wanted = {model: self._wanted.get(model, now) for model in sorted(absent)}
        if not self._wanted and self._leaving is not None:  # nobody waits any more
            models.add(self._leaving)
            self._leaving = None

    def _victim(self, now: float, *, idle: bool) -> int | None:
        """Chooses the model whose place is taken: of models that no request asks, the one not asked
        for longest; else the one that has been there longest, if that is long enough.
        """
        used = {model: self._used.get(model, -math.inf) for model in self._since}
        unused = [model for model in used if used[model] < now]
        if unused:
            return min(unused, key=lambda model: (used[model], model))
        oldest = min(self._since, key=lambda model: (self._since[model], model))
        return oldest if idle or now - self._since[oldest] >= self.stay_s else None

    def _begin(self, now: float) -> None:
        assert self._leaving is not None
        assert self._executor is not None
        self._coming = min(self._wanted, key=lambda model: (self._wanted[model], model))
        self._began_at = now
        del self._since[self._leaving]
        self._done = wrap_future(self._executor.replace_set(self._leaving, self._coming))
        self._done.add_done_callback(lambda _: self._wake())
        self._leaving = None

    def _finish(self, now: float, models: set[int]) -> None:
        assert self._done is not None
        assert self._coming is not None
        self._done.result()
        self.swap_s = max(0.9 * self.swap_s, now - self._began_at)
        self._since[self._coming] = now
        models.add(self._coming)
        self._wanted.pop(self._coming, None)
        log.debug("model %d has its weights after %.3g s", self._coming, now - self._began_at)
        self._coming = self._done = None
        self.num_swaps += 1
