"""Metrics of asynchronous workers: whether each is up, and the rows that wait for it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from serving.engine import Engine

LABELS = ["worker"]


def collect_workers(prefix: str, engine: "Engine | None") -> Iterator[Metric]:
    """Yields the workers' metric families; none outside mode aep.

    Rows pile up in front of a slow worker.
    """
    if engine is None:
        return
    from serving.execution.executor import HasWorkers  # imports jax, as the engine did

    executor = engine.executor
    if not isinstance(executor, HasWorkers):
        return
    up = GaugeMetricFamily(f"{prefix}worker_up", "1: the worker is there", labels=LABELS)
    stages = CounterMetricFamily(
        f"{prefix}worker_stages", "Stages that a worker has run since it started", labels=LABELS
    )
    rows = GaugeMetricFamily(
        f"{prefix}worker_waiting_rows", "Rows that wait before a worker's layers", labels=LABELS
    )
    oldest = GaugeMetricFamily(
        f"{prefix}worker_oldest_row_seconds", "How long the oldest of them waits", labels=LABELS
    )
    for seen in executor.seen():
        name = [seen.name]
        up.add_metric(name, float(seen.is_up))
        stages.add_metric(name, seen.stages)
        rows.add_metric(name, seen.rows)
        oldest.add_metric(name, seen.oldest_s)
    yield from (up, stages, rows, oldest)
