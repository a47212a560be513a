"""Copies of busy experts that stay: which experts get a second host, by the load seen lately.

Letters: E logical experts of a layer, D devices, C copies; G kinds of steps, such as those of each
model of a family, whose loads do not even each other out: one load, [E], is of one kind. An
expert's visits are divided alike among its hosts (`jmoe.parallel.experts.hosts_in_turn`), so that a
device's load is the sum of its experts' shares. On the host, in NumPy, between two steps of a
server: few calls on large arrays, since at 128 experts a call costs more than what it computes.
"""

import numpy as np
from jaxtyping import Bool, Float

ROUNDS, EPSILON = 2, 1e-9
CANDIDATES = 32  # experts that are looked at in place of a copy
_NEVER = 1e100  # what a copy costs on a device that can take none; finite, since it is added up


def device_loads(
    load: Float[np.ndarray, "*G E"], hosts: Bool[np.ndarray, "E D"]
) -> Float[np.ndarray, "*G D"]:
    """Returns what each device gets of the load, float64."""
    return (load / hosts.sum(axis=1)) @ hosts


def imbalance(load: Float[np.ndarray, "*G E"], hosts: Bool[np.ndarray, "E D"]) -> float:
    """Returns the load of each kind of steps' fullest device over the mean, of all kinds together;
    1 where there is no load.
    """
    loads = device_loads(load, hosts)
    return float(loads.max(axis=-1).sum() / loads.mean(axis=-1).sum()) if loads.any() else 1.0


def spare_that_gains(
    load: Float[np.ndarray, "L *G E"],
    homes: Bool[np.ndarray, "L E D"],
    most: int,
    min_gain: float,
) -> int:
    """Returns the fewest spare slots of each device whose copies leave the fullest devices, over
    all layers, at most 1 + `min_gain` times the load that `most` would leave them.
    """

    def fullest(spare: int) -> float:
        copied = (with_copies(*layer, spare) for layer in zip(load, homes, strict=True))
        return sum(
            float(device_loads(one, hosts).max(axis=-1).sum())
            for one, hosts in zip(load, copied, strict=True)
        )

    enough = (1 + min_gain) * fullest(most)
    return next(spare for spare in range(most + 1) if fullest(spare) <= enough)


