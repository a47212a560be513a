"""Prometheus metrics, named as in vLLM but with the prefix `jmoe_`.

The engine reports latencies as they occur; everything else is read from the engine at a scrape.
Names have no colon, since the client library's OpenMetrics output replaces colons in samples but
not in TYPE and HELP lines. Nothing here imports jax.
"""

import importlib.metadata
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import inf, isnan, nan
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from serving.errors import DeadlineExceeded, QueuedTooLong, ServingError
from serving.frontend.access import asked_model, current
from serving.request import AuditState, Output, Priority
from serving.telemetry.observer import Observer
from serving.telemetry.version import commit, jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.execution.executor import WorkerSeen
    from serving.frontend.access import Access
    from serving.plan import StepResult
    from serving.scheduling.sequence import SequenceState
    from serving.scheduling.step import ScheduledStep


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


MAX_MODELS = 100
"""Names of models with histograms of their own: models come and go. Further ones share theirs."""
OTHER_MODELS = "other models"


class Histograms:
    """Histograms of one metric family, by labels, of which the last may be a model's name."""

    def __init__(self, bounds: Sequence[float], *labels: str) -> None:
        self._bounds, self._labels = bounds, labels
        self._of: dict[tuple[str, ...], Histogram] = {}

    def observe(self, samples: np.ndarray, *values: str) -> None:
        """Counts samples under these values of the labels."""
        if values not in self._of:
            known = {labels[-1] for labels in self._of}
            if values[-1] not in known and len(known) >= MAX_MODELS:
                values = *values[:-1], OTHER_MODELS
            self._of.setdefault(values, Histogram(self._bounds))
        self._of[values].observe(samples)

    def count(self, *values: str) -> int:
        """Returns the number of samples so far under labels that begin with these."""
        found = list(self._of.items())
        return sum(one.count for labels, one in found if labels[: len(values)] == values)

    def collect(self, name: str, about: str) -> Iterator[HistogramMetricFamily]:
        """Yields the metric family, once it has a sample."""
        made = HistogramMetricFamily(PREFIX + name, about, labels=self._labels)
        for labels, histogram in sorted(self._of.items()):
            histogram.add_to(made, labels)
        if made.samples:
            yield made


def _family(
    kind: Any, name: str, about: str, values: float | Mapping[Any, float], *labels: str
) -> Metric:
    """Returns a metric family: of one value, or of one for each value of a label, or of several
    together; without those that are NaN.
    """
    made = kind(PREFIX + name, about, labels=labels)
    for of, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        if not isnan(value):
            made.add_metric([of] if isinstance(of, str) else [str(one) for one in of], value)
    return made


gauge, counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _by_place(counts: np.ndarray) -> dict[tuple[int, ...], int]:
    """Returns an array's values by their indices."""
    return {at: int(count) for at, count in np.ndenumerate(counts)}


PHASES = ("prefill", "decode")
SETTLED_STEPS = 1000  # after which the times of steps are known

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_IMBALANCE = (1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8)
_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # as vLLM's
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


REFUSED = ("429", "RESOURCE_EXHAUSTED")
MAX_SERIES = 20_000
"""Of the counter of calls; beyond them the calls of further keys and models count together."""
OTHERS = "other keys"


