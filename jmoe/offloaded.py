"""Experts of a family that have no slot of the pool for good (Multi-MoE, 3.2).

They lie in host memory, or are known by their difference from a sibling's (`jmoe.residuals`). At
every position, (MoE layer, expert), one expert or more stay on the device. A model whose own is not
among them is served by a sibling's, its substitute, or by its own once that is in a spare slot.
Only which slot a table names changes; no program does.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jmoe.experts import ABSENT, FETCHED, Pool, write_slots
from jmoe.sharing import Sharing
from jmoe.weights import PoolHolder, ResidentWeights

Expert = tuple[int, int, int]
"""Owner (a model's number, or `MERGED`), MoE layer, and number of a distinct expert."""


@runtime_checkable
class Source(Protocol):
    """Where the weights of offloaded experts come from."""

    @property
    def fetch_bytes(self) -> int:
        """Bytes that are read to fetch one expert."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes that the source itself takes on the device."""
        ...

    def write(self, pool: Pool, expert: Expert, slot: int) -> Pool:
        """Writes an expert into a slot. The pool passed in is gone afterwards (donated)."""
        ...


@dataclass(frozen=True, eq=False)
class OnHost:
    """Experts in host memory: a pool of one slot each, in NumPy arrays."""

    weights: Mapping[Expert, Pool]
    device_bytes = 0

    @property
    def fetch_bytes(self) -> int:
        """Bytes of one expert."""
        return next(iter(self.weights.values())).slot_bytes

    def write(self, pool: Pool, expert: Expert, slot: int) -> Pool:
        """See Source."""
        return write_slots(pool, jnp.asarray([slot], jnp.int32), self.weights[expert])


class OffloadedExperts:
    """Experts without a slot of their own, and which of them lie in spare slots now.

    `users` are the models that route to each, `substitute` the slot that serves them without it.
    One thread calls.
    """

    def __init__(
        self,
        spare: range,  # slots of the pool
        source: Source,
        users: Mapping[Expert, tuple[int, ...]],
        substitute: Mapping[Expert, int],
    ) -> None:
        self.spare, self.source, self.users, self.substitute = spare, source, users, substitute
        self.fetched: dict[Expert, int] = {}  # the slot of each that is there
        self.free = list(spare)  # slots that hold nothing
        self._by_user = {
            (user, layer, number): (owner, layer, number)
            for (owner, layer, number), own in users.items()
            for user in own
        }

    def of(self, model: int, layer: int, expert: int) -> Expert:
        """Returns the offloaded expert that a model routes to. Raises
        KeyError for others.
        """
        return self._by_user[model, layer, expert]

    def offloaded_of(self, model: int) -> frozenset[tuple[int, int]]:
        """Returns (MoE layer, expert) of the offloaded experts that a model routes to."""
        return frozenset((layer, e) for user, layer, e in self._by_user if user == model)

    def needed_by_a_row(self, num_picks: int) -> int:
        """Returns the spare slots that one row of any model can need in one step, all layers
        together.
        """
        return needed_by_a_row(self.users, num_picks)

    def first_fetched(self) -> dict[Expert, int]:
        """Chooses experts for the spare slots before visits are known, evenly over the layers."""
        order = sorted(self.users, key=lambda e: (e[2], e[1], e[0]))
        return dict(zip(order, self.spare, strict=False))

    def fetch(
        self,
        experts: Mapping[Expert, int],
        held: PoolHolder,
        models: Mapping[int, ResidentWeights],
    ) -> None:
        """Writes experts into spare slots, each its own, between two steps, and points their users'
        tables at them. What a slot held goes back to its substitute.
        """
        at = {slot: expert for expert, slot in self.fetched.items()}
        changes: dict[int, list[tuple[int, int, int, int]]] = {}
        for expert, slot in experts.items():
            if (gone := at.get(slot)) is not None:
                del self.fetched[gone]
                self._serve(gone, self.substitute[gone], ABSENT, changes)
            else:
                self.free.remove(slot)
            held.pool = self.source.write(held.pool, expert, slot)
            self.fetched[expert] = slot
            self._serve(expert, slot, FETCHED, changes)
        for user, own in changes.items():
            models[user].point(own)

    def _serve(self, expert: Expert, slot: int, offloaded: int, changes: dict[int, list]) -> None:
        _, layer, number = expert
        for user in self.users[expert]:
            changes.setdefault(user, []).append((layer, number, slot, offloaded))


def choose_resident(
    held: Int[np.ndarray, "slots 3"], num_positions: int, count: int
) -> Bool[np.ndarray, "slots"]:
    """Returns which distinct experts stay on the device for good.

    `held` is of `Sharing.slots`. First one at each position, merged ones and the first model's
    before others; then the other models' in turn, each model's spread over its layers, so that none
    goes without while another has all. Raises ValueError for a count that leaves a position without
    any.
    """
    if not num_positions <= count:
        raise ValueError(
            f"{count} experts on the device do not hold one model's; they must be {num_positions} "
            f"(one at each position) to {len(held)} (all of this family)"
        )
    owner, layer, expert = held.T
    _, first = np.unique(np.stack([layer, expert], axis=1), axis=0, return_index=True)
    stays = np.zeros(len(held), bool)
    stays[first] = True  # slots of a position are in the order of their owners
    rest = np.flatnonzero(~stays)
    turn = np.zeros(len(held), np.int64)  # of each among its owner's
    for one in np.unique(owner[rest]):
        own = rest[owner[rest] == one]
        own = own[np.lexsort((layer[own], expert[own]))]  # a layer's second after all layers' first
        turn[own] = np.arange(len(own))
    order = rest[np.lexsort((owner[rest], turn[rest]))]
    stays[order[: count - num_positions]] = True
    return stays


@dataclass(frozen=True)
class Homes:
    """Where the distinct routed experts of a family are: a slot each, or offloaded."""

    slot: Int[np.ndarray, "slots"]  # by number of `Sharing.slots`; -1: offloaded
    spare: range  # slots behind them
    routed: Int[np.ndarray, "N layers m"]  # the slot that serves each model's expert at the start
    offloaded: (
        Int[np.ndarray, "N layers m"] | None
    )  # as in ExpertTable; None: all are on the device
    users: Mapping[Expert, tuple[int, ...]]
    substitute: Mapping[Expert, int]

    @classmethod
    def of(cls, sharing: Sharing, num_resident: int, num_spare: int) -> "Homes":
        """Gives every distinct expert its home; `num_resident` 0: all are on the device for good,
        but for those that `sharing` knows by a difference from a sibling's. Raises ValueError for
        numbers that cannot be.
        """
        routed, held = sharing.slots()
        all_there = not num_resident or num_resident >= len(held)
        if sharing.differs.any():
            if num_resident:
                raise ValueError(
                    f"resident_experts is {num_resident}, and this family's map knows experts by "
                    "their difference from others, which are to stay on the device: set it to 0"
                )
            return cls._by_differences(sharing, routed, len(held), num_spare)
        if all_there and num_spare:
            raise ValueError(
                f"spare_experts is {num_spare}, and all {len(held)} experts of this family have a "
                "slot for good: set it to 0, or resident_experts to fewer"
            )
        if all_there:
            slot = np.arange(len(held), dtype=np.int32)
            return cls(slot, range(len(held), len(held)), routed, None, {}, {})
        stays = choose_resident(held, routed[0].size, num_resident)
        slot = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
        by_position = np.full(routed.shape[1:], -1)
        by_position[tuple(held[stays][::-1, 1:].T)] = slot[stays][::-1]  # the first of each
        offloaded = slot[routed] < 0
        served = np.where(offloaded, by_position[None], slot[routed]).astype(np.int32)
        users: dict[Expert, tuple[int, ...]] = {}
        for model, layer, expert in np.argwhere(offloaded).tolist():
            owner = int(held[routed[model, layer, expert], 0])
            users[owner, layer, expert] = (*users.get((owner, layer, expert), ()), model)
        return cls(
            slot,
            _behind(slot, num_spare),
            served,
            _marked(offloaded),
            users,
            _serving(users, served),
        )

    @classmethod
    def _by_differences(
        cls, sharing: Sharing, routed: np.ndarray, count: int, num_spare: int
    ) -> "Homes":
        slot = np.arange(count, dtype=np.int32)
        users: dict[Expert, tuple[int, ...]] = {
            (model, layer, expert): (model,)
            for model, layer, expert in np.argwhere(sharing.differs).tolist()
        }
        offloaded = _marked(sharing.differs)
        return cls(
            slot, _behind(slot, num_spare), routed, offloaded, users, _serving(users, routed)
        )

    @property
    def num_slots(self) -> int:
        """Slots of the pool: those of routed experts, and spare ones."""
        return self.spare.stop


def _behind(slot: Int[np.ndarray, "slots"], count: int) -> range:
    return range(int(slot.max()) + 1, int(slot.max()) + 1 + count)


def _marked(offloaded: Bool[np.ndarray, "N layers m"]) -> Int[np.ndarray, "N layers m"]:
    return np.where(offloaded, ABSENT, 0).astype(np.int32)


def _serving(
    users: Mapping[Expert, tuple[int, ...]], served: Int[np.ndarray, "N layers m"]
) -> dict[Expert, int]:
    return {e: int(served[own[0], e[1], e[2]]) for e, own in users.items()}


def needed_by_a_row(users: Mapping[Expert, tuple[int, ...]], num_picks: int) -> int:
    """Returns the offloaded experts and that one row of any model can visit: `num_picks` at
    most in each MoE layer. `users` are of each offloaded expert.
    """
    found = Counter((user, layer) for (_, layer, _), own in users.items() for user in own)
    by_model = Counter[int]()
    for (user, _), count in found.items():
        by_model[user] += min(num_picks, count)
    return max(by_model.values(), default=0)


def check_spare(count: int, per_row: int) -> None:
    """Raises ValueError for spare slots that are too few for a row that no substitute may serve."""
    if count < per_row:
        raise ValueError(
            f"spare_experts is {count}; a token of a request that refuses brownout can need "
            f"{per_row} experts at once that have no slot of their own: set it to {per_row} or more"
        )
