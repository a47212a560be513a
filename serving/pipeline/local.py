"""All workers in one process, on its devices: for notebooks and tests (AMoE, section 4)."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from jaxtyping import Bool

from jmoe.api import Model
from serving.pipeline.attention import AttentionWorker
from serving.pipeline.devices import AttentionDevice, ExpertDevice, Sizes
from serving.pipeline.experts import ExpertWorker
from serving.pipeline.messages import RowNumbers
from serving.scheduling.layers.picker import LayerPicker


class LocalWorkers:
    """Attention workers and expert workers on devices of this process.

    Nothing runs by itself: whoever drives a worker gives it what is in its inbox, and lets it run a
    stage.
    """

    def __init__(
        self,
        attention: Sequence[AttentionDevice],
        experts: Sequence[ExpertDevice],
        moe_layers: Sequence[bool],
        hosts: Bool[np.ndarray, "layers E W"],
        sizes: Sizes,
        picker: Callable[[], LayerPicker],
        clock: Callable[[], float],
        max_visits: int = 1 << 12,
    ) -> None:
        """Makes a worker for each device.

        Args:
            attention: of the attention workers.
            experts: of the expert workers.
            moe_layers: of each layer, whether it has experts.
            hosts: which expert worker has which logical expert of each MoE layer.
            sizes: of an attention worker.
            picker: makes one for each worker.
            clock: in seconds.
            max_visits: as of ExpertWorker.
        """
        numbers, self.clock = RowNumbers(len(attention), sizes.num_rows), clock
        self._sizes = sizes
        self.inboxes = [SimpleQueue[Any]() for _ in (*attention, *experts)]

        def to_attention(number: int, message: Any) -> None:
            self.inboxes[number].put(message)

        def to_experts(number: int, message: Any) -> None:
            self.inboxes[len(attention) + number].put(message)

        self.experts = [
            ExpertWorker(device, len(hosts), numbers, at, to_attention, picker(), max_visits)
            for at, device in enumerate(experts)
        ]
        self.attention = [
            AttentionWorker(device, moe_layers, hosts, numbers, at, to_experts, picker(), sizes)
            for at, device in enumerate(attention)
        ]

    @classmethod
    def of(
        cls,
        model: Model,
        attention: Sequence[Any],
        experts: Sequence[Any],
        sizes: Sizes,
        hosts: Bool[np.ndarray, "layers E W"],
        picker: Callable[[], LayerPicker],
        clock: Callable[[], float],
        *,
        ways: Sequence[int] = (),
    ) -> "LocalWorkers":
        """Gives jax devices their parts of a model.

        Args:
            model: on one device; workers start with the united experts of the way that it uses.
            attention: devices of attention workers, one or more; one may be named more than once.
            experts: devices of expert workers, likewise.
            sizes: of an attention worker.
            hosts: as of LocalWorkers.
            picker: makes one for each worker.
            clock: in seconds.
            ways: that may be used later, the one that the model uses first.

        Raises ValueError for a model over a mesh or with experts that are offloaded.
        """
        if model.home is not None:
            raise ValueError(f"{model.name} is spread over a mesh; load it without one")
        if model.table.offloaded is not None:
            raise ValueError(
                f"{model.name} has offloaded experts, and these workers fetch none: load "
                "it with resident_experts 0 and a map without differences"
            )
        num_rows = len(attention) * sizes.num_rows
        return cls(
            [AttentionDevice(model, ways, sizes, device) for device in attention],
            [
                ExpertDevice(model, ways, hosts[:, :, number], num_rows, device)
                for number, device in enumerate(experts)
            ],
            model.config.moe_layers,
            hosts,
            sizes,
            picker,
            clock,
            sizes.max_visits(model.config.experts_per_token),
        )

    @property
    def num_workers(self) -> int:
        """Number of workers of both kinds."""
        return len(self.inboxes)

    @property
    def workers(self) -> list[AttentionWorker | ExpertWorker]:
        """Attention workers first, then expert workers; they are numbered so."""
        return [*self.attention, *self.experts]

    def warm(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compiles all that may be needed, and runs it once."""
        parts = self.experts[0].stage_sizes
        rows = self._sizes.row_sizes
        for number, worker in enumerate(self.workers):
            if progress is not None:
                progress("compiling", number, self.num_workers)
            worker.warm(parts if isinstance(worker, AttentionWorker) else rows)
