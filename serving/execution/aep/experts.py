"""A worker with experts: keeps rows that came, runs a layer's visits at once, sends parts back."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.experts import ExpertPool
from jmoe.stages import expert_stage
from serving.execution.aep.messages import FromExperts, RowNumbers, ToExperts, moved
from serving.execution.aep.queues import Entry, MicroQueues, Picker, bucket


@partial(jax.jit, donate_argnums=0)
def _keep(
    store: Float[Array, "R d"], h: Float[Array, "n d"], rows: Int[Array, "n"]
) -> Float[Array, "R d"]:
    return store.at[rows].set(h, mode="drop")


@partial(jax.jit, static_argnames="max_active")
def _run(
    pool: ExpertPool,
    store: Float[Array, "R d"],
    slots: Int[Array, "E"],
    rows: Int[Array, "V"],
    expert_ids: Int[Array, "V"],
    *,
    max_active: int,
) -> Float[Array, "V d"]:
    return expert_stage(pool, store[rows], expert_ids, slots, max_active=max_active)


@jax.jit
def _some(parts: Float[Array, "V d"], at: Int[Array, "n"]) -> Float[Array, "n d"]:
    return parts[at]


class ExpertWorker:
    """Experts of one device. Launches: one for a message that comes, one for a stage, and one more
    for each attention worker that its parts go to if there are several; and one copy to each.
    """

    def __init__(
        self,
        pool: ExpertPool,
        slots: Int[np.ndarray, "layers E"],
        numbers: RowNumbers,
        device: Any,
        attention: Sequence[Any],
        send: Callable[[int, FromExperts], None],
        picker: Picker,
        *,
        groups: Int[np.ndarray, "E"] | None = None,
        max_visits: int = 1 << 16,
    ) -> None:
        """Takes over a device's experts.

        Args:
            pool: of this device alone, on it.
            slots: slot of each MoE layer's logical experts in that pool; -1: they are elsewhere.
            numbers: of the rows that may come.
            device: of the pool.
            attention: devices of the attention workers.
            send: called with an attention worker's number and parts for it.
            picker: whose layer runs next.
            groups: the group of each logical expert; experts of one are launched together. None:
                all of a layer are.
            max_visits: in one stage.
        """
        self.pool, self.device, self.numbers = pool, device, numbers
        self._slots = jax.device_put(jnp.asarray(slots, jnp.int32), device)
        self._each_layer = [self._slots[layer] for layer in range(len(slots))]
        self._max_active = max(1, int((slots >= 0).sum(axis=1).max()))
        width = pool.gate_up.shape[1]
        self._store = jax.device_put(jnp.zeros((numbers.total, width), pool.down.dtype), device)
        self._groups = np.zeros(slots.shape[1], np.int64) if groups is None else groups
        self.queues = MicroQueues(len(slots), int(self._groups.max()) + 1)
        self._attention, self._send, self._picker = list(attention), send, picker
        self._max_visits = max_visits
        self.stages = 0

    def receive(self, visits: ToExperts, now: float) -> None:
        """Rows came; they wait for their layer."""
        rows = np.full(len(visits.h), self.numbers.total, np.int32)  # padding: dropped
        rows[: len(visits.row)] = visits.row
        self._store = _keep(self._store, visits.h, rows)
        group = self._groups[visits.expert]
        for number in np.unique(group):
            own = np.flatnonzero(group == number)
            what = visits.row[visits.at[own]], visits.pick[own], visits.expert[own]
            entry = Entry(len(own), int(visits.urgent[own].sum()), now, what)
            self.queues.put(visits.layer, int(number), entry)

    def advance(self, now: float, *, more_may_come: bool = True) -> bool:
        """Runs a stage, if the picker says so; whether it did."""
        queues = self.queues
        if not queues.num_rows:
            return False
        chosen = self._picker.pick(
            queues.counts,
            queues.oldest,
            now,
            urgent=queues.urgent,
            more_may_come=more_may_come,
        )
        if chosen is None:
            return False
        layer, group = chosen
        taken = [entry.what for entry in queues.take(layer, group, self._max_visits)]
        row, pick, expert = (np.concatenate(column) for column in zip(*taken, strict=True))
        size = bucket(len(row))
        rows, ids = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        rows[: len(row)], ids[: len(row)] = row, expert
        parts = _run(
            self.pool, self._store, self._each_layer[layer], rows, ids, max_active=self._max_active
        )
        self.stages += 1
        self._return(parts, row, pick)
        return True

    def _return(self, parts: Array, row: np.ndarray, pick: np.ndarray) -> None:
        owner = self.numbers.owner(row)
        for number in np.unique(owner).tolist():
            own = np.flatnonzero(owner == number)
            some = parts
            if len(own) < len(row):
                at = np.zeros(bucket(len(own)), np.int32)
                at[: len(own)] = own
                some = _some(parts, at)
            self._send(
                number, FromExperts(moved(some, self._attention[number]), row[own], pick[own])
            )
