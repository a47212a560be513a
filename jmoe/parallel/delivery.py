"""Rows of a mesh that travel to the devices whose experts they visit, and to no other.

Where that takes less time than an all-gather (`cost.MeshStep.exchange`: few picks a row, or many
devices) what all devices gather is ids, gate weights and flags; rows follow in an all-to-all, once
to each device that needs them, in one hop; or in two, once to each node that needs them, and inside
from there to each device (as DeepEP forwards them). Their sums go back the same way.

An all-to-all has room for so many rows a pair of devices. All devices know all visits, and so
whether every pair's rows fit. If not, a step's rows go in blocks that fit whatever they visit, one
after another: a row's sum has the same bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool
from jmoe.moe import Answered, Asked, LayerStats, compute
from jmoe.parallel import cost
from jmoe.parallel.experts import (
    AXIS,
    by_pass,
    from_words,
    gathered,
    hosts_in_turn,
    in_passes,
    own_degraded,
    planned_together,
    room_of,
    to_words,
    visits_of_pass,
)
from pallas_kernels.backend import backend


def over_mesh(
    cfg: ModelConfig, pool: Pool, table: ExpertTable, asked: Asked, max_active: int
) -> Answered:
    """Serves the rows of this device wherever their experts are, by the exchange that is asked for
    or reckoned to take least. A `jmoe.moe.Exchange`.
    """
    assert table.hosts is not None
    way, given = exchange_of(cfg, asked.h, table.hosts.shape[1]), (cfg, pool, table, asked)
    if isinstance(way, cost.Delivery):
        return delivered(*given, max_active, way)
    return gathered(*given, max_active, halves=way == "halves")


def exchange_of(
    cfg: ModelConfig, h: Float[Array, "T d"], num_devices: int
) -> cost.Delivery | cost.AllGather:
    """Returns how rows and experts meet where `h` are a device's own. A CPU's devices share their
    memory, and compute nothing meanwhile; an odd number of rows has no halves.
    """
    if cfg.exchange == "auto" and backend() == "cpu":
        return "all-gather"
    way = cost.MeshStep(cfg, num_devices, len(h), h.dtype.itemsize).exchange()
    return "all-gather" if way == "halves" and len(h) % 2 else way


def delivered(
    cfg: ModelConfig,
    pool: Pool,
    table: ExpertTable,
    asked: Asked,
    max_active: int,
    delivery: cost.Delivery,
) -> Answered:
    """Serves the rows of this device as `jmoe.parallel.experts.gathered` does, and answers alike,
    but that each row goes to the devices that need it alone.
    """
    assert table.hosts is not None
    num_experts, num_devices = table.hosts.shape
    h, device, slots = asked.h, lax.axis_index(AXIS), jnp.maximum(table.slots, 0)
    weights, ids, _, plan = planned_together(cfg, table, asked, h[:, :0])
    hosts = hosts_in_turn(plan.expert_ids, table.hosts)
    fits = _fits(_needed(hosts, num_devices), delivery)
    # 0: no visit, as where an all-to-all has no row.
    codes = jnp.where(hosts >= 0, hosts * num_experts + plan.expert_ids + 1, 0)
    own = lax.dynamic_slice_in_dim(codes, device * len(h), len(h))
    words = jnp.concatenate(to_words(h, weights.astype(jnp.float32), own), axis=1)
    hops = _hops(delivery, num_devices)
    rows = len(h) if not hops else hops[-1].num_peers * hops[-1].room
    sizes: dict[str, Any] = {
        "max_active": room_of(cfg, pool, max_active),
        "activation": cfg.activation,
    }
    per_pass = visits_of_pass(cfg, h, num_devices * len(h), received=rows)

    def served(words: Array) -> tuple[Array, Array]:
        h, weights, codes = _apart(words, asked.h, ids.shape[1])
        here = (codes > 0) & ((codes - 1) // num_experts == device)
        visits = jnp.where(here, (codes - 1) % num_experts, -1)

        def run(ids: Array, max_visits: int | None) -> tuple[Array, Array]:
            return compute(pool, h, weights, ids, slots, max_visits=max_visits, **sizes)

        return in_passes(run, visits, per_pass)

    def travel(words: Array, hops: tuple[_Hop, ...]) -> tuple[Array, Array]:
        if not hops:
            return served(words)
        hop, *others = hops
        _, _, codes = _apart(words, h, ids.shape[1])
        to = jnp.where(codes > 0, (codes - 1) // num_experts, -1)
        at = _places(hop.peers_of(_needed(to, num_devices), device))
        sums, expert_rows = travel(hop.there(words, at), tuple(others))
        return hop.home(sums, at, ids.shape[1]), expert_rows

    def block(here: Bool[Array, "T 1"]) -> tuple[Array, Array]:
        return travel(jnp.where(here, words, 0), hops)

    numbers = jnp.arange(len(h), dtype=jnp.int32) // delivery.block(num_devices)
    out, expert_rows = by_pass(jnp.where(fits, 0, numbers), jnp.where(fits, 0, numbers[-1]), block)
    return Answered(out, ids, LayerStats(own_degraded(plan, device, len(h)), expert_rows))


def _apart(
    words: Array, h: Float[Array, "T d"], top_k: int
) -> tuple[Float[Array, "R d"], Float[Array, "R K"], Int[Array, "R K"]]:
    """Returns rows (as `h` are), gate weights and codes of what travels as one."""
    rest = words[:, h.shape[1] :]
    weights, codes = jnp.split(rest, 2, axis=1)
    return (
        from_words(words[:, : h.shape[1]], h.dtype),
        from_words(weights, jnp.float32).reshape(-1, top_k),
        from_words(codes, jnp.int32).reshape(-1, top_k),
    )


def _needed(hosts: Int[Array, "R K"], num_devices: int) -> Bool[Array, "R D"]:
    """Returns which devices compute visits of each row."""
    devices = jnp.arange(num_devices, dtype=jnp.int32)
    return jnp.any(hosts[:, :, None] == devices[None, None], axis=1)


def _places(needed: Bool[Array, "R P"]) -> Int[Array, "R P"]:
    """Returns each row's place among those that go to a peer; -1: it does not."""
    return jnp.where(needed, jnp.cumsum(needed, axis=0, dtype=jnp.int32) - 1, -1)


