"""Copies of busy experts that stay: which experts get a second host, by the load seen lately.

Letters: E logical experts of a layer, D devices, C copies. An expert's visits are divided alike
among its hosts (`jmoe.parallel.experts.hosts_in_turn`), so that a device's load is the sum of
its experts' shares. On the host, in NumPy, between two steps of a server: few calls on large
arrays, since at 128 experts a call costs more than what it computes.
"""

import numpy as np
from jaxtyping import Bool, Float

ROUNDS, EPSILON = 2, 1e-9
CANDIDATES = 32  # experts that are looked at in place of a copy
_NEVER = 1e100  # the load of a device that can take no copy; finite, since 0 times it must be 0


def device_loads(load: Float[np.ndarray, "E"], hosts: Bool[np.ndarray, "E D"]) -> np.ndarray:
    """Returns what each device gets of the load, float64 [D]."""
    return (load / hosts.sum(axis=1)) @ hosts


def imbalance(load: Float[np.ndarray, "E"], hosts: Bool[np.ndarray, "E D"]) -> float:
    """Returns the fullest device's load over the mean; 1 where there is no load."""
    loads = device_loads(load, hosts)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def spare_that_gains(
    load: Float[np.ndarray, "L E"], homes: Bool[np.ndarray, "L E D"], most: int, min_gain: float
) -> int:
    """Returns the fewest spare slots of each device whose copies leave the fullest devices, over
    all layers, at most 1 + `min_gain` times the load that `most` would leave them.
    """

    def fullest(spare: int) -> float:
        copied = (with_copies(*layer, spare) for layer in zip(load, homes, strict=True))
        return sum(
            float(device_loads(one, hosts).max()) for one, hosts in zip(load, copied, strict=True)
        )

    enough = (1 + min_gain) * fullest(most)
    return next(spare for spare in range(most + 1) if fullest(spare) <= enough)


def with_copies(
    load: Float[np.ndarray, "E"], homes: Bool[np.ndarray, "E D"], spare: int
) -> Bool[np.ndarray, "E D"]:
    """Returns the hosts of each expert: its home, and copies in up to `spare` slots of each device.

    One copy after another, each time the one that takes most off the sum of squared loads, until
    none takes anything: a greedy rule, as in the published balancers that place by past load. Then
    the copy that is most worth giving up for a better one is given up, until none is or as many
    times as each of `ROUNDS` rounds over all copies would.

    Args:
        load: visits or any other measure, 0 or more.
        homes: every expert's own device.
        spare: slots for copies on each device.
    """
    if not spare or not load.any():
        return homes.copy()
    room = spare * homes.shape[1]
    search = _Search(load / load.sum(), homes, spare)
    for _ in range(room):
        if not search.add():
            break
    for _ in range(ROUNDS * room):
        if not search.swap():
            break
    return search.hosts


