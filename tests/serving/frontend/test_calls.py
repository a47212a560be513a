"""What `jmoe_calls_total` counts: every call of every port, and who was at fault."""

import asyncio
import logging
from collections import Counter
from contextvars import Context
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kserve_requests import infer
from openai_served import NO_CERTIFICATES, head, serving_http
from served import collect, failure, serving, until

from serving.frontend.access import Caller, current
from serving.frontend.keys import Key, changing, digest, new_key
from serving.frontend.metrics import Calls
from serving.frontend.metrics_http import MetricsPort
from serving.proto.inference import inference_pb2_grpc as inference_rpc
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

FOUR = {"max_tokens": 4}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GENERATE = "/jmoe.v1.Generation/Generate"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def counted(s, protocol):
    """Returns the counts other than 0, by route and code."""
    found = Counter()
    for sample in s.server.metrics.calls.collect().samples:
        if sample.labels["protocol"] == protocol and sample.value:
            found[sample.labels["route"], sample.labels["code"]] += sample.value
    return found


async def test_calls_over_http():
    async with serving_http() as s:
        await s.complete()
        await s.chat(stream=True)
        await s.http.get(COMPLETIONS)
        await s.http.get("/health?x=1")
        for path in ("/v1/a-strangers", "/v1/models/nobody", "/v1/models/counter"):
            await s.http.get(path)
        await s.http.get("/v1/models", headers={"host": "evil.example"})
        async with s.http.stream("POST", COMPLETIONS, content=b"{") as answer:
            assert answer.status_code == 415
        _, writer = await s.raw()
        writer.write(b"no HTTP\r\n\r\n")
        await until(lambda: ("other", "400") in counted(s, "http"))
        writer.close()
    assert counted(s, "http") == {
        (COMPLETIONS, "200"): 1,
        (CHATS, "200"): 1,
        (COMPLETIONS, "405"): 1,
        (COMPLETIONS, "415"): 1,
        ("/health", "200"): 1,
        ("/v1/models", "403"): 1,
        ("/v1/models/{id:path}", "200"): 1,
        ("/v1/models/{id:path}", "404"): 1,
        ("other", "404"): 1,
        ("other", "400"): 1,
    }


@pytest.mark.parametrize("fields", [b"", b',"stream":true'])
async def test_a_stream_counts_by_its_end_and_a_client_that_leaves_as_one(fields):
    body = b'{"model":"counter","prompt":"ab","max_tokens":9%b}' % fields
    async with serving_http() as s:
        s.engine.gate.clear()
        _, writer = await s.raw()
        writer.write(head(length=len(body)) + body)
        await until(lambda: s.engine.running == 1)
        writer.transport.abort()
        await until(lambda: counted(s, "http"))
        assert counted(s, "http") == {(COMPLETIONS, "499"): 1}
        reader, writer = await s.raw()
        writer.write(head(length=len(body)) + body)
        await until(lambda: s.engine.running == 1)
        s.engine.fail("it was time")
        assert b"it was time" in await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        writer.close()
        assert counted(s, "http") == {(COMPLETIONS, "499"): 1, (COMPLETIONS, "503"): 1}


