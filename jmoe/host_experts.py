"""Experts of a family that do not fit on the device: they lie in host memory (Multi-MoE, 3.2).

At every position, (MoE layer, expert), one expert or more stay on the device for good. A model
whose own is not among them is served by a sibling's, its stand-in, or by its own once that is
fetched into a spare slot. Only which slot a table names changes; no program does.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jmoe.experts import ABSENT, FETCHED, write_slots
from jmoe.sharing import Sharing
from jmoe.weights import PoolHolder, ResidentWeights

Expert = tuple[int, int, int]
"""Owner (a model's number, or `MERGED`), MoE layer, and number of a distinct expert."""


def choose_resident(
    held: Int[np.ndarray, "slots 3"], num_positions: int, count: int
) -> Bool[np.ndarray, "slots"]:
    """Which distinct experts stay on the device for good.

    `held` is of `Sharing.slots`. First one at each position, merged ones and the first model's
    before others; then the other models' in turn, layer by layer, so that none goes without while
    another has all. Raises ValueError for a count that leaves a position without any, or a model
    without room.
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
        own = own[np.lexsort((layer[own], expert[own]))]
        turn[own] = np.arange(len(own))
    order = rest[np.lexsort((owner[rest], turn[rest]))]
    stays[order[: count - num_positions]] = True
    return stays


@dataclass(eq=False)
class HostExperts:
    """Experts in host memory, and which of them lie in spare slots now.

    `weights` has `gate_up [d, 2 f]` and `down [f, d]` of each, in the pool's dtype; `users` the
    models that route to it; `stand_in` the slot that serves them without it. One thread calls.
    """

    spare: range  # slots of the pool
    weights: Mapping[Expert, tuple[np.ndarray, np.ndarray]]
    users: Mapping[Expert, tuple[int, ...]]
    stand_in: Mapping[Expert, int]
    fetched: dict[Expert, int] = field(default_factory=dict)  # the slot of each that is there

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return sum(part.nbytes for part in next(iter(self.weights.values())))

    @property
    def free(self) -> list[int]:
        """Spare slots that hold nothing."""
        taken = set(self.fetched.values())
        return [slot for slot in self.spare if slot not in taken]

    def of(self, model: int, layer: int, expert: int) -> Expert:
        """The distinct expert in host memory that a model routes to. Raises KeyError for others."""
        return self._by_user[model, layer, expert]

    def away_of(self, model: int) -> frozenset[tuple[int, int]]:
        """(MoE layer, expert) of those that a model routes to and that lie in host memory."""
        return frozenset((layer, e) for user, layer, e in self._by_user if user == model)

    def needed_by_a_row(self, num_picks: int) -> int:
        """Spare slots that one row of any model can need in one step, all layers together."""
        return needed_by_a_row(self.users, num_picks)

    def fetch(
        self, expert: Expert, slot: int, held: PoolHolder, models: Mapping[int, ResidentWeights]
    ) -> None:
        """Copies an expert into a spare slot between two steps, and points its users' tables at it.

        What the slot held goes back to its stand-in.
        """
        for other in [e for e, at in self.fetched.items() if at == slot]:
            del self.fetched[other]
            self._point(other, self.stand_in[other], ABSENT, models)
        parts = (jnp.asarray(part[None]) for part in self.weights[expert])
        held.pool = write_slots(held.pool, jnp.asarray([slot], jnp.int32), *parts)
        self.fetched[expert] = slot
        self._point(expert, slot, FETCHED, models)

    def _point(
        self, expert: Expert, slot: int, away: int, models: Mapping[int, ResidentWeights]
    ) -> None:
        _, layer, number = expert
        for user in self.users[expert]:
            models[user].point(layer, number, slot, away)

    def __post_init__(self) -> None:
        self._by_user = {
            (user, layer, number): (owner, layer, number)
            for (owner, layer, number), users in self.users.items()
            for user in users
        }


@dataclass(frozen=True)
class Homes:
    """Where the distinct routed experts of a family are: a slot each, or host memory."""

    slot: Int[np.ndarray, "slots"]  # by number of `Sharing.slots`; -1: in host memory
    spare: range  # slots behind them
    routed: Int[np.ndarray, "N layers m"]  # the slot that serves each model's expert at the start
    away: Int[np.ndarray, "N layers m"] | None  # as in ExpertTable; None: all are on the device
    users: Mapping[Expert, tuple[int, ...]]
    stand_in: Mapping[Expert, int]

    @classmethod
    def of(cls, sharing: Sharing, num_resident: int, num_spare: int) -> "Homes":
        """`num_resident` 0: all are on the device for good. Raises ValueError."""
        routed, held = sharing.slots()
        if not num_resident or num_resident >= len(held):
            slot = np.arange(len(held), dtype=np.int32)
            return cls(slot, range(len(held), len(held)), routed, None, {}, {})
        stays = choose_resident(held, routed[0].size, num_resident)
        slot = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
        owner, layer, expert = held.T
        served, away = slot[routed], np.where(slot[routed] < 0, ABSENT, 0).astype(np.int32)
        users: dict[Expert, tuple[int, ...]] = {}
        stand_in: dict[Expert, int] = {}
        for at in np.flatnonzero(~stays):
            here = (layer == layer[at]) & (expert == expert[at]) & stays
            key = int(owner[at]), int(layer[at]), int(expert[at])
            stand_in[key] = int(slot[np.flatnonzero(here)[0]])
            asks = routed[:, layer[at], expert[at]] == at
            users[key] = tuple(np.flatnonzero(asks).tolist())
            served[asks, layer[at], expert[at]] = stand_in[key]
        end = int(stays.sum())
        return cls(slot, range(end, end + num_spare), served, away, users, stand_in)

    @property
    def num_slots(self) -> int:
        """Of the pool, routed experts and spare ones."""
        return self.spare.stop


def needed_by_a_row(users: Mapping[Expert, tuple[int, ...]], num_picks: int) -> int:
    """Experts of host memory that one row of any model can visit: `num_picks` at most in each MoE
    layer. `users` are of each expert there.
    """
    found = Counter((user, layer) for (_, layer, _), own in users.items() for user in own)
    by_model = Counter[int]()
    for (user, _), count in found.items():
        by_model[user] += min(num_picks, count)
    return max(by_model.values(), default=0)


def check_spare(count: int, per_row: int) -> None:
    """Raises ValueError for spare slots that are too few for a row that no stand-in may serve."""
    if count < per_row:
        raise ValueError(
            f"spare_experts is {count}; a token of a request that refuses brownout can need "
            f"{per_row} experts of host memory at once: set it to {per_row} or more"
        )
