"""Which experts to replicate, how to split their visits, and which device computes each visit.

Libra plans in two places. Before a layer, `plan_replicas` (its Algorithm 1) takes the visits that a
predictor expects and chooses experts that devices should hold beside their own. In the layer,
`shard_visits` (its Algorithm 2) takes the visits that the router really made and divides each
expert's among the devices that hold it; `device_of_visits` then names a device for every visit.

Letters: G devices of the mesh, E logical experts of a layer (routed, then united), R rows of the
gathered batch, K picks a row. `counts[g, e]` are visits that rows of device g make to expert e;
`hosts[e, g]` says that g holds e. An expert's *home* is its lowest-numbered host before replicas:
visits of rows whose own device does not hold the expert start there.

Everything is int32 arithmetic on replicated inputs, and the lowest index wins ties, so all devices
reach the same decision. All visits of one layer's step together must stay below 2^31.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

MANY = jnp.iinfo(jnp.int32).max
SPREAD = 4
"""Spare replicas go to 1/SPREAD of the devices at once: fewer rounds, hardly less balance."""
GRAIN = 256
"""Visits are passed on between overloaded devices in parts of 1/GRAIN of the mean or more."""


class Shares(NamedTuple):
    """How many visits of each expert each device computes."""

    kept: Int[Array, "G E"]  # of its own rows' visits
    remote: Int[Array, "G E"]  # of other devices' rows' visits


def plan_replicas(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    *,
    num_replicas: int,
    per_pair: int | None = None,
    alpha: float = 0.5,
    literal: bool = False,
) -> Bool[Array, "E G"]:
    """Replicas that devices should hold beside `hosts` (Libra, Algorithm 1).

    First every device takes the `floor(alpha * num_replicas)` experts that its own rows visit most
    and that it lacks, so that more visits stay local; an expert without visits is not taken. The
    second phase balances. As printed in the paper (`literal`) it copies the expert with most remote
    visits from the most loaded device to the least loaded one that can take it, and credits the
    copy with the taker's own visits; once a copy cannot be placed nothing changes any more. The
    other form moves visits between hosts as `shard_visits` will, copying an expert where that is
    what a move lacks, and then spends what is left against errors of the prediction: each time on
    the expert with most visits a host.

    Args:
        counts: int32, the visits that are expected.
        hosts: every expert has one or more hosts.
        num_replicas: N, the most that one device takes (static).
        per_pair: the most that one device sends to another, an expert's home being its sender
            (static); None is no bound.
        alpha: 0 to 1, the share of N for the first phase (static).
        literal: the second phase as printed (static).

    Raises ValueError for a negative number of replicas, a bound below 1, or alpha out of range.
    """
    if num_replicas < 0:
        raise ValueError(f"num_replicas is {num_replicas}; it must be 0 or more")
    if per_pair is not None and per_pair < 1:
        raise ValueError(f"per_pair is {per_pair}; it must be 1 or more, or None for no bound")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be between 0 and 1")
    devices = hosts.shape[1]
    num_local = int(alpha * num_replicas)
    bound = num_replicas if per_pair is None else per_pair
    plan = _Plan(
        hosts,
        home_of(hosts),
        jnp.full((devices,), num_replicas, jnp.int32),
        jnp.full((devices, devices), bound, jnp.int32),
    )
    plan = _take_local(counts, plan, num_local, bounded=bound < num_local)
    if literal:
        plan = _balance_as_printed(counts, plan, (num_replicas - num_local) * devices)
    else:
        plan = _spend_rest(counts, _balance_resharded(counts, plan))
    return plan.held & ~hosts


def shard_visits(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    *,
    home: Int[Array, "E"] | None = None,
    tolerance: float = 0.0,
    move_local: bool = True,
) -> Shares:
    """Divides every expert's visits among its hosts (Libra, Algorithm 2, with whole visits).

    Visits start on their own device where it holds the expert, else at the expert's home. While a
    device is above `(1 + tolerance)` times the mean (rounded up, as is the mean itself), the most
    loaded device that can gives visits of its hottest movable expert to that expert's least loaded
    host, as many as this one has room for below the mean. After each move all devices are looked at
    again: the paper's text says so, its listing would first finish a round.

    As printed (`move_local` False) only visits of other devices' rows move, and a move may take
    more than the excess. With `move_local` a device may give away its own rows' visits as well,
    the others' first, and never more than the excess. And where no host has room below the mean
    it may pass visits on to a less loaded one, half of the difference, which then is the one to
    give; differences that this moves by less than 1/GRAIN of the mean are left.

    Args:
        counts: int32, the visits that were made.
        hosts: homes and replicas.
        home: int32, `home_of` the hosts before there were replicas; None takes the hosts as given.
        tolerance: how far above the mean is left alone, in steps of 0.001 (static).
        move_local: own visits may move (static).

    Returns int32 shares: for each expert they add up to its visits, only hosts have any, and no
    device keeps more than its own rows made. Raises ValueError for a negative tolerance.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; it must be 0 or more")
    own = jnp.where(hosts.T, counts, 0)
    home = home_of(hosts) if home is None else home
    others = _at_home(_sum(counts - own, axis=0), home, counts.shape[0])
    mean = _mean(counts)
    permille = round(1000 * tolerance)
    limit = mean + mean // 1000 * permille + mean % 1000 * permille // 1000

    def unbalanced(loads: _Loads) -> Array:
        return (jnp.max(loads.load) > limit) & (jnp.max(loads.unstuck) > mean)

    def move(loads: _Loads) -> _Loads:
        source = _argmax(loads.unstuck)
        best = _best_move(loads, source, hosts, mean, move_local)
        return loads.moved(*lax.optimization_barrier((source, *best)))

    loads = _Loads.of(others + own if move_local else others, _sum(own + others, axis=1))
    loads = lax.while_loop(unbalanced, move, loads)
    computed = loads.movable if move_local else loads.movable + own
    kept = jnp.minimum(own, computed)
    return Shares(kept, computed - kept)


