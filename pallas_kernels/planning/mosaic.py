"""Mosaic GPU kernels of planning, for Hopper (sm_90a): one launch each.

The XLA reference is loops whose conditions the host reads, a few dozen small kernels a round, in
every layer of a step. Here one warpgroup keeps all in registers, [experts, devices] int32 with an
expert in four lanes. A round is a few maxima and sums: over devices within those lanes, over
experts through shared memory. There is no gather: what one expert or device has is a sum of which
one term is not zero. So the bound that pairs of devices have is kept by expert, for its home.

Experts are padded to whole 64s and devices to whole fours. Padding has no visits and no hosts, so
that nothing moves to it; as a source of moves it is barred.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.layouts import (
    BY_ROW,
    BY_SINGLE_COLUMN,
    I32,
    ROWS,
    SINGLE_COLUMNS,
    across,
    by_row,
    down,
    iota,
)
from pallas_kernels.planning.reference import GRAIN, MANY, SPREAD

LANES = 4  # of an expert, each with some of the devices
MAX_EXPERTS = 256  # elements of a TMA box
MAX_ELEMENTS = 2048  # of an array in registers, sixteen a thread


def supports(num_experts: int, num_devices: int) -> bool:
    """Returns whether the kernels take so many experts and devices."""
    experts, devices = _padded(num_experts, num_devices)
    return experts <= MAX_EXPERTS and experts * devices <= MAX_ELEMENTS


def plan_replicas(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    home: Int[Array, "E"],
    *,
    num_replicas: int,
    per_pair: int,
    num_local: int,
) -> Bool[Array, "E G"]:
    """See `reference.plan_replicas`; `supports` says for what."""

    def plan(at: _Problem) -> Array:
        replicas = _Replicas.none(at, num_replicas, per_pair)
        replicas = _take_local(at, replicas, num_local)
        replicas = _spend_rest(at, _balance(at, replicas))
        return jnp.where(at.hosts > 0, 0, replicas.held)

    return _run(plan, "plan_replicas", counts, hosts, home).astype(bool)


def shard_visits(
    counts: Int[Array, "G E"], hosts: Bool[Array, "E G"], home: Int[Array, "E"]
) -> Int[Array, "G E"]:
    """See `reference.shard_visits`."""
    return _run(_share, "shard_visits", counts, hosts, home).T


def _padded(num_experts: int, num_devices: int) -> tuple[int, int]:
    return -(-num_experts // ROWS) * ROWS, -(-num_devices // LANES) * LANES


def _run(
    solve: Callable[["_Problem"], Array],
    name: str,
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    home: Int[Array, "E"],
) -> Int[Array, "E G"]:
    """Runs `solve` in one block of a kernel."""
    (experts, devices), padded = hosts.shape, _padded(*hosts.shape)
    pads = [(0, p - n) for p, n in zip(padded, (experts, devices), strict=True)]
    given = (jnp.pad(counts.T, pads), jnp.pad(hosts.astype(I32), pads), jnp.pad(home, pads[0]))

    def kernel(counts, hosts, home, out, counts_smem, hosts_smem, home_smem, full):
        into = (counts_smem, hosts_smem, home_smem)
        for source, target in zip((counts, hosts, home), into, strict=True):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)
        at = _Problem(
            plgpu.load(counts_smem, layout=SINGLE_COLUMNS, optimized=False),
            plgpu.load(hosts_smem, layout=SINGLE_COLUMNS, optimized=False),
            by_row(home_smem),
            devices,
        )
        counts_smem[...] = solve(at)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(counts_smem, out)
        plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = name
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(padded, I32),
        scratch_types=[
            plgpu.SMEM(padded, I32),
            plgpu.SMEM(padded, I32),
            plgpu.SMEM(padded[:1], I32),
            plgpu.Barrier(num_arrivals=3),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(*given)[:experts, :devices]


class _Problem(NamedTuple):
    """The inputs, and the shape that indices of rows and columns are made of."""

    counts: Any  # [experts, devices]
    hosts: Any
    home: Any  # [experts]
    num_devices: int  # those that are there

    @property
    def shape(self) -> tuple[int, int]:
        """Shape with padding."""
        return self.counts.shape

    @property
    def expert(self):
        """Index of each row of a matrix."""
        return iota(self.shape, 0, SINGLE_COLUMNS)

    @property
    def device(self):
        """Index of each column of a matrix."""
        return iota(self.shape, 1, SINGLE_COLUMNS)

    @property
    def experts(self):
        """Indices along a vector over experts."""
        return iota(self.shape[:1], 0, BY_ROW)

    @property
    def devices(self):
        """Indices along a vector over devices."""
        return iota(self.shape[1:], 0, BY_SINGLE_COLUMN)

    def of_expert(self, matrix, expert):
        """Returns an expert's row, by device."""
        return jnp.sum(jnp.where(self.expert == expert, matrix, 0), axis=0)

    def of_device(self, matrix, device):
        """Returns a device's column, by expert."""
        return jnp.sum(jnp.where(self.device == device, matrix, 0), axis=1)

    def at_home(self, held):
        """Returns the visits as they start: on their own device where it holds the expert."""
        own = jnp.where(held > 0, self.counts, 0)
        moved = jnp.sum(self.counts - own, axis=1)
        home = across(self.home, self.shape)
        return own + jnp.where(self.device == home, across(moved, self.shape), 0)

    def lowest(self, can, load):
        """Returns the least load among the devices that may, by expert; MANY where none may."""
        return jnp.min(jnp.where(can > 0, down(load, self.shape), MANY), axis=1)


