"""XLA reference of planning: loops of small integer operations. Docstrings are in `op`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

MANY = jnp.iinfo(jnp.int32).max
SPREAD = 4
"""Spare replicas go to 1/SPREAD of the devices at once: fewer rounds, hardly less balance."""
GRAIN = 256
"""Visits are passed on between overloaded devices in parts of 1/GRAIN of the mean or more."""


def plan_replicas(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    *,
    num_replicas: int,
    per_pair: int,
    num_local: int,
) -> Bool[Array, "E G"]:
    """See `op.plan_replicas`; `num_local` of the replicas are the first phase's."""
    devices = hosts.shape[1]
    plan = _Plan(
        hosts,
        home_of(hosts),
        jnp.full((devices,), num_replicas, jnp.int32),
        jnp.full((devices, devices), per_pair, jnp.int32),
    )
    plan = _take_local(counts, plan, num_local, bounded=per_pair < num_local)
    plan = _spend_rest(counts, _balance(counts, plan))
    return plan.held & ~hosts


def shard_visits(
    counts: Int[Array, "G E"], hosts: Bool[Array, "E G"], home: Int[Array, "E"]
) -> Int[Array, "G E"]:
    """Returns the visits that each device computes; see `op.shard_visits`."""
    mean = _mean(counts)

    def unbalanced(loads: _Loads) -> Array:
        return jnp.max(loads.unstuck) > mean

    def move(loads: _Loads) -> _Loads:
        source = _argmax(loads.unstuck)
        best = _best_move(loads, source, hosts, mean)
        return loads.moved(*lax.optimization_barrier((source, *best)))

    return lax.while_loop(unbalanced, move, _Loads.of(counts, hosts, home)).movable


def home_of(hosts: Bool[Array, "E G"]) -> Int[Array, "E"]:
    """Returns the home of each expert, int32: its lowest-numbered host; 0 where it has none."""
    return lax.argmax(hosts, 1, jnp.int32)


# A loop's decision goes through an optimization_barrier before it is applied: or XLA computes it
# anew in every update, from old arrays that it then has to copy.
class _Loads(NamedTuple):
    """Visits where they would be computed now."""

    movable: Int[Array, "G E"]
    load: Int[Array, "G"]
    unstuck: Int[Array, "G"]  # the load, or -1: nothing of this device could move, as things are

    @classmethod
    def of(
        cls, counts: Int[Array, "G E"], held: Bool[Array, "E G"], home: Int[Array, "E"]
    ) -> "_Loads":
        """Returns the loads before a move: visits at their own device where it holds the expert,
        else at its home.
        """
        own = jnp.where(held.T, counts, 0)
        others = jnp.where(_is(home[None, :], len(counts)), _sum(counts - own, axis=0)[None, :], 0)
        load = _sum(own + others, axis=1)
        return cls(own + others, load, load)

    def moved(self, source: Array, target: Array, expert: Array, amount: Array) -> "_Loads":
        """Returns the loads after a move; a move of nothing leaves its source stuck until another
        one succeeds.
        """
        gives, takes = (_is(device, self.load.shape[0]) for device in (source, target))
        change = amount * (_int(takes) - _int(gives))
        column = lax.dynamic_slice_in_dim(self.movable, expert, 1, axis=1) + change[:, None]
        movable = lax.dynamic_update_slice_in_dim(self.movable, column, expert, axis=1)
        load = self.load + change
        unstuck = jnp.where(amount > 0, load, jnp.where(gives, -1, self.unstuck))
        return _Loads(movable, load, unstuck)


class _Plan(NamedTuple):
    """Replicas so far, and what may still be added."""

    held: Bool[Array, "E G"]  # homes and replicas
    home: Int[Array, "E"]
    slots: Int[Array, "G"]  # replicas that a device still has room for
    pairs: Int[Array, "G G"]  # [from, to]: experts that one device may still send another

    def open(self) -> Bool[Array, "G G"]:
        """Returns [from, to]: whether one device may send another an expert."""
        return (self.pairs > 0) & (self.slots > 0)[None, :]

    def copied(self, expert: Array, to: Bool[Array, "G"]) -> "_Plan":
        """Returns the plan with replicas of `expert` on devices that have room for it."""
        row = lax.dynamic_slice_in_dim(self.held, expert, 1) | to[None, :]
        held = lax.dynamic_update_slice_in_dim(self.held, row, expert, axis=0)
        sender = _is(self.home[expert], self.slots.shape[0])
        pairs = self.pairs - _int(sender[:, None] & to[None, :])
        return _Plan(held, self.home, self.slots - _int(to), pairs)


