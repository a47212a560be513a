"""The `grpc.health.v1` service: one status for all names, pushed at once to watchers."""

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as rpc

from serving.errors import NotFound, Overloaded, shown

MAX_WATCHERS = 256


class Health(rpc.HealthServicer):
    """The health service of the server as a whole ("") and of each service by name.

    A change takes no lock and waits for nobody, so a watcher that does not read delays only itself.
    (With the servicer of grpcio-health-checking it would delay every change.)
    """

    def __init__(self) -> None:
        self.is_serving = False  # whether the status of all names is SERVING
        self.names = {""}  # whoever serves one adds it
        self._changed = asyncio.Event()  # replaced at each change
        self._num_watchers = 0
        self._closed = False

    def set(self, serving: bool) -> None:
        """Sets the status of all names, and notifies watchers if it changed."""
        if serving != self.is_serving and not self._closed:
            self.is_serving = serving
            self._wake()

    def close(self) -> None:
        """Sets NOT_SERVING for good; watchers are notified, and their calls end."""
        self.is_serving, self._closed = False, True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _answer(self, name: str) -> pb.HealthCheckResponse:
        states = pb.HealthCheckResponse
        if name not in self.names:
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self.is_serving else states.NOT_SERVING)

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Returns the current status. Raises NotFound for an unknown name."""
        if request.service not in self.names:
            raise NotFound(f"no service is named {shown(request.service)}")
        return self._answer(request.service)

    async def List(self, request: Any, context: Any) -> Any:
        """Returns the current status of every name."""
        response: Any = pb.HealthListResponse  # pyright: ignore[reportAttributeAccessIssue]
        return response(statuses={name: self._answer(name) for name in self.names})

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        """Streams the current status, and each change of it."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} callers watch already; use Check", 1.0)
        self._num_watchers += 1
        try:
            last = None
            while True:
                changed, answer = self._changed, self._answer(request.service)
                if answer != last:
                    await context.write(answer)
                    last = answer
                if self._closed:
                    return
                await changed.wait()
        finally:
            self._num_watchers -= 1
