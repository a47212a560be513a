"""The experts loader: changes the way of united experts while serving goes on."""

import asyncio
import logging
import math
from collections.abc import Collection

from jmoe.family import Family
from serving.config import BalanceConfig, BrownoutConfig
from serving.control.losses import LossBound
from serving.control.mover import make_mover
from serving.control.slo import SloAnalyser
from serving.errors import InvalidRequest, Overloaded
from serving.execution.executor import ChangesWay, Executor, LoadsWays
from serving.request import BrownoutChange

log = logging.getLogger(__name__)

BALANCE = BalanceConfig()
MAX_PENDING = 8
"""Changes of way that may wait for each other; of callers who ask for the same, one counts."""


def allowed_ways(config: BrownoutConfig, family: Family | None) -> tuple[int, ...]:
    """Returns the ways that may be served, the one to start with first; empty without united
    experts.

    Raises ValueError for a way that a model lacks; those of a family have the same ones.
    """
    return ways_among({} if family is None else family[0].united, config)


def ways_among(have: Collection[int], config: BrownoutConfig) -> tuple[int, ...]:
    """Returns what `allowed_ways` does, for a model that has united experts for the ways `have`."""
    wanted = config.ways or tuple(have)
    for way in (*wanted, *([config.way] if config.way else [])):
        if way not in have:
            raise ValueError(
                f"brownout way is {way}; the model has united experts for: "
                f"{', '.join(map(str, have)) or 'none'}"
            )
    if not wanted:
        return ()
    first = config.way or max(wanted)
    return (first, *(way for way in wanted if way != first))


class ExpertsLoader:
    """Loads a way one layer a tick, so that no step waits for more than one layer's copy.

    Where rows of many layers are under way at once (`ChangesWay`), no layer could be changed but
    under some: nothing begins until all of them have left and all layers are loaded.

    It keeps `slo.way`, the way that every layer had last.
    """

    def __init__(
        self,
        executor: Executor,
        family: Family | None,
        ways: tuple[int, ...],
        slo: SloAnalyser,
        balance: BalanceConfig = BALANCE,
    ) -> None:
        """`balance` says whether a mover gets the ticks in which no way is loaded."""
        self.mover = make_mover(balance, executor, family)
        self._executor, self._ways, self._slo = executor, ways, slo
        self._num_layers = 1 if family is None else len(family) * family.config.num_moe_layers
        self._pending: list[tuple[int, asyncio.Future[None]]] = []
        self._waiting: list[BrownoutChange] = []  # in turn, each for its way
        self._layer = 0
        self.is_waiting = False  # for the devices to change
        self._held_at = math.nan  # since when nothing begins

    @property
    def busy(self) -> bool:
        """Whether layers are left to load."""
        return bool(self._pending)

    @property
    def _last_way(self) -> int:
        """The way that every layer will have once the pending changes are made."""
        return self._pending[-1][0] if self._pending else self._slo.way

    @property
    def holds(self) -> bool:
        """Whether nothing may begin now."""
        return self.busy and isinstance(self._executor, ChangesWay)

    def bound(self, change: BrownoutChange) -> LossBound:
        """Returns the bound on expected loss, and the brownout that has to keep it, once a change
        is made and those that wait for their ways; one of another way comes behind them.
        """
        if change.way is not None:
            return self._slo.bound([*self._waiting, change], change.way)
        return self._slo.bound([change, *self._waiting], self._last_way)

    async def load(self, change: BrownoutChange) -> None:
        """Loads the way of a change; returns when every layer has it.

        Changes are made one after another, even if nobody waits for them any more; one to the way
        of the last pending change waits for that one.

        Raises InvalidRequest for a way that was not prepared at start, and Overloaded where too
        many changes wait.
        """
        way = change.way
        if way is None or way not in self._ways:
            have = ", ".join(map(str, self._ways)) or "none"
            raise InvalidRequest(f"way is {way}; this server can switch to: {have}")
        if way != self._last_way:
            if len(self._pending) >= MAX_PENDING:
                raise Overloaded(f"{MAX_PENDING} changes of way wait already; try again later", 1.0)
            self._pending.append((way, asyncio.get_running_loop().create_future()))
        if not self._pending:
            return
        self._waiting.append(change)
        try:
            await asyncio.shield(self._pending[-1][1])  # goes on even if this caller is cancelled
        finally:
            self._waiting.remove(change)

    def abandon(self, error: Exception) -> None:
        """Fails the pending changes, since the engine no longer ticks."""
        for _, done in self._pending:
            if not done.done():
                done.set_exception(error)
        self._pending.clear()

    def advance(self, now: float, rows_under_way: int = 0) -> None:
        """Loads one layer of the oldest change, or all where no row is under way. The tick calls it
        between two steps.
        """
        if not self._pending:
            if self.mover is not None:
                self.mover.advance(now)
            return
        way, _ = self._pending[0]
        self._slo.way_changes = True
        if isinstance(self._executor, ChangesWay):
            if math.isnan(self._held_at):
                self._held_at = now
            if not rows_under_way and not self.is_waiting:
                self.is_waiting = True
                self._executor.change_way(way)
            return
        assert isinstance(self._executor, LoadsWays)  # `ways` has one way otherwise
        self._executor.load_way(way, self._layer)
        self._layer += 1
        if self._layer == self._num_layers:
            self._layer = 0
            self._end_change(now)

    def changed(self, now: float) -> None:
        """Ends the oldest change: all devices have made it."""
        self.is_waiting = False
        self._end_change(now)
        if not self.busy:
            log.info("nothing began for %.3f s, while the way changed", now - self._held_at)
            self._held_at = math.nan

    def _end_change(self, now: float) -> None:
        way, done = self._pending.pop(0)
        self._slo.use_way(way, now)
        if not done.done():
            done.set_result(None)