def _fits(needed: Bool[Array, "N D"], delivery: cost.Delivery) -> Bool[Array, ""]:
    """Returns whether all rows of a step fit; the same on all devices."""
    num_devices = needed.shape[1]
    by_sender = needed.reshape(num_devices, -1, num_devices)
    count = jnp.sum(by_sender, axis=1, dtype=jnp.int32)
    if not delivery.node:
        return jnp.max(count) <= delivery.room
    nodes = num_devices // delivery.node
    to_node = jnp.any(by_sender.reshape(num_devices, -1, nodes, delivery.node), axis=3)
    forwarded = jnp.sum(count.reshape(nodes, delivery.node, num_devices), axis=0)
    fits = jnp.max(jnp.sum(to_node, axis=1, dtype=jnp.int32)) <= delivery.room
    return fits & (jnp.max(forwarded) <= delivery.inside)


class _Hop(NamedTuple):
    """An all-to-all among the devices of each group."""

    groups: list[list[int]]
    room: int  # rows from one device to another
    stride: int  # between the numbers of a group's devices
    """1: a node's; a node's size: those with one number in their nodes; or 1 where all are one."""

    @property
    def num_peers(self) -> int:
        return len(self.groups[0])

    def peers_of(self, needed: Bool[Array, "R D"], device: Array) -> Bool[Array, "R P"]:
        """Returns which of this device's peers each row goes to: in a node, to who needs it; among
        nodes, to the one whose node does.
        """
        if self.stride > 1:
            return jnp.any(needed.reshape(len(needed), self.num_peers, self.stride), axis=2)
        first = device // self.num_peers * self.num_peers
        return lax.dynamic_slice_in_dim(needed, first, self.num_peers, axis=1)

    def there(self, words: Array, at: Int[Array, "R P"]) -> Array:
        """Returns the rows that arrive, `[P room, words]`, zeros where none does."""
        peers = jnp.arange(self.num_peers, dtype=jnp.int32)[None]
        rows = jnp.broadcast_to(jnp.arange(len(at), dtype=jnp.int32)[:, None], at.shape)
        empty = jnp.full((self.num_peers, self.room), len(at), jnp.int32)
        places = jnp.where(at < 0, self.room + rows, at)  # no two alike, or they would be sorted
        order = empty.at[jnp.broadcast_to(peers, at.shape), places].set(
            rows, mode="drop", unique_indices=True
        )
        sent = jnp.take(words, order.reshape(-1), axis=0, mode="fill", fill_value=0)
        return self._swapped(sent)

    def home(self, sums: Float[Array, "Q d"], at: Int[Array, "R P"], top_k: int) -> Array:
        """Returns each row's sum, of those that come back from at most `top_k` peers; in float32,
        in the order of peers.
        """
        back = self._swapped(sums)
        turn = jnp.cumsum(at >= 0, axis=1, dtype=jnp.int32) - 1
        peers = jnp.arange(self.num_peers, dtype=jnp.int32)[None]
        out = jnp.zeros((len(at), sums.shape[1]), jnp.float32)
        for number in range(min(top_k, self.num_peers)):
            own = (at >= 0) & (turn == number)
            place = jnp.sum(jnp.where(own, peers * self.room + at, 0), axis=1, dtype=jnp.int32)
            place = jnp.where(jnp.any(own, axis=1), place, len(back))
            out = out + jnp.take(back, place, axis=0, mode="fill", fill_value=0).astype(out.dtype)
        return out.astype(sums.dtype)

    def _swapped(self, rows: Array) -> Array:
        groups = None if len(self.groups) == 1 else self.groups
        return lax.all_to_all(rows, AXIS, 0, 0, axis_index_groups=groups, tiled=True)


def _hops(delivery: cost.Delivery, num_devices: int) -> tuple[_Hop, ...]:
    node, devices = delivery.node, list(range(num_devices))
    if not node:
        return (_Hop([devices], delivery.room, 1),)
    nodes = [devices[first : first + node] for first in range(0, num_devices, node)]
    return (
        _Hop([devices[number::node] for number in range(node)], delivery.room, node),
        _Hop(nodes, delivery.inside, 1),
    )
