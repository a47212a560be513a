"""Ways to balance one layer's step, each from what it may know to the load of every device.

Written from the papers' descriptions; the shares and replicas of Libra are jmoe's own
(`pallas_kernels.planning`), everything else is plain NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np

from jmoe.parallel import placement
from pallas_kernels import planning

Load = np.ndarray


@dataclass(frozen=True)
class Case:
    """One step of one layer; all arrays are visits [G, E]."""

    made: np.ndarray
    predicted: np.ndarray
    path_table: np.ndarray  # as Lina predicts them
    history: np.ndarray
    num_replicas: int
    per_pair: int | None
    seed: int = 0

    @cached_property
    def hosts(self) -> np.ndarray:
        """The home placement [E, G]: ranges of ids."""
        devices, experts = self.made.shape
        return np.asarray(placement.contiguous(1, experts, devices).hosts[0])


def none(case: Case) -> Load:
    """Returns every visit at its expert's home."""
    return case.made.sum(axis=0) @ case.hosts


def history_alone(case: Case) -> Load:
    """Returns experts packed by their past load, each on one device."""
    made = placement.by_load(case.history.sum(axis=0)[None], case.made.shape[0])
    return case.made.sum(axis=0) @ made.hosts[0]


def eplb(case: Case) -> Load:
    """Balances as EPLB does: experts and replicas are placed anew by past load; a visit goes to a
    replica at random.
    """
    devices, experts = case.made.shape
    past = case.history.sum(axis=0)
    room = placement.slots_per_layer(experts, devices, case.num_replicas)
    copies = np.ones(experts, np.int64)
    for _ in range(devices * case.num_replicas):
        per_copy = np.where(copies < devices, past / copies, -1)
        copies[np.argmax(per_copy)] += 1
    hosts, total = np.zeros((experts, devices), bool), np.zeros(devices)
    for expert in np.argsort(-past / copies, kind="stable"):
        for _ in range(copies[expert]):
            free = (hosts.sum(axis=0) < room) & ~hosts[expert]
            if free.any():
                to = np.argmin(np.where(free, total, np.inf))
                hosts[expert, to] = True
                total[to] += past[expert] / copies[expert]
    rng = np.random.default_rng(case.seed)
    visits = case.made.sum(axis=0)
    drawn = [rng.multinomial(n, h / h.sum()) for n, h in zip(visits, hosts, strict=True)]
    return np.sum(drawn, axis=0)


def lina(case: Case) -> Load:
    """Returns lina: replicas by popularity that paths predict; each replica gets as many visits."""
    expected = case.path_table.sum(axis=0)
    held, home = case.hosts.copy(), case.hosts.argmax(axis=1)
    slots = np.full(case.made.shape[0], case.num_replicas)
    pairs = np.full((len(slots), len(slots)), case.per_pair or case.num_replicas)
    while True:
        per_host = expected / held.sum(axis=1)
        can = ~held & (slots > 0)[None] & (pairs[home] > 0)
        expert = np.argmax(np.where(can.any(axis=1), per_host, -1))
        if not can[expert].any() or expected[expert] <= 0:
            break
        load = per_host @ held
        to = np.argmin(np.where(can[expert], load, np.inf))
        held[expert, to] = True
        slots[to] -= 1
        pairs[home[expert], to] -= 1
    return (case.made.sum(axis=0) / held.sum(axis=1)) @ held


_plan = jax.jit(planning.plan_replicas, static_argnames=("num_replicas", "per_pair", "literal"))
_shard = jax.jit(planning.shard_visits, static_argnames=("move_local",))


def libra(case: Case, *, exact: bool = False, literal: bool, move_local: bool) -> Load:
    """Replicas by the predicted visits, or the `exact` ones; shares by those that were made."""
    replicas = _plan(
        case.made if exact else case.predicted,
        case.hosts,
        num_replicas=case.num_replicas,
        per_pair=case.per_pair,
        literal=literal,
    )
    home = case.hosts.argmax(axis=1).astype(np.int32)
    shares = _shard(case.made, case.hosts | replicas, home=home, move_local=move_local)
    return (np.asarray(shares.kept) + np.asarray(shares.remote)).sum(axis=1)


STRATEGIES: dict[str, Callable[[Case], Load]] = {
    "none": none,
    "placement by history": history_alone,
    "EPLB": eplb,
    "Lina": lina,
    "Libra, both as printed": partial(libra, literal=True, move_local=False),
    "Libra, replicas as printed": partial(libra, literal=True, move_local=True),
    "Libra, modelled": partial(libra, literal=False, move_local=True),
    "exact after routing": partial(libra, exact=True, literal=False, move_local=True),
}
"""By name. The last one is HarMoEny's information, which comes too late to hide the copies."""

UNBOUNDED = ("none", "placement by history", "EPLB")
"""What sends no expert during a step: a bound a pair changes nothing."""
