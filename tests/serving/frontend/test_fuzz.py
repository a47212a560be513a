"""Thousands of broken messages to every method of both ports: each is refused by name."""

import asyncio
import logging
import random
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from openai_served import serving_http
from served import CODE, collect, serving

from benchmarks.hostile.attempts import learn
from benchmarks.hostile.fuzzing import message
from benchmarks.hostile.run import PROTOCOLS
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

REFUSALS = {
    *(CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.CANCELLED),
    CODE.RESOURCE_EXHAUSTED,  # with more at once than the server takes
}
METHODS = [
    ("main", "jmoe.v1.Generation/Generate", pb.GenerateRequest, 1000),
    ("main", "jmoe.v1.Generation/GetServerInfo", pb.GetServerInfoRequest, 500),
    ("main", "jmoe.v1.Generation/GetModelInfo", pb.GetModelInfoRequest, 500),
    ("admin", "jmoe.v1.Admin/GetBrownout", pb.GetBrownoutRequest, 500),
    ("admin", "jmoe.v1.Admin/SetBrownout", pb.SetBrownoutRequest, 1000),
    ("admin", "jmoe.v1.Admin/GetStats", pb.GetStatsRequest, 500),
    ("main", "grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, 1000),
    ("main", "grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest, 500),
    (
        *("main", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        *(reflection_pb2.ServerReflectionRequest, 1500),
    ),
]


async def send(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> grpc.StatusCode:
    """Sends bytes as they are, reads an answer to each, and hangs up."""
    call = channel.stream_stream(f"/{method}")()
    try:
        for message in messages:
            await call.write(message)
            if await call.read() is grpc.aio.EOF:
                break
        else:
            call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


@pytest.mark.sized(
    deep=(
        "main-grpc.health.v1.Health/Check-HealthCheckRequest-1000",
        "main-grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo-ServerReflectionRequest-1500",
        "main-jmoe.v1.Generation/GetServerInfo-GetServerInfoRequest-500",
    )
)
@pytest.mark.parametrize(("port", "method", "message_type", "count"), METHODS)
async def test_broken_messages_are_refused_and_the_server_lives_on(
    port: str, method: str, message_type, count: int, caplog
) -> None:
    caplog.set_level(logging.WARNING, "serving")  # a change of brownout that is right is a line
    rng, seen = random.Random(method), set()
    async with serving() as s:
        channel = s.channel if port == "main" else s.admin_channel
        each = 3 if "Reflection" in method else 1  # a stream goes on after a good message
        for _ in range(0, count, 50):
            batch = [message(rng, message_type.DESCRIPTOR) for _ in range(50)]
            groups = [batch[i : i + each] for i in range(0, 50, each)]
            seen |= set(await asyncio.gather(*(send(channel, method, g) for g in groups)))
        assert seen <= REFUSALS
        assert CODE.INVALID_ARGUMENT in seen
        assert len(await collect(s.counting(3))) == 3
        assert await s.health() == "SERVING"
    assert s.engine.running == 0
    assert len(caplog.text) < 5_000  # some lines, not one for each


@pytest.mark.parametrize(
    ("protocol", "seen"),
    [
        ("http", ("right: 200", "wrong values: 400", "noise: 400")),
        ("kserve", ("ModelInfer: OK", "ModelInfer: INVALID_ARGUMENT", "ModelStreamInfer: OK")),
    ],
)
async def test_some_of_what_attacks_a_server_is_answered(protocol: str, seen) -> None:
    """Of two thousand in tests/benchmarks/test_hostile.py."""
    (fuzz,), rng, codes = PROTOCOLS[protocol].fuzz, random.Random(11), Counter()
    async with serving_http() as s:
        facts = await learn(s.server.address, s.address)
        async with fuzz.connect(facts) as send:
            for _ in range(100):
                for kind, code, problem in await send(fuzz.draw(rng, facts.model)):
                    assert not problem
                    codes[f"{kind.partition(' /')[0]}: {code}"] += 1  # on any route
        assert await s.health() == "SERVING"
        assert len(await collect(s.counting(3))) == 3
    assert s.engine.running == 0
    assert not Counter(seen) - codes
