"""Traces as a collector gets them: a small one listens here and reads the protobuf."""

import asyncio
import contextlib
import gzip
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import grpc
import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as conventions
import pytest
from counting import counting_engine
from fake_engine import FakeEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.semconv.attributes import error_attributes, service_attributes
from served import collect, failure, request, until

from serving.bench.scrape import free_port
from serving.config import ServerConfig
from serving.errors import InvalidRequest, Overloaded, RequestFailed, SettingsError
from serving.frontend import tracing
from serving.frontend.server import Server
from serving.frontend.tracing import make_tracer
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.request import Priority, Request, SamplingParams
from serving.settings import reading as settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
LS = Priority.LATENCY_SENSITIVE


class Collector:
    """Takes OTLP over HTTP; `status` is what it answers, `gate` holds its answers up."""

    def __init__(self):
        self.messages, self.resources, self.status = [], [], 200
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.messages.append(ExportTraceServiceRequest.FromString(body))
                collector.gate.wait(60)
                answer = ExportTraceServiceResponse().SerializeToString()
                with contextlib.suppress(OSError):  # who asked has gone
                    self.send_response(collector.status)
                    self.send_header("content-type", "application/x-protobuf")
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self):
        return [
            span
            for message in self.messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def roots(self):
        return [span for span in self.spans() if span.kind == span.SPAN_KIND_SERVER]

    def inside(self, root):
        inner = [span for span in self.spans() if span.parent_span_id == root.span_id]
        return sorted(inner, key=lambda span: span.start_time_unix_nano)

    def close(self):
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def value(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in any_value.array_value.values]
    return getattr(any_value, kind)


def attributes(span):
    return {pair.key: value(pair.value) for pair in span.attributes}


@contextlib.asynccontextmanager
async def traced(url, engine=None):
    """Yields a server that traces to `url`, and a stub; spans are sent when it has ended."""
    tracer = make_tracer(url)
    server = Server(ServerConfig(port=0), tracer=tracer)
    await server.start()
    engine = engine or (lambda tracer: counting_engine(observer=tracer))
    await server.attach(engine(tracer))
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield rpc.GenerationStub(channel)
    await server.stop()


def asked(count, **fields):
    sampling = pb.SamplingParams(max_new_tokens=count, temperature=0.5, top_k=7, stop_token_ids=[1])
    return request([1, 2, 3], sampling=sampling, **fields)


async def test_a_request_is_a_span_with_its_queue_its_prompt_and_its_tokens(collector):
    async with traced(collector.url) as stub:
        call = stub.Generate(
            asked(4, request_id="mine", priority=pb.BEST_EFFORT),
            metadata=[("traceparent", TRACEPARENT), ("tracestate", "vendor=1")],
        )
        assert len(await collect(call)) == 4
    (root,) = collector.roots()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.trace_state == "vendor=1"
    found = attributes(root)
    first_s = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_s < 60
    model = found["gen_ai.request.model"]
    assert root.name == f"text_completion {model}"
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jmoe",
        "gen_ai.request.model": model,
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "jmoe.priority": "best_effort",
        "jmoe.degraded_share": 0.0,
        "jmoe.allow_brownout": True,
        "jmoe.prefill_threshold.min_percent": 100,
        "jmoe.prefill_threshold.max_percent": 100,
        "jmoe.decode_threshold.min_percent": 100,
        "jmoe.decode_threshold.max_percent": 100,
    }
    phases = collector.inside(root)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in phases]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert root.start_time_unix_nano <= times[0][0]
    assert times[-1][1] <= root.end_time_unix_nano
    assert {span.trace_id.hex() for span in phases} == {TRACE}


def test_names_are_those_of_the_conventions():
    known = {v for v in vars(conventions).values() if isinstance(v, str)}
    known |= {error_attributes.ERROR_TYPE, service_attributes.SERVICE_NAME}
    with open(tracing.__file__, encoding="utf-8") as file:
        words = {word.strip('",:[]()') for word in file.read().split()}
    named = {word for word in words if word.startswith(("gen_ai.", "error."))}
    assert len(named) > 10
    assert named <= known
    assert "text_completion" in {kind.value for kind in conventions.GenAiOperationNameValues}


async def test_without_a_trace_or_with_a_malformed_one_a_new_one_begins(collector):
    async with traced(collector.url) as stub:
        await collect(stub.Generate(asked(1)))
        for wrong in ("00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "é".encode("latin-1").hex()):
            await collect(stub.Generate(asked(1), metadata=[("traceparent", wrong)]))
    roots = collector.roots()
    assert len(roots) == len({root.trace_id for root in roots}) == 4
    assert all(not root.parent_span_id for root in roots)


async def test_a_caller_that_samples_nothing_gets_no_span(collector):
    async with traced(collector.url) as stub:
        unsampled = [("traceparent", TRACEPARENT[:-1] + "0")]
        assert len(await collect(stub.Generate(asked(2), metadata=unsampled))) == 2
        await collect(stub.Generate(asked(1, request_id="sampled")))
    assert [attributes(r)["gen_ai.response.id"] for r in collector.roots()] == ["sampled"]


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (RequestFailed("a fault"), True),
        (RuntimeError("a bug"), True),
        (Overloaded("full", 1.0), False),
        (InvalidRequest("too long"), False),
    ],
)
async def test_how_a_request_failed_is_in_its_span(collector, error, is_ours):
    fake = FakeEngine()
    fake.failure = error
    async with traced(collector.url, lambda _: fake) as stub:
        await failure(stub.Generate(asked(2)))
    (root,) = collector.roots()
    assert attributes(root)["error.type"] == type(error).__name__
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["error"]
    assert root.status.code == (root.status.STATUS_CODE_ERROR if is_ours else 0)