def _first(values, numbers, value):
    """Returns the lowest index at which a vector has a value."""
    return jnp.min(jnp.where(values == value, numbers, MANY))


def _value(values, numbers, number):
    """Returns a vector's value at an index."""
    return jnp.sum(jnp.where(numbers == number, values, 0))


class _Loads(NamedTuple):
    """Visits where they would be computed now. See `reference`."""

    movable: Any  # [experts, devices]
    load: Any  # [devices]
    unstuck: Any  # [devices]

    @classmethod
    def of(cls, at: _Problem, movable) -> "_Loads":
        """Returns the loads before a move. Padding is no source of any."""
        load = jnp.sum(movable, axis=0)
        return cls(movable, load, jnp.where(at.devices < at.num_devices, load, -1))

    def mean(self, at: _Problem):
        """Returns the visits of each device if all had the same, rounded up."""
        return lax.div(jnp.sum(self.load) + (at.num_devices - 1), I32(at.num_devices))

    def moved(self, at: _Problem, source, target, expert, amount) -> "_Loads":
        """Returns the loads after a move; a move of nothing leaves its source stuck until another
        one succeeds.
        """
        takes = jnp.where(at.device == target, amount, 0)
        change = takes - jnp.where(at.device == source, amount, 0)
        movable = self.movable + jnp.where(at.expert == expert, change, 0)
        takes = jnp.where(at.devices == target, amount, 0)
        load = self.load + takes - jnp.where(at.devices == source, amount, 0)
        anew = jnp.where(at.devices < at.num_devices, load, -1)
        stuck = jnp.where(at.devices == source, -1, self.unstuck)
        return _Loads(movable, load, jnp.where(jnp.full(load.shape, amount) > 0, anew, stuck))


def _share(at: _Problem) -> Array:
    """Runs `reference.shard_visits`, whose `_best_move` this is."""
    loads = _Loads.of(at, at.at_home(at.hosts))
    mean = loads.mean(at)
    grain = lax.max(lax.div(mean, I32(GRAIN)), I32(1))

    def move(loads: _Loads) -> _Loads:
        most = jnp.max(loads.unstuck)
        source = _first(loads.unstuck, at.devices, most)
        lowest = at.lowest(at.hosts, loads.load)
        visits = at.of_device(loads.movable, source)
        below = jnp.where(lowest < mean, visits, 0)
        half = jnp.minimum(visits, lax.shift_right_logical(most - jnp.minimum(lowest, most), 1))
        found = jnp.max(below)
        score = jnp.where(jnp.full(below.shape, found) > 0, below, half)
        best = jnp.max(score)
        expert = _first(score, at.experts, best)
        its_lowest = _value(lowest, at.experts, expert)
        room = mean - lax.min(its_lowest, mean)
        given = lax.min(lax.min(best, room), most - mean)
        amount = jnp.where(found > 0, given, jnp.where(best >= grain, best, 0))
        its_hosts = at.of_expert(at.hosts, expert)
        loads_there = jnp.where(its_hosts > 0, loads.load, MANY)
        target = _first(loads_there, at.devices, its_lowest)
        return loads.moved(at, source, target, expert, amount)

    def unbalanced(loads: _Loads):
        return (jnp.max(loads.load) > mean) & (jnp.max(loads.unstuck) > mean)

    return lax.while_loop(unbalanced, move, loads).movable


class _Replicas(NamedTuple):
    """Replicas so far, and what may still be added."""

    held: Any  # [experts, devices]: homes and replicas
    pairs: Any  # [experts, devices]: experts that each one's home may still send each device
    slots: Any  # [devices]: replicas that a device still has room for

    @classmethod
    def none(cls, at: _Problem, num_replicas: int, per_pair: int) -> "_Replicas":
        """Returns the state before there are any. Padding has no room."""
        there = at.device < at.num_devices
        slots = jnp.where(at.devices < at.num_devices, num_replicas, 0)
        return cls(at.hosts, jnp.where(there, per_pair, 0), slots)

    def may_send(self, at: _Problem):
        """Returns [experts, devices]: 1 where the expert's home may send the device a copy."""
        open_ = jnp.where(down(self.slots, at.shape) > 0, 1, 0)
        return jnp.where(self.pairs > 0, open_, 0)

    def copied(self, at: _Problem, expert, to) -> "_Replicas":
        """Returns the state with replicas of an expert on devices (1 in `to`) that have room for
        it.
        """
        to_all = down(to, at.shape)
        held = jnp.where(at.expert == expert, self.held + to_all, self.held)
        sender = _value(at.home, at.experts, expert)
        sent = jnp.where(across(at.home, at.shape) == sender, to_all, 0)
        return _Replicas(held, self.pairs - sent, self.slots - to)


