"""Experts spread over the devices of a mesh: the part of an MoE layer that knows of the others.

Runs inside `jax.shard_map` over `AXIS`, with attention data-parallel: each of D devices has T rows
of its own, the same number everywhere; all of them, in the order of devices, are N = D T rows. They
travel to every device in one all-gather, each device computes the visits that fall to it, and a
reduce-scatter brings a row's parts home (Libra, section 3.1).

What all devices have to agree on, the brownout plan and who computes a visit, is a function of
gathered bits alone. Two devices that compute the same number each for itself may differ in its last
bit, and a visit would be computed twice or by nobody.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.brownout import Control
from jmoe.experts import ExpertPool
from pallas_kernels import grouped_gemm, routing

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


def routed_experts(
    pool: ExpertPool,
    h: Float[Array, "T d"],
    logits: Float[Array, "T columns"],
    *,
    slots: Int[Array, "E"],
    hosts: Bool[Array, "E D"],
    groups: Int[Array, "m"],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    control: Control,
    top_k: int,
    normalize: bool,
    max_active: int,
) -> tuple[Float[Array, "T d"], Int[Array, "T K"], Bool[Array, "T K"], Int[Array, "E"]]:
    """Runs the routed experts of this device's rows, wherever those are.

    One brownout plan covers the rows of all devices. `slots` are this device's own (-1: not here),
    `hosts` says who has which expert, `max_active` (static) bounds the experts that are visited on
    this device; the caller guarantees it.

    Returns the sum of experts for each own row, what their routers chose, which of these visits
    were degraded, and the rows, of all devices, that this one computed by logical expert.
    """
    num_rows = h.shape[0]
    logits = logits[:, : groups.shape[0]]
    weights, ids = routing.gate(logits, top_k=top_k, normalize=normalize)
    rows = gather_rows(h, weights, ids, valid, exempt)
    plan = routing.brownout_plan(
        rows.ids,
        groups=groups,
        threshold_percent=control.threshold_percent,
        strategy=control.strategy,
        valid=rows.valid,
        exempt=rows.exempt,
    )
    device = lax.axis_index(AXIS)
    own = hosts_in_turn(plan.expert_ids, hosts) == device
    work = routing.dispatch(
        jnp.where(own, plan.expert_ids, -1),
        rows.weights,
        jnp.maximum(slots, 0),
        block_m=grouped_gemm.block_rows(rows.weights.size, max_active),
        max_active=max_active,
    )
    parts = grouped_gemm.moe_mlp(rows.h, pool.gate_up, pool.down, work).astype(h.dtype)
    out = lax.psum_scatter(parts, AXIS, tiled=True)
    degraded = lax.dynamic_slice_in_dim(plan.degraded, device * num_rows, num_rows)
    return out, ids, degraded, work.expert_rows
