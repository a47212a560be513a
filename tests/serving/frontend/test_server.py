"""The server over a real socket, with an engine that counts up."""

import asyncio
import filecmp
import logging
import math
import os
import re
import signal
from pathlib import Path

import grpc
import pytest
from fake_engine import FakeEngine
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from keyed import KeysFile
from served import CODE, SERVICES, Setup, collect, failure, process, request, serving, until

from serving.config import EngineConfig, ServerConfig
from serving.frontend.server import Server, serve
from serving.proto import build
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.request import BrownoutChange, Priority, SamplingParams

INFERENCE = "inference.GRPCInferenceService"


def test_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    build.build(tmp_path)
    stems = [proto.removesuffix(".proto") for proto in build.PROTOS]
    names = [stem + ending for stem in stems for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]
    same, *_ = filecmp.cmpfiles(build.ROOT, tmp_path, names, shallow=False)
    assert same == names, "run python -m serving.proto.build"


async def test_streams_tokens_and_usage() -> None:
    async with serving() as s:
        got = await collect(s.counting(4, request_id="mine", model="counter"))
    assert [list(m.token_ids) for m in got] == [[4], [5], [6], [7]]
    assert [m.finish_reason for m in got] == ["", "", "", "length"]
    assert {m.request_id for m in got} == {"mine"}
    assert got[-1].usage == pb.Usage(
        prompt_tokens=3,
        completion_tokens=4,
        expert_visits=48,
        degraded_visits=6,
        expected_loss=0.375,
    )
    assert (got[0].usage.HasField("expected_loss"), got[0].usage.expected_loss) == (True, 0)
    assert not got[0].HasField("decode_threshold")
    assert got[1].decode_threshold == pb.ThresholdSpan(min_percent=40, max_percent=70)


async def test_text_prompt_and_logprobs() -> None:
    sampling = pb.SamplingParams(max_new_tokens=2, logprobs=True)
    async with serving() as s:
        got = await collect(s.stub.Generate(pb.GenerateRequest(text="ab", sampling=sampling)))
    assert "".join(m.text for m in got) == "cd"
    assert [list(m.logprobs) for m in got] == [[-0.5], [-0.5]]


async def test_absent_fields_take_defaults_and_zeros_are_kept() -> None:
    sampling = pb.SamplingParams(
        max_new_tokens=1, seed=0, temperature=0.5, stop_token_ids=[7], stop=["x", "y"]
    )
    async with serving() as s:
        call = s.stub.Generate(request([1]))
        await anext(aiter(call))
        call.cancel()
        await collect(
            s.stub.Generate(
                request(
                    [1],
                    sampling=sampling,
                    allow_brownout=False,
                    priority=pb.BEST_EFFORT,
                    max_degraded_percent=0,
                    allow_audit=False,
                )
            )
        )
    first, second = s.engine.calls
    assert (first["max_degraded_percent"], second["max_degraded_percent"]) == (100, 0)
    assert (first["allow_audit"], second["allow_audit"]) == (True, False)
    assert first["sampling"] == SamplingParams()
    assert (first["allow_brownout"], first["priority"]) == (True, Priority.LATENCY_SENSITIVE)
    assert first["timeout_s"] is None
    assert re.fullmatch("[0-9a-f]{32}", first["request_id"])
    assert second["sampling"] == SamplingParams(
        max_new_tokens=1, seed=0, temperature=0.5, stop_token_ids=(7,), stop=("x", "y")
    )
    assert (second["allow_brownout"], second["priority"]) == (False, Priority.BEST_EFFORT)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (pb.GenerateRequest(), "missing"),
        (request([]), "empty"),
        (request([1], sampling=pb.SamplingParams(top_p=math.nan)), "top_p"),
    ],
)
async def test_bad_requests_are_invalid_arguments(bad, named) -> None:
    async with serving() as s:
        error = await failure(s.stub.Generate(bad))
    assert error.code() == CODE.INVALID_ARGUMENT
    assert named in error.details()
    assert s.engine.calls == []


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_caller_that_goes_away_aborts_its_request(way: str) -> None:
    async with serving() as s:
        s.engine.gate.clear()
        call = s.counting(5)
        await anext(aiter(call))
        assert s.engine.running == 1
        if way == "cancel":
            call.cancel()
        else:
            await s.channel.close()
        await until(lambda: s.engine.closed == 1)
        assert s.engine.running == 0


async def test_a_caller_that_does_not_read_is_aborted_in_the_middle_of_a_write() -> None:
    async with serving() as s:
        call = s.counting(10**7)  # flow control blocks the writer long before the end
        await anext(aiter(call))
        await asyncio.sleep(0.3)
        call.cancel()
        await until(lambda: s.engine.closed == 1)