def _take_local(at: _Problem, replicas: _Replicas, num_local: int) -> _Replicas:
    """Runs the first phase: `num_local` times every device takes what its rows visit most and it
    lacks.
    """

    def take(_, replicas: _Replicas) -> _Replicas:
        wanted = jnp.where(replicas.held > 0, 0, at.counts)
        wanted = jnp.where(replicas.pairs > 0, wanted, 0)
        best = jnp.max(wanted, axis=0)
        expert = jnp.min(jnp.where(wanted == down(best, at.shape), at.expert, MANY), axis=0)
        found = jnp.where(best > 0, 1, 0)
        mine = at.expert == down(expert, at.shape)
        home = across(at.home, at.shape)
        sender = jnp.sum(jnp.where(mine, home, 0), axis=0)
        took = down(found, at.shape)
        held = replicas.held + jnp.where(mine, took, 0)
        sent = jnp.where(home == down(sender, at.shape), took, 0)
        return _Replicas(held, replicas.pairs - sent, replicas.slots - found)

    return lax.fori_loop(0, num_local, take, replicas)


def _balance(at: _Problem, replicas: _Replicas) -> _Replicas:
    """Runs the second phase: moves that may need a copy first, until all is even."""
    loads = _Loads.of(at, at.at_home(replicas.held))
    mean = loads.mean(at)

    def move(state: tuple[_Replicas, _Loads]) -> tuple[_Replicas, _Loads]:
        replicas, loads = state
        most = jnp.max(loads.unstuck)
        source = _first(loads.unstuck, at.devices, most)
        can = jnp.where(replicas.held > 0, 2, replicas.may_send(at))
        lowest = at.lowest(can, loads.load)
        visits = jnp.where(lowest < mean, at.of_device(loads.movable, source), 0)
        best = jnp.max(visits)
        expert = _first(visits, at.experts, best)
        its_lowest = _value(lowest, at.experts, expert)
        its_can = at.of_expert(can, expert)
        target = _first(jnp.where(its_can > 0, loads.load, MANY), at.devices, its_lowest)
        room = mean - lax.min(its_lowest, mean)
        amount = lax.min(lax.min(best, room), most - mean)
        missing = jnp.where(its_can == 1, jnp.where(amount > 0, 1, 0), 0)
        missing = jnp.where(at.devices == target, missing, 0)
        replicas = replicas.copied(at, expert, missing)
        return replicas, loads.moved(at, source, target, expert, amount)

    def unbalanced(state: tuple[_Replicas, _Loads]):
        return jnp.max(state[1].unstuck) > mean

    return lax.while_loop(unbalanced, move, (replicas, loads))[0]


def _spend_rest(at: _Problem, replicas: _Replicas) -> _Replicas:
    """Copies the expert with most visits a host, until slots, pairs or visits are used up."""
    at_once = max(1, at.num_devices // SPREAD)
    visits = jnp.sum(at.counts, axis=1)
    num_hosts = jnp.sum(jnp.where(replicas.held > 0, 1, 0), axis=1)

    def copy(state: tuple[_Replicas, Any]) -> tuple[_Replicas, Any]:
        replicas, per_host = state
        may_send = jnp.max(replicas.may_send(at), axis=1)
        per_host = jnp.where(may_send > 0, per_host, 0)
        best = jnp.max(per_host)
        expert = _first(per_host, at.experts, best)
        held = at.of_expert(replicas.held, expert)
        pairs = at.of_expert(replicas.pairs, expert)
        can = jnp.where(held > 0, 0, jnp.where(best > 0, 1, 0))
        room = jnp.where(pairs > 0, jnp.where(can > 0, replicas.slots, 0), 0)
        to = jnp.zeros_like(room)
        for _ in range(at_once):
            most = jnp.max(room)
            one = at.devices == _first(room, at.devices, most)
            to = jnp.where(one, jnp.where(most > 0, 1, to), to)
            room = jnp.where(one, 0, room)
        sent = jnp.sum(to)
        its_visits = _value(visits, at.experts, expert)
        left = lax.div(its_visits, lax.max(jnp.sum(held) + sent, I32(1)))
        left = jnp.where(sent > 0, left, 0)
        replicas = replicas.copied(at, expert, to)
        return replicas, jnp.where(at.experts != expert, per_host, left)

    def some_left(state: tuple[_Replicas, Any]):
        return jnp.max(state[1]) > 0

    per_host = lax.div(visits, jnp.maximum(num_hosts, 1))
    return lax.while_loop(some_left, copy, (replicas, per_host))[0]
