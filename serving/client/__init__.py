"""A small asynchronous client of `jmoe.v1`. Does not import jax."""

import serving.settings.extras  # noqa: F401  (names the extra of a package that is missing)

# isort: split
import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.client.connection import Connection, bare
from serving.cluster.addresses import is_loopback, join, parse
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

WATCHES_EVERY_S = 0.25
"""How long to wait before health is watched again, where a server has ended that."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def admin_address_of(address: str, info: pb.ServerInfo) -> str:
    """Returns the address of a server's admin service, given the server's own `info`.

    The host is that of `address`. If that is a loopback address, though, the server is on this
    machine, and the host is the one that its admin service listens on.
    """
    host, colon, _ = bare(address).rpartition(":")
    if not (colon and info.admin_port):
        return address
    if info.admin_host and parse(host) is not None and is_loopback(host):
        host = _LOOPBACK.get(info.admin_host, info.admin_host)
    scheme = address.removesuffix(bare(address))
    return f"{scheme}{join(host, info.admin_port)}"


class Client:
    """A client of one server, with one channel for requests and one to its admin service.

    One `grpc.aio` channel read with `async for` takes as little CPU per token as any other way, and
    less than threads. Calls raise `grpc.aio.AioRpcError`.
    """

    def __init__(
        self,
        address: str,
        admin_address: str | None = None,
        connection: Connection | None = None,
    ) -> None:
        """`address` is `host:port`, or `https://host:port`. Use within a running event loop.

        Without `admin_address`, the first call on the admin service asks the server for the port
        and takes the host of `address`. Without `connection`, key and certificates are those of
        the environment (`serving.client.connection`).
        """
        self.address, self.admin_address = address, admin_address
        self._connection = connection or Connection.of_environment()
        self._metadata = self._connection.metadata
        self.channel = self._connection.aio_channel(address)
        self._generation = rpc.GenerationStub(self.channel)
        self._admin_channel: grpc.aio.Channel | None = None
        self._finding_admin = asyncio.Lock()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *of_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is in flight and closes the channels."""
        await self.channel.close()
        if self._admin_channel is not None:
            await self._admin_channel.close()

    async def _admin(self) -> rpc.AdminStub:
        async with self._finding_admin:
            if self._admin_channel is None:
                if self.admin_address is None:
                    self.admin_address = admin_address_of(self.address, await self.server_info())
                self._admin_channel = self._connection.aio_channel(self.admin_address)
        return rpc.AdminStub(self._admin_channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        request_id: str = "",
        allow_brownout: bool = True,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        model: str = "",
        reuse_prefix: bool = True,
        cache_salt: str = "",
        timeout_s: float | None = None,
        max_degraded_percent: int = 100,
    ) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        """Starts a request; iterate over the messages, or `cancel()` to free what it holds.

        `model` must be the name of a served model; empty: the first of them. KV pages of a prompt's
        prefix are shared only between requests with the same `cache_salt`. Of the request's expert
        visits, brownout degrades `max_degraded_percent` at most.
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=sampling,
            allow_brownout=allow_brownout,
            priority=priority,
            model=model,
            reuse_prefix=reuse_prefix,
            cache_salt=cache_salt,
            max_degraded_percent=max_degraded_percent,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        return self._generation.Generate(request, timeout=timeout_s, metadata=self._metadata)

    async def get_brownout(self) -> pb.BrownoutState:
        """Returns thresholds in percent, SLOs and recent P90 latencies in seconds."""
        return await (await self._admin()).GetBrownout(
            pb.GetBrownoutRequest(), metadata=self._metadata
        )

    async def set_brownout(self, **change: str | int | float | bool) -> pb.BrownoutState:
        """Sets the named fields of `SetBrownoutRequest`; returns the state after the change."""
        request = pb.SetBrownoutRequest(**change)  # type: ignore[arg-type]
        return await (await self._admin()).SetBrownout(request, metadata=self._metadata)

    async def load_model(self, name: str, directory: str) -> pb.ServedModels:
        """Loads a model of the server's machine, or of the Hub, beside those that it serves."""
        request = pb.LoadModelRequest(name=name, directory=directory)
        return await (await self._admin()).LoadModel(request, metadata=self._metadata)

    async def unload_model(self, name: str, drain_s: float = 0.0) -> pb.ServedModels:
        """Unloads a model, whose requests may go on for `drain_s` seconds."""
        request = pb.UnloadModelRequest(name=name, drain_s=drain_s)
        return await (await self._admin()).UnloadModel(request, metadata=self._metadata)

    async def stats(self) -> pb.Stats:
        """Returns the engine's counters and gauges."""
        return await (await self._admin()).GetStats(pb.GetStatsRequest(), metadata=self._metadata)

    async def server_info(self, timeout_s: float | None = None) -> pb.ServerInfo:
        """Returns the server's version, status and limits. Fails at once if nothing listens."""
        return await self._generation.GetServerInfo(
            pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata
        )

    async def model_info(self, model: str = "") -> pb.ModelInfo:
        """Returns architecture and sizes of a served model; of the first, if none is named."""
        return await self._generation.GetModelInfo(
            pb.GetModelInfoRequest(model=model), metadata=self._metadata
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until the health service says SERVING. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            health: Any = health_pb2_grpc.HealthStub(self.channel)  # its types leave out Watch
            while True:
                watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                try:
                    async for reply in watch:
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                finally:
                    watch.cancel()
                await asyncio.sleep(WATCHES_EVERY_S)  # the server drains; another may come
