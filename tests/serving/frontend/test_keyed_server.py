"""A server that asks for keys, over sockets; and that keys are shown to nobody."""

import asyncio
import logging
from http.client import HTTPConnection

import pytest
from keyed import WRONG, Clock, keyed
from kserve_requests import infer
from openai_served import CHAT, serving_http
from served import CODE, Setup, collect, failure, request, until

from serving.client import Client
from serving.client.connection import Connection
from serving.frontend.access import Access
from serving.frontend.metrics import Metrics
from serving.frontend.reload import Watched
from serving.proto.inference import inference_pb2_grpc as inference
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import Priority

BE = Priority.BEST_EFFORT
ADMIN_METHODS = {"get_brownout": {}, "stats": {}, "set_brownout": {"way": 2}}


def meta(key: str | None):
    return () if key is None else (("authorization", f"Bearer {key}"),)


def ask(s: Setup, key: str | None, count: int = 3, stub=None, **fields):
    sampling = pb.SamplingParams(max_new_tokens=count)
    message = request([1, 2, 3], sampling=sampling, **fields)
    return (stub or s.stub).Generate(message, metadata=meta(key))


async def test_every_method_over_grpc_asks_for_a_key_but_health(file):
    async with keyed(file, admin_on_main_port=True) as s:
        for channel in (s.channel, s.admin_channel):
            for method in sorted(
                name
                for service in (s.server.main, s.server.front_ends["admin"])
                for name in _methods(channel is s.channel, service is s.server.main)
            ):
                call = channel.stream_stream(method)(metadata=meta(WRONG))
                status = await call.code()
                assert status == CODE.UNAUTHENTICATED, method
                assert "Bearer KEY" in await call.details()
        assert await s.health() == "SERVING"
        assert await s.health("jmoe.v1.Generation") == "SERVING"


def _methods(on_main_channel: bool, on_main_server: bool) -> list[str]:
    services = list(pb.DESCRIPTOR.services_by_name.values())
    if on_main_channel != on_main_server:
        return []
    found = [
        f"/{service.full_name}/{method.name}"
        for service in services
        if on_main_channel or service.name == "Admin"
        for method in service.methods
    ]
    reflections = ("grpc.reflection.v1alpha", "grpc.reflection.v1")
    return found + [f"/{name}.ServerReflection/ServerReflectionInfo" for name in reflections]


async def test_who_has_no_key_is_refused_before_a_message_is_received(file):
    """The call sends none, and nothing waits for it."""
    async with keyed(file, message_timeout_s=300) as s:
        call = s.channel.stream_stream("/jmoe.v1.Generation/Generate")()
        assert await asyncio.wait_for(call.code(), 60) == CODE.UNAUTHENTICATED
        assert s.engine.calls == []


async def test_two_keys_in_one_call_are_none(file):
    async with keyed(file) as s:
        twice = (*meta(file.text("alice")), *meta(file.text("root")))
        call = s.stub.Generate(request([1]), metadata=twice)
        assert (await failure(call)).code() == CODE.UNAUTHENTICATED


async def test_a_key_generates_and_only_an_admins_administers_on_either_port(file):
    async with keyed(file, admin_on_main_port=True) as s:
        plain, admin = (Connection(file.text(name)) for name in ("alice", "root"))
        for address in (s.server.addresses["admin"], s.server.address):
            async with Client(s.server.address, address, plain) as client:
                assert len([out async for out in client.generate([1, 2, 3])]) == 128
                assert (await client.server_info()).status == "ready"
                for name, fields in ADMIN_METHODS.items():
                    error = await failure(getattr(client, name)(**fields))
                    assert error.code() == CODE.PERMISSION_DENIED, name
                    assert "no admin key" in error.details()
            async with Client(s.server.address, address, admin) as client:
                for name, fields in ADMIN_METHODS.items():
                    assert await getattr(client, name)(**fields)
        assert s.server.access.callers["alice"].refused["admin"] == 2 * len(ADMIN_METHODS)


async def test_usage_is_charged_also_of_what_is_broken_off(file):
    async with keyed(file) as s:
        await collect(ask(s, file.text("alice"), 5))
        alice = s.server.access.callers["alice"]
        assert alice.num_tokens == 3 + 5
        s.engine.gate.clear()
        call = ask(s, file.text("alice"), 50)
        await call.read()
        assert alice.num_running == 1
        call.cancel()
        await until(lambda: not alice.num_running)
        assert alice.num_tokens == (3 + 5) + (3 + 1)