async def test_a_caller_that_goes_away_is_an_abort(collector):
    engines = []

    def slow(tracer):
        engines.append(counting_engine(0.02, observer=tracer))
        return engines[0]

    async with traced(collector.url, slow) as stub:
        call = stub.Generate(asked(150))
        await call.read()
        call.cancel()
        await until(lambda: engines[0].stats().requests_aborted)
    (root,) = collector.roots()
    found = attributes(root)
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert "error.type" not in found
    assert 1 <= found["gen_ai.usage.output_tokens"] < 150
    assert [span.name for span in collector.inside(root)] == ["queue", "prefill", "decode"]


async def test_several_answers_of_one_call_are_in_one_span(collector):
    """What a front end does that answers a call with several of the engine's."""
    tracer = make_tracer(collector.url)
    engine = counting_engine(observer=tracer)

    async def answer(span, number):
        async for out in engine.generate([1, 2, 3], request_id=f"id-{number}"):
            span.note(out)

    with tracer.request("id", "counter", LS, operation="chat") as span:
        span.note_prompts(3)  # both are of one prompt
        await asyncio.gather(*(answer(span, number) for number in range(2)))
    await engine.stop()
    await tracer.close()
    (root,) = collector.roots()
    found = attributes(root)
    assert root.name == "chat counter"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 256)
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    names = [span.name for span in collector.inside(root)]
    assert sorted(names) == ["decode", "decode", "prefill", "prefill", "queue", "queue"]


async def test_headers_of_http_name_the_callers_trace_too(collector):
    headers = [(b"host", b"localhost"), (b"traceparent", TRACEPARENT.encode())]
    tracer = make_tracer(collector.url)
    with tracer.request("id", "counter", LS, headers):
        pass
    await tracer.close()
    (root,) = collector.roots()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)


async def test_who_sends_is_named(collector, monkeypatch):
    for name in (None, "mine"):
        if name is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        tracer = make_tracer(collector.url)
        with tracer.request("a", "counter", LS):
            pass
        await tracer.close()
    names = [
        {pair.key: value(pair.value) for pair in resource.resource.attributes}["service.name"]
        for message in collector.messages
        for resource in message.resource_spans
    ]
    assert names == ["jmoe", "mine"]


async def test_a_collector_that_is_gone_costs_nothing_but_spans(caplog, monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_S", 0.5)
    caplog.set_level(logging.INFO)
    endpoint = f"http://127.0.0.1:{free_port()}/v1/traces"
    async with traced(endpoint) as stub:
        for _ in range(20):
            assert len(await collect(stub.Generate(asked(3)))) == 3

    def told():
        return [r.getMessage() for r in caplog.records if "traces" in r.getMessage()]

    await until(told)  # by the thread that gave up when the server ended
    assert len(told()) == 1
    assert told()[0].startswith(f"traces do not reach {endpoint} (otlp_endpoint):")
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_collector_that_hangs_holds_nobody_up(collector, monkeypatch):
    """Neither requests nor the end of the server: that is over in `FLUSH_S`."""
    monkeypatch.setattr(tracing, "FLUSH_S", 0.5)
    collector.gate.clear()
    loop = asyncio.get_running_loop()
    async with traced(collector.url) as stub:
        # More spans than are sent at once, so that the thread sends and waits meanwhile.
        calls = [stub.Generate(asked(1)) for _ in range(150)]
        for call in calls:
            assert len(await collect(call)) == 1
        await until(lambda: collector.messages)
        assert len(await collect(stub.Generate(asked(3)))) == 3
        ends_at = loop.time()
    assert loop.time() - ends_at < tracing.FLUSH_S + 10


async def test_without_an_endpoint_nothing_is_imported():
    tracer = make_tracer("")
    with tracer.request("a", "counter", LS, [("traceparent", TRACEPARENT)]) as span:
        assert type(span) is tracing.RequestSpan  # which records nothing
        span.note(None)
    await tracer.close()
    code = (
        "import sys; import serving.frontend.server; "
        "sys.exit(any(n.startswith(('opentelemetry.sdk', 'jax')) for n in sys.modules))"
    )
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=subprocess.PIPE)
    assert (await done.communicate(), done.returncode) == ((None, b""), 0)


def test_an_endpoint_without_the_extra_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"otlp_endpoint is 'http://c'.*jmoe\[otel\]"):
        make_tracer("http://c")


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector", "http://", "http:// c"])
def test_an_endpoint_that_is_no_url_is_refused(url):
    with pytest.raises(SettingsError, match=r"otlp_endpoint is .* http://127\.0\.0\.1:4318/v1"):
        settings.load(overrides={"otlp_endpoint": url})


async def test_what_a_caller_may_ask_can_be_sent(collector, caplog):
    """A seed beyond 64 bits with a sign, and text that is no UTF-8."""
    tracer = make_tracer(collector.url)
    sampling = SamplingParams(seed=2**64 - 1, stop=("\ud800x",))
    with tracer.request("id", "counter", LS) as span:
        request = Request("id", [1, 2], sampling)
        span.admitted(SimpleNamespace(request=request, arrived_at=1.0, began_at=2.0))
    with pytest.raises(RequestFailed), tracer.request("other", "counter", LS):
        raise RequestFailed("half a pair: \ud800")
    await tracer.close()
    found = {attributes(root)["gen_ai.response.id"]: root for root in collector.roots()}
    assert attributes(found["id"])["gen_ai.request.seed"] == str(2**64 - 1)
    assert attributes(found["id"])["gen_ai.request.stop_sequences"] == ["?x"]
    assert found["other"].status.message == "half a pair: ?"
    assert not caplog.records
