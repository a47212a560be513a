"""Metrics of API keys, labelled by key name."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from serving.frontend.access import Access


def collect_keys(prefix: str, access: "Access | None") -> Iterator[Metric]:
    """Yields the metric families of keys; none if the server has no keys."""
    if access is None or not access.paths:
        return
    callers = list(access.callers.values())
    for kind, name, about, field in (
        (CounterMetricFamily, "requests", "Requests that were let in", "num_requests"),
        (CounterMetricFamily, "tokens", "Tokens of prompts and outputs", "num_tokens"),
        (GaugeMetricFamily, "requests_running", "Requests under way", "num_running"),
    ):
        family = kind(f"{prefix}{name}_by_key", f"{about}, by a key's name", labels=["key"])
        for caller in callers:
            family.add_metric([caller.name], getattr(caller, field))
        yield family
    refused = CounterMetricFamily(
        f"{prefix}refused_by_key", "What a key asked for and may not", labels=["key", "reason"]
    )
    for caller in callers:
        for reason, count in caller.refused.items():
            refused.add_metric([caller.name, reason], count)
    yield refused
