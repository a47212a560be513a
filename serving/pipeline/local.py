"""All workers in one process, on its devices: for notebooks and tests (AMoE, section 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jmoe.api import Model
from jmoe.experts import UnitedExperts
from jmoe.parallel.placement import Placement, contiguous
from jmoe.steps import make_state
from serving.pipeline.attention import AttentionWorker, Result, Unit
from serving.pipeline.devices import (
    AttentionDevice,
    ExpertDevice,
    UnitedPart,
)
from serving.pipeline.experts import ExpertWorker
from serving.pipeline.messages import RowNumbers
from serving.pipeline.queues import Picker, buckets


@dataclass(frozen=True)
class Sizes:
    """Sizes of each attention worker."""

    num_slots: int
    num_pages: int | tuple[int, ...]  # of each group of layers, or of all alike
    page_size: int
    max_blocks: int
    num_rows: int  # on their way at a time, of all its units
    decode_buckets: tuple[int, ...] = (8, 32, 128)
    prefill_buckets: tuple[int, ...] = (32, 128, 512)
    num_groups: int = 1  # of layers, each with pages of its own

    @property
    def max_len(self) -> int:
        """Positions that a sequence's pages hold."""
        return self.max_blocks * self.page_size

    def max_visits(self, picks: int) -> int:
        """Returns the visits of an expert stage: those of the largest stage of attention."""
        return picks * max(*self.decode_buckets, *self.prefill_buckets)

    @property
    def row_sizes(self) -> list[int]:
        """Rows that come to an expert worker at a time, padded."""
        return row_sizes([*self.decode_buckets, *self.prefill_buckets])


def row_sizes(stage_sizes: Sequence[int]) -> list[int]:
    """Returns the sizes that attention workers send: whole stages, or the rows of some."""
    return sorted({*stage_sizes, *buckets(max(stage_sizes))})


