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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.brownout import Control
from jmoe.experts import ExpertPool, ExpertTable
from jmoe.parallel.experts import AXIS, EXEMPT, VALID
from jmoe.parallel.visits import count_visits, device_of_visits
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.planning import home_of, plan_replicas, shard_visits


class Replication(NamedTuple):
    """How experts are copied (static: another choice is another program)."""

    num_replicas: int
    """N: copies that a device takes for a layer."""
    per_pair: int = 2
    """Experts that one device sends another; the busiest pair sets the time of the copies."""
    alpha: float = 0.5
    """Share of N for the experts that a device's own rows visit most."""


class Ahead(NamedTuple):
    """What a layer needs of the next MoE layer in order to prepare it."""

    logits: Float[Array, "T columns"]  # of its router, on this layer's rows; float32
    table: ExpertTable  # its row


class Replicas(NamedTuple):
    """Copies of one layer's experts. `pool` and `slots` are those a device got; all devices know
    the rest.
    """

    pool: ExpertPool  # by sender, P of each
    slots: Int[Array, "E"]  # place of each logical expert in that pool, -1: no copy here
    held: Bool[Array, "E D"]  # which devices got a copy
    expected: Int[Array, "D E"]  # visits that they were chosen for

    @classmethod
    def none(cls, pool: ExpertPool, table: ExpertTable, replication: Replication) -> "Replicas":
        """Returns the replicas before the first MoE layer: none. `table` is the model's, as one
        device sees it.
        """
        assert table.hosts is not None
        experts, devices = table.hosts.shape[1:]
        room = devices * replication.per_pair
        return cls(
            ExpertPool(*(jnp.zeros((room, *leaf.shape[1:]), leaf.dtype) for leaf in pool)),
            jnp.full((experts,), -1, jnp.int32),
            jnp.zeros((experts, devices), bool),
            jnp.zeros((devices, experts), jnp.int32),
        )


class Balance(NamedTuple):
    """Counts of one layer that all devices know."""

    right: Int[Array, ""]  # visits by device and expert that were expected and made
    copied: Int[Array, ""]  # experts that were sent for it


class _Choices(NamedTuple):
    """What the routers chose for the rows of all devices."""

    ids: Int[Array, "N K"]
    weights: Float[Array, "N K"]
    valid: Bool[Array, "N"]
    exempt: Bool[Array, "N"]
    next_ids: Int[Array, "N K"] | None


def _gather_choices(
    ids: Array, weights: Array, valid: Array, exempt: Array, next_ids: Array | None
) -> _Choices:
    """Gathers choices in one collective of 4-byte words; the rows themselves travel apart."""
    top_k = ids.shape[1]
    flags = jnp.where(valid, VALID, 0) | jnp.where(exempt, EXEMPT, 0)
    bits = lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
    columns = [ids, bits, flags.astype(jnp.int32)[:, None]]
    columns += [] if next_ids is None else [next_ids]
    all_ = lax.all_gather(jnp.concatenate(columns, axis=1), AXIS, tiled=True)
    flags = all_[:, 2 * top_k]
    return _Choices(
        all_[:, :top_k],
        lax.bitcast_convert_type(all_[:, top_k : 2 * top_k], jnp.float32),
        (flags & VALID) > 0,
        (flags & EXEMPT) > 0,
        None if next_ids is None else all_[:, 2 * top_k + 1 :],
    )


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