async def test_a_rate_is_refused_with_the_time_to_come_back(file):
    file.write(alice={"requests_per_min": 2}, root={"concurrency": 1})
    async with keyed(file) as s:
        access = s.server.access
        clock = access.callers["alice"]._clock = Clock()
        clock.now_ns = 10**18
        for _ in range(2):
            await collect(ask(s, file.text("alice")))
            clock.now_ns += 1_000_100_000
        error = await failure(ask(s, file.text("alice")))
        assert error.code() == CODE.RESOURCE_EXHAUSTED
        # 30 s after the first of them, less two times 1.0001 s: rounded up, or one comes too early.
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "28000"
        s.engine.gate.clear()
        held = ask(s, file.text("root"), 9)
        await held.read()
        error = await failure(ask(s, file.text("root")))
        assert error.code() == CODE.RESOURCE_EXHAUSTED
        assert "1 requests under way" in error.details()
        held.cancel()


async def test_models_and_classes_of_a_key(file):
    """What it may not is in test_refusals.py."""
    file.write(alice={"models": ("counter",), "classes": (BE,)}, root={"models": ("another",)})
    async with keyed(file) as s:
        # Without a name it is the first model, by that one's name.
        for named in ({"model": "counter"}, {}):
            good = ask(s, file.text("alice"), priority=pb.BEST_EFFORT, **named)
            assert len(await collect(good)) == 3
        error = await failure(ask(s, file.text("root"), model="nowhere"))
        assert error.code() == CODE.NOT_FOUND
        assert [call["key"] for call in s.engine.calls] == ["alice", "alice"]


async def test_a_request_without_a_class_is_of_the_keys_own(file):
    file.write(alice={"classes": (BE,)}, root={})
    async with serving_http() as s:
        s.server.access = Access(file.path)
        stub = inference.GRPCInferenceServiceStub(s.channel)
        for name in ("alice", "root"):
            headers = {"authorization": file.says(name)}
            for path, prompt in (
                ("/v1/completions", {"prompt": "ab"}),
                ("/v1/chat/completions", {"messages": CHAT, "priority": 0}),
                ("/v1/responses", {"input": "hi"}),
            ):
                answer = await s.http.post(path, json=prompt, headers=headers)
                assert answer.status_code == 200, answer.text
            await collect(ask(s, file.text(name)))
            for parameters in ({}, {"priority": 0}):
                await stub.ModelInfer(infer(parameters=parameters), metadata=meta(file.text(name)))
        found = [(call["key"], call["priority"]) for call in s.engine.calls]
    assert found == [("alice", BE)] * 6 + [("root", Priority.LATENCY_SENSITIVE)] * 6


def get(
    s: Setup, path: str, authorization: str | None = None, of: str = "metrics"
) -> tuple[int, str, str | None]:
    connection = HTTPConnection("127.0.0.1", s.server.front_ends[of].port, timeout=60)
    connection.request(
        "GET", path, headers={"Authorization": authorization} if authorization else {}
    )
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode(), answer.getheader("WWW-Authenticate")
    finally:
        connection.close()


async def test_metrics_ask_for_a_key_that_may_and_probes_for_none(file):
    file.write(alice={}, root={"admin": True}, prometheus={"metrics": True})
    async with keyed(file) as s:
        for path in ("/healthz", "/readyz"):
            assert (await asyncio.to_thread(get, s, path))[0] == 200
        wanted = {None: 401, f"Bearer {WRONG}": 401, "alice": 403, "root": 200, "prometheus": 200}
        for who, status in wanted.items():
            says = file.says(who) if who in file.found else who
            for port in ("metrics", "http"):
                got, body, asks = await asyncio.to_thread(get, s, "/metrics", says, port)
                assert got == status
                assert asks == ("Bearer" if status == 401 else None)
                assert ("jmoe_prompt_tokens" in body) == (status == 200)
        for _ in range(2):
            error = await failure(ask(s, file.text("prometheus")))
            assert error.code() == CODE.PERMISSION_DENIED
        _, body, _ = await asyncio.to_thread(get, s, "/metrics", file.says("prometheus"))
        assert 'jmoe_refused_by_key_total{key="prometheus",reason="generate"} 2.0' in body
        assert not s.engine.calls