def _best_move(
    loads: _Loads, source: Array, hosts: Bool[Array, "E G"], mean: Array
) -> tuple[Array, Array, Array]:
    """Returns (target, expert, visits to move) for an overloaded source; 0 visits where there is no
    move.

    The expert is the source's hottest of those that a device below the mean hosts, and no more than
    the excess moves; without such a device, it is the expert of which half the difference in load
    to its least loaded host is most. (So the source itself is never the target.)
    """
    lowest = _lowest(hosts, loads.load)
    visits, load = loads.movable[source], loads.load[source]
    below = jnp.where(lowest < mean, visits, 0)
    room = mean - jnp.minimum(lowest, mean)
    half = jnp.minimum(visits, (load - jnp.minimum(lowest, load)) // 2)
    found = jnp.max(below) > 0
    expert = _argmax(jnp.where(found, below, half))
    amount = jnp.minimum(jnp.minimum(below[expert], room[expert]), load - mean)
    passed = jnp.where(half[expert] >= jnp.maximum(mean // GRAIN, 1), half[expert], 0)
    amount = jnp.where(found, amount, passed)
    target = lax.argmin(jnp.where(hosts[expert], loads.load, MANY), 0, jnp.int32)
    return target, expert, amount


def _take_local(counts: Int[Array, "G E"], plan: _Plan, num_local: int, *, bounded: bool) -> _Plan:
    """Runs the first phase: `num_local` times every device takes what its rows visit most and it
    lacks.

    Not `bounded`: no pair's bound can be reached in this phase.
    """
    num_experts, devices = plan.held.shape

    def take(_: Any, plan: _Plan) -> _Plan:
        wanted = jnp.where(plan.held, 0, counts.T)
        if bounded:
            wanted = jnp.where((plan.pairs > 0)[plan.home], wanted, 0)
        best = lax.argmax(wanted, 0, jnp.int32)
        found = (jnp.max(wanted, axis=0) > 0)[None, :]
        held = plan.held | (_is(best[None, :], num_experts) & found)
        sent = _is(plan.home[best][None, :], devices) & found
        return _Plan(held, plan.home, plan.slots - _int(found[0]), plan.pairs - _int(sent))

    return lax.fori_loop(0, num_local, take, plan)


def _balance(counts: Int[Array, "G E"], plan: _Plan) -> _Plan:
    """Runs the second phase, modelling Algorithm 2: moves that may need a copy first, until all is
    even.
    """
    mean = _mean(counts)

    def unbalanced(state: tuple[_Plan, _Loads]) -> Array:
        return jnp.max(state[1].unstuck) > mean

    def move(state: tuple[_Plan, _Loads]) -> tuple[_Plan, _Loads]:
        plan, loads = state
        source = _argmax(loads.unstuck)
        may_send = plan.open()
        lowest = _lowest(may_send, loads.load)[plan.home]  # of devices that could take a copy
        lowest = jnp.minimum(lowest, _lowest(plan.held, loads.load))
        visits = jnp.where(lowest < mean, loads.movable[source], 0)
        expert = _argmax(visits)
        can = plan.held[expert] | may_send[plan.home[expert]]
        target = lax.argmin(jnp.where(can, loads.load, MANY), 0, jnp.int32)
        room = mean - jnp.minimum(lowest[expert], mean)
        amount = jnp.minimum(jnp.minimum(visits[expert], room), loads.load[source] - mean)
        missing = ~plan.held[expert] & (amount > 0) & _is(target, plan.slots.shape[0])
        decided = lax.optimization_barrier((source, target, expert, amount, missing))
        source, target, expert, amount, missing = decided
        return plan.copied(expert, missing), loads.moved(source, target, expert, amount)

    start = plan, _Loads.of(counts, plan.held, plan.home)
    return lax.while_loop(unbalanced, move, start)[0]


def _spend_rest(counts: Int[Array, "G E"], plan: _Plan) -> _Plan:
    """Copies the expert with most visits a host, until slots, pairs or visits are used up.

    Each time to the devices with most slots left, a part of them at once. What the router really
    chooses differs from what was expected; the more hosts a busy expert has, the more of that
    `shard_visits` can level.
    """
    devices = counts.shape[0]
    at_once = max(1, devices // SPREAD)
    visits = _sum(counts, axis=0)

    def some_left(state: tuple[_Plan, Array]) -> Array:
        return jnp.max(state[1]) > 0

    def copy(state: tuple[_Plan, Array]) -> tuple[_Plan, Array]:
        plan, per_host = state
        may_send = jnp.any(plan.open(), axis=1)
        per_host = jnp.where(may_send[plan.home], per_host, 0)
        expert = _argmax(per_host)
        can = ~plan.held[expert] & (plan.pairs[plan.home[expert]] > 0) & (per_host[expert] > 0)
        room = jnp.where(can, plan.slots, 0)
        to = (_rank(room) < at_once) & (room > 0)
        expert, to = lax.optimization_barrier((expert, to))
        plan = plan.copied(expert, to)
        hosts = _sum(_int(plan.held[expert]))
        left = jnp.where(jnp.any(to), visits[expert] // hosts, 0)
        return plan, jnp.where(_is(expert, visits.shape[0]), left, per_host)

    num_hosts = _sum(_int(plan.held), axis=1)
    return lax.while_loop(some_left, copy, (plan, visits // jnp.maximum(num_hosts, 1)))[0]


def _lowest(can: Bool[Array, "n G"], load: Int[Array, "G"]) -> Int[Array, "n"]:
    """Returns the least load among the devices that each row allows; MANY where it allows none."""
    return jnp.min(jnp.where(can, load[None, :], MANY), axis=1)


def _mean(counts: Int[Array, "G E"]) -> Int[Array, ""]:
    """Returns the visits of each device if all had the same, rounded up."""
    return -(-_sum(counts) // counts.shape[0])


def _rank(values: Int[Array, "n"]) -> Int[Array, "n"]:
    """Returns how many values are ahead of each one: larger, or equal with a lower index."""
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    tie = (values[None, :] == values[:, None]) & (index[None, :] < index[:, None])
    return _sum(_int((values[None, :] > values[:, None]) | tie), axis=1)


def _is(index: Array, size: int) -> Bool[Array, "..."]:
    """Returns the one-hot [size] of a scalar, or [size, n] of a row [1, n]."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    return (numbers if index.ndim == 0 else numbers[:, None]) == index


def _argmax(values: Int[Array, "n"]) -> Int[Array, ""]:
    return lax.argmax(values, 0, jnp.int32)


def _int(mask: Bool[Array, "..."]) -> Int[Array, "..."]:
    return mask.astype(jnp.int32)


def _sum(values: Int[Array, "..."], axis: int | None = None) -> Int[Array, "..."]:
    return jnp.sum(values, axis=axis, dtype=jnp.int32)
