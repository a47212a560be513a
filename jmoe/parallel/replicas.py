"""Hot experts that are copied to other devices while a step runs, one layer before they are needed.

Libra (sections 3.1 to 3.3) for the MoE block of a prefill step. While layer l computes, the visits
of the next MoE layer are expected from its router on layer l's rows; experts are chosen from that
(Algorithm 1) and travel to the devices that get a copy. Layer l + 1 then divides the visits that
were really made among the devices that hold their expert (Algorithm 2).

The layer computes in two parts, so that what travels is hidden: visits of a device's own rows while
the rows of all devices are gathered, and those of other devices' rows while the copies travel.

Everything that devices have to agree on is integer arithmetic on gathered choices, as in
`jmoe.parallel.experts`. A pool is only read: copies live in arrays of their own.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool
from jmoe.moe import Answered, Asked, Balance, LayerStats, compute, gate, planned, router
from jmoe.parallel.experts import (
    AXIS,
    exchanged,
    gather_rows,
    in_passes,
    own_degraded,
    room_of,
    visits_of_pass,
)
from jmoe.parallel.probe import Probe
from jmoe.weights import Params
from pallas_kernels import routing
from pallas_kernels.activation import Activation
from pallas_kernels.planning import Shares, home_of, plan_replicas, shard_visits


class Replication(NamedTuple):
    """How experts are copied (static: another choice is another program)."""

    num_replicas: int
    """N: copies that a device takes for a layer."""
    per_pair: int = 2
    """Experts that one device sends another; the busiest pair sets the time of the copies."""
    alpha: float = 0.5
    """Share of N for the experts that a device's own rows visit most."""


class Replicas(NamedTuple):
    """Copies of one layer's experts. `pool` and `slots` are those a device got; all devices know
    the rest.
    """

    pool: Pool  # by sender, P of each
    slots: Int[Array, "E"]  # place of each logical expert in that pool, -1: no copy here
    held: Bool[Array, "E D"]  # which devices got a copy
    expected: Int[Array, "D E"]  # visits that they were chosen for

    @classmethod
    def none(cls, pool: Pool, table: ExpertTable, replication: Replication) -> "Replicas":
        """Returns the replicas before the first MoE layer: none. `table` is the model's, as one
        device sees it.
        """
        assert table.hosts is not None
        experts, devices = table.hosts.shape[1:]
        room = devices * replication.per_pair
        return cls(
            pool.empty(room),
            jnp.full((experts,), -1, jnp.int32),
            jnp.zeros((experts, devices), bool),
            jnp.zeros((devices, experts), jnp.int32),
        )

    @classmethod
    def leaving(
        cls, pool: Pool, table: ExpertTable, expected: Int[Array, "D E"], replication: Replication
    ) -> "Replicas":
        """Chooses a layer's copies, before they travel: `pool` has what this device sends, by
        receiver, P for each, used or not. `table` is the layer's.

        A device's place for an expert follows from its sender and from its order among those that
        it sends here.
        """
        num_replicas, per_pair, alpha = replication
        assert table.hosts is not None
        wanted = plan_replicas(
            expected, table.hosts, num_replicas=num_replicas, per_pair=per_pair, alpha=alpha
        )
        sent, device = senders(wanted, home_of(table.hosts), per_pair), lax.axis_index(AXIS)
        own = jnp.maximum(table.slots[jnp.maximum(sent[device], 0).reshape(-1)], 0)
        received = sent[:, device].reshape(-1)
        num_experts = wanted.shape[0]
        at = jnp.where(received >= 0, received, num_experts)  # out of range: dropped
        places = jnp.arange(received.shape[0], dtype=jnp.int32)
        slots = jnp.full((num_experts,), -1, jnp.int32).at[at].set(places, mode="drop")
        return cls(pool.read(own), slots, wanted, expected)

    def arrived(self) -> "Replicas":
        """Exchanges the experts of `leaving`, array by array."""
        return self._replace(pool=exchanged(self.pool))


