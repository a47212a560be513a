"""A model's weights as one value, and the holder of those that lie on the device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jmoe.experts import ExpertPool, ExpertTable, UnitedExperts, load_layer

Params = Mapping[str, Any]
"""`embed`, `final_norm`, `lm_head` (untied) and `segments`; docs/architecture.md has the table.

A segment is a dict of stacked arrays or, `unstack`ed, a tuple of a dict a layer.
"""


class Weights(NamedTuple):
    """All that a program reads of a model: a pytree, one argument."""

    params: Params
    pool: ExpertPool
    table: ExpertTable

    @property
    def num_united_slots(self) -> int:
        """United experts a layer has slots for."""
        return self.table.slots.shape[1] - self.table.groups.shape[1]


class ResidentWeights:
    """The weights on the device, and the one record of whose united experts are among them.

    Loading a way donates the pool, so that there is one holder of a pool and everybody reads
    `weights` of it, at each use.
    """

    def __init__(
        self, weights: Weights, united: Mapping[int, UnitedExperts], name: str = "the model"
    ) -> None:
        """`united` lie in host memory, by way; no way is loaded. `name` is for messages."""
        self.weights = weights
        self.united = dict(united)
        self.way: int | None = None
        self._name = name

    def use_way(self, way: int) -> None:
        """Loads the united experts of `way`. Raises ValueError for one the model does not have."""
        if way == self.way:
            return
        for layer in range(self.weights.table.slots.shape[0]):
            self.load_way_layer(way, layer)

    def load_way_layer(self, way: int, layer: int) -> None:
        """Loads the united experts of `way` for one MoE layer; call it for each, in order.

        Until the last one is loaded layers are of different ways and `way` is None, so that a
        change that is broken off is made again. Raises ValueError as `use_way`.
        """
        united, (params, pool, table) = self.united_of(way), self.weights
        self.way = None
        self.weights = Weights(params, *load_layer(pool, table, united, layer))
        if layer == table.slots.shape[0] - 1:
            self.way = way

    def united_of(self, way: int) -> UnitedExperts:
        """United experts of a way in host memory. Raises ValueError where there are none."""
        if way not in self.united:
            have = ", ".join(map(str, self.united)) or "none"
            raise ValueError(f"way is {way}; {self._name} has united experts for: {have}")
        return self.united[way]
