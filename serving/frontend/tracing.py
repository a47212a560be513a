"""OpenTelemetry traces: a span for each request, with child spans for queue, prefill and decode.

Every front end wraps the handling of a request in `tracer.request(...)`. A thread sends spans to
the collector; if that is slow or down, spans are lost and nothing else happens. Attributes follow
OpenTelemetry's conventions for generative AI, plus `jmoe.*`. Without `otlp_endpoint` no
OpenTelemetry SDK is imported.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from serving.errors import (
    Aborted,
    DeadlineExceeded,
    RequestFailed,
    ServingError,
    SettingsError,
    Unavailable,
)
from serving.request import Output, Priority, ThresholdSpan, Usage
from serving.telemetry import logs
from serving.telemetry.observer import Observer
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, TracerProvider

    from serving.scheduling.sequence import SequenceState

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Time limit for sending the last spans when a server stops."""

_OURS_TO_MEND = (RequestFailed, Unavailable, DeadlineExceeded)
"""Errors that mark a span as failed; other ServingErrors are the caller's fault."""

Attributes = dict[str, Any]


class RequestSpan:
    """A running request's span. This base class records nothing, for servers without tracing."""

    def note(self, output: Output) -> None:
        """Notes an output before it is sent; called for every token."""

    def note_prompts(self, num_tokens: int) -> None:
        """Sets the number of prompt tokens as reported to the caller.

        Outputs do not tell it if a call has several choices, which may share a prompt or not.
        """

    def admitted(self, sequence: "SequenceState") -> None:
        """Notes that the engine admitted the request, or one of the several of a call."""


_NOT_TRACED = RequestSpan()
_current: ContextVar[RequestSpan] = ContextVar("jmoe_request_span", default=_NOT_TRACED)


class Tracer(Observer):
    """An observer of the engine that makes a span of each request; without a provider of spans, as
    `make_tracer` says, it makes none.

    The engine reports which requests it admitted; the span is found in a context variable of the
    task that called the engine.
    """

    def __init__(self, provider: "TracerProvider | None" = None, exporter: Any = None) -> None:
        """`exporter` is the one that sends the spans of `provider`."""
        super().__init__()
        self._provider, self._exporter = provider, exporter
        self._tracer = None if provider is None else provider.get_tracer("jmoe", jmoe_version())

    @contextlib.contextmanager
    def request(
        self,
        request_id: str,
        model: str,
        priority: Priority,
        headers: Iterable[tuple[str | bytes, str | bytes]] = (),
        *,
        operation: str = "text_completion",
    ) -> Iterator[RequestSpan]:
        """Traces one request until the block ends; log lines of its task get the request's id.

        Args:
            request_id: the request's id.
            model: the model's name.
            priority: the request's class.
            headers: of HTTP, or a gRPC call's metadata; W3C's name the caller's trace, and are
                ignored if malformed.
            operation: `chat` or `text_completion`, as OpenTelemetry's conventions name them.
        """
        logs.note_request(request_id)
        if self._tracer is None:
            yield _NOT_TRACED
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span: Any = self._tracer.start_span(
            f"{operation} {model}",
            TraceContextTextMapPropagator().extract(_trace_headers(headers)),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jmoe",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request_id,
                "jmoe.priority": priority.value,
            },
        )
        request = _Recorded(self._tracer, span) if span.is_recording() else _NOT_TRACED
        _current.set(request)
        failure: BaseException | None = None
        try:
            yield request
        except BaseException as error:
            failure = error
            raise
        finally:
            _current.set(_NOT_TRACED)
            if isinstance(request, _Recorded):
                request.end(failure)
            span.end()

    def request_admitted(self, sequence: "SequenceState", now: float) -> None:
        """See Observer."""
        _current.get().admitted(sequence)

    async def close(self) -> None:
        """Sends the remaining spans, for at most `FLUSH_S`."""
        if (provider := self._provider) is None:
            return
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def flush() -> None:
            provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(done.set)

        # A daemon thread, so that an unresponsive collector cannot keep the process alive.
        threading.Thread(target=flush, name="jmoe-traces", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_S):
                await done.wait()
        except TimeoutError:
            self._exporter.shutdown()


def _trace_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """Returns W3C's among some headers, by name."""
    texts = (
        [one.decode("latin-1") if isinstance(one, bytes) else one for one in header]
        for header in headers
    )
    return {name: value for name, value in texts if name in ("traceparent", "tracestate")}


def make_tracer(endpoint: str) -> Tracer:
    """Makes a tracer that sends spans to `endpoint` by OTLP over HTTP; if empty, one without spans.

    OpenTelemetry's environment variables (headers, sampler, resource) are respected. Raises
    SettingsError if OpenTelemetry is not installed.
    """
    if not endpoint:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"otlp_endpoint is {endpoint!r}, and {error.name} is not installed; install it with "
            "`pip install 'jmoe[otel]'`, or leave otlp_endpoint empty"
        ) from None
    attributes = {"service.version": jmoe_version()}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "jmoe"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    exporter = _watched(OTLPSpanExporter, endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, exporter)


