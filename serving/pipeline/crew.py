"""Asynchronous workers as an engine sees them: units enter, and leave when they are through."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import DELTA_SLOT, Q_LEN, SLOT
from serving.execution.ranks import ByRank
from serving.pipeline.messages import Steer, Unit
from serving.plan import Limits, Phase, StepPlan


class WorkerSeen(NamedTuple):
    """A worker as an operator sees it."""

    name: str
    is_up: bool
    stages: int  # since it started
    rows: int  # that wait in its queues
    oldest_s: float  # for how long the oldest of them has; 0 without any


@runtime_checkable
class Crew(Protocol):
    """A Runner besides (`serving.execution.runner`): its `limits` have a rank for each attention
    worker.
    """

    def enter(
        self,
        plan: StepPlan,
        numbers: Sequence[int],
        *,
        ends_prompt: Sequence[bool],
        urgent: Sequence[bool],
        scores: Sequence[bool],
    ) -> None:
        """Hands a step's rows to the workers, each known by its number from now on. Returns at
        once.
        """
        ...

    def steer(self, steer: Steer) -> None:
        """Sets the brownout of all stages from now on."""
        ...

    def listen(self, tell: Callable[[Any], None]) -> None:
        """Registers `tell`, which is called, in any thread, with Left, LostUnits and FailedUnits,
        and with WorkerDown and WorkerUp where workers may end.
        """
        ...

    def record(self) -> None:
        """Reports Stages to the listener as well from now on."""
        ...

    def seen(self) -> list[WorkerSeen]:
        """Returns the workers now, those with attention first."""
        ...

    @property
    def unreachable(self) -> str:
        """An expert that no worker has now, and who had it; empty: none is missing."""
        ...

    @property
    def retry_after_s(self) -> float:
        """How long it takes until a worker that is gone is there again."""
        ...


def units_of(
    plan: StepPlan,
    limits: Limits,
    numbers: Sequence[int],
    *,
    ends_prompt: Sequence[bool],
    urgent: Sequence[bool],
    scores: Sequence[bool],
) -> list[list[Unit]]:
    """Splits a step's rows by the attention worker that has their sequence, numbered as on it."""
    step, found = ByRank.of(plan, limits), [list[Unit]() for _ in range(limits.num_ranks)]
    ends = np.cumsum(step.rows[:, Q_LEN])
    for at, row in enumerate(step.rows):
        slot, rank, tokens = int(row[SLOT]), int(step.rank[at]), None
        places = np.array([slot], np.int32)
        if plan.phase is Phase.PREFILL:
            own = slice(int(ends[at] - row[Q_LEN]), int(ends[at]))
            tokens, places = step.tokens[own], step.places[own]
        mine = (step.delta_rank == rank) & (step.deltas[:, DELTA_SLOT] == slot)
        unit = Unit(
            row.copy(),
            tokens,
            places,
            step.deltas[mine],
            urgent[at],
            ends_prompt[at],
            scores[at],
            numbers[at],
        )
        found[rank].append(unit)
    return found


class OneModel:
    """What a Runner says whose model is whole, alone, and stays as it is."""

    limits: Limits
    copy_s = 0.0
    unreachable = ""
    retry_after_s = 0.0

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """See Runner: all."""
        return self.limits.num_layers

    @property
    def part_layers_by_size(self) -> Mapping[str, int]:
        """See Runner."""
        return {}

    @property
    def implementations(self) -> Mapping[str, str]:
        """See Runner: nothing to tell."""
        return {}

    def mixes(self, counts: Sequence[int]) -> bool:
        """See Runner: never."""
        return False

    @property
    def resident_models(self) -> Sequence[int] | None:
        """See Runner: all."""
        return None

    def launch(self, plan: StepPlan, control: Any) -> Future[Any]:
        """Raises: steps run through `Crew` here."""
        raise NotImplementedError

    def draw(self, allowed: np.ndarray) -> None:
        """Raises: structured outputs are refused."""
        raise NotImplementedError

    def load_way(self, way: int, layer: int) -> None:
        """Raises: only one way is there."""
        raise NotImplementedError

    def host_layer(self, layer: int, hosts: Int[np.ndarray, "E D"]) -> None:
        """Raises: experts stay where they are."""
        raise NotImplementedError

    def replace_set(self, victim: int, model: int) -> Future[None]:
        """Raises: there is one model."""
        raise NotImplementedError

    def fetch_experts(self, experts: Any) -> None:
        """Raises: all experts are there."""
        raise NotImplementedError
