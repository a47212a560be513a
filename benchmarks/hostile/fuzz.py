"""Fuzzed messages to every method of every service, and what the server answers."""

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks.hostile.load import HUNG, left_to_code
from benchmarks.hostile.messages import message
from serving.client import Client
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

SERVICES: dict[str, ServiceDescriptor] = {
    service.name: service
    for file in (pb, inference_pb2, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
LOST = "ANSWER_LOST"
"""Stands for a code where the server's answer was too large for a status, and never arrived."""
BAD_CODES = frozenset({"UNKNOWN", "INTERNAL", "UNAVAILABLE", HUNG, LOST})
"""UNAVAILABLE: a server that is ready does not say so, but one that is gone does not listen."""

_TIMEOUT_S = 30.0
_NUM_CHANNELS, _NUM_WORKERS = 4, 32
_MOST_MESSAGES = 4  # read of one stream
_MOST_EXAMPLES = 20


@dataclass
class FuzzResult:
    """What one service answered. `examples` has messages, in hexadecimal, behind bad codes."""

    service: str
    num_messages: int = 0
    codes: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    examples: list[dict[str, str]] = field(default_factory=list)
    alive: bool = False  # it serves, says its health, when all is over
    duration_s: float = 0.0

    def count(self, *codes: str) -> int:
        """Messages that ended with one of the codes."""
        return sum(number for (_, code), number in self.codes.items() if code in codes)

    def add(self, method: str, payload: bytes, code: str, details: str) -> None:
        """Counts one answer."""
        self.codes[method, code] += 1
        if code in BAD_CODES and len(self.examples) < _MOST_EXAMPLES:
            example = {"method": method, "code": code, "details": details[:300]}
            self.examples.append({**example, "message": payload[:2000].hex()})


async def fuzz(
    service: ServiceDescriptor, address: str, *, num_messages: int, seed: int, limit_s: float
) -> FuzzResult:
    """Sends messages to the methods of a service in turn, a bounded number at a time."""
    result, rng = FuzzResult(service.name), random.Random(f"{seed} {service.full_name}")
    started_at = time.monotonic()
    left = iter(range(num_messages))
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            for _ in range(_NUM_CHANNELS)
        ]

        async def worker(channel: Any) -> None:
            for number in left:
                if time.monotonic() > started_at + limit_s:
                    return
                method = service.methods[number % len(service.methods)]
                payload = message(rng, method.input_type)
                code, details = await _send(channel, method, payload)
                result.num_messages += 1
                result.add(method.name, payload, code, details)

        workers = [worker(channels[i % _NUM_CHANNELS]) for i in range(_NUM_WORKERS)]
        await asyncio.gather(*workers)
    result.alive = await serves(address)
    result.duration_s = time.monotonic() - started_at
    return result


async def _send(channel: Any, method: MethodDescriptor, payload: bytes) -> tuple[str, str]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if method.client_streaming:
                call = channel.stream_stream(path)(iter([payload]))
            else:
                call = channel.unary_stream(path)(payload)  # one reply is a stream of one
            return await _finish(call, _most_messages(method))
    except TimeoutError:
        return HUNG, f"no end after {_TIMEOUT_S:g} s"


def _most_messages(method: MethodDescriptor) -> int:
    return 1 if method.server_streaming and not method.client_streaming else _MOST_MESSAGES


async def _finish(call: Any, most_messages: int) -> tuple[str, str]:
    count = 0
    with left_to_code():
        async for _ in call:
            count += 1
            if count == most_messages:
                call.cancel()
                break
    code, details = (await call.code()).name, await call.details() or ""
    return LOST if "metadata size exceeds" in details else code, details


async def serves(address: str, timeout_s: float = 30.0) -> bool:
    """Whether the server says that it serves."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


@contextlib.asynccontextmanager
async def brownout_kept(client: Client) -> AsyncIterator[None]:
    """Puts brownout back as it was; fuzzed messages to Admin change it where they are valid."""
    try:
        before = await client.get_brownout()
    except grpc.aio.AioRpcError:  # a server that is gone, or has no Admin here
        yield
        return
    try:
        yield
    finally:
        change: dict[str, Any] = {"strategy": before.strategy}
        change |= {"ttft_slo_s": before.ttft_slo_s, "itl_slo_s": before.itl_slo_s}
        if before.way:
            change["way"] = before.way
        if before.salc_enabled:
            change["salc_enabled"] = True
        else:
            change["prefill_threshold_percent"] = round(before.prefill_threshold_percent)
            change["decode_threshold_percent"] = round(before.decode_threshold_percent)
        with contextlib.suppress(grpc.aio.AioRpcError):  # a server that is gone
            await client.set_brownout(**change)
