"""What an engine needs of its devices: an `Executor`, and what only some executors can do.

A step runner (`serving.execution.runner`) takes steps one after another and completes each whole,
in order, so there is room for one beside the one that runs. A crew of asynchronous workers
(`serving.pipeline.crew`) has room for any number, and completes rows singly, in any order.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from serving.plan import Limits, Phase, StepControl, StepPlan, StepResult

if TYPE_CHECKING:  # front ends look at what an executor can do, and import no jax
    from jmoe.api import Model
    from jmoe.arrival import Arrival
    from jmoe.offloaded import Expert
    from jmoe.weights import Params

STEPS_AT_ONCE = 2
"""Steps that a step runner takes before it completes the first: one runs, one waits behind it."""

# ---- what an executor reports ---------------------------------------------------------------


class Completed(NamedTuple):
    """Rows whose layers have run."""

    result: StepResult | BaseException  # of these rows; or what ended the executor
    rows: Sequence[int] = ()
    """Their numbers (`Singles.numbers`), all of one phase; empty where steps complete whole."""
    strategy: int = 0  # of single rows, that of the last to enter
    least_percent: Sequence[int] = ()  # of single rows: the lowest threshold on each one's way
    most_percent: Sequence[int] = ()


class LostRows(NamedTuple):
    """Rows that will never complete, though their rank has all that was computed of them before."""

    rows: list[int]


class FailedRows(NamedTuple):
    """Rows that cannot go on, and why."""

    rows: list[int]
    reason: str


class RankDown(NamedTuple):
    """A rank is gone, with the keys and values of its sequences."""

    rank: int
    reason: str


class RankUp(NamedTuple):
    """A rank is there again, and empty."""

    rank: int


class WayChanged(NamedTuple):
    """Every device has the united experts of the way that was asked for (`ChangesWay`)."""

    way: int


class Stages(NamedTuple):
    """Stages that a worker ran, in order. Times are seconds of its machine's `time.monotonic`."""

    worker: str
    layers: Int[np.ndarray, "n"]  # with attention, the one after the last is the head
    rows: Int[np.ndarray, "n"]
    began_at: Float[np.ndarray, "n"]
    ended_at: Float[np.ndarray, "n"]  # when its host went on; a device may be at it still
    waiting: Int[np.ndarray, "n layers"]  # rows in its queues as it began


# ---- what every executor does -----------------------------------------------------------------


