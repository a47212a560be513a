"""Metrics of a mesh: load balance of its devices, and copies of experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from serving.frontend.families import PREFIX, Histogram, counter, family, gauge

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.plan import StepResult


class MeshLoad:
    """Load of a mesh's devices, accumulated over steps."""

    def __init__(self, imbalance: dict[str, Histogram]) -> None:
        """`imbalance` has an empty histogram for each phase."""
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
        about, counts = "Rows that a device's experts computed", np.ndenumerate(self.rows)
        of_devices = {at: int(count) for at, count in counts}
        labels = ["layer", "device"]
        yield family(CounterMetricFamily, "device_expert_rows", about, labels, of_devices)
        imbalance = HistogramMetricFamily(
            PREFIX + "imbalance_ratio",
            "Rows of the fullest device over the mean, of a step's layers together",
            labels=["phase"],
        )
        for phase, histogram in self.imbalance.items():
            histogram.add_to(imbalance, [phase])
        yield imbalance
        lacking = self.padding / max(1.0, self.padding + self.positions)
        yield gauge("padded_rows_perc", "Rows that were padding; 1 is all", lacking)
        yield counter(
            "expected_visits", "Visits of layers that copies were made for", self.expected
        )
        yield counter("expected_visits_right", "Of them, foreseen by device and expert", self.right)
        yield counter("experts_copied", "Copies made while a step ran", self.copied)
        mover = None if engine is None else engine.loader.mover
        if mover is not None:
            yield counter(
                "experts_placed", "Copies made between steps, to stay", mover.experts_copied
            )
            for_long = float(np.mean(mover.imbalances()))
            about = "Imbalance expected of the load seen lately, mean over layers"
            yield gauge("placement_imbalance_ratio", about, for_long)
            about = "1: copies could not be moved, and are not any more"
            yield gauge("placement_failed", about, float(bool(mover.failure)))
        if engine is not None and engine.model is not None:
            copies = self.copied + (0 if mover is None else mover.experts_copied)
            about = "Of experts that were copied between devices"
            yield counter("expert_copy_bytes", about, copies * engine.model.pool.slot_bytes)
