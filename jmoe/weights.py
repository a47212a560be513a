"""A model's weights as one value, and the holder of those that lie on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jmoe.experts import ExpertTable, Pool, UnitedExperts, load_layer
from jmoe.numbers import integer

if TYPE_CHECKING:
    from jmoe.parallel.home import Home

Params = Mapping[str, Any]
"""`embed`, `final_norm`, `lm_head` (untied) and `segments`; docs/architecture.md has the table.

A segment is a dict of stacked arrays or, `unstack`ed, a tuple of a dict a layer.
"""


class Weights(NamedTuple):
    """All that a program reads of a model: a pytree, one argument."""

    params: Params
    pool: Pool
    table: ExpertTable

    @property
    def num_united_slots(self) -> int:
        """United experts a layer has slots for."""
        return self.table.slots.shape[-1] - self.table.groups.shape[1]


@dataclass(eq=False)
class PoolHolder:
    """The one holder of a pool, whichever models' experts are in it: writing a slot donates the
    pool.
    """

    pool: Pool


class ResidentWeights:
    """A model's weights on the device, and the one record of whose united experts are among them.

    Loading a way donates the pool, so that a pool has one holder, shared by the models of a family,
    and everybody reads `weights` at each use.
    """

    def __init__(
        self,
        weights: Weights,
        united: Mapping[int, UnitedExperts],
        name: str = "the model",
        home: "Home | None" = None,
        held: PoolHolder | None = None,
        lender: "ResidentWeights | None" = None,
    ) -> None:
        """`united` lie in host memory, by way; no way is loaded. `name` is for messages. `home`
        says where the weights lie, None: on one device. `held` holds a pool that other models have
        experts in as well; None: the pool is this model's alone. `lender` is whose united experts
        the table names; what either loads, both have.
        """
        self.home = home
        self.held = held or PoolHolder(weights.pool)
        self.weights = weights
        self.united = dict(united)
        self._lender = lender or self
        self._users = [self] if lender is None else lender._users
        if lender is not None:
            self._users.append(self)
        self._ways: list[int | None] = [None] * weights.table.groups.shape[0]  # of layers
        self._levels: Mapping[int, np.ndarray] = {}
        self._name = name

    @property
    def weights(self) -> Weights:
        """The weights as they are now."""
        return Weights(self._params, self.held.pool, self._table)

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._params, self.held.pool, self._table = weights

    @property
    def way(self) -> int | None:
        """The way whose united experts are loaded; None: none, or not in every layer yet."""
        ways = self._lender._ways
        return ways[0] if len(set(ways)) == 1 else None

    def use_way(self, way: int) -> None:
        """Loads the united experts of `way`. Raises ValueError for one the model does not have."""
        if way == self.way:
            return
        for layer in range(self.weights.table.groups.shape[0]):
            self.load_way_layer(way, layer)

    def load_way_layer(self, way: int, layer: int) -> None:
        """Loads the united experts of `way` for one MoE layer; call it for each, in order.

        Until the last one is loaded layers are of different ways and `way` is None, so that a
        change that is broken off is made again. What a lender has loaded its borrowers have. Raises
        ValueError as `use_way`.
        """
        lender = self._lender
        if lender is not self:
            if lender._ways[layer] != way:
                lender.load_way_layer(way, layer)
            return
        united, (_, pool, table) = self.united_of(way), self.weights
        self._ways[layer] = None
        write = None if self.home is None else self.home.write
        self.held.pool, table = load_layer(pool, table, united, layer, write)
        for user in self._users:
            user._table = user._table._replace(groups=table.groups)
            if user._levels:
                levels = np.array(user._table.levels)
                levels[layer] = user._levels[way][layer]
                user.set_levels(levels)
        self._ways[layer] = united.way

    def use_levels(self, by_way: Mapping[int, np.ndarray]) -> None:
        """Gives programs thresholds by layer of whichever way is loaded from now on; `by_way` has
        all (`jmoe.levels.by_code`).
        """
        self._levels = by_way
        self.set_levels(by_way[self.way or max(by_way)])

    @property
    def has_levels(self) -> bool:
        """Whether it has levels for good, which what runs it was compiled for."""
        return bool(self._levels)

    def largest_threshold(self, strategy: int, level: int) -> int:
        """Returns the largest threshold of any layer at a level, by the strategy's code; of all
        ways while they change.
        """
        found = [own for of, own in self._levels.items() if self.way in (None, of)]
        return max((int(each[:, strategy, level].max()) for each in found), default=level)

    def set_levels(self, levels: np.ndarray | None) -> None:
        """Gives programs thresholds by layer (`jmoe.levels.by_code`), or takes them back."""
        self._table = self._table._replace(levels=None if levels is None else jnp.asarray(levels))

    def point(self, changes: Sequence[tuple[int, int, int, int]]) -> None:
        """Points routed experts to other slots of the pool; nothing is copied.

        A change is an MoE layer, an expert, its slot, and what that means
        (`ExpertTable.offloaded`); they are made in order.
        """
        slots, gone = np.array(self._table.slots), np.array(self._table.offloaded)
        for layer, expert, slot, offloaded in changes:
            slots[layer, expert], gone[layer, expert] = slot, offloaded
        self._table = self._table._replace(slots=jnp.asarray(slots), offloaded=jnp.asarray(gone))

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """Gives one MoE layer's experts other hosts, to which they are copied from their home.

        Raises ValueError as `jmoe.parallel.placement.rehosted` does, or without a mesh.
        """
        if self.home is None:
            raise ValueError(f"{self._name} is on one device, which hosts all experts")
        home, self.held.pool = self.home.host_layer(self.held.pool, layer, hosts)
        self.use_home(home)

    def use_home(self, home: "Home", numbers: Int[np.ndarray, "layers E"] | None = None) -> None:
        """Points the table to where experts lie from now on; `numbers` as of `Home.table`."""
        self.home, (slots, hosts) = home, home.columns(numbers)
        self._table = self._table._replace(slots=slots, hosts=hosts)

    def united_of(self, way: int) -> UnitedExperts:
        """Returns the united experts of a way in host memory. Raises ValueError where there are
        none.
        """
        way = integer("way", way)
        if way not in self.united:
            have = ", ".join(map(str, self.united)) or "none"
            raise ValueError(f"way is {way}; {self._name} has united experts for: {have}")
        return self.united[way]
