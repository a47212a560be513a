"""Which device's pool holds which expert of which layer, and in which slot.

Letters: D devices of the mesh, L MoE layers, E logical experts of a layer: the m routed ones, then
the united ones, which are placed like them. Every device's pool has the same number of slots, an
equal range of them for each layer; ranges may have spare slots, for experts that are hosted twice.

Placements are made on the host, before weights load, and are NumPy arrays until a program takes
them.
"""

import math
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

Numbers = Array | np.ndarray


class Placement(NamedTuple):
    """Where experts are; a pytree."""

    local: Int[Numbers, "D L E"]  # int32: slot in that device's pool, -1: it does not hold it
    hosts: Bool[Numbers, "L E D"]  # the same without slots, for what all devices decide alike
    room: int = 0  # slots that every device has for each layer; 0: as many as are used
    spare: int = 0  # of them, those for copies: the others have room for experts of its own

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.local.shape[0]

    def part(self, numbers: Int[np.ndarray, "L e"]) -> "Placement":
        """Returns where these experts of each layer are."""
        layers = np.arange(len(numbers))[:, None]
        return self._replace(
            local=self.local[:, layers, numbers], hosts=self.hosts[layers, numbers]
        )


def slots_per_layer(num_experts: int, num_devices: int, spare: int = 0) -> int:
    """Returns the slots that each device needs for a layer: its part of the experts, rounded up,
    and `spare`.

    Raises ValueError for numbers that are no mesh, no experts, or negative spare slots.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices is {num_devices}; it must be 1 or more")
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; it must be 1 or more")
    if spare < 0:
        raise ValueError(f"spare is {spare}; it must be 0 or more")
    return math.ceil(num_experts / num_devices) + spare


def contiguous(
    num_layers: int, num_experts: int, num_devices: int, *, num_united: int = 0, spare: int = 0
) -> Placement:
    """Gives each device a range of ids; the `num_united` last ones are dealt out in turn.

    United experts are visited during brownout only, so that every device has its part of them and
    of the others. A way that uses only the first n of them has them on all devices as well, at most
    n / D rounded up on each. Ranges differ by one expert at most, the first devices have the longer
    ones, and united experts are dealt from the last device on. The spare slots stay empty.

    Raises ValueError as `slots_per_layer` does, and for more united experts than experts.
    """
    slots_per_layer(num_experts, num_devices, spare)
    if not 0 <= num_united < num_experts:
        raise ValueError(f"num_united is {num_united}; it must be 0 to {num_experts - 1}")
    routed = _ranges(num_experts - num_united, num_devices)
    united = num_devices - 1 - np.arange(num_united) % num_devices
    device = np.concatenate([routed, united])
    hosts = device[:, None] == np.arange(num_devices)
    return from_hosts(np.tile(hosts, (num_layers, 1, 1)), spare=spare)


def _ranges(num_experts: int, num_devices: int) -> np.ndarray:
    """Returns the device of each expert, int [num_experts], ascending."""
    short, longer = divmod(num_experts, num_devices)
    return np.repeat(np.arange(num_devices), short + (np.arange(num_devices) < longer))


def from_hosts(hosts: ArrayLike, *, spare: int = 0) -> Placement:
    """Returns the slots for given hosts, bool [L, E, D]: on each device in the order of the
    experts' ids.

    Experts with several hosts use spare slots. Raises ValueError where an expert has no host, or a
    device hosts more of a layer's experts than `slots_per_layer` has room for.
    """
    array = np.asarray(hosts, bool)
    if array.ndim != 3:
        raise ValueError(f"hosts must be bool [layers, experts, devices]; got {array.shape}")
    _, num_experts, num_devices = array.shape
    room = slots_per_layer(num_experts, num_devices, spare)
    _check_hosted(array)
    held = array.sum(axis=1)
    if held.max(initial=0) > room:
        layer, device = np.argwhere(held > room)[0]
        needed = int(held.max()) - room + spare
        raise ValueError(
            f"device {device} hosts {held[layer, device]} experts of MoE layer {layer} and has "
            f"{room} slots for them; spare={needed} would be enough"
        )
    return _in_order(array, room, spare)


def with_spare(
    homes: Placement, spare: int, hosts: Bool[np.ndarray, "L E D"] | None = None
) -> Placement:
    """Returns a placement of `hosts` (None: those that there are) that has `spare` slots of each
    layer and device beside what `homes`, every expert's own device, has room for.
    """
    placed = np.asarray(homes.hosts) if hosts is None else hosts
    return _in_order(placed, homes.room + spare, spare)


def _in_order(hosts: Bool[np.ndarray, "L E D"], room: int, spare: int = 0) -> Placement:
    """Gives each layer `room` slots on every device, and experts their slots by id."""
    slot = np.cumsum(hosts, axis=1) - hosts + room * np.arange(len(hosts))[:, None, None]
    local = np.where(hosts, slot, -1).transpose(2, 0, 1)
    return Placement(np.ascontiguousarray(local, np.int32), hosts, room, spare)


def of_tables(
    slots: Int[np.ndarray, "N L E"], num_experts: int, num_devices: int
) -> tuple[Placement, Int[np.ndarray, "N L E"]]:
    """Places the experts of N models over one pool, `slots` being their tables on one device.

    The distinct experts of a layer are numbered by slot; a layer with fewer than others has numbers
    of none, which are given slots that are left over. A step may have rows of one model alone, so
    each model's `num_experts` routed ones are spread evenly, and as evenly as that allows all of a
    layer. United ones are dealt out in turn, as in `contiguous`. Every device has the room of the
    fullest.

    Returns the placement by these numbers, and the number of each model's logical expert. Raises
    ValueError as `slots_per_layer`.
    """
    share = slots_per_layer(num_experts, num_devices)
    _, num_layers, logical = slots.shape
    numbers = np.empty_like(slots)
    hosts = np.zeros((num_layers, slots[:, 0].size, num_devices), bool)
    for layer in range(num_layers):
        held, first, inverse = np.unique(slots[:, layer], return_index=True, return_inverse=True)
        numbers[:, layer] = inverse.reshape(len(slots), logical)
        uses = np.zeros((len(slots), len(held)), bool)  # whose experts they are
        np.put_along_axis(uses, numbers[:, layer, :num_experts].astype(np.int64), True, axis=1)
        of_model, of_all = np.zeros((len(slots), num_devices), int), np.zeros(num_devices, int)
        for number in np.argsort(-uses.sum(axis=0), kind="stable"):
            expert, users = first[number] % logical, uses[:, number]
            if users.any():
                over = np.maximum(of_model[users] + 1 - share, 0).sum(axis=0)
                device = np.lexsort((of_all, over))[0]
            else:
                device = num_devices - 1 - (expert - num_experts) % num_devices
            hosts[layer, number, device] = True
            of_model[users, device] += 1
            of_all[device] += 1
    hosts = hosts[:, : int(numbers.max()) + 1]
    for own in hosts:
        for number in np.flatnonzero(~own.any(axis=1)):
            own[number, own.sum(axis=0).argmin()] = True
    return _in_order(hosts, int(hosts.sum(axis=1).max())), numbers


def rehosted(placement: Placement, layer: int, hosts: ArrayLike) -> Placement:
    """Returns the placement with other hosts, bool [E, D], of one layer; who stays keeps its slot.

    New hosts get slots of the layer that are free by then, the lowest first. Raises ValueError
    where an expert has no host, or a device has too few slots for what it is to host.
    """
    array, local = np.asarray(hosts, bool), np.array(placement.local)
    if array.shape != placement.hosts.shape[1:]:
        raise ValueError(f"hosts must be {placement.hosts.shape[1:]} of a layer; got {array.shape}")
    _check_hosted(array[None])
    for device, wanted in enumerate(array.T):
        if wanted.sum() > placement.room:
            raise ValueError(
                f"device {device} would host {wanted.sum()} experts of MoE layer {layer} and has "
                f"{placement.room} slots for them; place with more spare slots"
            )
        slots = np.where(wanted, local[device, layer], -1)
        own = np.arange(layer * placement.room, (layer + 1) * placement.room)
        new = np.flatnonzero(wanted & (slots < 0))
        slots[new] = np.setdiff1d(own, slots)[: len(new)]
        local[device, layer] = slots
    all_hosts = np.array(placement.hosts)
    all_hosts[layer] = array
    return placement._replace(local=local, hosts=all_hosts)


def check(placement: Placement, num_slots: int) -> None:
    """Raises ValueError unless `placement` fits pools of `num_slots` slots a device.

    What is refused: an expert that no device hosts, a slot that the pool has not, a slot that two
    experts of a device share, hosts that disagree with the slots, shapes that disagree.
    """
    local, hosts = np.asarray(placement.local), np.asarray(placement.hosts)
    if local.ndim != 3 or hosts.shape != (*local.shape[1:], local.shape[0]):
        raise ValueError(
            f"local is {local.shape} and hosts {hosts.shape}; they must be [devices, layers, "
            "experts] and [layers, experts, devices]"
        )
    _check_hosted(hosts)
    wrong = (local < -1) | (local >= num_slots)
    if wrong.any():
        device, layer, expert = np.argwhere(wrong)[0]
        raise ValueError(
            f"expert {expert} of MoE layer {layer} is in slot {local[wrong][0]} of device {device};"
            f" its pool has slots 0 to {num_slots - 1}, and -1 says that it is not held"
        )
    for device, slots in enumerate(local):
        used, times = np.unique(slots[slots >= 0], return_counts=True)
        if (times > 1).any():
            slot = used[times > 1][0]
            pairs = [f"{e} of layer {n}" for n, e in np.argwhere(slots == slot)[:2]]
            raise ValueError(
                f"slot {slot} of device {device} holds expert {' and expert '.join(pairs)}; "
                "give one of them another slot"
            )
    if ((local >= 0).transpose(1, 2, 0) != hosts).any():
        layer, expert, device = np.argwhere((local >= 0).transpose(1, 2, 0) != hosts)[0]
        raise ValueError(
            f"hosts says {hosts[layer, expert, device]} for expert {expert} of MoE layer {layer} on"
            f" device {device}, where local has slot {local[device, layer, expert]}; make hosts"
            " from local >= 0"
        )


def check_room(
    num_layers: int,
    num_experts: int,
    num_devices: int,
    num_slots: int,
    spare: int = 0,
) -> None:
    """Raises ValueError where a device's memory is too small for its part, before weights load.

    Args:
        num_layers: MoE layers L.
        num_experts: E, united ones included.
        num_devices: D.
        num_slots: experts that fit a device.
        spare: slots of each layer beside a device's part of the experts.

    The message names the smallest mesh that would work.
    """
    home = num_layers * slots_per_layer(num_experts, num_devices, spare)
    if home > num_slots:
        per_layer = num_slots // num_layers - spare
        if per_layer < 1:
            raise ValueError(
                f"a device has room for {num_slots} experts; {num_layers} MoE layers need at least "
                f"{spare + 1} slots each, so no mesh is large enough"
            )
        smallest = math.ceil(num_experts / per_layer)
        raise ValueError(
            f"a mesh of {num_devices} devices is too small: each would hold {home} experts and has "
            f"room for {num_slots}; {smallest} devices are enough"
        )


def _check_hosted(hosts: np.ndarray) -> None:
    """Raises ValueError for an expert without a host."""
    nowhere = ~hosts.any(axis=2)
    if nowhere.any():
        layer, expert = np.argwhere(nowhere)[0]
        raise ValueError(
            f"no device hosts expert {expert} of MoE layer {layer} ({nowhere.sum()} such experts); "
            "every expert needs one host or more"
        )
