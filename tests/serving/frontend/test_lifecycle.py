"""Two ports, a failed engine, and a drain that ends with what callers got."""

import asyncio
import logging
import socket
from http.client import HTTPConnection

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_server import start as start_scripted
from served import CODE, SERVICES, Setup, failure, process, request, serving, until

from serving.bench.scrape import free_port
from serving.client import Client
from serving.config import EngineConfig, ServerConfig
from serving.errors import SettingsError
from serving.frontend.server import Server, serve
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.settings import reading as settings

# ---- the admin service -------------------------------------------------------------------------


async def test_admin_calls_are_not_implemented_on_the_main_port() -> None:
    async with serving() as s:
        stub = rpc.AdminStub(s.channel)
        for call in (
            stub.GetBrownout(pb.GetBrownoutRequest()),
            stub.SetBrownout(pb.SetBrownoutRequest(way=2)),
            stub.GetStats(pb.GetStatsRequest()),
        ):
            assert (await failure(call)).code() == CODE.UNIMPLEMENTED
        call = rpc.GenerationStub(s.admin_channel).Generate(request([1]))
        assert (await failure(call)).code() == CODE.UNIMPLEMENTED
        assert s.server.addresses["admin"].startswith("127.0.0.1:")


async def test_admin_calls_can_be_let_onto_the_main_port() -> None:
    async with serving(admin_on_main_port=True) as s:
        stats = await rpc.AdminStub(s.channel).GetStats(pb.GetStatsRequest())
        assert stats.kv_pages_total == 100


async def test_a_client_finds_the_admin_service() -> None:
    async with serving() as s:
        info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.admin_port == s.server.front_ends["admin"].port
        async with Client(s.server.address) as client:
            found = await asyncio.gather(client.stats(), client.get_brownout(), client.stats())
            assert (found[0].kv_pages_total, found[1].way) == (100, 8)
            assert client.admin_address == s.server.addresses["admin"]
        async with Client("127.0.0.1:1", s.server.addresses["admin"]) as client:
            assert (await client.set_brownout(way=2)).way == 2


async def test_a_client_asks_on_the_main_port_where_there_is_no_other() -> None:
    server, _, address = await start_scripted()
    try:
        async with Client(address) as client:
            await client.stats()
    finally:
        await server.stop(0)


# ---- addresses ---------------------------------------------------------------------------------