class Calls:
    """Counts the calls that have ended: by protocol, route, code, and the caller's key and the
    model asked for, as far as the call came to know them. Thread-safe.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, str, str]] = Counter()
        self._lock = Lock()

    def door(
        self, protocol: str, routes: Iterable[str], failed: str
    ) -> Callable[[str, str | int], None]:
        """Returns a function that a door calls with the route and code of each call that has ended.

        `failed` is the code of a fault of the server. For each of `routes` it is counted from 0,
        since Prometheus sees no increase in a series that begins at 1.
        """
        self._counts.update({(protocol, route, failed, "", ""): 0 for route in routes})

        def ended(route: str, code: str | int) -> None:
            who = current.get().name, asked_model.get()
            with self._lock:
                of = protocol, route, str(code), *who
                if of not in self._counts and len(self._counts) >= MAX_SERIES:
                    of = protocol, route, str(code), OTHERS, ""
                self._counts[of] += 1

        return ended

    def refused(self) -> Counter[tuple[str, str]]:
        """Returns the calls that were refused for load or rate, by key and model."""
        with self._lock:
            counts = list(self._counts.items())
        found = Counter[tuple[str, str]]()
        for (_, _, code, key, model), count in counts:
            if code in REFUSED:
                found[key, model] += count
        return found

    def collect(self) -> Metric:
        """Returns the metric family."""
        with self._lock:
            counts = dict(self._counts)
        about = "Calls that have ended, by HTTP status or gRPC code"
        labels = "protocol", "route", "code", "key", "model_name"
        return counter("calls", about, counts, *labels)


@cache
def _build() -> tuple[str, str, str]:
    return jmoe_version(), commit() or "", importlib.metadata.version("jax")


MAX_CALLERS = 1000
"""Pairs of a key and a model with figures of their own."""


class Metrics(Observer):
    """Metrics of one server, with its own registry. Times are in seconds.

    The engine reports from its event loop, and a scrape reads from another thread, which may see a
    histogram's new counts before its new sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        by = "priority", "model_name"
        self.ttft, self.itl, self.e2e = (Histograms(of, *by) for of in (_TTFT, _ITL, _E2E))
        self.queue, self.wait = Histograms(_TTFT, by[0]), Histograms(_TTFT, by[0])
        for priority in Priority:  # there from the start, without a sample
            self.requests_began(np.zeros(0), np.zeros(0), priority)
        self.prefill_in_itl = Histogram(_ITL)
        # [start, end) of prefill steps since the last decode step. Few occur between two tokens of
        # a sequence; but if every request wants one token, no decode step ever clears them.
        self._prefills: deque[tuple[float, float]] = deque(maxlen=256)
        self.expert_rows: np.ndarray | None = None  # int64 [MoE layers, E], after a first step
        self.violations = {"prefill": 0, "decode": 0}
        self.finished: Counter[str] = Counter(stop=0, length=0)
        self.expired: Counter[str] = Counter(deadline=0, queue=0)
        self.prompt_tokens = self.prefill_tokens = self.generation_tokens = 0
        self.calls = Calls()
        # What finished requests of a key to a model had: their number, those whose first token or
        # mean time between further ones was late, expert visits, and the degraded among them.
        self.by_caller = defaultdict[tuple[str, str], Counter[str]](Counter)
        self.by_model = ModelLoad()
        self.mesh = MeshLoad()
        self.engine: Engine | None = None  # set it when the engine is ready
        self._reference_step_s = 0.0  # of a full decode step, as soon as steps are known
        self.access: Access | None = None  # keys to report metrics of, and to check at a scrape
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def speed(self, engine: "Engine") -> float:
        """Returns the speed of the machine over that of the first time that anybody asked after a
        thousand steps, of which some decoded; NaN until then.
        """
        step_s = engine.stats().full_decode_step_s
        if engine.pace.times.num_observed < SETTLED_STEPS or isnan(step_s):
            return nan
        self._reference_step_s = self._reference_step_s or step_s
        return self._reference_step_s / step_s

    def step_read(
        self, step: "ScheduledStep", result: "StepResult", started_at: float, now: float
    ) -> None:
        """See Observer."""
        if result.expert_rows.size:  # workers count for some time, and tell of it then
            rows = result.expert_rows.astype(np.int64)
            self.expert_rows = rows if self.expert_rows is None else self.expert_rows + rows
        self.mesh.step_read(step.phase, step.size, result)
        if step.phase == "prefill":
            self.prefill_tokens += step.num_prompt_tokens * step.is_last
            self._prefills.append((started_at, now))
        if step.decodes and step.is_last and self._prefills:
            starts, ends = np.array(self._prefills).T
            decoding = step.sequences[: step.num_decodes or None]
            # A sequence that has ended gets no token from this step, and may never have had one.
            previous_at = np.array([s.previous_at for s in decoding if not s.done])
            inside = np.clip(
                ends[None, :] - np.maximum(starts[None, :], previous_at[:, None]), 0, None
            )
            self.prefill_in_itl.observe(inside.sum(axis=1))
            self._prefills.clear()

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """See Observer."""
        self.queue.observe(queue_s, priority)
        self.wait.observe(wait_s, priority)

    def first_tokens(
        self, ttft_s: np.ndarray, slo_s: float, priority: Priority, model: str
    ) -> None:
        """See Observer."""
        self.ttft.observe(ttft_s, priority, model)
        self._tokens("prefill", ttft_s, slo_s, priority, model)

    def further_tokens(
        self, itl_s: np.ndarray, slo_s: float, priority: Priority, model: str
    ) -> None:
        """See Observer."""
        self.itl.observe(itl_s, priority, model)
        self._tokens("decode", itl_s, slo_s, priority, model)

    def _tokens(
        self, phase: str, samples: np.ndarray, slo_s: float, priority: Priority, model: str
    ) -> None:
        self.generation_tokens += len(samples)
        if priority is not Priority.LATENCY_SENSITIVE:
            return  # what is late is a share of the latency-sensitive ones
        late = int(np.count_nonzero(samples > slo_s))
        self.violations[phase] += late
        self.by_model.late[model, phase] += late

    def request_finished(self, sequence: "SequenceState", output: Output, now: float) -> None:
        """See Observer."""
        self.prompt_tokens += output.usage.prompt_tokens
        self.finished[output.finish_reason or "stop"] += 1
        took_s = np.array([now - sequence.arrived_at])
        request = sequence.request
        self.e2e.observe(took_s, request.priority, request.model_name)
        self.by_model.request_finished(sequence, output, now)
        who = request.key, request.model_name
        if who not in self.by_caller and len(self.by_caller) >= MAX_CALLERS:
            who = OTHERS, ""
        load, usage = self.by_caller[who], output.usage
        load.update(requests=1, visits=usage.expert_visits, degraded=usage.degraded_visits)
        if self.engine is not None and request.priority is Priority.LATENCY_SENSITIVE:
            ttft_s, itl_s = self.engine.slo.objectives(request.priority, request.model)
            mean_s = (now - sequence.first_at) / max(1, usage.completion_tokens - 1)
            load["late"] += sequence.first_at - sequence.arrived_at > ttft_s or mean_s > itl_s

    def request_ended(self, sequence: "SequenceState", error: ServingError | None) -> None:
        """See Observer."""
        if isinstance(error, DeadlineExceeded):
            self.expired["queue" if isinstance(error, QueuedTooLong) else "deadline"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families; the registry calls this at a scrape."""
        yield from self.ttft.collect("time_to_first_token_seconds", "Arrival to first token")
        yield from self.itl.collect("inter_token_latency_seconds", "Between tokens of a request")
        inside = HistogramMetricFamily(
            PREFIX + "inter_token_prefill_seconds", "Prefill steps inside an inter-token latency"
        )
        self.prefill_in_itl.add_to(inside, [])
        yield inside
        yield from self.queue.collect("request_queue_time_seconds", "Arrival to the first layers")
        yield from self.wait.collect(
            "preemption_latency_seconds", "From slot and pages being there to the first layers"
        )
        if self.expert_rows is not None:
            about, counts = "Rows an expert computed, united ones last", _by_place(self.expert_rows)
            yield counter("expert_rows", about, counts, "layer", "expert")
        yield from self.mesh.collect(self.engine)
        yield from _workers(self.engine)
        yield from self.by_model.collect(self.engine)
        yield from _keys(self.access)
        yield self.calls.collect()
        yield gauge("build_info", "1; what runs", {_build(): 1}, "version", "commit", "jax")
        yield from self.e2e.collect("e2e_request_latency_seconds", "Arrival to last token")
        yield counter("prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens)
        about = "Tokens computed by prefill steps, those of preempted requests again"
        yield counter("prefill_tokens", about, self.prefill_tokens)
        yield counter("generation_tokens", "Tokens generated", self.generation_tokens)
        about = "Latency-sensitive tokens later than the SLO of their phase"
        yield counter("slo_violations", about, self.violations, "phase")
        about = (
            "Requests whose time ran out: their own, or that for which they may wait in the queue"
        )
        yield counter("requests_expired", about, self.expired, "reason")
        ended: dict[str, float] = {**self.finished, "abort": 0, "error": 0}
        if self.engine is not None:
            yield from _engine_families(self.engine)
            stats, speed = self.engine.stats(), self.speed(self.engine)
            if not isnan(speed):
                about = "Speed of the machine: 1 is what it was when a thousand steps were known"
                yield gauge("step_time_speed", about, speed)
            ended |= {"abort": stats.requests_aborted, "error": stats.requests_failed}
        about = "Ended requests by reason; error: failed by the server"
        yield counter("request_success", about, ended, "finished_reason")


def _engine_families(engine: "Engine") -> Iterator[Metric]:
    stats, brownout = engine.stats(), engine.get_brownout()
    yield gauge("num_requests_running", "Requests that hold pages", stats.num_running)
    yield gauge("num_requests_waiting", "Requests in the queue", stats.num_waiting)
    scheduler = engine.scheduler
    queues = {priority: len(queue) for priority, queue in scheduler.queues.items()}
    about = "Requests in the queue of a class"
    yield gauge("num_requests_waiting_by_priority", about, queues, "priority")
    yield counter("parks", "Steps that another went before, between layers", scheduler.num_parks)
    yield counter("joins", "Parked steps whose rows another took along", scheduler.num_joins)
    yield counter("hybrid_steps", "Steps that decoded beside prompts", scheduler.num_hybrid)
    about = "Requests that gave up their pages, to be computed again"
    yield counter("evictions", about, scheduler.num_evictions, "priority")
    usage = stats.kv_pages_used / max(stats.kv_pages_total, 1)
    yield gauge("kv_cache_usage_perc", "KV pages in use; 1 is all", usage)
    about = "KV pages that nobody has, kept for prompts that begin alike"
    yield gauge("prefix_pages_kept", about, stats.kv_pages_kept)
    about = "Tokens of prompts that were looked up among those kept"
    yield counter("prefix_cache_queries", about, stats.prefix_queries)
    about = "Of those, found: an earlier request had computed them"
    yield counter("prefix_cache_hits", about, stats.reused_tokens)
    about = "Kept KV pages that had to make room"
    yield counter("prefix_pages_evicted", about, stats.kept_pages_evicted)
    yield counter("expert_visits", "(token, layer, pick) visits", stats.expert_visits)
    yield counter("degraded_visits", "Visits rerouted or dropped", stats.degraded_visits)
    about = "Sampled tokens whose expected loss is known"
    yield counter("priced_tokens", about, stats.priced_tokens)
    about = "Loss that their thresholds let expect, together"
    yield counter("expected_loss_nats", about, stats.expected_loss_nats)
    about = "Bound on a threshold's expected loss, nats a token; 0: none"
    yield gauge("max_expected_loss_nats", about, brownout.max_expected_loss)
    about = "Compilations that a step waited for"
    yield counter("recompilations", about, stats.compilations_since_ready)
    about = "Requests refused for load"
    yield counter("requests_rejected", about, stats.requests_rejected)
    refused = {(one.key, one.priority): one.count for one in stats.refused}
    yield counter("requests_rejected_by_key", about, refused, "key", "priority")
    thresholds = brownout.prefill_threshold_percent, brownout.decode_threshold_percent
    by_phase = dict(zip(PHASES, thresholds, strict=True))
    yield gauge("brownout_threshold_percent", "Visits kept exact, at least", by_phase, "phase")
    p90s = {
        ("prefill", "seen"): brownout.ttft_p90_s,
        ("decode", "seen"): brownout.itl_p90_s,
        ("prefill", "expected"): brownout.predicted_ttft_p90_s,
        ("decode", "expected"): brownout.predicted_itl_p90_s,
    }
    about = "P90 latency as the controller saw it, and as it expected it of its last decision"
    yield gauge("controller_p90_seconds", about, p90s, "phase", "what")
    about = "The shortest objective that can be kept, if the one that is set cannot; else 0"
    least = zip(PHASES, (brownout.least_ttft_s, brownout.least_itl_s), strict=True)
    by_phase = {phase: 0.0 if isnan(seconds) else seconds for phase, seconds in least}
    yield gauge("objective_least_seconds", about, by_phase, "phase")
    yield from _audits(stats.audits)
    times = engine.pace.times
    yield gauge("step_time_error", "Mean relative error of expected step times", times.error)


def _audits(audits: Iterable[AuditState]) -> Iterator[Metric]:
    """Yields what brownout cost each model's answers that were scored; nothing before the first."""
    scored = [audit for audit in audits if audit.num_scored or audit.num_unscored]
    if not scored:
        return
    of = "model_name", "key"
    expected = "The excess that the thresholds of those answers let expect"
    for make, name, about, field in (
        (counter, "answers", "Degraded answers that were scored exactly", "num_scored"),
        (counter, "unscored", "Degraded answers for which was no room", "num_unscored"),
        (gauge, "exempt", "1: brownout cost more than the bound", "is_exempt"),
        (gauge, "expected_nats", expected, "expected_nats"),
    ):
        values = {(audit.model, audit.key): float(getattr(audit, field)) for audit in scored}
        yield make(f"audit_{name}", about, values, *of)
    for name, about in (
        ("excess_nats", "A token's log-probability above that under the exact model"),
        ("disagreement", "Share of greedy tokens that are not the exact model's first choice"),
    ):
        stem = name.removesuffix("_nats")
        bounds = {"mean": name} | {
            bound: name.replace(stem, f"{stem}_{bound}") for bound in ("low", "high")
        }
        values = {
            (audit.model, audit.key, bound): getattr(audit, field)
            for audit in scored
            for bound, field in bounds.items()
        }
        yield gauge(f"audit_{name}", about, values, *of, "bound")


def _keys(access: "Access | None") -> Iterator[Metric]:
    """Yields what each key has used, by its name; nothing if the server has no keys."""
    if access is None or not access.paths:
        return
    callers = access.callers.values()
    for make, name, about, field in (
        (counter, "requests", "Requests that were let in", "num_requests"),
        (counter, "tokens", "Tokens of prompts and outputs", "num_tokens"),
        (gauge, "requests_running", "Requests under way", "num_running"),
    ):
        used = {caller.name: getattr(caller, field) for caller in callers}
        yield make(f"{name}_by_key", f"{about}, by a key's name", used, "key")
    refused = {
        (caller.name, reason): count
        for caller in callers
        for reason, count in caller.refused.items()
    }
    yield counter("refused_by_key", "What a key asked for and may not", refused, "key", "reason")


def workers_of(engine: "Engine") -> "list[WorkerSeen] | None":
    """Returns the state of the workers; None outside mode aep."""
    from serving.execution.executor import HasWorkers  # imports jax, as the engine did

    executor = engine.executor
    return list(executor.seen()) if isinstance(executor, HasWorkers) else None


def _workers(engine: "Engine | None") -> Iterator[Metric]:
    """Yields the state of asynchronous workers; nothing outside mode aep.

    Rows pile up in front of a slow worker.
    """
    workers = None if engine is None else workers_of(engine)
    if workers is None:
        return
    for make, name, about, field in (
        (gauge, "up", "1: the worker is there", "is_up"),
        (counter, "stages", "Stages that a worker has run since it started", "stages"),
        (gauge, "waiting_rows", "Rows that wait before a worker's layers", "rows"),
        (gauge, "oldest_row_seconds", "How long the oldest of them waits", "oldest_s"),
    ):
        seen = {worker.name: float(getattr(worker, field)) for worker in workers}
        yield make(f"worker_{name}", about, seen, "worker")


_OF_A_REQUEST = {
    "prompt_tokens": "Tokens of a finished request's prompt",
    "generation_tokens": "Tokens of its answer",
    "prefill_time_seconds": "From its first layers to its first token",
    "decode_time_seconds": "From its first token to its last",
}


class ModelLoad:
    """What each model's finished requests had; further numbers if several models are served."""

    def __init__(self) -> None:
        self.finished, self.degraded = Counter[str](), Counter[str]()
        self.late = Counter[tuple[str, str]]()  # latency-sensitive tokens that came late, by phase
        self._lengths = {
            name: Histograms(_LENGTHS if name.endswith("tokens") else _E2E, "model_name")
            for name in _OF_A_REQUEST
        }

    def request_finished(self, sequence: "SequenceState", output: Output, now: float) -> None:
        """Counts a finished request of a model."""
        model, usage, began_at = sequence.request.model_name, output.usage, sequence.began_at
        self.finished[model] += 1
        self.degraded[model] += usage.degraded_visits
        for name, value in (
            ("prompt_tokens", usage.prompt_tokens),
            ("generation_tokens", usage.completion_tokens),
            ("prefill_time_seconds", sequence.first_at - began_at),
            ("decode_time_seconds", now - sequence.first_at),
        ):
            if not isnan(value):  # a step of workers that began again may not say when
                self._lengths[name].observe(np.array([value]), model)

    def collect(self, engine: "Engine | None") -> Iterator[Metric]:
        """Yields metric families with the model as label."""
        for name, about in _OF_A_REQUEST.items():
            yield from self._lengths[name].collect(f"request_{name}", about)
        if engine is None or len(engine.names) < 2:
            return
        scheduler, registry, fetcher = engine.scheduler, engine.registry, engine.fetcher
        running = Counter(s.request.model_name for s in list(scheduler.running))
        waiting = Counter(s.request.model_name for s in scheduler.waiting)
        for make, name, about, counts in (
            (counter, "degraded_visits", "Degraded visits of finished requests", self.degraded),
            (gauge, "num_requests_running", "Requests that hold pages", running),
            (gauge, "num_requests_waiting", "Requests in the queue", waiting),
        ):
            named = {model: counts[model] for model in engine.names if model}
            yield make(f"{name}_by_model", about, named, "model_name")
        late, about = {}, "Latency-sensitive tokens later than their objective"
        objectives, bounds = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
        for number, own in enumerate(engine.slo.models):
            if own.name:
                slos_s = engine.slo.objectives(Priority.LATENCY_SENSITIVE, number)
                for phase, slo_s in zip(PHASES, slos_s, strict=True):
                    late[own.name, phase] = self.late[own.name, phase]
                    objectives[own.name, phase] = slo_s
                bounds[own.name, "floor"] = own.floor_percent
                bounds[own.name, "ceiling"] = own.ceiling_percent
        of = "model_name", "phase"
        yield counter("slo_violations_by_model", about, late, *of)
        about = "Objectives of latency-sensitive requests"
        yield gauge("objective_seconds", about, objectives, *of)
        about = "Bounds of a model's thresholds"
        yield gauge("model_threshold_bound_percent", about, bounds, "model_name", "bound")
        about = "Decode steps with rows of several models"
        yield counter("mixed_steps", about, scheduler.num_mixed)
        resident = len(scheduler.models or list(filter(None, engine.names)))
        yield gauge("resident_models", "Models whose weights are on the device", resident)
        about = "Sets of non-expert weights copied in the place of others"
        yield counter("model_swaps", about, registry.num_swaps)
        fetches = {reason: fetcher.fetches[reason] for reason in ("miss", "ahead")}
        about = "Experts of host memory copied into spare slots"
        yield counter("expert_fetches", about, fetches, "reason")
        yield counter("expert_fetched_bytes", "Bytes of those", fetcher.fetched_bytes)
        about = "Rows that ran again, since a substitute had served what refuses one"
        yield counter("exact_reruns", about, fetcher.num_reruns)


class MeshLoad:
    """Load of a mesh's devices, accumulated over steps."""

    def __init__(self) -> None:
        self.imbalance = Histograms(_IMBALANCE, "phase")
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
            self.imbalance.observe(np.array([rows.max(1).sum() / rows.mean(1).sum()]), phase)
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
        about, counts = "Rows that a device's experts computed", _by_place(self.rows)
        yield counter("device_expert_rows", about, counts, "layer", "device")
        about = "Rows of the fullest device over the mean, of a step's layers together"
        yield from self.imbalance.collect("imbalance_ratio", about)
        lacking = self.padding / max(1.0, self.padding + self.positions)
        yield gauge("padded_rows_perc", "Rows that were padding; 1 is all", lacking)
        about = "Visits of layers that copies were made for"
        yield counter("expected_visits", about, self.expected)
        yield counter("expected_visits_right", "Of them, foreseen by device and expert", self.right)
        yield counter("experts_copied", "Copies made while a step ran", self.copied)
        mover = None if engine is None else engine.loader.mover
        if mover is not None:
            about = "Copies made between steps, to stay"
            yield counter("experts_placed", about, mover.experts_copied)
            for_long = float(np.mean(mover.imbalances()))
            about = "Imbalance expected of the load seen lately, mean over layers"
            yield gauge("placement_imbalance_ratio", about, for_long)
            about = "1: copies could not be moved, and are not any more"
            yield gauge("placement_failed", about, float(bool(mover.failure)))
        if engine is not None and engine.model is not None:
            copies = self.copied + (0 if mover is None else mover.experts_copied)
            about = "Of experts that were copied between devices"
            yield counter("expert_copy_bytes", about, copies * engine.model.pool.slot_bytes)
