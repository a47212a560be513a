"""Experts spread over the devices of a mesh: the part of an MoE layer that knows of the others.

Runs inside `jax.shard_map` over `AXIS`, with attention data-parallel: each of D devices has T rows
of its own, the same number everywhere; all of them, in the order of devices, are N = D T rows. They
travel to every device in one all-gather, each device computes the visits that fall to it, and a
reduce-scatter brings a row's parts home (Libra, section 3.1).

What all devices have to agree on, the brownout plan and who computes a visit, is a function of
gathered bits alone. Two devices that compute the same number each for itself may differ in its last
bit, and a visit would be computed twice or by nobody.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool
from jmoe.moe import Answered, Asked, LayerStats, compute, gate, planned
from pallas_kernels import routing

AXIS = "ep"
"""The mesh axis that experts are spread over."""

VALID, EXEMPT = 1, 2  # bits of a row's flags


class AllRows(NamedTuple):
    """What experts have to know of the rows of all devices."""

    h: Float[Array, "N d"]  # normed
    weights: Float[Array, "N K"]  # gate weights, float32
    ids: Int[Array, "N K"]  # experts that the routers chose, int32
    valid: Bool[Array, "N"]
    exempt: Bool[Array, "N"]


def gather_rows(
    h: Float[Array, "T d"],
    weights: Float[Array, "T K"],
    ids: Int[Array, "T K"],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
) -> AllRows:
    """Returns the rows of all devices in one collective, to the bit: all travels as integers of h's
    width.
    """
    word = jnp.dtype(f"uint{8 * h.dtype.itemsize}")
    flags = jnp.where(valid, VALID, 0) | jnp.where(exempt, EXEMPT, 0)
    numbers = jnp.concatenate([ids, flags.astype(jnp.int32)[:, None]], axis=1)
    parts = [_to_words(a, word) for a in (h, weights.astype(jnp.float32), numbers)]
    sent = lax.all_gather(jnp.concatenate(parts, axis=1), AXIS, tiled=True)
    ends = (parts[0].shape[1], parts[0].shape[1] + parts[1].shape[1])
    rows, weights, numbers = jnp.split(sent, ends, axis=1)
    numbers = _from_words(numbers, jnp.int32)
    flags = numbers[:, -1]
    return AllRows(
        _from_words(rows, h.dtype),
        _from_words(weights, jnp.float32),
        numbers[:, :-1],
        (flags & VALID) > 0,
        (flags & EXEMPT) > 0,
    )


def _to_words(a: Array, word: jnp.dtype) -> Array:
    """Returns a matrix's bits as integers of its own width or narrower: [T, columns * words]."""
    return lax.bitcast_convert_type(a, word).reshape(a.shape[0], -1)


def _from_words(words: Array, kind: jnp.dtype | type) -> Array:
    """Returns the matrix that `_to_words` was given."""
    per_element = jnp.dtype(kind).itemsize // words.dtype.itemsize
    if per_element > 1:
        words = words.reshape(words.shape[0], -1, per_element)
    return lax.bitcast_convert_type(words, kind)


def hosts_in_turn(expert_ids: Int[Array, "N K"], hosts: Bool[Array, "E D"]) -> Int[Array, "N K"]:
    """Returns the device that computes each visit, -1 for none: an expert's hosts take turns, row
    by row.

    Chosen per (row, expert), so that two picks of a row that met in one expert are computed once.
    """
    num_experts, num_devices = hosts.shape
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    visited = jnp.any(expert_ids[:, :, None] == experts[None, None], axis=1)
    turn = jnp.cumsum(visited, axis=0, dtype=jnp.int32) - 1  # of the row among the expert's
    count = jnp.maximum(jnp.sum(hosts, axis=1, dtype=jnp.int32), 1)
    place = jnp.cumsum(hosts, axis=1, dtype=jnp.int32) - 1  # of the device among the hosts
    there = jnp.maximum(expert_ids, 0)
    turn = jnp.take_along_axis(turn, there, axis=1) % count[there]
    takes = hosts[there] & (place[there] == turn[:, :, None])
    devices = jnp.arange(num_devices, dtype=jnp.int32)
    device = jnp.sum(jnp.where(takes, devices[None, None], 0), axis=-1)
    return jnp.where(expert_ids >= 0, device, -1)


def gathered(
    cfg: ModelConfig, pool: Pool, table: ExpertTable, asked: Asked, max_active: int
) -> Answered:
    """Serves the rows of this device wherever their experts are. A `jmoe.moe.Exchange`.

    One brownout plan covers the rows of all devices. The table's slots are this device's own (-1:
    not here), its hosts say who has which expert. Rows by expert are those, of all devices, that
    this one computed.
    """
    assert table.hosts is not None
    num_rows = asked.h.shape[0]
    weights, ids = gate(cfg, asked.logits, asked.layer)
    rows = gather_rows(asked.h, weights, ids, asked.rows.valid, asked.rows.exempt)
    plan = planned(
        cfg, rows.ids, rows.weights, table.groups, rows.valid, rows.exempt, asked.control
    )
    device = lax.axis_index(AXIS)
    own = hosts_in_turn(plan.expert_ids, table.hosts) == device
    visits, slots = jnp.where(own, plan.expert_ids, -1), jnp.maximum(table.slots, 0)
    room = room_of(cfg, pool, max_active)
    given: dict[str, Any] = {"max_active": room, "activation": cfg.activation}
    parts, expert_rows = compute(pool, rows.h, rows.weights, visits, slots, **given)
    out = lax.psum_scatter(parts, AXIS, tiled=True)
    return Answered(out, ids, LayerStats(own_degraded(plan, device, num_rows), expert_rows))


def room_of(cfg: ModelConfig, pool: Pool, max_active: int) -> int:
    """Returns how many experts of a layer one device can be asked for."""
    return min(max_active, pool.num_slots // cfg.num_moe_layers)


def exchanged(pool: Pool) -> Pool:
    """Returns what arrives of experts that each device sends each other one, by sender; `pool` has
    those that this one sends, by receiver.
    """
    return jax.tree.map(lambda leaf: lax.all_to_all(leaf, AXIS, 0, 0, tiled=True), pool)


def own_degraded(plan: routing.Plan, device: Int[Array, ""], num_rows: int) -> Int[Array, "T"]:
    """Returns the degraded visits of each of a device's own rows, by the plan of all."""
    degraded = lax.dynamic_slice_in_dim(plan.degraded, device * num_rows, num_rows)
    return jnp.sum(degraded, axis=-1, dtype=jnp.int32)