def count_visits(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], *, num_experts: int, num_devices: int
) -> Int[Array, "G E"]:
    """Visits by device and expert as `device_of_visits` counts them, int32.

    Args: as there; `num_experts` and `num_devices` are static.
    """
    visited = _visited(ids, valid, num_experts).reshape(num_devices, -1, num_experts)
    return _sum(_int(visited), axis=1)


def device_of_visits(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], shares: Shares, hosts: Bool[Array, "E G"]
) -> Int[Array, "R K"]:
    """The device that computes each visit of a gathered batch, int32; -1 where it is not valid.

    Visits of an expert stand in line by the device of their row, then by row. Of a device's own the
    first `kept` stay; all others, still in line, fill the hosts' `remote` shares in the order of
    the devices. If the shares come from `count_visits` of the same batch, devices get exactly
    theirs. Whatever the shares leave over goes to the expert's lowest-numbered host.

    A row that names an expert twice (merged picks of united experts) counts once, and both of its
    visits go to one device.

    Args:
        ids: int32, logical experts; anything where `valid` is False. Rows are in the order of the
            devices that they come from, the same number of each.
        valid: False for padding and for visits that were dropped.
        shares: of this batch.
        hosts: homes and replicas.
    """
    num_devices, num_experts = shares.kept.shape
    rows = ids.shape[0] // num_devices
    visited = _int(_visited(ids, valid, num_experts)).reshape(num_devices, rows, num_experts)
    counts = _sum(visited, axis=1)
    before = jnp.cumsum(visited, axis=1, dtype=jnp.int32) - visited  # of the same device
    expert = jnp.where(valid, ids, 0)
    place = jnp.take_along_axis(before.reshape(-1, num_experts), expert, axis=1)

    away = jnp.maximum(counts - shares.kept, 0)
    away_before = jnp.cumsum(away, axis=0, dtype=jnp.int32) - away
    remote_end = jnp.cumsum(shares.remote, axis=0, dtype=jnp.int32)
    source = jnp.repeat(jnp.arange(num_devices, dtype=jnp.int32), rows)[:, None]
    kept = shares.kept[source, expert]
    in_line = away_before[source, expert] + place - kept
    ends = remote_end.T[expert]  # [R, K, G]
    other = _sum(_int(ends <= in_line[..., None]), axis=-1)
    other = jnp.where(other < num_devices, other, home_of(hosts)[expert])
    return jnp.where(valid, jnp.where(place < kept, source, other), -1)


