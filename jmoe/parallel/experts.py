"""Experts spread over the devices of a mesh: the part of an MoE layer that knows of the others.

Runs inside `jax.shard_map` over `AXIS`, with attention data-parallel: each of D devices has T rows
of its own, the same number everywhere; all of them, in the order of devices, are N = D T rows. They
travel to every device in one all-gather, each device computes the visits that fall to it, and a
reduce-scatter brings a row's parts home (Libra, section 3.1).

Rows may travel in two halves, every second row each: the second one comes under visits of the
first, whose sums leave under visits of the second. `jmoe.parallel.delivery` chooses, and has
another exchange.

A device's part of the visits varies, up to all of them; arrays of rows sorted for experts have room
for `cost.OVER` times the mean, and the rows that are over wait for further passes (`in_passes`).

What all devices have to agree on, the brownout plan and who computes a visit, is a function of
gathered bits alone. Two devices that compute the same number each for itself may differ in its last
bit, and a visit would be computed twice or by nobody.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool
from jmoe.moe import Answered, Asked, LayerStats, compute, gate, planned
from jmoe.parallel import cost
from pallas_kernels import routing
from pallas_kernels.backend import backend

AXIS = "ep"
"""The mesh axis that experts are spread over."""

VALID, EXEMPT = 1, 2  # bits of a row's flags


class AllRows(NamedTuple):
    """What experts have to know of the rows of all devices."""

    sent: Int[Array, "R words"]  # as they travelled, all or a half; begins with the rows
    weights: Float[Array, "N K"]  # gate weights, float32
    ids: Int[Array, "N K"]  # experts that the routers chose, int32
    valid: Bool[Array, "N"]
    exempt: Bool[Array, "N"]
    next_ids: Int[Array, "N K"] | None = None  # experts that the next layer's may choose, if asked

    def h(self, own: Float[Array, "T d"]) -> Float[Array, "R d"]:
        """Returns the normed rows, of which `own` are this device's. Where it is called they are
        read out of what was sent; a loop that was given them would want a copy.
        """
        return from_words(self.sent[:, : own.shape[1]], own.dtype)


def gather_rows(
    h: Float[Array, "R d"],
    weights: Float[Array, "T K"],
    ids: Int[Array, "T K"],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    next_ids: Int[Array, "T K"] | None = None,
) -> AllRows:
    """Returns the rows of all devices in one collective, to the bit: all travels as integers of h's
    width. Where `h` are every second row, those between them are known but for themselves.
    """
    flags, top_k = jnp.where(valid, VALID, 0) | jnp.where(exempt, EXEMPT, 0), ids.shape[1]
    columns = [ids, flags.astype(jnp.int32)[:, None], *([] if next_ids is None else [next_ids])]
    joined = jnp.concatenate(columns, axis=1)
    parts = to_words(h, weights.astype(jnp.float32), joined)
    sent = lax.all_gather(jnp.concatenate(parts, axis=1), AXIS, tiled=True)
    ends = (parts[0].shape[1], parts[0].shape[1] + parts[1].shape[1])
    _, weights, numbers = jnp.split(sent, ends, axis=1)
    numbers = from_words(numbers, jnp.int32).reshape(-1, joined.shape[1])
    flags = numbers[:, top_k]
    return AllRows(
        sent,
        from_words(weights, jnp.float32).reshape(-1, top_k),
        numbers[:, :top_k],
        (flags & VALID) > 0,
        (flags & EXEMPT) > 0,
        None if next_ids is None else numbers[:, top_k + 1 :],
    )


def to_words(h: Float[Array, "R d"], *others: Array) -> list[Array]:
    """Returns matrices as integers of h's width, so that they can travel side by side."""
    word = jnp.dtype(f"uint{8 * h.dtype.itemsize}")
    return [lax.bitcast_convert_type(a, word).reshape(len(h), -1) for a in (h, *others)]