class LocalWorkers:
    """Attention workers and expert workers on devices of this process.

    Nothing runs by itself: `turn` lets one worker have its messages and run a stage. What it
    launches goes on while others have theirs.
    """

    def __init__(
        self,
        attention: Sequence[AttentionDevice],
        experts: Sequence[ExpertDevice],
        moe_layers: Sequence[bool],
        hosts: Bool[np.ndarray, "layers E W"],
        num_rows: int,
        picker: Callable[[], Picker],
        *,
        groups: Int[np.ndarray, "E"] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        max_visits: int = 1 << 12,
        **sizes: Any,
    ) -> None:
        """Makes a worker for each device.

        Args:
            attention: of the attention workers.
            experts: of the expert workers.
            moe_layers: of each layer, whether it has experts.
            hosts: which expert worker has which logical expert of each MoE layer.
            num_rows: on their way at a time, of each attention worker.
            picker: makes one for each worker.
            groups: of logical experts, launched together; None: all of a layer are.
            clock: in seconds.
            max_visits: as of ExpertWorker.
            sizes: buckets and blocks as of AttentionWorker.
        """
        numbers, self.clock = RowNumbers(len(attention), num_rows), clock
        self.inboxes = [SimpleQueue[Any]() for _ in (*attention, *experts)]
        num_layers, num_experts, _ = hosts.shape
        self.experts = [
            ExpertWorker(
                device,
                num_layers,
                np.zeros(num_experts, np.int64) if groups is None else groups,
                numbers,
                number,
                [each.device for each in attention],
                lambda to, message: self.inboxes[to].put(message),
                picker(),
                max_visits=max_visits,
            )
            for number, device in enumerate(experts)
        ]
        self.attention = [
            AttentionWorker(
                device,
                moe_layers,
                hosts,
                numbers,
                number,
                [each.device for each in experts],
                lambda to, message: self.inboxes[len(attention) + to].put(message),
                picker(),
                **sizes,
            )
            for number, device in enumerate(attention)
        ]

    @classmethod
    def of(
        cls,
        model: Model,
        attention: Sequence[Any],
        experts: Sequence[Any],
        sizes: Sizes,
        picker: Callable[[], Picker],
        *,
        placement: Placement | None = None,
        ways: Sequence[int] = (),
        **options: Any,
    ) -> "LocalWorkers":
        """Gives jax devices their parts of a model.

        Args:
            model: on one device; workers start with the united experts of the way that it uses.
            attention: devices of attention workers, one or more; one may be named more than once.
            experts: devices of expert workers, likewise.
            sizes: of an attention worker.
            picker: makes one for each worker.
            placement: of logical experts on expert workers; None: ranges of them.
            ways: that may be used later, the one that the model uses first.
            options: as of LocalWorkers.

        Raises ValueError for no worker of a kind, a model over a mesh or with experts that are
        offloaded, and a placement on another number of workers or of other experts.
        """
        if not attention or not experts:
            raise ValueError(
                f"{len(attention)} attention workers and {len(experts)} expert workers were asked "
                "for; there must be one of each kind or more"
            )
        if model.home is not None:
            raise ValueError(f"{model.name} is spread over a mesh; load it without one")
        if model.table.offloaded is not None:
            raise ValueError(
                f"{model.name} has offloaded experts, and these workers fetch none: load "
                "it with resident_experts 0 and a map without differences"
            )
        slots = np.asarray(model.table.slots)
        placement = placement or contiguous(slots.shape[0], slots.shape[1], len(experts))
        hosts = np.asarray(placement.hosts)
        if hosts.shape != (*slots.shape, len(experts)):
            raise ValueError(
                f"placement.hosts is {hosts.shape}; it must be {(*slots.shape, len(experts))}: MoE "
                "layers, logical experts, expert workers"
            )
        num_rows = len(attention) * sizes.num_rows
        return cls(
            [attention_of(model, ways, sizes, device) for device in attention],
            [
                experts_of(model, ways, hosts[:, :, number], num_rows, device)
                for number, device in enumerate(experts)
            ],
            model.config.moe_layers,
            hosts,
            sizes.num_rows,
            picker,
            max_blocks=sizes.max_blocks,
            max_len=sizes.max_len,
            num_groups=sizes.num_groups,
            decode_buckets=sizes.decode_buckets,
            prefill_buckets=sizes.prefill_buckets,
            max_visits=sizes.max_visits(model.config.experts_per_token),
            **options,
        )

    @property
    def num_workers(self) -> int:
        """Number of workers of both kinds."""
        return len(self.inboxes)

    @property
    def is_idle(self) -> bool:
        """Whether no unit, message or visit is anywhere."""
        return not (
            any(worker.num_units or worker.queues.num_rows for worker in self.attention)
            or any(worker.queues.num_rows for worker in self.experts)
            or any(not inbox.empty() for inbox in self.inboxes)
        )

    @property
    def workers(self) -> list[AttentionWorker | ExpertWorker]:
        """Attention workers first, then expert workers; they are numbered so."""
        return [*self.attention, *self.experts]

    def submit(self, worker: int, unit: Unit) -> None:
        """Lets a unit enter the first layer of an attention worker. Raises
        ValueError as `submit`.
        """
        self.attention[worker].submit(unit, self.clock())

    def deliver(self, number: int, most: int | None = None) -> int:
        """Gives a worker messages that wait for it, the oldest first; returns how many."""
        inbox, worker = self.inboxes[number], self.workers[number]
        count = inbox.qsize() if most is None else min(most, inbox.qsize())
        for _ in range(count):
            worker.take(inbox.get_nowait(), self.clock())
        return count

    def advance(self, number: int, *, more_may_come: bool = True) -> list[Result]:
        """Lets a worker run a stage; returns the results of units that have left."""
        return self.workers[number].advance(self.clock(), more_may_come=more_may_come) or []

    def turn(self, number: int) -> list[Result]:
        """Delivers all messages and runs a stage."""
        self.deliver(number)
        return self.advance(number)

    def warm(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compiles all that may be needed, and runs it once."""
        parts = self.experts[0].stage_sizes
        rows = row_sizes(self.attention[0].stage_sizes)
        for number, worker in enumerate(self.workers):
            if progress is not None:
                progress("compiling", number, self.num_workers)
            worker.warm(parts if isinstance(worker, AttentionWorker) else rows)


def experts_of(
    model: Model,
    ways: Sequence[int],
    hosted: Bool[np.ndarray, "layers E"],
    num_rows: int,
    device: Any,
) -> ExpertDevice:
    """Copies the experts that a device is to host to it, and their united experts of all `ways`
    within host memory, so that the model can go.
    """
    slots = np.asarray(model.table.slots)
    local = np.full(slots.shape, -1, np.int32)
    local[hosted] = np.arange(int(hosted.sum()))
    taken = jnp.asarray(slots[hosted])
    pool = jax.device_put(model.pool.read(taken), device)

    def part(united: UnitedExperts, layer: int) -> UnitedPart:
        experts = united.layer(layer)
        own = local[layer, model.config.num_experts :][: experts.num_slots]
        here = np.flatnonzero(own >= 0)
        return UnitedPart(own[here], experts.read(here))

    united = {
        way: [part(model.united_of(way), layer) for layer in range(len(slots))] for way in ways
    }
    cfg = model.config
    rows = num_rows, cfg.d_model
    return ExpertDevice(pool, local, rows, device, united, activation=cfg.activation)


def attention_of(model: Model, ways: Sequence[int], sizes: Sizes, device: Any) -> AttentionDevice:
    """Returns an attention worker's programs and empty state, on a device."""
    state = make_state(
        model.config,
        num_slots=sizes.num_slots,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        max_blocks=sizes.max_blocks,
        dtype=model.dtype,
    )
    params, state = jax.device_put((model.params, state), device)
    groups = np.asarray(model.table.groups)
    num_experts = model.table.slots.shape[1]
    return AttentionDevice(
        model.config,
        params,
        groups,
        num_experts,
        state,
        sizes.num_rows,
        device,
        {way: model.united_of(way).groups for way in ways},
    )
