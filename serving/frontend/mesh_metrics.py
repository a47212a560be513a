"""Metrics of a mesh: load balance of its devices, and copies of experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.frontend.metrics import Histogram
    from serving.plan import StepResult


class MeshLoad:
    """Load of a mesh's devices, accumulated over steps."""

    def __init__(self, prefix: str, imbalance: "dict[str, Histogram]") -> None:
        """`imbalance` has an empty histogram for each phase."""
        self._prefix = prefix
        self.imbalance = imbalance
        self.rows: np.ndarray | None = None  # int64 [MoE layers, D], computed by experts
        self.expected = self.right = self.copied = 0
        self.positions = self.padding = 0.0

    def step_read(self, phase: str, positions: int, result: "StepResult") -> None:
        """Adds the results of a step's layers; `positions` is the step's, without padding."""
        if result.device_rows is None:
            return
        rows = result.device_rows.astype(np.int64)
        self.rows = rows if self.rows is None else self.rows + rows
        if rows.any():  # each layer waits for its busiest device
            self.imbalance[phase].observe(np.array([rows.max(1).sum() / rows.mean(1).sum()]))
        if result.copies is not None:
            foreseen = result.copies.copied > 0
            self.expected += int(rows[foreseen].sum())
            self.right += int(result.copies.right[foreseen].sum())
            self.copied += int(result.copies.copied.sum())
        self.positions += positions
        self.padding += positions * result.padded_share / max(1e-9, 1 - result.padded_share)

    def collect(self, engine: "Engine | None") -> Iterator[Metric]:
        """Yields the metric families; none without a mesh."""
        if self.rows is None:
            return
        family = CounterMetricFamily(
            f"{self._prefix}device_expert_rows",
            "Rows that a device's experts computed",
            labels=["layer", "device"],
        )
        for (layer, device), count in np.ndenumerate(self.rows):
            family.add_metric([str(layer), str(device)], int(count))
        yield family
        imbalance = HistogramMetricFamily(
            f"{self._prefix}imbalance_ratio",
            "Rows of the fullest device over the mean, of a step's layers together",
            labels=["phase"],
        )
        for phase, histogram in self.imbalance.items():
            histogram.add_to(imbalance, [phase])
        yield imbalance
        lacking = self.padding / max(1.0, self.padding + self.positions)
        yield self._gauge("padded_rows_perc", "Rows that were padding; 1 is all", lacking)
        yield self._counter(
            "expected_visits", "Visits of layers that copies were made for", self.expected
        )
        yield self._counter(
            "expected_visits_right", "Of them, foreseen by device and expert", self.right
        )
        yield self._counter("experts_copied", "Copies made while a step ran", self.copied)
        mover = None if engine is None else engine.loader.mover
        if mover is not None:
            yield self._counter(
                "experts_placed", "Copies made between steps, to stay", mover.experts_copied
            )
            for_long = float(np.mean(mover.imbalances()))
            about = "Imbalance expected of the load seen lately, mean over layers"
            yield self._gauge("placement_imbalance_ratio", about, for_long)
            about = "1: copies could not be moved, and are not any more"
            yield self._gauge("placement_failed", about, float(bool(mover.failure)))
        if engine is not None and engine.model is not None:
            copies = self.copied + (0 if mover is None else mover.experts_copied)
            size = sum(leaf.nbytes // leaf.shape[0] for leaf in engine.model.pool)
            about = "Of experts that were copied between devices"
            yield self._counter("expert_copy_bytes", about, copies * size)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        return GaugeMetricFamily(self._prefix + name, about, value)

    def _counter(self, name: str, about: str, value: float) -> Metric:
        return CounterMetricFamily(self._prefix + name, about, value)
