"""Metric families, and the histograms that some are made of. Names are without the prefix."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from serving.request import Priority

PREFIX = "jmoe_"


class Histogram:
    """A histogram that is updated once per step with the samples of all its tokens."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array([*bounds, inf])
        self.counts = np.zeros(len(self.bounds), np.int64)
        self.sum = 0.0

    def observe(self, samples: np.ndarray) -> None:
        """Counts every sample in the first bucket whose bound it does not exceed."""
        at = np.searchsorted(self.bounds, samples)
        self.counts = self.counts + np.bincount(at, minlength=len(self.bounds))
        self.sum += float(samples.sum())

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return int(self.counts.sum())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds this histogram to a metric family, with cumulative counts as Prometheus expects."""
        bounds = ["+Inf" if bound == inf else str(bound) for bound in self.bounds.tolist()]
        counts = self.counts.cumsum().tolist()
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), self.sum)


class ByClass:
    """A histogram for each class of requests; one metric family, with the class as label."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.of = {priority: Histogram(bounds) for priority in Priority}

    @property
    def count(self) -> int:
        """The number of samples so far, over all classes."""
        return sum(histogram.count for histogram in self.of.values())

    def collect(self, name: str, about: str) -> HistogramMetricFamily:
        """Returns the metric family."""
        made = HistogramMetricFamily(PREFIX + name, about, labels=["priority"])
        for priority, histogram in self.of.items():
            histogram.add_to(made, [priority.value])
        return made


def gauge(name: str, about: str, value: float) -> Metric:
    """Returns the family of one gauge."""
    return GaugeMetricFamily(PREFIX + name, about, value)


def counter(name: str, about: str, value: float) -> Metric:
    """Returns the family of one counter."""
    return CounterMetricFamily(PREFIX + name, about, value)


def family(
    kind: type, name: str, about: str, labels: str | Sequence[str], values: Mapping[Any, float]
) -> Metric:
    """Returns a family with a metric for each value of a label, or of several together."""
    several = not isinstance(labels, str)
    made = kind(PREFIX + name, about, labels=labels if several else [labels])
    for key, value in values.items():
        made.add_metric([str(one) for one in key] if several else [key], value)
    return made