def senders(
    wanted: Bool[Array, "E D"], home: Int[Array, "E"], per_pair: int
) -> Int[Array, "D D P"]:
    """Returns the experts that each device (first axis) sends each other one: their ids, -1 for
    none.

    An expert's home sends it; in the order of ids. The caller sees to it that no pair has more than
    `per_pair` (static), as `plan_replicas` does.
    """
    devices = jnp.arange(wanted.shape[1], dtype=jnp.int32)
    goes = (home[:, None] == devices[None, :])[:, :, None] & wanted[:, None, :]
    order = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    places = jnp.arange(per_pair, dtype=jnp.int32)
    at = goes[..., None] & (order[..., None] == places[None, None, None, :])
    ids = jnp.arange(1, wanted.shape[0] + 1, dtype=jnp.int32)
    return jnp.sum(jnp.where(at, ids[:, None, None, None], 0), axis=0, dtype=jnp.int32) - 1


class Copying(NamedTuple):
    """A `jmoe.moe.Exchange` like `jmoe.parallel.experts.gathered`, with copies of experts; it sends
    those for the layer after it.
    """

    replication: Replication
    replicas: Replicas | None
    """This layer's copies; None: there are none, as in a model's first MoE layer."""
    next_layer: Params | Probe | None
    """What guesses the next MoE layer's routing, its router or a probe; None: there is no next."""
    next_table: ExpertTable | None  # its row

    def __call__(
        self, cfg: ModelConfig, pool: Pool, table: ExpertTable, asked: Asked, max_active: int
    ) -> Answered:
        """See Exchange; `max_active` does not count copies."""
        num_rows, replicas, h = asked.h.shape[0], self.replicas, asked.h
        assert table.hosts is not None
        num_experts, devices = table.hosts.shape
        ahead = self._ahead(cfg, asked.x)
        weights, ids = gate(cfg, asked.logits, asked.layer)
        next_ids = None if ahead is None else gate(cfg, *ahead)[1]
        flags = asked.rows.valid, asked.rows.exempt
        rows = gather_rows(weights[:, :0], weights, ids, *flags, next_ids)
        # After the choices, which all planning waits for.
        rows, sent_h = lax.optimization_barrier((rows, h))
        all_h = lax.all_gather(sent_h, AXIS, tiled=True)

        def counted(
            ids: Array, weights: Array | None, groups: Array
        ) -> tuple[routing.Plan, Int[Array, "D E"]]:
            """Returns the brownout plan of all rows, and the visits that it leaves by device and
            expert.
            """
            plan = planned(cfg, ids, weights, groups, rows.valid, rows.exempt, asked.control)
            made, size = plan.expert_ids >= 0, {"num_experts": num_experts, "num_devices": devices}
            return plan, count_visits(plan.expert_ids, made, **size)

        plan, counts = counted(rows.ids, rows.weights, table.groups)
        hosts = table.hosts if replicas is None else table.hosts | replicas.held
        shares = shard_visits(counts, hosts, home=home_of(table.hosts))
        device = device_of_visits(plan.expert_ids, plan.expert_ids >= 0, shares, hosts)
        me = lax.axis_index(AXIS)
        mine = jnp.where(device == me, plan.expert_ids, -1)
        own = lax.dynamic_slice_in_dim(mine, me * num_rows, num_rows)
        of_others = jnp.arange(mine.shape[0], dtype=jnp.int32) // num_rows != me
        others = jnp.where(of_others[:, None], mine, -1)

        outgoing = None
        if rows.next_ids is not None and self.next_table is not None:
            # By visits, whatever is kept: a guess is not worth sending weights for.
            expected = counted(rows.next_ids, None, self.next_table.groups)[1]
            outgoing = Replicas.leaving(pool, self.next_table, expected, self.replication)
        where = _Held(pool, table.slots, replicas, room_of(cfg, pool, max_active), cfg.activation)
        # What a transfer is to be hidden by is tied to its end, and the next one's beginning to
        # that: rows travel under own rows' visits, copies under the others', and the sum goes home
        # last.
        out, own_rows = where.compute(h, weights, own)
        out, all_h, outgoing = lax.optimization_barrier((out, all_h, outgoing))
        parts, other_rows = in_passes(
            partial(where.compute, all_h, rows.weights),
            others,
            visits_of_pass(cfg, h, len(all_h)),
        )
        arriving = None if outgoing is None else outgoing.arrived()
        parts, arriving = lax.optimization_barrier((parts, arriving))
        out = out + lax.psum_scatter(parts, AXIS, tiled=True)
        degraded = own_degraded(plan, me, num_rows)
        stats = LayerStats(degraded, own_rows + other_rows, balance=_balance(counts, replicas))
        return Answered(out, ids, stats, arriving)

    def _ahead(
        self, cfg: ModelConfig, x: Float[Array, "T d"]
    ) -> tuple[Float[Array, "T columns"], Params] | None:
        """Returns the logits that the next MoE layer's router is expected to have, and its
        parameters; None: there is none.
        """
        if self.next_layer is None:
            return None
        if isinstance(self.next_layer, Probe):
            return self.next_layer.logits(x), {}
        return router(cfg, self.next_layer, x)[1], self.next_layer