class Executor(Protocol):
    """Runs steps."""

    limits: Limits

    @property
    def in_order(self) -> bool:
        """Whether steps complete whole, in the order in which they were submitted, with room for
        `STEPS_AT_ONCE`. False: rows complete singly (`StepPlan.singles`), with room for any number.
        """
        ...

    @property
    def compilations_since_ready(self) -> int:
        """Compilations since the executor was ready that a step waited for; each one is a fault."""
        ...

    @property
    def num_programs(self) -> int:
        """Programs that are compiled by now."""
        ...

    def listen(self, tell: Callable[[Any], None]) -> None:
        """Registers `tell`, which is called in any thread with all that is defined above, and with
        `Stages` by executors that record them.
        """
        ...

    def submit(self, plan: StepPlan, control: StepControl) -> None:
        """Starts a step's layers under `control` and returns at once."""
        ...

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Calls `on_failure` with the reason, in any thread, once nothing can be computed any
        more.
        """
        ...

    def close(self) -> None:
        """Releases what the executor holds outside the device."""
        ...


class StepExecutor:
    """Base of executors that complete whole steps: a subclass launches, and this reports."""

    in_order = True
    _tell: Callable[[Any], None]

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """Starts a step's layers under `control` and returns at once.

        The future is done when they are, in any thread; futures are done in order.
        """
        raise NotImplementedError

    def listen(self, tell: Callable[[Any], None]) -> None:
        """See Executor."""
        self._tell = tell

    def submit(self, plan: StepPlan, control: StepControl) -> None:
        """See Executor."""
        self.launch(plan, control).add_done_callback(self._complete)

    def _complete(self, done: "Future[StepResult]") -> None:
        if not done.cancelled():
            self._tell(Completed(done.exception() or done.result()))


# ---- what some executors do -------------------------------------------------------------------


@runtime_checkable
class Draws(Protocol):
    """Draws tokens that depend on those of the step before (structured output)."""

    def draw(self, allowed: Int[np.ndarray, "B W"]) -> None:
        """Draws the tokens of the step that was submitted last and waits (`Shapes.waits`): a bit a
        token, the lowest first, for each of its rows. Before that nothing else is submitted.
        """
        ...


@runtime_checkable
class RunsParts(Protocol):
    """Runs a step in parts of some layers each, so that another can go between them (QLLM)."""

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """Returns how many layers to launch at once, where others may have to go between.

        `size` is the step's number of positions on its fullest rank.
        """
        ...

    @property
    def part_layers_by_size(self) -> Mapping[str, int]:
        """`layers_at_once` by phase and size, such as "decode 64"."""
        ...


@runtime_checkable
class Mixes(Protocol):
    """Runs decode steps with rows of several models."""

    def mixes(self, counts: Int[np.ndarray, "models ranks"]) -> bool:
        """Returns whether one decode step with so many rows of each of several models, by rank,
        takes less than their steps one after another.
        """
        ...


@runtime_checkable
class DecodesBesidePrompts(Protocol):
    """Runs hybrid steps, in which rows decode beside chunks of prompts."""

    @property
    def has_hybrid(self) -> bool:
        """Whether there are such steps, of at most `max_prefill_tokens`, those of rows that decode
        included.
        """
        ...


@runtime_checkable
class ChoosesImplementations(Protocol):
    """Has several implementations of an op, by device and size."""

    @property
    def implementations(self) -> Mapping[str, str]:
        """Which implementation each op runs, by phase and op; empty on a CPU."""
        ...


@runtime_checkable
class LoadsWays(Protocol):
    """Changes the united experts that it serves (BrownoutServe)."""

    def load_way(self, way: int, layer: int) -> None:
        """Puts one MoE layer's united experts of `way` into the pool, between two steps.

        Layers of a family's models are counted through, those of the first one first.
        """
        ...


@runtime_checkable
class ChangesWay(Protocol):
    """Changes the united experts of all its devices at once, while no row is under way."""

    def change_way(self, way: int) -> None:
        """Has every device load `way` and returns at once. Nothing is submitted until WayChanged
        says that all have it; of devices that are gone, none counts as back before it has it, too.
        """
        ...


@runtime_checkable
class CopiesExperts(Protocol):
    """Copies experts among the devices of a mesh (Libra)."""

    @property
    def copy_s(self) -> float:
        """Seconds that `host_layer` takes of the device."""
        ...

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """Copies one MoE layer's experts to other hosts, between two steps."""
        ...


@runtime_checkable
class SwapsModels(Protocol):
    """Holds the non-expert weights of some of a family's models (Multi-MoE)."""

    @property
    def resident_models(self) -> Sequence[int] | None:
        """Models whose non-expert weights are on the device; None: all, for good."""
        ...

    def replace_set(self, victim: int, model: int) -> "Future[None]":
        """Copies a model's non-expert weights into the place of another's, which no longer runs.

        The future is done when the model can run.
        """
        ...


@runtime_checkable
class TakesModels(Protocol):
    """Has models of its family come and go while others run (Multi-MoE)."""

    def place_params(self, params: "Params") -> "Params":
        """Returns a model's weights but the experts on the device, shared with other models where
        they are equal; in a thread of the caller's.
        """
        ...

    def write_experts(self, arrival: "Arrival") -> None:
        """Writes the next few experts of a model that arrives, between two steps."""
        ...

    def load_united(self, model: "Model", way: int, layer: int) -> None:
        """Writes one MoE layer's united experts of a model that arrives, between two steps."""
        ...

    def install(self, number: int, model: "Model") -> None:
        """Puts a model at a place; from now on steps may have rows of it."""
        ...

    def vacate(self, number: int) -> None:
        """Lets go what is at a place, of which no step that is submitted from now on has rows."""
        ...


@runtime_checkable
class FetchesExperts(Protocol):
    """Fetches experts from host memory (Multi-MoE)."""

    def fetch_experts(self, experts: "Mapping[Expert, int]") -> None:
        """Puts offloaded experts into spare slots of the pool, between two steps."""
        ...


class WorkerSeen(NamedTuple):
    """A worker as an operator sees it."""

    name: str
    is_up: bool
    stages: int  # since it started
    rows: int  # that wait in its queues
    oldest_s: float  # for how long the oldest of them has; 0 without any


@runtime_checkable
class HasWorkers(Protocol):
    """Consists of workers, which may go and come back (AMoE)."""

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
