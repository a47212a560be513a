"""Paged experts: the pool of slots, the table from logical expert to slot, and united experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmoe import display
from jmoe.numbers import integer
from pallas_kernels.routing import TableRow

FETCHED, ABSENT = 1, 2
"""Of `ExpertTable.offloaded`."""


class ExpertPool(NamedTuple):
    """Weights of every routed and united expert; a slot holds one expert.

    Programs only read a pool. `write_slots` is the one writer, and it donates.
    """

    gate_up: Float[Array, "slots d f2"]  # columns [:f] gate, [f:] up
    down: Float[Array, "slots f d"]

    def __repr__(self) -> str:
        return display.arrays(self)


class ExpertTable(NamedTuple):
    """Where logical experts live. Logical ids: m routed experts, then U united ones.

    With `hosts` they are spread over D devices. `slots` is [D, layers, E] then: of each device's
    own pool, -1 where it does not have the expert. Inside `jax.shard_map` a device sees its own.
    """

    slots: Int[Array, "layers E"]  # pool slot of (MoE layer, logical expert); E = m + U
    groups: Int[Array, "layers m"]  # united expert of each routed one; -1: none is loaded
    hosts: Bool[Array, "layers E D"] | None = None  # which devices have the expert
    offloaded: Int[Array, "layers m"] | None = None
    """Where some routed experts lie in host memory: 0 for one that is on the device for good,
    `FETCHED` for one that is there now, `ABSENT` for one whose slot is its substitute's.
    """

    def __repr__(self) -> str:
        return display.arrays(self)


@dataclass(frozen=True, repr=False)
class UnitedExperts:
    """United experts of one way, in host memory: L MoE layers of U experts each."""

    way: int
    gate_up: np.ndarray  # [L, U, d, 2 f]
    down: np.ndarray  # [L, U, f, d]
    groups: np.ndarray  # int32 [L, m]

    def __post_init__(self) -> None:
        """Raises ValueError where groups name a united expert that is not there."""
        if self.groups.min() < 0 or self.groups.max() >= self.gate_up.shape[1]:
            raise ValueError(
                f"groups of way {self.way} name united experts {self.groups.min()} to "
                f"{self.groups.max()}, but there are {self.gate_up.shape[1]}"
            )

    def __repr__(self) -> str:
        layers, count = self.gate_up.shape[:2]
        parts = f"gate_up: {display.array(self.gate_up)}, down: {display.array(self.down)}"
        return f"UnitedExperts(way {self.way}, {layers} MoE layers of {count}, {parts})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in host memory."""
        return self.gate_up.nbytes + self.down.nbytes


def groups_by_index(num_experts: int, way: int) -> np.ndarray:
    """Returns int32 [m]: consecutive experts, `way` a group; the last may be short. Raises
    ValueError.
    """
    way = integer("way", way)
    if not 2 <= way <= num_experts:
        raise ValueError(
            f"way is {way}; it must be between 2 and the {num_experts} experts there are"
        )
    return np.arange(num_experts, dtype=np.int32) // way


def make_table(num_layers: int, num_experts: int, num_united_slots: int) -> ExpertTable:
    """Returns the table of a pool that holds each layer's routed experts first, then its united
    ones.

    Layer l owns slots `[l * E, (l + 1) * E)` with E = num_experts + num_united_slots.
    """
    logical = num_experts + num_united_slots
    slots = np.arange(num_layers * logical, dtype=np.int32).reshape(num_layers, logical)
    groups = np.full((num_layers, num_experts), -1, np.int32)
    return ExpertTable(jnp.asarray(slots), jnp.asarray(groups))


def uncut(row: Any, table: Any, layer: int) -> Any:
    """Returns `row`, cut out of the tables of `table`, but for slots and groups: the routing kernel
    reads them in the table, and cut out they would be a launch in every layer.
    """
    at = np.int32(layer)
    return row._replace(slots=TableRow(table.slots, at), groups=TableRow(table.groups, at))


@partial(jax.jit, donate_argnums=0)
def write_slots(
    pool: ExpertPool,
    slots: Int[Array, "n"],
    gate_up: Float[Array, "n d f2"],
    down: Float[Array, "n f d"],
) -> ExpertPool:
    """Overwrites `slots` in place. The pool passed in is gone afterwards (donated)."""
    return ExpertPool(
        pool.gate_up.at[slots].set(gate_up.astype(pool.gate_up.dtype)),
        pool.down.at[slots].set(down.astype(pool.down.dtype)),
    )


@jax.jit
def set_groups(
    groups: Int[Array, "layers m"], layer: Int[Array, ""], row: Int[Array, "m"]
) -> Int[Array, "layers m"]:
    """Replaces one layer's groups."""
    return groups.at[layer].set(row)


def load_layer(
    pool: ExpertPool, table: ExpertTable, united: UnitedExperts, layer: int
) -> tuple[ExpertPool, ExpertTable]:
    """Puts one layer's united experts into its united slots and points its groups at them.

    Both happen between two programs, so none sees new weights behind old groups. Raises ValueError
    where the pool has too few slots.
    """
    num_experts = table.groups.shape[1]
    count = united.gate_up.shape[1]
    slots = np.asarray(table.slots)[layer, num_experts : num_experts + count]
    if len(slots) < count:
        raise ValueError(no_room(united.way, count, len(slots)))
    pool = write_slots(
        pool,
        jnp.asarray(slots),
        jnp.asarray(united.gate_up[layer], pool.gate_up.dtype),
        jnp.asarray(united.down[layer], pool.down.dtype),
    )
    row = jnp.asarray(united.groups[layer], jnp.int32)
    return pool, table._replace(groups=set_groups(table.groups, jnp.int32(layer), row))


def no_room(way: int, count: int, num_slots: int) -> str:
    """Returns the error of a way that does not fit."""
    return (
        f"way {way} has {count} united experts a layer, but the pool has {num_slots} slots for "
        "them; load the model with that way among its ways"
    )


def num_united_slots(ways: Mapping[int, UnitedExperts]) -> int:
    """Returns the slots a layer needs so that any one of the ways fits."""
    return max((united.gate_up.shape[1] for united in ways.values()), default=0)