class _Recorded(RequestSpan):
    """Records what becomes a request's attributes and child spans at its end."""

    def __init__(self, tracer: Any, span: "Span") -> None:
        self._tracer, self._span = tracer, span
        self._began_at = time.monotonic()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._last: dict[str, Output] = {}  # by request id: a call may have several requests
        self._first_at: dict[str, float] = {}
        self._sequences: list[SequenceState] = []
        self._prompt_tokens: int | None = None

    def note(self, output: Output) -> None:
        """See RequestSpan."""
        if output.request_id not in self._last:
            self._first_at[output.request_id] = time.monotonic()
        self._last[output.request_id] = output

    def note_prompts(self, num_tokens: int) -> None:
        """See RequestSpan."""
        self._prompt_tokens = num_tokens

    def admitted(self, sequence: "SequenceState") -> None:
        """See RequestSpan."""
        self._sequences.append(sequence)

    def end(self, failure: BaseException | None) -> None:
        """Sets the final attributes and makes the child spans."""
        from opentelemetry.trace import Status, StatusCode

        now, attributes = time.monotonic(), self._outcome(failure)
        for sequence in self._sequences[:1]:
            attributes |= _asked(sequence)
        self._span.set_attributes(attributes)
        if failure is not None and (
            isinstance(failure, _OURS_TO_MEND)
            or not isinstance(failure, ServingError | asyncio.CancelledError | GeneratorExit)
        ):
            self._span.set_status(Status(StatusCode.ERROR, _sendable(str(failure))))
        for sequence in self._sequences:
            self._phases(sequence, now)

    def _outcome(self, failure: BaseException | None) -> Attributes:
        outputs = list(self._last.values())
        found: Attributes = {}
        if outputs:
            found |= _usage([output.usage for output in outputs])
            if self._prompt_tokens is not None:
                found["gen_ai.usage.input_tokens"] = self._prompt_tokens
            found["gen_ai.response.time_to_first_chunk"] = (
                min(self._first_at.values()) - self._began_at
            )
            found |= _thresholds("prefill", [output.prefill_threshold for output in outputs])
            found |= _thresholds("decode", [output.decode_threshold for output in outputs])
        reasons = [output.finish_reason or "abort" for output in outputs]
        if isinstance(failure, Exception):
            found["error.type"] = type(failure).__name__
            reasons = ["abort" if isinstance(failure, Aborted) else "error"]
        found["gen_ai.response.finish_reasons"] = reasons or ["abort"]
        return found

    def _phases(self, sequence: "SequenceState", now: float) -> None:
        """Makes the spans of queue, prefill and decode, as far as the request got."""
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._span)
        first_at = self._first_at.get(sequence.request.request_id, math.nan)
        stages = {
            "queue": sequence.arrived_at,
            "prefill": sequence.began_at,
            "decode": first_at,
        }
        reached = [(name, at) for name, at in stages.items() if not math.isnan(at)]
        ends = [at for _, at in reached[1:]] + [now]
        for (name, start), end in zip(reached, ends, strict=True):
            child = self._tracer.start_span(name, inside, start_time=self._ns(start))
            child.end(self._ns(max(start, end)))

    def _ns(self, at: float) -> int:
        """Converts a time of the engine's clock to nanoseconds since the epoch."""
        return round(1e9 * at) + self._epoch_ns


def _usage(each: list[Usage]) -> Attributes:
    visits = sum(usage.expert_visits for usage in each)
    degraded = sum(usage.degraded_visits for usage in each)
    return {
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in each),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in each),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in each),
        "jmoe.degraded_share": degraded / visits if visits else 0.0,
    }


def _thresholds(phase: str, spans: list[ThresholdSpan | None]) -> Attributes:
    """Returns the smallest and largest threshold, in percent, of a phase's steps."""
    found = [span for span in spans if span is not None]
    if not found:
        return {}
    return {
        f"jmoe.{phase}_threshold.min_percent": min(span.min_percent for span in found),
        f"jmoe.{phase}_threshold.max_percent": max(span.max_percent for span in found),
    }


def _asked(sequence: "SequenceState") -> Attributes:
    """Returns the request's parameters as attributes, without those that are unset."""
    request, sampling = sequence.request, sequence.request.sampling
    seed = sampling.seed
    found: Mapping[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        # Integer attributes are signed 64-bit; a larger seed is sent as text.
        "gen_ai.request.seed": str(seed) if seed is not None and seed >= 2**63 else seed,
        "gen_ai.request.stop_sequences": [_sendable(text) for text in sampling.stop] or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "jmoe.allow_brownout": request.allow_brownout,
    }
    return {key: value for key, value in found.items() if value is not None}


def _sendable(text: str) -> str:
    """Replaces unpaired surrogates of a caller's text, since OTLP messages must be UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _watched(kind: Any, endpoint: str) -> Any:
    """Makes an exporter of a kind that logs once when spans get lost, and once when that ends.

    OpenTelemetry's own log lines about every attempt are suppressed.
    """
    from opentelemetry.sdk.trace.export import SpanExportResult

    for name in (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.sdk._shared_internal",  # logs every span that a full queue loses
    ):
        logging.getLogger(name).addFilter(_heard)

    class Watched(kind):
        lost = 0

        def export(self, spans: Any) -> Any:
            found = super().export(spans)
            if found is SpanExportResult.SUCCESS:
                if self.lost:
                    log.info("traces reach %s again; %d spans were lost", endpoint, self.lost)
                self.lost = 0
                return found
            if not self.lost:
                log.warning(
                    "traces do not reach %s (otlp_endpoint): %s; spans are dropped until they do",
                    endpoint,
                    _heard.line,
                )
            self.lost += len(spans)
            return found

    return Watched(endpoint=endpoint)


class _LastLine(logging.Filter):
    """A log filter that suppresses all records, and keeps the last one's text."""

    line = "no answer"

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        self.line = " ".join(record.getMessage().split())
        return False


_heard = _LastLine()