class Outgoing(NamedTuple):
    """Copies of one layer's experts that are about to travel."""

    pool: ExpertPool  # what this device sends: by receiver, P for each, used or not
    slots: Int[Array, "E"]  # as in `Replicas`, and so are the others
    held: Bool[Array, "E D"]
    expected: Int[Array, "D E"]

    @classmethod
    def of(
        cls,
        pool: ExpertPool,
        table: ExpertTable,
        wanted: Bool[Array, "E D"],
        expected: Int[Array, "D E"],
        per_pair: int,
    ) -> "Outgoing":
        """Returns the experts for the devices that want them. `table` is one layer's.

        A device's place for an expert follows from its sender and from its order among those that
        it sends here.
        """
        assert table.hosts is not None
        sent, device = senders(wanted, home_of(table.hosts), per_pair), lax.axis_index(AXIS)
        own = jnp.maximum(table.slots[jnp.maximum(sent[device], 0).reshape(-1)], 0)
        received = sent[:, device].reshape(-1)
        num_experts = wanted.shape[0]
        at = jnp.where(received >= 0, received, num_experts)  # out of range: dropped
        places = jnp.arange(received.shape[0], dtype=jnp.int32)
        slots = jnp.full((num_experts,), -1, jnp.int32).at[at].set(places, mode="drop")
        return cls(ExpertPool(*(leaf[own] for leaf in pool)), slots, wanted, expected)

    def sent(self) -> Replicas:
        """Exchanges the experts, array by array, and returns them as replicas."""
        arrived = (lax.all_to_all(leaf, AXIS, 0, 0, tiled=True) for leaf in self.pool)
        return Replicas(ExpertPool(*arrived), *self[1:])


def replicated_experts(
    pool: ExpertPool,
    h: Float[Array, "T d"],
    logits: Float[Array, "T columns"],
    *,
    table: ExpertTable,
    replicas: Replicas | None,
    ahead: Ahead | None,
    replication: Replication,
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    control: Control,
    top_k: int,
    normalize: bool,
    max_active: int,
) -> tuple[Float[Array, "T d"], Int[Array, "T K"], Bool[Array, "T K"], Array, Replicas | None, Any]:
    """Runs `jmoe.parallel.experts.routed_experts` with copies of experts, and sends those for the
    layer after it.

    Args:
        pool: this device's.
        h: normed rows of this device.
        logits: of this layer's router.
        table: this layer's row; its hosts are given.
        replicas: of this layer; None: there are none, as in a model's first MoE layer.
        ahead: of the next MoE layer; None: there is none.
        replication: how experts are copied (static).
        valid: False for padding.
        exempt: rows that refuse brownout.
        control: of the brownout.
        top_k: K (static).
        normalize: whether gate weights of a row sum up to 1 (static).
        max_active: experts that are visited on this device, copies apart (static).

    Returns the sum of experts for each own row, what their routers chose, which of these visits
    were degraded, the rows that this device computed by logical expert, the next layer's copies,
    and this layer's `Balance`.
    """
    num_rows, groups = h.shape[0], table.groups
    assert table.hosts is not None
    num_experts, devices = table.hosts.shape
    weights, ids = routing.gate(logits[:, : groups.shape[0]], top_k=top_k, normalize=normalize)
    next_ids = None
    if ahead is not None:
        next_ids = routing.gate(
            ahead.logits[:, : groups.shape[0]], top_k=top_k, normalize=normalize
        )[1]
    rows = _gather_choices(ids, weights, valid, exempt, next_ids)
    # After the choices, which all planning waits for.
    rows, sent_h = lax.optimization_barrier((rows, h))
    all_h = lax.all_gather(sent_h, AXIS, tiled=True)

    def planned(ids: Array, groups: Array) -> tuple[routing.Plan, Int[Array, "D E"]]:
        """Returns the brownout plan of all rows, and the visits that it leaves by device and
        expert.
        """
        plan = routing.brownout_plan(
            ids,
            groups=groups,
            threshold_percent=control.threshold_percent,
            strategy=control.strategy,
            valid=rows.valid,
            exempt=rows.exempt,
        )
        made, size = plan.expert_ids >= 0, {"num_experts": num_experts, "num_devices": devices}
        return plan, count_visits(plan.expert_ids, made, **size)

    plan, counts = planned(rows.ids, groups)
    hosts = table.hosts if replicas is None else table.hosts | replicas.held
    shares = shard_visits(counts, hosts, home=home_of(table.hosts))
    device = device_of_visits(plan.expert_ids, plan.expert_ids >= 0, shares, hosts)
    me = lax.axis_index(AXIS)
    mine = jnp.where(device == me, plan.expert_ids, -1)
    own = lax.dynamic_slice_in_dim(mine, me * num_rows, num_rows)
    of_others = jnp.arange(mine.shape[0], dtype=jnp.int32) // num_rows != me
    others = jnp.where(of_others[:, None], mine, -1)

    outgoing = None
    if rows.next_ids is not None and ahead is not None:
        expected = planned(rows.next_ids, ahead.table.groups)[1]
        outgoing = _choose(pool, ahead.table, expected, replication)
    where = _Held(pool, table.slots, replicas, max_active)
    # What a transfer is to be hidden by is tied to its end, and the next one's beginning to that:
    # rows travel under own rows' visits, copies under the others', and the sum goes home last.
    out, own_rows = where.compute(h, weights, own)
    out, all_h, outgoing = lax.optimization_barrier((out, all_h, outgoing))
    parts, other_rows = where.compute(all_h, rows.weights, others)
    arriving = None if outgoing is None else outgoing.sent()
    parts, arriving = lax.optimization_barrier((parts, arriving))
    out = out + lax.psum_scatter(parts, AXIS, tiled=True)
    degraded = lax.dynamic_slice_in_dim(plan.degraded, me * num_rows, num_rows)
    return out, ids, degraded, own_rows + other_rows, arriving, _balance(counts, replicas)


