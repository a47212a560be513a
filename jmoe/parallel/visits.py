"""Visits of a gathered batch: how many there are, and which device computes each.

Letters: G devices of the mesh, E logical experts of a layer, R rows of the gathered batch, K picks
a row. What the shares are comes from `pallas_kernels.planning`; all of it is int32 arithmetic on
replicated inputs, so that all devices reach the same decision.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.planning import Shares, home_of


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