async def test_the_port_of_http_that_grpc_was_given_is_said(monkeypatch, caplog) -> None:
    """As after `--port 8000` of somebody who means HTTP."""
    wanted = free_port()
    monkeypatch.setattr("serving.frontend.openai.app.FIRST_PORT", wanted)
    server = Server(ServerConfig(port=wanted))
    try:
        await server.start()
        (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        assert f"--port is gRPC's, and HTTP is on port {wanted + 1}" in said
        assert f"need --http-port {wanted}" in said
    finally:
        await server.stop()


@pytest.mark.parametrize(("key", "flag"), [("port", "--port"), ("admin_port", "--admin-port")])
async def test_a_taken_port_names_the_flag(key: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(ServerConfig(**{"port": 0, key: port}))
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: Address .*in use; .* {flag}$"):
            await server.start()


@pytest.mark.parametrize(
    ("host", "reason"),
    [("no.such.host.invalid", ""), ("192.0.2.1", "Cannot assign"), ("a" * 300, "")],
)
async def test_a_bad_host_names_the_flag(host: str, reason: str) -> None:
    server = Server(ServerConfig(port=0, host=host))
    with pytest.raises(OSError, match=rf"^cannot listen on {host}:0: {reason}.*another --host$"):
        await server.start()
    server = Server(ServerConfig(port=0, admin_host=host))
    with pytest.raises(OSError, match=r"choose another --admin-host$"):
        await server.start()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_needs_no_brackets(host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    async with serving(host=host, admin_host=host) as s:
        assert s.server.address == f"[::1]:{s.server.main.port}"
        async with Client(s.server.address) as client:
            assert (await client.stats()).kv_pages_total == 100


# ---- probes ----------------------------------------------------------------------------------


async def test_probes_answer_from_before_the_model_is_loaded_until_the_end() -> None:
    port = free_port()

    def get(path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()

    async def probes() -> list[tuple[int, str]]:
        return [await asyncio.to_thread(get, path) for path in ("/healthz", "/readyz")]

    async with Setup(ServerConfig(port=0, metrics_port=port)) as s:
        assert await probes() == [(200, "ok"), (503, "starting")]
        assert "jmoe_" in (await asyncio.to_thread(get, "/metrics"))[1]
        await s.ready()
        assert await probes() == [(200, "ok"), (200, "ready")]
        assert "jmoe_kv_cache_usage_perc 0.25" in (await asyncio.to_thread(get, "/metrics"))[1]
        s.engine.gate.clear()
        call = s.counting(2)
        await anext(aiter(call))
        draining = asyncio.create_task(s.server.drain())
        await until(lambda: s.server.status == "draining")
        assert await probes() == [(200, "ok"), (503, "draining")]
        s.engine.gate.set()
        assert await draining
        with pytest.raises(ConnectionRefusedError):
            await probes()


async def test_a_failed_engine_is_not_ready() -> None:
    async with serving() as s:
        s.engine.fail("out of luck")
        await until(lambda: s.server.failure is not None)
        assert s.server.readiness() == (False, "failed")


async def test_a_taken_metrics_port_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(ServerConfig(port=0, metrics_port=taken.getsockname()[1]))
        with pytest.raises(OSError, match=r"choose another --metrics-port$"):
            await server.start()


# ---- a drain -----------------------------------------------------------------------------------


async def finished_but_not_read(s: Setup, num_tokens: int):
    """Returns a call to a real engine, which has made every token while the caller has read one."""
    from serving.engine import Engine
    from serving.plan import Limits
    from tests.serving.fake_runner import FakeRunner

    config = EngineConfig(
        max_num_seqs=1, max_model_len=num_tokens + 3, page_size=64, max_prefill_tokens=64
    )
    engine = Engine(config, FakeRunner(Limits(1, 64, 64, 64, 1)), None)
    engine.run()
    await s.server.attach(engine)
    sampling = pb.SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    call = s.stub.Generate(request([1, 2, 3], sampling=sampling, request_id="x" * 128))
    await call.read()
    await until(lambda: engine.stats().requests_finished == 1, timeout_s=120)
    assert s.server.guard.num_calls == 1
    return call


@pytest.mark.deep
async def test_a_drain_waits_for_a_slow_reader() -> None:
    async with Setup(ServerConfig(port=0)) as s:
        call = await finished_but_not_read(s, 2000)
        draining = asyncio.create_task(s.server.drain())
        await until(lambda: s.server.status == "draining")
        read = 1
        while (message := await call.read()) is not grpc.aio.EOF:
            read += len(message.token_ids)
            await asyncio.sleep(0)
        assert read == 2000
        assert await draining


@pytest.mark.deep
async def test_a_drain_that_could_not_deliver_says_so() -> None:
    async with Setup(ServerConfig(port=0, drain_timeout_s=0.3)) as s:
        await finished_but_not_read(s, 2000)
        assert not await s.server.drain()


# ---- a failed engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
async def test_an_engine_whose_process_ends_with_it_knows_how_long_a_start_takes(ends) -> None:
    async with serving(exit_on_failure=ends) as s:
        assert (getattr(s.engine, "restart_s", None) is not None) == ends
        assert not ends or 0 < s.engine.restart_s < 600


async def test_a_failed_engine_is_not_serving_before_anyone_calls(caplog) -> None:
    async with serving() as s:
        s.engine.gate.clear()
        call = s.counting(3)
        await anext(aiter(call))
        s.engine.fail("a step failed: out of luck")
        await until(lambda: s.server.failure is not None)
        assert [await s.health(name) for name in ("", *SERVICES)] == ["NOT_SERVING"] * 4
        error = await failure(call)
        assert (error.code(), "out of luck" in error.details()) == (CODE.UNAVAILABLE, True)
        assert (await failure(s.counting(1))).code() == CODE.UNAVAILABLE
    assert [r.levelno for r in caplog.records if "NOT_SERVING" in r.message] == [logging.ERROR]


async def test_a_failed_engine_ends_the_process_and_callers_are_told() -> None:
    async with process(0.0, 60.0) as (child, stdout):
        address = await ready(stdout)
        async with grpc.aio.insecure_channel(address) as channel:
            sampling = pb.SamplingParams(max_new_tokens=3)
            call = rpc.GenerationStub(channel).Generate(request([1], sampling=sampling))
            await anext(aiter(call))
            dying = rpc.GenerationStub(channel).Generate(request([66]))  # the process's cue
            assert (await failure(dying)).code() == CODE.UNAVAILABLE
            assert "66 is unlucky" in (await failure(call)).details()
        assert await asyncio.wait_for(child.wait(), 60) == 4


async def test_a_failed_engine_can_leave_the_process_up() -> None:
    async with process(0.0, 60.0, "--stay") as (child, stdout):
        address = await ready(stdout)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = rpc.GenerationStub(channel)
            assert (await failure(stub.Generate(request([66])))).code() == CODE.UNAVAILABLE
            assert await health_at(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_a_client_does_not_take_a_server_that_drains_for_one_that_is_ready() -> None:
    async with serving() as s, Client(s.server.address) as client:
        await client.wait_ready(30)
        s.server.health.close()  # which ends what watches it
        with pytest.raises(TimeoutError):
            await client.wait_ready(0.5)


async def health_at(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def ready(stdout) -> str:
    async with asyncio.timeout(60):
        while not (line := (await stdout.readline()).decode()).startswith("jmoe ready on "):
            assert line
    return line.split()[-1]


async def test_a_port_that_is_taken_ends_serving_before_anything_is_loaded() -> None:
    async def load():
        raise AssertionError("it must not be loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="--port"):
        await serve(ServerConfig(port=taken.getsockname()[1]), load)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("admin_port", 50051),  # the main port's
        ("admin_port", 65536),
        ("admin_host", ""),
        ("max_connections", 0),
        ("max_concurrent_calls", -1),
        ("max_bytes_in_flight", 4095),
        ("message_timeout_s", 0.0),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=key):
        settings.load(None, {key: value})
