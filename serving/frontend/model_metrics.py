"""Metrics of each model of a family, in addition to the totals. Nothing here imports jax."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.frontend.families import counter, family, gauge
from serving.request import Output

if TYPE_CHECKING:
    from serving.engine import Engine


_COUNTER = CounterMetricFamily


class ModelLoad:
    """Counters of each model's finished requests; reported only if several models are served."""

    def __init__(self) -> None:
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
        scheduler, registry, fetcher = engine.scheduler, engine.registry, engine.fetcher
        running = Counter(s.request.model for s in list(scheduler.running))
        waiting = Counter(s.request.model for s in scheduler.waiting)
        for kind, name, about, counts in (
            (_COUNTER, "requests_finished", "Requests that got their last token", self.finished),
            (_COUNTER, "prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens),
            (_COUNTER, "generation_tokens", "Tokens of finished requests", self.generation_tokens),
            (_COUNTER, "degraded_visits", "Degraded visits of finished requests", self.degraded),
            (GaugeMetricFamily, "num_requests_running", "Requests that hold pages", running),
            (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue", waiting),
        ):
            named = {model: counts[number] for number, model in enumerate(engine.names)}
            yield family(kind, f"{name}_by_model", about, "model", named)
        yield counter(
            "mixed_steps", "Decode steps with rows of several models", scheduler.num_mixed
        )
        yield gauge(
            "resident_models", "Models whose weights are on the device", registry.num_resident
        )
        about = "Sets of non-expert weights copied in the place of others"
        yield counter("model_swaps", about, registry.num_swaps)
        fetches = {reason: fetcher.fetches[reason] for reason in ("miss", "ahead")}
        about = "Experts of host memory copied into spare slots"
        yield family(_COUNTER, "expert_fetches", about, "reason", fetches)
        yield counter("expert_fetched_bytes", "Bytes of those", fetcher.fetched_bytes)
        about = "Rows that ran again, since a substitute had served what refuses one"
        yield counter("exact_reruns", about, fetcher.num_reruns)
