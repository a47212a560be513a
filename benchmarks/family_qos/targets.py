"""Several servers behind one face, as the load generator sees it: side by side, or in turn."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
from jaxtyping import UInt8

from benchmarks.family_qos.gate import Gate
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


class SideBySide:
    """A server for each model: a request goes to its model's."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        """Clients by model; what is asked of the admin service is asked of the first one's."""
        self._clients = clients
        self._first = next(iter(clients.values()))
        self.get_brownout, self.stats = self._first.get_brownout, self._first.stats

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See Client."""
        async for message in self._clients[model].generate(
            prompt, sampling, priority=priority, model=model, timeout_s=timeout_s
        ):
            yield message


class InTurn(SideBySide):
    """A server for each model, of which one has requests at a time, behind a gate."""

    def __init__(self, clients: Mapping[str, Client], gate: Gate) -> None:
        """`gate` knows the models."""
        super().__init__(clients)
        self.gate = gate

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See Client; the time at the gate counts."""
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline, self.gate.turn(model):
                async for message in super().generate(
                    prompt, sampling, priority=priority, model=model
                ):
                    yield message
        except TimeoutError:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details="the run's time was over",
            ) from None


class Weights:
    """All weights of each model in host memory, and those of one of them where they are used."""

    def __init__(self, directories: Mapping[str, Path], num_bytes: int) -> None:
        """`num_bytes` are a model's as it is served; a file in 16 bits has half of float32's."""
        self._host: dict[str, UInt8[np.ndarray, "num_bytes"]] = {}
        for name, directory in directories.items():
            files = sorted(directory.glob("*.safetensors"))
            content = np.concatenate([np.fromfile(file, np.uint8) for file in files])
            self._host[name] = np.resize(content, num_bytes)
        self._in_use: UInt8[np.ndarray, "num_bytes"] | None = None

    async def change(self, model: str) -> None:
        """Frees the weights in use, and copies the model's to new memory, beside the event loop."""
        self._in_use = None
        self._in_use = await asyncio.to_thread(self._host[model].copy)