async def test_deadline_reaches_the_engine_and_aborts() -> None:
    async with serving() as s:
        s.engine.gate.clear()
        sampling = pb.SamplingParams(max_new_tokens=2)
        error = await failure(s.stub.Generate(request([1], sampling=sampling), timeout=0.3))
        await until(lambda: s.engine.closed == 1)
    assert error.code() == CODE.DEADLINE_EXCEEDED
    assert 0 < s.engine.calls[0]["timeout_s"] < 0.31  # clocks of two libraries


async def test_health_follows_loading_and_serving() -> None:
    async with Setup(ServerConfig(port=0)) as s:
        assert await s.health() == "NOT_SERVING"
        assert (await failure(s.counting(1))).code() == CODE.UNAVAILABLE
        assert (await failure(s.admin.GetStats(pb.GetStatsRequest()))).code() == CODE.UNAVAILABLE
        info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.status, info.model) == ("starting", "bundled")
        await s.ready()
        assert [await s.health(name) for name in ("", *SERVICES)] == ["SERVING"] * 4


async def reflect(channel: grpc.aio.Channel, version: str, **ask):
    """Asks a version of the reflection service one question, in the messages of v1alpha."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    return await anext(aiter(call(iter([reflection_pb2.ServerReflectionRequest(**ask)]))))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_of_each_port(version: str) -> None:
    async def listed(channel: grpc.aio.Channel) -> set[str]:
        answer = await reflect(channel, version, list_services="")
        return {service.name for service in answer.list_services_response.service}

    both = {"grpc.health.v1.Health"}
    both |= {f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")}
    async with serving() as s:
        assert await listed(s.channel) == both | {"jmoe.v1.Generation", INFERENCE}
        assert await listed(s.admin_channel) == both | {"jmoe.v1.Admin"}
    async with serving(admin_on_main_port=True) as s:
        assert await listed(s.channel) == both | set(SERVICES)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service_that_it_lists(version: str) -> None:
    async with serving() as s:
        services = await reflect(s.channel, version, list_services="")
        for service in services.list_services_response.service:
            answer = await reflect(s.channel, version, file_containing_symbol=service.name)
            pool = descriptor_pool.DescriptorPool()
            for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
                pool.AddSerializedFile(file)
            (method, *_) = pool.FindServiceByName(service.name).methods
            package = service.name.rpartition(".")[0]
            assert method.input_type.full_name.startswith(package)


async def test_server_and_model_info() -> None:
    async with serving() as s:
        info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
        model = await s.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.status, info.model, info.num_kv_pages) == ("ready", "counter", 100)
    assert list(info.threshold_buckets_percent) == [20, 40, 70, 100]
    assert info.platform.startswith("cpu")
    assert (info.num_programs, dict(info.part_layers)) == (7, {"decode 64": 4})
    assert dict(info.implementations)["prefill routing"] == "batched XLA"
    assert info.best_effort_wait_s == 31.5  # best_effort_max_wait_s, and the engine's steps
    assert (model.name, list(model.united_ways), model.num_parameters) == ("counter", [2, 8], 2**40)


async def test_admin_reads_and_sets() -> None:
    async with serving() as s:
        state = await s.admin.GetBrownout(pb.GetBrownoutRequest())
        assert (state.strategy, state.way, state.decode_threshold_percent) == ("partial", 8, 62.5)
        assert math.isnan(state.ttft_p90_s)
        assert (state.controller, state.prefill_company) == ("predictive", True)
        assert state.predicted_itl_p90_s == 0.06
        change = pb.SetBrownoutRequest(controller="algorithm2", prefill_company=False)
        state = await s.admin.SetBrownout(change)
        assert s.engine.changes == BrownoutChange(controller="algorithm2", prefill_company=False)
        assert (state.controller, state.prefill_company) == ("algorithm2", False)
        assert (await s.admin.SetBrownout(pb.SetBrownoutRequest(keep="weight"))).keep == "weight"
        await s.admin.SetBrownout(pb.SetBrownoutRequest(max_expected_loss=0.0))
        assert s.engine.changes.max_expected_loss == 0
        change = pb.SetBrownoutRequest(max_expected_loss=0.25)
        assert (await s.admin.SetBrownout(change)).max_expected_loss == 0.25
        await s.admin.SetBrownout(pb.SetBrownoutRequest(way=2, decode_threshold_percent=0))
        assert s.engine.changes == BrownoutChange(way=2, decode_threshold_percent=0)
        error = await failure(s.admin.SetBrownout(pb.SetBrownoutRequest(way=3)))
        assert (error.code(), "2, 8" in error.details()) == (CODE.INVALID_ARGUMENT, True)
        stats = await s.admin.GetStats(pb.GetStatsRequest())
        assert (stats.kv_pages_total, stats.expert_visits) == (100, 800)


async def test_drain_finishes_streams_and_refuses_new_ones() -> None:
    async with serving() as s:
        s.engine.gate.clear()
        call = s.counting(3)
        await anext(aiter(call))
        draining = asyncio.create_task(s.server.drain())
        await until(lambda: s.engine.status == "draining")
        assert await s.health() == "NOT_SERVING"
        assert (await failure(s.counting(1))).code() == CODE.UNAVAILABLE
        s.engine.gate.set()
        assert [list(m.token_ids) for m in await collect(call)] == [[5], [6]]
        assert await draining


async def test_drain_cancels_what_takes_too_long() -> None:
    async with serving(drain_timeout_s=0.1) as s:
        s.engine.gate.clear()
        call = s.counting(3)
        await anext(aiter(call))
        finished, error = await asyncio.gather(s.server.drain(), failure(call))
    assert (finished, error.code()) == (False, CODE.CANCELLED)


async def test_a_taken_port_is_an_error() -> None:
    async with serving() as s:
        other = Server(ServerConfig(port=s.server.main.port))
        with pytest.raises(OSError, match=str(s.server.main.port)):
            await other.start()


@pytest.mark.parametrize(("signals", "hold_s", "code"), [(1, 0.5, 0), (2, 60.0, 1)])
async def test_signals_drain_then_kill(signals: int, hold_s: float, code: int) -> None:
    async with process(0.0, hold_s) as (child, stdout):
        assert await stdout.readline() == b"loading\n"
        for what in (b"admin on ", b"http on http://", b"page on http://"):
            assert (await stdout.readline()).startswith(b"jmoe " + what + b"127.0.0.1:")
        ready = (await stdout.readline()).decode()
        assert ready.startswith("jmoe ready on 127.0.0.1:")
        async with grpc.aio.insecure_channel(ready.split()[-1]) as channel:
            sampling = pb.SamplingParams(max_new_tokens=3)
            call = rpc.GenerationStub(channel).Generate(request([1], sampling=sampling))
            await anext(aiter(call))
            child.send_signal(signal.SIGTERM)
            if signals == 2:
                await asyncio.sleep(0.2)
                child.send_signal(signal.SIGINT)
            else:
                assert len(await collect(call)) == 2
            assert await asyncio.wait_for(child.wait(), 60) == code


async def test_sighup_reads_keys_again_and_says_so(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    file = KeysFile(tmp_path / "keys.json", one={})

    async def start_engine() -> FakeEngine:
        return FakeEngine()

    config = ServerConfig(port=0, http_port=-1, admin_http_port=-1, keys_file=str(file.path))
    served = asyncio.create_task(serve(config, start_engine))
    for number, says in (
        (0, "ready on "),
        (signal.SIGHUP, f"keys were read again from {file.path}"),  # though they are the same
    ):
        os.kill(os.getpid(), number)
        await until(lambda says=says: any(says in one.message for one in caplog.records))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await served


async def test_a_signal_while_loading_ends_the_process() -> None:
    async with process(60.0, 0.0) as (child, stdout):
        await stdout.readline()
        await asyncio.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_with_the_engine_a_dropped_stream_frees_its_pages() -> None:
    from serving.engine import Engine
    from serving.plan import Limits
    from tests.serving.fake_runner import FakeRunner

    runner = FakeRunner(Limits(4, 64, 4, 64, 4), step_s=0.002)
    config = EngineConfig(max_num_seqs=4, max_model_len=128, page_size=4, max_prefill_tokens=64)
    engine = Engine(config, runner, None)
    engine.run()
    async with Setup(ServerConfig(port=0, engine=config)) as s:
        await s.server.attach(engine)
        call = s.counting(100)
        await anext(aiter(call))
        assert engine.stats().kv_pages_used > 0
        call.cancel()
        await until(lambda: engine.stats().kv_pages_used == 0)
        assert engine.stats().requests_aborted == 1
        got = await collect(s.counting(5))
        assert [token for m in got for token in m.token_ids] == [4, 5, 6, 7, 8]
        last = s.counting(50)
        await anext(aiter(last))
        finished, rest = await asyncio.gather(s.server.drain(), collect(last))
    assert (finished, rest[-1].finish_reason) == (True, "length")