def with_copies(
    load: Float[np.ndarray, "*G E"], homes: Bool[np.ndarray, "E D"], spare: int
) -> Bool[np.ndarray, "E D"]:
    """Returns the hosts of each expert: its home, and copies in up to `spare` slots of each device.

    One copy after another, each time the one that takes most off the sum of squared loads, until
    none takes anything: a greedy rule, as in the published balancers that place by past load. Then
    the copy that is most worth giving up for a better one is given up, until none is or as many
    times as each of `ROUNDS` rounds over all copies would. A kind of steps counts by its load, as
    the time of its fullest device does.

    Args:
        load: visits or any other measure, 0 or more.
        homes: every expert's own device.
        spare: slots for copies on each device.
    """
    if not spare or not load.any():
        return homes.copy()
    room = spare * homes.shape[1]
    of_kinds = load.reshape(-1, load.shape[-1])
    of_kinds = of_kinds[of_kinds.any(axis=1)]
    total = of_kinds.sum(axis=1, keepdims=True)
    search = _Search(of_kinds / np.sqrt(total * total.sum()), homes, spare)
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
        """`load` is [G, E]."""
        self.load, self.homes, self.hosts = load, homes, homes.copy()
        self.places = homes.astype(np.float64)  # a product with bools would convert them each time
        self.count = self.places.sum(axis=1)
        self.free = np.full(homes.shape[1], spare)
        self.full = np.zeros((homes.shape[1], 1))  # what a copy costs a device without a free slot
        self.barred = np.where(homes.T, _NEVER, 0.0)  # [D, E]
        self._count_anew()

    def _count_anew(self) -> None:
        self.now = self.load / self.count  # [G, E]
        self.then = self.load / (self.count + 1)
        self.less = self.now - self.then  # on each host of an expert, once it has one more
        self.fixed = self.count * _dots(self.less, self.less) + _dots(self.then, self.then)
        self.loads = self.now @ self.places  # [G, D]

    def put(self, expert: int, device: int, there: bool) -> None:
        """Adds a copy, or removes it."""
        self.hosts[expert, device] = self.places[expert, device] = there
        self.count[expert] += 1 if there else -1
        self.free[device] += -1 if there else 1
        self.full[device] = 0.0 if self.free[device] else _NEVER
        self.barred[device, expert] = _NEVER if there else 0.0
        self._count_anew()

    def _added(self, full: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the change of the sum by a copy of each expert where it is least, [E], and what
        one costs on each device, [D, E], beside what it takes off the others.
        """
        there = self.loads.T @ self.then
        there += self.barred
        there += full
        others = _dots(self.less, self.loads @ self.places.T)
        return self.fixed + 2 * (there.min(axis=0) - others), there

    def add(self) -> bool:
        """Adds the copy that lowers the sum of squared loads most; False: none lowers it."""
        change, there = self._added(self.full)
        expert = int(change.argmin())
        if change[expert] >= 0:
            return False
        self.put(expert, int(there[:, expert].argmin()), True)
        return True

    def swap(self) -> bool:
        """Replaces the copy whose best replacement lowers the sum most; False: none lowers it."""
        experts, devices = np.nonzero(self.hosts & ~self.homes)
        if not len(experts):
            return False
        each = np.arange(len(experts))
        # Loads [G, C, D] once each copy, for itself, is given up: its share goes to other hosts.
        share = self.now[:, experts]
        more = share / (self.count[experts] - 1)
        loads = self.loads[:, None] + more[..., None] * self.places[experts]
        loads[:, each, devices] = self.loads[:, devices] - share
        before = (self.loads**2).sum()
        gone = (loads**2).sum(axis=(0, 2)) - before
        free = np.flatnonzero(self.free)
        where = np.empty((len(experts), len(free) + 1), int)  # that have a free slot then
        where[:, 0], where[:, 1:] = devices, free
        others = self._promising()
        change = np.empty((len(experts), len(others) + 1))
        change[:, :-1] = self._change(others, loads, where)
        change[:, :-1][experts[:, None] == others] = np.inf  # reckoned with a host too many
        change[:, -1] = self._moved(experts, devices, loads, where)
        best = change.argmin(axis=1)
        total = gone + change[each, best]
        copy = int(total.argmin())
        if total[copy] >= -EPSILON * before:
            return False
        expert = int(np.append(others, experts[copy])[best[copy]])
        there = self.load[:, expert] @ loads[:, copy] + self.barred[:, expert]
        device = where[copy, there[where[copy]].argmin()]
        self.put(int(experts[copy]), int(devices[copy]), False)
        self.put(expert, int(device), True)
        return True

    def _promising(self) -> np.ndarray:
        """Returns ids [M] of the experts that a copy on the emptiest device without one would help
        most.
        """
        change, _ = self._added(0.0)
        if len(change) <= CANDIDATES:
            return np.arange(len(change))
        return np.argpartition(change, CANDIDATES)[:CANDIDATES]

    def _change(self, experts: np.ndarray, loads: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Returns the change of the sum [C, M] by a copy of each expert [M] on that of the devices
        `where` [C, free] it is least, given loads [G, C, D].
        """
        there = loads[:, np.arange(len(where))[:, None], where]
        there = there.reshape(len(loads), -1).T @ self.then[:, experts]
        there = there.reshape(*where.shape, -1)
        there += self.barred[:, experts][where]
        others = loads @ self.places[experts].T * self.less[:, None, experts]
        return self.fixed[experts] - 2 * others.sum(axis=0) + 2 * there.min(axis=1)

    def _moved(
        self, experts: np.ndarray, devices: np.ndarray, loads: np.ndarray, where: np.ndarray
    ) -> np.ndarray:
        """Returns the change [C] by moving a copy to another device, its expert's other hosts as
        before.
        """
        count, then = self.count[experts] - 1, self.now[:, experts]
        less = self.load[:, experts] / count - then
        on_hosts, each = (loads * self.places[experts]).sum(axis=2), np.arange(len(experts))
        on_hosts -= loads[:, each, devices]
        there = (loads[:, each[:, None], where] * then[..., None]).sum(axis=0)
        there += self.barred[where, experts[:, None]]
        change = count * less**2 + then**2 - 2 * less * on_hosts
        return change.sum(axis=0) + 2 * there.min(axis=1)


def _dots(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.einsum("ge,ge->e", rows, others)