def _visited(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], num_experts: int
) -> Bool[Array, "R E"]:
    """Which experts each row visits. Not by sorting: on a GPU these are a few plain kernels."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.any((ids[:, :, None] == experts[None, None]) & valid[:, :, None], axis=1)


def home_of(hosts: Bool[Array, "E G"]) -> Int[Array, "E"]:
    """The home of each expert, int32: its lowest-numbered host; 0 where it has none."""
    return lax.argmax(hosts, 1, jnp.int32)


# A loop's decision goes through an optimization_barrier before it is applied: or XLA computes it
# anew in every update, from old arrays that it then has to copy.
class _Loads(NamedTuple):
    """Visits where they would be computed now."""

    movable: Int[Array, "G E"]
    load: Int[Array, "G"]  # with those that may not move
    unstuck: Int[Array, "G"]  # the load, or -1: nothing of this device could move, as things are

    @classmethod
    def of(cls, movable: Int[Array, "G E"], load: Int[Array, "G"]) -> "_Loads":
        return cls(movable, load, load)

    def moved(self, source: Array, target: Array, expert: Array, amount: Array) -> "_Loads":
        """After a move; a move of nothing leaves its source stuck until another one succeeds."""
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
        """[from, to]: whether one device may send another an expert."""
        return (self.pairs > 0) & (self.slots > 0)[None, :]

    def copied(self, expert: Array, to: Bool[Array, "G"]) -> "_Plan":
        """With replicas of `expert` on devices that have room for it."""
        row = lax.dynamic_slice_in_dim(self.held, expert, 1) | to[None, :]
        held = lax.dynamic_update_slice_in_dim(self.held, row, expert, axis=0)
        sender = _is(self.home[expert], self.slots.shape[0])
        pairs = self.pairs - _int(sender[:, None] & to[None, :])
        return _Plan(held, self.home, self.slots - _int(to), pairs)


def _best_move(
    loads: _Loads, source: Array, hosts: Bool[Array, "E G"], mean: Array, pass_on: bool
) -> tuple[Array, Array, Array]:
    """(target, expert, visits to move) for an overloaded source; 0 visits where there is no move.

    The expert is the source's hottest of those that a device below the mean hosts. `pass_on`: never
    more than the excess; and without such a device, the expert of which half the difference in load
    to its least loaded host is most. (So the source itself is never the target.)
    """
    lowest = _lowest(hosts, loads.load)
    visits, load = loads.movable[source], loads.load[source]
    below = jnp.where(lowest < mean, visits, 0)
    room = mean - jnp.minimum(lowest, mean)
    if not pass_on:
        expert = _argmax(below)
        amount = jnp.minimum(below[expert], room[expert])
    else:
        half = jnp.minimum(visits, (load - jnp.minimum(lowest, load)) // 2)
        found = jnp.max(below) > 0
        expert = _argmax(jnp.where(found, below, half))
        amount = jnp.minimum(jnp.minimum(below[expert], room[expert]), load - mean)
        passed = jnp.where(half[expert] >= jnp.maximum(mean // GRAIN, 1), half[expert], 0)
        amount = jnp.where(found, amount, passed)
    target = lax.argmin(jnp.where(hosts[expert], loads.load, MANY), 0, jnp.int32)
    return target, expert, amount


def _take_local(counts: Int[Array, "G E"], plan: _Plan, num_local: int, *, bounded: bool) -> _Plan:
    """First phase: `num_local` times every device takes what its rows visit most and it lacks.

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


