"""Models of a family that come and go while others are served (Multi-MoE).

A model is read in a thread; its experts are written a few a tick, then its united experts of the
way in force, a layer a tick; between two steps it is there. A model that is unloaded is not found
from that moment on; its requests may go on for a while, and end with an error then. What it leaves
is free for the next: a place, slots of the pool that no other model uses, memory of its other
weights.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from jmoe.api import Model
from jmoe.arrival import Arrival
from jmoe.family import Family
from jmoe.weights import Params
from serving.config import EngineConfig
from serving.control.audit import Auditor
from serving.control.experts_loader import ExpertsLoader
from serving.control.losses import CurvesOf, LossBound, Losses
from serving.control.slo import SloAnalyser
from serving.errors import (
    InvalidRequest,
    ModelUnloaded,
    NotFound,
    RequestFailed,
    ServingError,
    shown,
)
from serving.execution.executor import Executor, TakesModels
from serving.intake.admission import Admission
from serving.request import BrownoutChange
from serving.scheduling.sequence import SequenceState
from serving.settings.composes import COMING, why_not

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 256

Read = Callable[
    [EngineConfig, Family, TakesModels, str, str, Callable[[CurvesOf], None]],
    tuple[Arrival, Params, CurvesOf],
]
"""`serving.startup.arrivals.arriving`."""


@dataclass
class _Coming:
    """A model whose weights are being written."""

    arrival: Arrival
    params: Params
    done: "asyncio.Future[Model]" = field(default_factory=asyncio.Future)
    model: Model | None = None  # once its experts are there
    layer: int = 0  # of its united experts


class Models:
    """The models of an engine, by place, and the one that is coming."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        family: Family | None,
        names: list[str],
        loader: ExpertsLoader,
        slo: SloAnalyser,
        admission: Admission,
        auditor: Auditor,
        read: Read,
        wake: Callable[[], None],
    ) -> None:
        """`names` are those of the family, by place, and empty where it is vacant; they are changed
        as models come and go. `wake` is called when the tick has something to write.
        """
        self._config, self._family, self._read, self._wake = config, family, read, wake
        self._loader, self._slo, self._admission, self._auditor = loader, slo, admission, auditor
        self._executor = executor if isinstance(executor, TakesModels) else None
        self.names = names
        self.generations = Counter[int]()  # how often each place was left
        self.retired = asyncio.Event()  # a request has ended
        self._changing = asyncio.Lock()
        self._coming: _Coming | None = None
        self._losses: Losses | None = None  # of a model that is read and not served yet
        self._ended: ServingError | None = None  # once the engine no longer ticks

    @property
    def busy(self) -> bool:
        """Whether the tick has weights to write."""
        return self._coming is not None

    def salt(self, number: int) -> str:
        """Returns what keeps KV pages of a model apart from those that another wrote which was
        there before.
        """
        return f"{self.generations[number]}:" if self.generations[number] else ""

    def check(self, bound: LossBound) -> None:
        """Raises InvalidRequest for a bound on expected loss that a model which is coming could not
        be held to.
        """
        if self._losses is not None:
            bound.check(self._losses)

    async def load(self, name: str, directory: str) -> None:
        """Loads a model; returns when it is served. One comes or goes at a time.

        Its expected loss is checked by the bound in force at the start, before its weights are
        read, and by that in force then, before any is written.

        Raises InvalidRequest for a model that cannot be served here, or has no place, slots or
        memory, and what the engine ended with.
        """
        async with self._changing:
            family, executor = self._changeable()
            if not name or len(name) > MAX_NAME_CHARS or name != name.strip():
                wanted = f"1 to {MAX_NAME_CHARS} printable characters, without space around them"
                raise InvalidRequest(f"name is {shown(name)}; it must be {wanted}", "name")
            if not name.isprintable() or name in self.names:
                why = "is served already" if name in self.names else "is not printable"
                raise InvalidRequest(f"the name {shown(name)} {why}; choose another", "name")
            bound, levels = self._loader.bound(BrownoutChange()), self._config.brownout.levels

            def check(curves: CurvesOf) -> None:
                bound.check(Losses((name,), [curves], levels=levels))

            of_model = self._config, family, executor, name, directory, check
            try:
                arrival, params, curves = await asyncio.to_thread(self._read, *of_model)
            except (ValueError, OSError) as error:
                raise InvalidRequest(f"{shown(name)} was not loaded: {error}") from None
            self._changeable()  # still
            losses = Losses((name,), [curves], levels=levels)
            self._loader.bound(BrownoutChange()).check(losses)  # settings may be others by now
            self._losses, self._coming = losses, _Coming(arrival, params)
            self._wake()
            try:
                model = await self._coming.done
                await self._admission.put(arrival.number, model)
                self._slo.put(arrival.number, name, curves)
                self.names[arrival.number] = name
            finally:
                self._losses = None
            log.info("model %s is served", shown(name), extra={"event": "model_loaded"})

    async def unload(
        self,
        name: str,
        drain_s: float,
        open_sequences: Collection[SequenceState],
        end: Callable[[SequenceState, ModelUnloaded], None],
    ) -> int:
        """Unloads a model. Its requests may go on for `drain_s` seconds; `end` ends those that are
        there still. Returns how many of users were ended.

        Raises NotFound, and InvalidRequest for the first model and a time that is none.
        """
        async with self._changing:
            family, executor = self._changeable()
            if not name or name not in self.names:
                have = ", ".join(shown(one) for one in self.names if one)
                raise NotFound(f"model {shown(name)} is not served; {have} are")
            if not (math.isfinite(drain_s) and drain_s >= 0):
                raise InvalidRequest(f"drain_s is {drain_s}; it must be 0 or more", "drain_s")
            number = self.names.index(name)
            if not number:
                raise InvalidRequest(
                    f"{shown(name)} is the first model, which answers requests that name none; "
                    "unload another",
                    "name",
                )
            self.names[number] = ""
            self.generations[number] += 1

            def under_way() -> list[SequenceState]:
                return [one for one in open_sequences if one.request.model == number]

            try:
                async with asyncio.timeout(drain_s):
                    while under_way():
                        self.retired.clear()
                        await self.retired.wait()
            except TimeoutError:
                pass
            ended = under_way()
            for sequence in ended:
                end(sequence, ModelUnloaded(f"model {shown(name)} was unloaded; ask another"))
            executor.vacate(number)
            self._slo.put(number, "", None)
            self._auditor.forget(number)
            await self._admission.put(number, family[0])
            count = sum(not one.request.is_audit for one in ended)
            extra = {"event": "model_unloaded", "ended": count}
            what = "model %s is unloaded; %d of its requests were ended"
            log.info(what, shown(name), count, extra=extra)
            return count

    def _changeable(self) -> tuple[Family, TakesModels]:
        if self._ended is not None:
            raise self._ended
        if why := why_not(self._config, COMING, len(self.names)):
            raise InvalidRequest(f"models do not come and go {why}")
        family = self._family
        if self._executor is None or family is None or not family.routed_slots:
            raise InvalidRequest(
                "models come and go where the server was started with several, or with "
                "engine.spare_models"
            )
        return family, self._executor

    def abandon(self, error: ServingError) -> None:
        """Gives up the model that is coming, and those that are read, since the engine no longer
        ticks.
        """
        self._ended = error
        self._give_up(error)

    def _give_up(self, error: ServingError) -> None:
        if self._coming is not None and not self._coming.done.done():
            self._coming.done.set_exception(error)
        self._coming = None

    def advance(self) -> None:
        """Writes a little of the model that is coming. The tick calls it between two steps. What
        goes wrong ends that model's arrival alone.
        """
        try:
            self._write()
        except Exception as error:
            log.exception("a model that was coming is given up")
            self._give_up(RequestFailed(f"the model was not loaded: {error}"))

    def _write(self) -> None:
        coming, executor = self._coming, self._executor
        if coming is None or self._loader.busy:  # which may change the way
            return
        assert executor is not None
        assert self._family is not None
        if coming.arrival.pieces:
            executor.write_experts(coming.arrival)
            return
        if coming.model is None:
            coming.model = coming.arrival.model(self._family, coming.params)
        model, way = coming.model, self._family[0].way or 0
        if way and model.way != way:
            executor.load_united(model, way, coming.layer)
            coming.layer = (coming.layer + 1) % model.config.num_moe_layers
            return
        executor.install(coming.arrival.number, model)
        self._coming = None
        if not coming.done.done():
            coming.done.set_result(model)
