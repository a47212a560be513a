"""Metrics of each model of a family, in addition to the totals. Nothing here imports jax."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.request import Output

if TYPE_CHECKING:
    from serving.engine import Engine


class ModelLoad:
    """Counters of each model's finished requests; reported only if several models are served."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.finished, self.prompt_tokens = Counter[int](), Counter[int]()
        self.generation_tokens, self.degraded = Counter[int](), Counter[int]()

    def request_finished(self, model: int, output: Output) -> None:
        """Counts a finished request of a model."""
        usage = output.usage
        self.finished[model] += 1
        self.prompt_tokens[model] += usage.prompt_tokens
        self.generation_tokens[model] += usage.completion_tokens
        self.degraded[model] += usage.degraded_visits

    def collect(self, engine: "Engine | None") -> Iterator[Metric]:
        """Yields metric families with the model as label."""
        if engine is None or len(engine.names) < 2:
            return
        for name, about, counts in (
            ("requests_finished", "Requests that got their last token", self.finished),
            ("prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens),
            ("generation_tokens", "Tokens of finished requests", self.generation_tokens),
            ("degraded_visits", "Degraded visits of finished requests", self.degraded),
        ):
            yield self._family(CounterMetricFamily, name, about, counts, engine.names)
        scheduler = engine.scheduler
        running = Counter(s.request.model for s in list(scheduler.running))
        waiting = Counter(s.request.model for s in scheduler.waiting)
        for name, about, counts in (
            ("num_requests_running", "Requests that hold pages", running),
            ("num_requests_waiting", "Requests in the queue", waiting),
        ):
            yield self._family(GaugeMetricFamily, name, about, counts, engine.names)

        yield CounterMetricFamily(
            f"{self._prefix}mixed_steps",
            "Decode steps with rows of several models",
            scheduler.num_mixed,
        )
        registry = engine.registry
        yield GaugeMetricFamily(
            f"{self._prefix}resident_models",
            "Models whose weights are on the device",
            registry.num_resident,
        )
        yield CounterMetricFamily(
            f"{self._prefix}model_swaps",
            "Sets of non-expert weights copied in the place of others",
            registry.num_swaps,
        )
        yield from self._experts(engine)

    def _experts(self, engine: "Engine") -> Iterator[Metric]:
        """Yields the metrics of experts in host memory."""
        fetcher = engine.fetcher
        fetches = CounterMetricFamily(
            f"{self._prefix}expert_fetches",
            "Experts of host memory copied into spare slots",
            labels=["reason"],
        )
        for reason in ("miss", "ahead"):
            fetches.add_metric([reason], fetcher.fetches[reason])
        yield fetches
        yield CounterMetricFamily(
            f"{self._prefix}expert_fetched_bytes", "Bytes of those", fetcher.fetched_bytes
        )
        yield CounterMetricFamily(
            f"{self._prefix}exact_reruns",
            "Rows that ran again, since a substitute had served what refuses one",
            fetcher.num_reruns,
        )

    def _family(
        self,
        kind: type,
        name: str,
        about: str,
        counts: Mapping[int, int],
        names: tuple[str, ...],
    ) -> Metric:
        family = kind(f"{self._prefix}{name}_by_model", about, labels=["model"])
        for number, model in enumerate(names):
            family.add_metric([model], counts[number])
        return family