def _choose(
    pool: ExpertPool, table: ExpertTable, expected: Int[Array, "D E"], replication: Replication
) -> Outgoing:
    """Chooses the next layer's copies, and puts those together that leave this device."""
    num_replicas, per_pair, alpha = replication
    assert table.hosts is not None
    wanted = plan_replicas(
        expected, table.hosts, num_replicas=num_replicas, per_pair=per_pair, alpha=alpha
    )
    return Outgoing.of(pool, table, wanted, expected, per_pair)


def _balance(counts: Int[Array, "D E"], replicas: Replicas | None) -> Balance:
    if replicas is None:
        return Balance(jnp.int32(0), jnp.int32(0))
    right = jnp.sum(jnp.minimum(counts, replicas.expected), dtype=jnp.int32)
    return Balance(right, jnp.sum(replicas.held, dtype=jnp.int32))


class _Held(NamedTuple):
    """A layer's experts on this device: its own, and copies."""

    pool: ExpertPool
    slots: Int[Array, "E"]
    replicas: Replicas | None
    max_active: int

    def compute(
        self, h: Float[Array, "R d"], weights: Float[Array, "R K"], ids: Int[Array, "R K"]
    ) -> tuple[Float[Array, "R d"], Int[Array, "E"]]:
        """Returns the sum of visits (`ids` -1: none) for each row, and rows by logical expert."""
        copies = self.replicas
        if copies is None:
            return _visits(self.pool, h, weights, ids, self.slots, self.max_active)
        is_copy = (ids >= 0) & (copies.slots[jnp.maximum(ids, 0)] >= 0)
        of_own, of_copies = jnp.where(is_copy, -1, ids), jnp.where(is_copy, ids, -1)
        room = copies.pool.down.shape[0]
        found = (
            _visits(self.pool, h, weights, of_own, self.slots, self.max_active),
            _visits(copies.pool, h, weights, of_copies, copies.slots, room),
        )
        return jax.tree.map(jnp.add, *found)


def _visits(
    pool: ExpertPool, h: Array, weights: Array, ids: Array, slots: Array, max_active: int
) -> tuple[Array, Array]:
    work = routing.dispatch(
        ids,
        weights,
        jnp.maximum(slots, 0),
        block_m=grouped_gemm.block_rows(weights.size, max_active),
        max_active=max_active,
    )
    out = grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work)
    return out.astype(h.dtype), work.expert_rows