def _balance(counts: Int[Array, "D E"], replicas: Replicas | None) -> Balance:
    if replicas is None:
        return Balance(jnp.int32(0), jnp.int32(0))
    right = jnp.sum(jnp.minimum(counts, replicas.expected), dtype=jnp.int32)
    return Balance(right, jnp.sum(replicas.held, dtype=jnp.int32))


class _Held(NamedTuple):
    """A layer's experts on this device: its own, and copies."""

    pool: Pool
    slots: Int[Array, "E"]
    replicas: Replicas | None
    max_active: int
    activation: Activation

    def compute(
        self,
        h: Float[Array, "R d"],
        weights: Float[Array, "R K"],
        ids: Int[Array, "R K"],
        max_visits: int | None = None,
    ) -> tuple[Float[Array, "R d"], Int[Array, "E"]]:
        """Returns the sum of visits (`ids` -1: none; `max_visits` at most) for each row, and rows
        by logical expert.
        """
        copies, slots = self.replicas, jnp.maximum(self.slots, 0)
        run = partial(compute, activation=self.activation, max_visits=max_visits)
        if copies is None:
            return run(self.pool, h, weights, ids, slots, max_active=self.max_active)
        is_copy = (ids >= 0) & (copies.slots[jnp.maximum(ids, 0)] >= 0)
        of_own, of_copies = jnp.where(is_copy, -1, ids), jnp.where(is_copy, ids, -1)
        room, copied = copies.pool.num_slots, jnp.maximum(copies.slots, 0)
        found = (
            run(self.pool, h, weights, of_own, slots, max_active=self.max_active),
            run(copies.pool, h, weights, of_copies, copied, max_active=room),
        )
        return jax.tree.map(jnp.add, *found)


def count_visits(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], *, num_experts: int, num_devices: int
) -> Int[Array, "G E"]:
    """Counts visits by device and expert as `device_of_visits` does, int32.

    Args: as there; `num_experts` and `num_devices` are static.
    """
    visited = _visited(ids, valid, num_experts).reshape(num_devices, -1, num_experts)
    return _sum(_int(visited), axis=1)


def device_of_visits(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], shares: Shares, hosts: Bool[Array, "E G"]
) -> Int[Array, "R K"]:
    """Returns the device that computes each visit of a gathered batch, int32; -1 where it is not
    valid.

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

    moved = jnp.maximum(counts - shares.kept, 0)
    moved_before = jnp.cumsum(moved, axis=0, dtype=jnp.int32) - moved
    remote_end = jnp.cumsum(shares.remote, axis=0, dtype=jnp.int32)
    source = jnp.repeat(jnp.arange(num_devices, dtype=jnp.int32), rows)[:, None]
    kept = shares.kept[source, expert]
    in_line = moved_before[source, expert] + place - kept
    ends = remote_end.T[expert]  # [R, K, G]
    other = _sum(_int(ends <= in_line[..., None]), axis=-1)
    other = jnp.where(other < num_devices, other, home_of(hosts)[expert])
    return jnp.where(valid, jnp.where(place < kept, source, other), -1)


def _visited(
    ids: Int[Array, "R K"], valid: Bool[Array, "R K"], num_experts: int
) -> Bool[Array, "R E"]:
    """Returns which experts each row visits. Not by sorting: on a GPU these are a few plain
    kernels.
    """
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.any((ids[:, :, None] == experts[None, None]) & valid[:, :, None], axis=1)


def _int(mask: Bool[Array, "..."]) -> Int[Array, "..."]:
    return mask.astype(jnp.int32)


def _sum(values: Int[Array, "..."], axis: int) -> Int[Array, "..."]:
    return jnp.sum(values, axis=axis, dtype=jnp.int32)