def _balance_as_printed(counts: Int[Array, "G E"], plan: _Plan, most_copies: int) -> _Plan:
    """Second phase of Algorithm 1 as the paper prints it: at most `most_copies` copies.

    A copy that cannot be placed changes nothing, nor would any later one: the loop ends there.
    """
    devices = counts.shape[0]
    mean = _sum(counts) // devices  # whole loads above it are those above the exact mean

    def going(state: tuple[Any, ...]) -> Array:
        return state[0] > 0

    def copy(state: tuple[Any, ...]) -> tuple[Any, ...]:
        left, plan, others, load = state
        source = _argmax(load)
        remote = jnp.where(plan.home == source, others, 0)
        expert = _argmax(remote)
        can = ~plan.held[expert] & (plan.slots > 0) & (plan.pairs[source] > 0)
        candidates = jnp.where(can, load, MANY)
        target = lax.argmin(candidates, 0, jnp.int32)
        gained = counts[target, expert]
        overloaded = (load[source] > mean) & (remote[expert] > 0)
        placed = overloaded & can[target] & (gained <= mean - load[target])
        gained = jnp.where(placed, gained, 0)
        gives, takes = _is(source, devices), _is(target, devices)
        others = others - gained * _int(_is(expert, others.shape[0]))
        load = load + gained * (_int(takes) - _int(gives))
        left = jnp.where(placed, left - 1, 0)
        return left, plan.copied(expert, takes & placed), others, load

    own = jnp.where(plan.held.T, counts, 0)
    others = _sum(counts - own, axis=0)
    load = _sum(own + _at_home(others, plan.home, devices), axis=1)
    return lax.while_loop(going, copy, (jnp.int32(most_copies), plan, others, load))[1]


def _balance_resharded(counts: Int[Array, "G E"], plan: _Plan) -> _Plan:
    """Second phase, modelling Algorithm 2: moves that may need a copy first, until all is even."""
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

    own = jnp.where(plan.held.T, counts, 0)
    visits = own + _at_home(_sum(counts - own, axis=0), plan.home, counts.shape[0])
    return lax.while_loop(unbalanced, move, (plan, _Loads.of(visits, _sum(visits, axis=1))))[0]


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
    """The least load among the devices that each row allows; MANY where it allows none."""
    return jnp.min(jnp.where(can, load[None, :], MANY), axis=1)


def _at_home(visits: Int[Array, "E"], home: Int[Array, "E"], devices: int) -> Int[Array, "G E"]:
    """Visits as their experts' homes have them."""
    return jnp.where(_is(home[None, :], devices), visits[None, :], 0)


def _mean(counts: Int[Array, "G E"]) -> Int[Array, ""]:
    """Visits a device if all had the same, rounded up."""
    return -(-_sum(counts) // counts.shape[0])


def _rank(values: Int[Array, "n"]) -> Int[Array, "n"]:
    """Values ahead of each one: larger, or equal with a lower index."""
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    tie = (values[None, :] == values[:, None]) & (index[None, :] < index[:, None])
    return _sum(_int((values[None, :] > values[:, None]) | tie), axis=1)


def _is(index: Array, size: int) -> Bool[Array, "..."]:
    """One-hot of a scalar, [size]; or of a row [1, n], [size, n]."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    return (numbers if index.ndim == 0 else numbers[:, None]) == index


def _argmax(values: Int[Array, "n"]) -> Int[Array, ""]:
    return lax.argmax(values, 0, jnp.int32)


def _int(mask: Bool[Array, "..."]) -> Int[Array, "..."]:
    return mask.astype(jnp.int32)


def _sum(values: Int[Array, "..."], axis: int | None = None) -> Int[Array, "..."]:
    return jnp.sum(values, axis=axis, dtype=jnp.int32)