async def test_calls_over_grpc():
    async with serving() as s:
        await collect(s.counting(2))
        await failure(s.channel.unary_unary("/a.strangers/Method")(b""))
        health = health_pb2_grpc.HealthStub(s.channel)
        await failure(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        s.engine.gate.clear()
        await failure(s.stub.Generate(pb.GenerateRequest(text="ab"), timeout=0.1))
        call = s.counting(2)
        await call.read()
        call.cancel()
        await until(lambda: counted(s, "grpc").get((GENERATE, "CANCELLED")) == 1)
        await s.admin.GetStats(pb.GetStatsRequest())
        assert counted(s, "admin") == {("/jmoe.v1.Admin/GetStats", "OK"): 1}
    assert counted(s, "grpc") == {
        (GENERATE, "OK"): 1,
        (GENERATE, "CANCELLED"): 1,
        (GENERATE, "DEADLINE_EXCEEDED"): 1,
        ("other", "UNIMPLEMENTED"): 1,
        ("/grpc.health.v1.Health/Check", "NOT_FOUND"): 1,
    }


async def test_requests_of_a_stream_count_one_by_one():
    async with serving() as s:
        stub = inference_rpc.GRPCInferenceServiceStub(s.channel)
        requests = [infer(id="a", sampling=FOUR), infer(id="b", sampling={"n": 2})]
        assert len([one async for one in stub.ModelStreamInfer(iter(requests))]) == 2
        s.engine.failure = RuntimeError("a fault")
        assert [one async for one in stub.ModelStreamInfer(iter(requests[:1]))]
    assert counted(s, "kserve") == {
        (STREAM, "OK"): 2,
        (f"{STREAM}/request", "OK"): 1,
        (f"{STREAM}/request", "INVALID_ARGUMENT"): 1,
        (f"{STREAM}/request", "INTERNAL"): 1,
    }


async def test_streams_that_are_cancelled_are_nobodys_fault(caplog):
    """Whatever is being written at that moment."""
    caplog.set_level(logging.INFO)
    async with serving() as s:
        stub = inference_rpc.GRPCInferenceServiceStub(s.channel)
        many = {"max_tokens": 2000, "stop_token_ids": []}
        requests = [infer(id=str(i), stream=True, sampling=many) for i in range(6)]
        for i in range(30):
            call = stub.ModelStreamInfer(iter(requests))
            for _ in range(1 + i % 7):
                await call.read()
            call.cancel()
        await until(lambda: s.engine.running == s.server.guard.num_calls == 0)
        await until(lambda: not len(s.server.guard.streams))
    codes = {code for _, code in counted(s, "kserve")}
    assert codes == {"CANCELLED"}
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_write_that_fails_is_the_clients_leave(caplog):
    async with serving() as s:
        s.engine.failure = grpc.aio.InternalError("Failed execute_batch")
        stub = inference_rpc.GRPCInferenceServiceStub(s.channel)
        await failure(stub.ModelInfer(infer(sampling=FOUR)))
        await failure(s.counting(2))
    assert counted(s, "grpc") == {(GENERATE, "CANCELLED"): 1}
    assert {code for _, code in counted(s, "kserve")} == {"CANCELLED"}
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_calls_of_the_page_and_of_metrics():
    async with serving_http(admin_http_port=0) as s:
        url = f"http://127.0.0.1:{s.page.port}"
        async with httpx2.AsyncClient(base_url=url, verify=NO_CERTIFICATES) as http:
            for path in ("/", "/nothing", "/api/state"):
                await http.get(path)
            s.engine.stats = None
            await http.get("/", headers={"host": "evil.example"})
            await http.post("/api/brownout", json={"zzz": 1})
        metrics = MetricsPort(s.server, "127.0.0.1", 0)
        await metrics.start()
        try:
            for path in ("/healthz", "/readyz?x=1", "/nothing", "/metrics"):
                where = f"http://127.0.0.1:{metrics.port}{path}"
                try:
                    await asyncio.to_thread(urlopen, where)
                except HTTPError as error:
                    error.close()
            _, writer = await asyncio.open_connection("127.0.0.1", metrics.port)
            writer.write(b"no HTTP at all\r\n\r\n")
            await until(lambda: ("other", "400") in counted(s, "metrics"))
            writer.close()
        finally:
            await metrics.stop()
    assert counted(s, "page") == {
        ("/", "200"): 1,
        ("/", "404"): 1,
        ("/", "403"): 1,
        ("/api/state", "200"): 1,
        ("/api/brownout", "400"): 1,
    }
    assert counted(s, "metrics") == {
        ("/healthz", "200"): 1,
        ("/readyz", "200"): 1,
        ("/metrics", "500"): 1,  # the engine's numbers are gone
        ("other", "404"): 1,
        ("other", "400"): 1,
    }


async def test_every_call_is_of_a_key_and_a_model_once(tmp_path):
    """Whatever the protocol: calls of alice are hers, with the model that she asked for; those of a
    stream's requests have each its own; what names no model that is served has none.
    """
    path = tmp_path / "keys.yml"
    keys = {name: new_key() for name in ("alice", "bob")}
    limits = {"alice": {"models": ("counter",)}, "bob": {"models": ("nobody",)}}
    with changing(path) as there:
        for name, key in keys.items():
            there[name] = Key(digest(key).hex(), **limits[name])
    says = {name: f"Bearer {key}" for name, key in keys.items()}
    async with serving_http(keys_file=str(path)) as s:
        for name, model in (("alice", "counter"), ("alice", "stranger"), ("bob", "counter")):
            heads = {"authorization": says[name]}
            body = {"model": model, "prompt": "ab", "max_tokens": 2}
            await s.http.post(COMPLETIONS, json=body, headers=heads)
            told = [("authorization", says[name])]
            asked = pb.GenerateRequest(text="ab", model=model, sampling={"max_new_tokens": 2})
            async with grpc.aio.insecure_channel(s.server.address) as channel:
                call = rpc.GenerationStub(channel).Generate(asked, metadata=told)
                await (collect(call) if (name, model) == ("alice", "counter") else failure(call))
                stub = inference_rpc.GRPCInferenceServiceStub(channel)
                request = infer(id="a", sampling=FOUR)
                request.model_name = model
                async for _ in stub.ModelStreamInfer(iter([request] * 2), metadata=told):
                    pass
        await s.http.get("/v1/models")
    found = {
        tuple(sample.labels.values()): sample.value
        for sample in s.server.metrics.calls.collect().samples
        if sample.value
    }
    assert found == {
        ("http", COMPLETIONS, "200", "alice", "counter"): 1,
        ("http", COMPLETIONS, "404", "alice", ""): 1,
        ("http", COMPLETIONS, "403", "bob", "counter"): 1,
        ("http", "/v1/models", "401", "", ""): 1,
        ("grpc", GENERATE, "OK", "alice", "counter"): 1,
        ("grpc", GENERATE, "NOT_FOUND", "alice", ""): 1,
        ("grpc", GENERATE, "PERMISSION_DENIED", "bob", "counter"): 1,
        ("kserve", STREAM, "OK", "alice", ""): 2,
        ("kserve", STREAM, "OK", "bob", ""): 1,
        ("kserve", f"{STREAM}/request", "OK", "alice", "counter"): 2,
        ("kserve", f"{STREAM}/request", "NOT_FOUND", "alice", ""): 2,
        ("kserve", f"{STREAM}/request", "PERMISSION_DENIED", "bob", "counter"): 2,
    }


def test_faults_are_counted_from_0():
    """Of a series that begins at 1 Prometheus would see no increase."""
    calls = Calls()
    ended = calls.door("http", ["/a", "other"], "500")
    Context().run(ended, "/a", 200)  # nobody's, whoever called before
    found = {tuple(sample.labels.values()): sample.value for sample in calls.collect().samples}
    assert found == {
        ("http", "/a", "500", "", ""): 0,
        ("http", "other", "500", "", ""): 0,
        ("http", "/a", "200", "", ""): 1,
    }


def test_keys_beyond_the_bound_count_together(monkeypatch):
    monkeypatch.setattr("serving.frontend.metrics.MAX_SERIES", 2)
    calls = Calls()
    ended = calls.door("http", ["/a"], "500")
    for name in ("alice", "bob", "carol", "alice"):
        Context().run(lambda name=name: (current.set(Caller(name)), ended("/a", 200)))
    found = {tuple(sample.labels.values())[3]: sample.value for sample in calls.collect().samples}
    assert found == {"": 0, "alice": 2, "other keys": 2}