class _Search:
    """Hosts under way, and what follows from them and is kept up as they change."""

    def __init__(self, load: np.ndarray, homes: np.ndarray, spare: int) -> None:
        self.load, self.homes, self.hosts = load, homes, homes.copy()
        self.places = homes.astype(np.float64)  # a product with bools would convert them each time
        self.count = self.places.sum(axis=1)
        self.free = np.full(homes.shape[1], spare)
        self.barred = np.where(homes.T, _NEVER, 0.0)  # [D, E]
        self._count_anew()

    def _count_anew(self) -> None:
        now = self.load / self.count
        self.then = self.load / (self.count + 1)
        self.less = now - self.then  # on each host of an expert, once it has one more
        self.fixed = self.count * self.less**2 + self.then**2
        self.loads = now @ self.places

    def put(self, expert: int, device: int, there: bool) -> None:
        """Adds a copy, or removes it."""
        self.hosts[expert, device] = self.places[expert, device] = there
        self.count[expert] += 1 if there else -1
        self.free[device] += -1 if there else 1
        self.barred[device, expert] = _NEVER if there else 0.0
        self._count_anew()

    def _where(self) -> np.ndarray:
        """Returns the devices' loads, with a prohibitive one for devices without a free slot."""
        return np.where(self.free > 0, self.loads, _NEVER)

    def add(self) -> bool:
        """Adds the copy that lowers the sum of squared loads most; False: none lowers it."""
        at = self.barred + self._where()[:, None]
        change = self.fixed - 2 * self.less * (self.places @ self.loads)
        change += 2 * self.then * at.min(axis=0)  # for each expert, the emptiest device is best
        expert = int(change.argmin())
        if change[expert] >= 0:
            return False
        self.put(expert, int(at[:, expert].argmin()), True)
        return True

    def swap(self) -> bool:
        """Replaces the copy whose best replacement lowers the sum most; False: none lowers it."""
        experts, devices = np.nonzero(self.hosts & ~self.homes)
        if not len(experts):
            return False
        each = np.arange(len(experts))
        # Loads [C, D] once each copy, for itself, is given up: its share goes to the other hosts.
        share = self.load[experts] / self.count[experts]
        more = share / (self.count[experts] - 1)
        loads = self.loads + more[:, None] * self.places[experts]
        loads[each, devices] = self.loads[devices] - share
        gone = (loads**2).sum(axis=1) - (self.loads**2).sum()
        at = np.where(self.free > 0, loads, _NEVER)
        at[each, devices] = loads[each, devices]
        others = self._promising()
        change = np.empty((len(experts), len(others) + 1))
        change[:, :-1] = self._change(others, loads, at)
        change[:, :-1][experts[:, None] == others] = np.inf  # reckoned with a host too many
        change[:, -1] = self._moved(experts, devices, loads, at)
        best = change.argmin(axis=1)
        total = gone + change[each, best]
        copy = int(total.argmin())
        if total[copy] >= -EPSILON * (self.loads**2).sum():
            return False
        expert = int(np.append(others, experts[copy])[best[copy]])
        device = int((self.barred[:, expert] + at[copy]).argmin())
        self.put(int(experts[copy]), int(devices[copy]), False)
        self.put(expert, device, True)
        return True

    def _promising(self) -> np.ndarray:
        """Returns ids [M] of the experts that a copy on the emptiest device without one would help
        most.
        """
        emptiest = (self.barred + self.loads[:, None]).min(axis=0)
        change = self.fixed - 2 * self.less * (self.places @ self.loads) + 2 * self.then * emptiest
        if len(change) <= CANDIDATES:
            return np.arange(len(change))
        return np.argpartition(change, CANDIDATES)[:CANDIDATES]

    def _change(self, experts: np.ndarray, loads: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Returns the change of the sum by a copy of each expert [M] where it is least, given loads
        [C, M].
        """
        num = min(at.shape[1], int(self.count[experts].max()) + 1)
        # So many of the emptiest devices that no expert is on all of them, or all that there are.
        near = np.argpartition(at, num - 1, axis=1)[:, :num]
        place = self.barred[near[..., None], experts]  # [C, num, M]
        place += np.take_along_axis(at, near, axis=1)[..., None]
        change = self.fixed[experts] - 2 * self.less[experts] * (loads @ self.places[experts].T)
        emptiest = place.min(axis=1)
        change += 2 * self.then[experts] * emptiest
        return np.where(
            emptiest < _NEVER, change, np.inf
        )  # a copy of no load costs nothing anywhere

    def _moved(
        self, experts: np.ndarray, devices: np.ndarray, loads: np.ndarray, at: np.ndarray
    ) -> np.ndarray:
        """Returns the change [C] by moving a copy to another device, its expert's other hosts as
        before.
        """
        count = self.count[experts] - 1
        then = self.load[experts] / self.count[experts]
        less = self.load[experts] / count - then
        on_hosts = (loads * self.places[experts]).sum(axis=1)
        on_hosts -= loads[np.arange(len(experts)), devices]
        emptiest = (self.barred[:, experts].T + at).min(axis=1)
        change = count * less**2 + then**2 - 2 * less * on_hosts + 2 * then * emptiest
        return np.where(emptiest < _NEVER, change, np.inf)
