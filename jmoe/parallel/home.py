"""A mesh of devices, and a model's weights spread over it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Shaped

from jmoe.experts import ExpertTable, Pool, make_table
from jmoe.numbers import integer
from jmoe.parallel.experts import AXIS, exchanged
from jmoe.parallel.placement import Placement, rehosted
from jmoe.weights import Weights

WHOLE, SPLIT = P(), P(AXIS)
"""All of it on every device; split along the first axis."""

WEIGHTS = Weights._make((WHOLE, SPLIT, ExpertTable._make((SPLIT, WHOLE, WHOLE, None, None))))
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


def require_mesh(mesh: Any) -> None:
    """Raises ValueError for what is no mesh of `make_mesh`."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh is {mesh!r}; it must be made by jmoe.make_mesh, such as of 4")


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
            own = weights.pool.read(slots[layer, :num_experts])
            pool = self.write(pool, layer, jax.tree.map(np.asarray, own))
        return Weights(self.whole(weights.params), pool, self.table(num_experts))

    def gathered(self, weights: Weights) -> Weights:
        """Returns what was spread as weights of one device, united experts too, in host memory.

        A device's part of one array is in flight at a time. Raises ValueError over several
        processes, of which none has all.
        """
        if self.mesh.is_multi_process:
            raise ValueError("the mesh is of several processes, and each has a part of the experts")
        local, num_experts = np.asarray(self.placement.local), weights.table.groups.shape[1]
        num_layers, logical = local.shape[1:]

        def whole(leaf: Array) -> np.ndarray:
            found = np.empty((num_layers * logical, *leaf.shape[1:]), leaf.dtype)
            for shard in leaf.addressable_shards:
                device = (shard.index[0].start or 0) * self.mesh.size // len(leaf)
                own = local[device].reshape(-1)
                found[own >= 0] = np.asarray(shard.data)[own[own >= 0]]
            return found

        table = make_table(num_layers, num_experts, logical - num_experts)
        params = jax.tree.map(np.asarray, weights.params)
        return Weights(params, jax.tree.map(whole, weights.pool), table)

    def table(
        self, num_experts: int, numbers: Int[np.ndarray, "layers E"] | None = None
    ) -> ExpertTable:
        """Returns the table of `num_experts` routed experts a layer, without groups.

        `numbers` are of the distinct experts of several models: where a device does not have one,
        its slot is -1 less that number, which tells a mixed step what its models share.
        """
        groups = np.full((len(self.placement.hosts), num_experts), -1, np.int32)
        slots, hosts = self.columns(numbers)
        return ExpertTable(slots, _put(self.mesh, WHOLE, groups), hosts)

    def columns(
        self, numbers: Int[np.ndarray, "layers E"] | None = None
    ) -> tuple[Int[Array, "D layers E"], Bool[Array, "layers E D"]]:
        """Returns the slots and hosts of a `table`."""
        local, hosts = map(np.asarray, self.placement[:2])
        if numbers is not None:
            local = np.where(local < 0, -1 - numbers[None], local)
        return _put(self.mesh, SPLIT, local), _put(self.mesh, WHOLE, hosts)

    def part(self, numbers: Int[np.ndarray, "layers E"]) -> "Home":
        """Returns where these experts of each layer lie, as those of a model."""
        return self._replace(placement=self.placement.part(numbers))

    def whole(self, tree: Any) -> Any:
        """Copies arrays to every device."""
        return jax.tree.map(partial(_put, self.mesh, WHOLE), tree)

    def empty_pool(self, like: Pool) -> Pool:
        """Returns zeroed pools of the kind of `like` (of arrays, or their shapes and dtypes): each
        device has as many slots for each layer as the fullest needs.
        """
        return like.empty(self.mesh.size * self.num_slots, NamedSharding(self.mesh, SPLIT))

    @property
    def num_slots(self) -> int:
        """Slots of each device's pool."""
        num_layers = self.placement.local.shape[1]
        used = -(-(int(self.placement.local.max()) + 1) // num_layers)
        return num_layers * max(self.placement.room, used)

    def write(
        self, pool: Pool, layer: int, experts: Pool, first: int | Int[np.ndarray, "n"] = 0
    ) -> Pool:
        """Writes n logical experts of a layer, from `first` on or of these numbers, wherever they
        have a slot.

        `experts` lie in host memory, and every device is given its own only. The pool passed in is
        gone afterwards (donated).
        """
        count = experts.num_slots
        numbers = first + np.arange(count) if isinstance(first, int) else first
        local = np.asarray(self.placement.local)[:, layer, numbers]
        own = [np.flatnonzero(slots >= 0) for slots in local]
        # With room for the copies that may come: other hosts are to be written by the same program.
        share = -(-count // len(local)) + self.spare
        most = max(share, *map(len, own))
        if not isinstance(first, int):  # any number of them; a program for each would be many
            most = 1 << (most - 1).bit_length()
        slots = np.full((len(own), most), pool.num_slots, np.int32)  # out of range: dropped
        for device, mine in enumerate(own):
            slots[device, : len(mine)] = local[device, mine]
        parts = jax.tree.map(partial(_of_devices, self.mesh, own, most), experts)
        return _write(self.mesh, pool, _put(self.mesh, SPLIT, slots.reshape(-1)), parts)

    def host_layer(
        self, pool: Pool, layer: int, hosts: Bool[np.ndarray, "E D"]
    ) -> tuple["Home", Pool]:
        """Gives one layer's experts other hosts, each copied from the lowest-numbered one so far.

        All copies travel in one exchange; the pool passed in is gone afterwards (donated), and
        tables are those of the home that is returned. Raises ValueError as `rehosted` does, or
        where more experts would travel between two devices than there are spare slots.
        """
        before, after = self.placement, rehosted(self.placement, layer, hosts)
        devices, spare = len(before.local), self.spare
        sends = np.zeros((devices, devices, spare), np.int32)
        writes = np.full((devices, devices, spare), pool.num_slots, np.int32)  # dropped
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
        if count.any():
            put = partial(_put, self.mesh, SPLIT)
            pool = _copy(self.mesh, pool, put(sends.reshape(-1)), put(writes.reshape(-1)))
        return self._replace(placement=after), pool

    @property
    def spare(self) -> int:
        """Slots that each device has for copies of each layer's experts."""
        return self.placement.spare


def _put(mesh: Mesh, spec: P, value: Any) -> Array:
    lies = NamedSharding(mesh, spec)
    if lies.is_fully_addressable:
        return jax.device_put(value, lies)
    held = np.asarray(value)  # of several processes, each places what its own devices get
    return jax.make_array_from_callback(held.shape, lies, lambda index: held[index])


def _of_devices(
    mesh: Mesh, own: list[np.ndarray], most: int, weights: np.ndarray
) -> Shaped[Array, "rows ..."]:
    """Returns each device's own experts, padded to `most`; no copy of all of them is made."""

    def part(index: Any) -> np.ndarray:
        mine = own[(index[0].start or 0) // most]
        missing = [(0, most - len(mine))] + [(0, 0)] * (weights.ndim - 1)
        return np.pad(weights[mine], missing)

    shape = (len(own) * most, *weights.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, SPLIT), part)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(mesh: Mesh, pool: Pool, slots: Array, experts: Pool) -> Pool:
    def one_device(pool: Pool, slots: Array, experts: Pool) -> Pool:
        return pool.with_experts(slots, experts)

    return jax.shard_map(one_device, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT)(
        pool, slots, experts
    )


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy(mesh: Mesh, pool: Pool, sends: Array, writes: Array) -> Pool:
    """Copies experts between devices: slots that each sends to each, and where each one's go.

    What is sent is read before anything is written.
    """

    def one_device(pool: Pool, sends: Array, writes: Array) -> Pool:
        return pool.with_experts(writes, exchanged(pool.read(sends)))

    return jax.shard_map(one_device, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT)(
        pool, sends, writes
    )
