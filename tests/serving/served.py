"""A server over a real socket, with an engine that counts up, and helpers for tests."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import grpc
import pytest
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.config import ServerConfig
from serving.frontend.server import Server
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

CODE = grpc.StatusCode
SERVICES = ("jmoe.v1.Generation", "jmoe.v1.Admin", "inference.GRPCInferenceService")


class Setup:
    """A listening server and a channel to it."""

    def __init__(self, config: ServerConfig) -> None:
        self.engine = FakeEngine()
        self.server = Server(config)

    async def __aenter__(self) -> "Setup":
        await self.server.start()
        # A client that takes no more than it has asked for: a slow reader is one at once.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
        self.channel = grpc.aio.insecure_channel(self.server.address, options)
        self.stub = rpc.GenerationStub(self.channel)
        self.admin_channel = grpc.aio.insecure_channel(self.server.addresses["admin"])
        self.admin = rpc.AdminStub(self.admin_channel)
        return self

    async def __aexit__(self, *_) -> None:
        await self.channel.close()
        await self.admin_channel.close()
        await self.server.stop()

    @property
    def web(self):
        return self.server.front_ends["http"]

    @property
    def page(self):
        return self.server.front_ends["page"]

    async def ready(self) -> "Setup":
        await self.server.attach(self.engine)
        return self

    async def health(self, name: str = "") -> str:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def counting(self, count: int, **fields):
        """Starts a stream of the tokens 4, 5, ..."""
        return self.stub.Generate(
            request([1, 2, 3], sampling=pb.SamplingParams(max_new_tokens=count), **fields)
        )


@contextlib.asynccontextmanager
async def serving(**fields):
    async with Setup(ServerConfig(port=0, **fields)) as setup:
        yield await setup.ready()


def request(tokens: list[int], **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), **fields)


async def collect(call) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def until(holds, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


PROCESS = """
import asyncio, sys
from fake_engine import FakeEngine
from serving.config import EngineConfig, ServerConfig
from serving.errors import Unavailable
from serving.frontend.server import serve

async def start_engine():
    await asyncio.sleep(float(sys.argv[1]))
    engine = FakeEngine()
    engine.gate.clear()
    asyncio.get_running_loop().call_later(float(sys.argv[2]), engine.gate.set)
    return engine

print("loading", flush=True)
config = ServerConfig(port=0, exit_on_failure="--stay" not in sys.argv)
try:
    finished = asyncio.run(serve(config, start_engine))
except Unavailable:
    sys.exit(4)
assert "jax" not in sys.modules
sys.exit(0 if finished else 3)
"""


@contextlib.asynccontextmanager
async def process(load_s: float, hold_s: float, *flags: str):
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROCESS, str(load_s), str(hold_s), *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        yield child, child.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