async def test_what_keys_did_is_counted_by_their_names(file):
    file.write(alice={"models": ("counter",), "requests_per_min": 1}, root={"admin": True})
    async with keyed(file) as s:
        await collect(ask(s, file.text("alice"), 4))
        for _ in range(3):
            await failure(ask(s, file.text("alice")))
        await failure(ask(s, WRONG))
        await failure(ask(s, None))
        _, text, _ = await asyncio.to_thread(get, s, "/metrics", file.says("root"))
    lines = set(text.splitlines())
    assert 'jmoe_requests_by_key_total{key="alice"} 1.0' in lines
    assert 'jmoe_tokens_by_key_total{key="alice"} 7.0' in lines
    assert 'jmoe_requests_running_by_key{key="alice"} 0.0' in lines
    assert 'jmoe_refused_by_key_total{key="alice",reason="requests"} 3.0' in lines
    assert 'jmoe_refused_by_key_total{key="root",reason="requests"} 0.0' in lines
    labels = (
        'code="UNAUTHENTICATED",key="",model_name="",protocol="grpc",'
        'route="/jmoe.v1.Generation/Generate"'
    )
    assert f"jmoe_calls_total{{{labels}}} 2.0" in lines


def test_without_keys_there_are_no_metrics_of_keys():
    metrics = Metrics()
    metrics.access = Access()
    assert not [family.name for family in metrics.collect() if "key" in family.name]


async def test_keys_are_shown_to_nobody(file, caplog, capfd):
    """Logs of every library, errors, metrics and the texts of objects, after all went wrong."""
    caplog.set_level(logging.DEBUG)
    file.write(alice={"models": ("x",)}, root={"admin": True})
    right, wrong = file.text("alice"), [WRONG, "Bearer-" + WRONG, "nonsense" * 20]
    told = []
    async with keyed(file) as s:
        for key in (right, *wrong):
            told.append(await failure(ask(s, key)))
            told.append(await failure(s.admin.GetStats(pb.GetStatsRequest(), metadata=meta(key))))
            told.append(await asyncio.to_thread(get, s, "/metrics", f"Bearer {key}"))
            told.append(await asyncio.to_thread(get, s, "/nowhere", f"Bearer {key}"))
            connection = Connection(key)
            told += [connection, vars(connection).keys()]
        with pytest.raises(ValueError, match="copied whole") as caught:
            Connection(WRONG + "\n")
        told.append(caught.value)
        told.append(await asyncio.to_thread(get, s, "/metrics", file.says("root")))
        server = s.server
        told += [server, server.access, server.access.callers, server.config, server.guard]
        told += [vars(caller) for caller in server.access.callers.values()]
        told += [vars(server.access), file.path.read_text()]
    out, err = capfd.readouterr()
    seen = "\n".join([repr(told), str(told), *map(str, told), caplog.text, out, err])
    for record in caplog.records:
        seen += repr(vars(record))
    for key in (right, *wrong, file.text("root")):
        assert key not in seen
    assert "alice" in seen  # names are what is shown


# -- clients -------------------------------------------------------------------------------------


def test_a_client_takes_its_key_from_the_environment_only():
    found = Connection.of_environment(environment={"JMOE_API_KEY": "k\n", "JMOE_TLS_CA": "ca"})
    assert found == Connection("k", "ca")
    assert found.metadata == (("authorization", "Bearer k"),)
    other = Connection.of_environment("MINE", {"MINE": "m", "JMOE_API_KEY": "k"}, tls_ca="c")
    assert other == Connection("m", "c")
    assert Connection.of_environment(environment={}).metadata == ()
    with pytest.raises(ValueError, match="MINE is empty"):
        Connection.of_environment("MINE", {"JMOE_API_KEY": "k"})


async def test_a_server_reads_it_again_by_itself(file, monkeypatch):
    monkeypatch.setattr(Watched.watch, "__defaults__", (0.01,))
    async with keyed(file) as s:
        file.write(bob={})
        await until(lambda: "bob" in s.server.access.callers)
        assert (await failure(ask(s, file.text("alice")))).code() == CODE.UNAUTHENTICATED
        assert len(await collect(ask(s, file.text("bob")))) == 3
