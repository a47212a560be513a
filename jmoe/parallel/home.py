"""A mesh of devices, and a model's weights spread over it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jmoe.experts import ExpertPool, ExpertTable, UnitedExperts, no_room, set_groups
from jmoe.numbers import integer
from jmoe.parallel.experts import AXIS
from jmoe.parallel.placement import Placement, rehosted
from jmoe.weights import Weights

WHOLE, SPLIT = P(), P(AXIS)
"""All of it on every device; split along the first axis."""

WEIGHTS = Weights._make(
    (WHOLE, ExpertPool._make((SPLIT, SPLIT)), ExpertTable._make((SPLIT, WHOLE, WHOLE, None)))
)
"""How weights lie: a prefix of their pytree."""


def make_mesh(num_devices: int) -> Mesh:
    """Returns the first `num_devices` devices, over which experts are spread.

    Raises ValueError where there are not so many.
    """
    num_devices, have = integer("num_devices", num_devices), jax.device_count()
    if not 1 <= num_devices <= have:
        raise ValueError(
            f"a mesh of {num_devices} devices was asked for, and there are {have}; on a CPU "
            "JAX_NUM_CPU_DEVICES says how many there are to be"
        )
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


class Home(NamedTuple):
    """Where a model's weights lie: a mesh, and which expert is on which of its devices.

    `placement` covers the logical experts of every MoE layer, united ones included.
    """

    mesh: Mesh
    placement: Placement

    def spread(self, weights: Weights) -> Weights:
        """Spreads the weights of one device; the slots of united experts are left empty.

        One layer is in flight at a time. The weights passed in are left as they are.
        """
        slots, num_experts = np.asarray(weights.table.slots), weights.table.groups.shape[1]
        pool = self.empty_pool(weights.pool)
        for layer in range(len(slots)):
            own = slots[layer, :num_experts]
            gate_up, down = (np.asarray(leaf[own]) for leaf in weights.pool)
            pool = self.write(pool, layer, gate_up, down)
        return Weights(self.whole(weights.params), pool, self.table(num_experts))

    def table(self, num_experts: int) -> ExpertTable:
        """Returns the table of `num_experts` routed experts a layer, without groups."""
        local, hosts = map(np.asarray, self.placement[:2])
        groups = np.full((local.shape[1], num_experts), -1, np.int32)
        put = partial(_put, self.mesh)
        return ExpertTable(put(SPLIT, local), put(WHOLE, groups), put(WHOLE, hosts))

    def whole(self, tree: Any) -> Any:
        """Copies arrays to every device."""
        return jax.tree.map(partial(_put, self.mesh, WHOLE), tree)

    def empty_pool(self, like: Any) -> ExpertPool:
        """Returns zeroed pools of experts like those of `like` (arrays, or their shapes and
        dtypes): each device has as many slots for each layer as the fullest needs.
        """
        num_layers = self.placement.local.shape[1]
        used = -(-(int(self.placement.local.max()) + 1) // num_layers)
        num_slots = num_layers * max(self.placement.room, used)
        split = NamedSharding(self.mesh, SPLIT)
        shapes = [(self.mesh.size * num_slots, *leaf.shape[1:]) for leaf in like]
        return ExpertPool(
            *(
                jnp.zeros(shape, leaf.dtype, device=split)
                for shape, leaf in zip(shapes, like, strict=True)
            )
        )

    def write(
        self,
        pool: ExpertPool,
        layer: int,
        gate_up: Float[np.ndarray, "n d f2"],
        down: Float[np.ndarray, "n f d"],
        first: int = 0,
    ) -> ExpertPool:
        """Writes n logical experts of a layer, from `first` on, wherever they have a slot.

        Every device is given its own experts only. The pool passed in is gone afterwards (donated).
        """
        local = np.asarray(self.placement.local)[:, layer, first : first + len(down)]
        own = [np.flatnonzero(slots >= 0) for slots in local]
        # With room for the copies that may come: other hosts are to be written by the same program.
        share = -(-len(down) // len(local)) + self.spare
        most = max(share, *map(len, own))
        slots = np.full((len(own), most), pool.down.shape[0], np.int32)  # out of range: dropped
        for device, experts in enumerate(own):
            slots[device, : len(experts)] = local[device, experts]
        parts = (_of_devices(self.mesh, own, most, weights) for weights in (gate_up, down))
        return _write(self.mesh, pool, _put(self.mesh, SPLIT, slots.reshape(-1)), *parts)

    def load_layer(
        self, pool: ExpertPool, table: ExpertTable, united: UnitedExperts, layer: int
    ) -> tuple[ExpertPool, ExpertTable]:
        """Runs `jmoe.experts.load_layer` for these devices: every host of a united
        expert gets it.
        """
        count, room = united.gate_up.shape[1], table.slots.shape[-1] - table.groups.shape[1]
        if count > room:
            raise ValueError(no_room(united.way, count, room))
        first = table.groups.shape[1]
        pool = self.write(pool, layer, united.gate_up[layer], united.down[layer], first)
        row = jnp.asarray(united.groups[layer], jnp.int32)
        return pool, table._replace(groups=set_groups(table.groups, jnp.int32(layer), row))

    def host_layer(
        self, pool: ExpertPool, table: ExpertTable, layer: int, hosts: Bool[np.ndarray, "E D"]
    ) -> tuple["Home", ExpertPool, ExpertTable]:
        """Gives one layer's experts other hosts, each copied from the lowest-numbered one so far.

        All copies travel in one exchange; the pool passed in is gone afterwards (donated). Raises
        ValueError as `rehosted` does, or where more experts would travel between two devices than
        there are spare slots.
        """
        before, after = self.placement, rehosted(self.placement, layer, hosts)
        devices, spare = len(before.local), self.spare
        sends = np.zeros((devices, devices, spare), np.int32)
        writes = np.full((devices, devices, spare), pool.down.shape[0], np.int32)  # dropped
        count = np.zeros((devices, devices), np.int32)
        for expert, to in np.argwhere(hosts & ~np.asarray(before.hosts)[layer]):
            sender = int(np.argmax(before.hosts[layer, expert]))
            at = count[sender, to]
            if at == spare:
                raise ValueError(
                    f"device {sender} would send device {to} more than {spare} experts of MoE "
                    f"layer {layer}, which is as many as have room; place fewer at once"
                )
            sends[sender, to, at] = before.local[sender, layer, expert]
            writes[to, sender, at] = after.local[to, layer, expert]
            count[sender, to] += 1
        put = partial(_put, self.mesh)
        if count.any():
            slots = (put(SPLIT, plan.reshape(-1)) for plan in (sends, writes))
            pool = _copy(self.mesh, pool, *slots)
        table = table._replace(
            slots=put(SPLIT, np.asarray(after.local)), hosts=put(WHOLE, np.asarray(after.hosts))
        )
        return self._replace(placement=after), pool, table

    @property
    def spare(self) -> int:
        """Slots that each device has for each layer beside its part of the experts."""
        _, num_experts, devices = self.placement.hosts.shape
        return max(0, self.placement.room - -(-num_experts // devices))


def _put(mesh: Mesh, spec: P, value: Any) -> Array:
    lies = NamedSharding(mesh, spec)
    if lies.is_fully_addressable:
        return jax.device_put(value, lies)
    held = np.asarray(value)  # of several processes, each places what its own devices get
    return jax.make_array_from_callback(held.shape, lies, lambda index: held[index])


def _of_devices(
    mesh: Mesh, own: list[np.ndarray], most: int, weights: np.ndarray
) -> Float[Array, "rows ..."]:
    """Returns each device's own experts, padded to `most`; no copy of all of them is made."""

    def part(index: Any) -> np.ndarray:
        mine = own[(index[0].start or 0) // most]
        missing = [(0, most - len(mine))] + [(0, 0)] * (weights.ndim - 1)
        return np.pad(weights[mine], missing)

    shape = (len(own) * most, *weights.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, SPLIT), part)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(mesh: Mesh, pool: ExpertPool, slots: Array, gate_up: Array, down: Array) -> ExpertPool:
    def one_device(pool: ExpertPool, slots: Array, *parts: Array) -> ExpertPool:
        written = (
            held.at[slots].set(part.astype(held.dtype), mode="drop")
            for held, part in zip(pool, parts, strict=True)
        )
        return ExpertPool(*written)

    specs = WEIGHTS.pool
    return jax.shard_map(
        one_device, mesh=mesh, in_specs=(specs, SPLIT, SPLIT, SPLIT), out_specs=specs
    )(pool, slots, gate_up, down)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy(mesh: Mesh, pool: ExpertPool, sends: Array, writes: Array) -> ExpertPool:
    """Copies experts between devices: slots that each sends to each, and where each one's go.

    What is sent is read before anything is written.
    """

    def one_device(pool: ExpertPool, sends: Array, writes: Array) -> ExpertPool:
        arrived = [lax.all_to_all(held[sends], AXIS, 0, 0, tiled=True) for held in pool]
        written = (
            held.at[writes].set(part, mode="drop") for held, part in zip(pool, arrived, strict=True)
        )
        return ExpertPool(*written)

    specs = WEIGHTS.pool
    return jax.shard_map(one_device, mesh=mesh, in_specs=(specs, SPLIT, SPLIT), out_specs=specs)(
        pool, sends, writes
    )