def from_words(words: Array, kind: jnp.dtype | type) -> Array:
    """Returns the matrix whose bits they are."""
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
    cfg: ModelConfig,
    pool: Pool,
    table: ExpertTable,
    asked: Asked,
    max_active: int,
    *,
    halves: bool = False,
) -> Answered:
    """Serves the rows of this device wherever their experts are, at once or in two halves. A
    `jmoe.moe.Exchange`.

    One brownout plan covers the rows of all devices. The table's slots are this device's own (-1:
    not here), its hosts say who has which expert. Rows by expert are those, of all devices, that
    this one computed.
    """
    assert table.hosts is not None
    num_rows, parts = asked.h.shape[0], 2 if halves else 1
    h = asked.h.reshape(-1, parts, asked.h.shape[1])
    _, ids, rows, plan = planned_together(cfg, table, asked, h[:, 0])
    device = lax.axis_index(AXIS)
    own = hosts_in_turn(plan.expert_ids, table.hosts) == device
    visits, slots = jnp.where(own, plan.expert_ids, -1), jnp.maximum(table.slots, 0)
    given: dict[str, Any] = {"max_active": room_of(cfg, pool, max_active)}

    def computed(part: int, rows: AllRows) -> tuple[Array, Array]:
        def run(ids: Array, max_visits: int | None) -> tuple[Array, Array]:
            sizes = given | {"activation": cfg.activation, "max_visits": max_visits}
            return compute(pool, rows.h(asked.h), rows.weights[part::parts], ids, slots, **sizes)

        own = visits[part::parts]
        return in_passes(run, own, visits_of_pass(cfg, h[:, part], len(own)))

    if parts == 1:
        sums, expert_rows = computed(0, rows)
        out = lax.psum_scatter(sums, AXIS, tiled=True)
    else:
        # What a transfer is to be hidden by is tied to its end.
        word = rows.sent.dtype
        others = lax.all_gather(lax.bitcast_convert_type(h[:, 1], word), AXIS, tiled=True)
        sums, expert_rows = computed(0, rows)
        sums, others = lax.optimization_barrier((sums, others))
        first = lax.psum_scatter(sums, AXIS, tiled=True)
        sums, more = computed(1, rows._replace(sent=others))
        sums, first = lax.optimization_barrier((sums, first))
        second = lax.psum_scatter(sums, AXIS, tiled=True)
        expert_rows, out = expert_rows + more, jnp.stack([first, second], 1).reshape(asked.h.shape)
    return Answered(out, ids, LayerStats(own_degraded(plan, device, num_rows), expert_rows))


def planned_together(
    cfg: ModelConfig, table: ExpertTable, asked: Asked, h: Float[Array, "R columns"]
) -> tuple[Float[Array, "T K"], Int[Array, "T K"], AllRows, routing.Plan]:
    """Returns gate weights and ids of this device's rows; and the rows of all devices, of which `h`
    travel, with their brownout plan.
    """
    weights, ids = gate(cfg, asked.logits, asked.layer, table.groups.shape[0])
    rows = gather_rows(h, weights, ids, asked.rows.valid, asked.rows.exempt)
    flags = rows.valid, rows.exempt
    plan = planned(cfg, rows.ids, rows.weights, table.groups, *flags, asked.control)
    return weights, ids, rows, plan


def visits_of_pass(
    cfg: ModelConfig, h: Float[Array, "T d"], num_rows: int, received: int | None = None
) -> int | None:
    """Returns the visits after which a device leaves further rows to another pass, where `h` are
    its own ones of `num_rows` in all, of which it has `received` (None: all); None: room for all
    visits costs less. A CPU's loops cost nothing.
    """
    sizes = num_rows // len(h), len(h), h.dtype.itemsize
    loop_s = 0.0 if backend() == "cpu" else cost.LOOP_S
    return cost.MeshStep(cfg, *sizes, loop_s=loop_s).visits_of_pass(received)


def in_passes(
    run: Callable[[Array, int | None], tuple[Float[Array, "N d"], Int[Array, "E"]]],
    expert_ids: Int[Array, "N K"],
    per_pass: int | None,
) -> tuple[Float[Array, "N d"], Int[Array, "E"]]:
    """Runs visits (-1: none) row by row in passes, the next one from `per_pass` visits on (None:
    all are one pass). `run` is given visits and a bound of their number, and returns each row's sum
    and the rows by expert.

    A row's visits are all in one pass, so that its sum has the same bits in any number of them. No
    other device has to know how many these are, as long as `run` has no collective.
    """
    if per_pass is None:
        return run(expert_ids, None)
    visits = jnp.sum(expert_ids >= 0, axis=1, dtype=jnp.int32)
    pass_of = (jnp.cumsum(visits, dtype=jnp.int32) - visits) // per_pass
    last = jnp.max(jnp.where(visits > 0, pass_of, 0))
    most = per_pass + expert_ids.shape[1] - 1  # the last row may begin just before the end
    return by_pass(pass_of, last, lambda here: run(jnp.where(here, expert_ids, -1), most))


def by_pass(
    pass_of: Int[Array, "N"],
    last: Int[Array, ""],
    run: Callable[[Bool[Array, "N 1"]], tuple[Float[Array, "N d"], Int[Array, "E"]]],
) -> tuple[Float[Array, "N d"], Int[Array, "E"]]:
    """Runs rows in passes 0 to `last`: `run` is told which are in one, and returns their sums and
    the rows by expert.
    """

    @jax.jit  # lowered once for both uses
    def only(number: Array) -> tuple[Array, Array, Array]:
        here = (pass_of == number)[:, None]
        return here, *run(here)

    def one_more(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, before, expert_rows = state
        here, out, more_rows = only(number)
        return number - 1, jnp.where(here, out, before), expert_rows + more_rows

    # The first is no part of the loop, which would have to begin with an array of zeros, and with
    # one more question whether it goes on.
    _, *found = only(jnp.int32(0))
    _, out, expert_rows = lax.while_loop(lambda state: state[0] > 0, one_more, (last, *found))
    return out, expert_rows


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
