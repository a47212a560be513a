"""The gRPC server: `jmoe.v1`, health and reflection, in the engine's event loop.

It listens before the engine is there and answers NOT_SERVING until then. Nothing here imports jax.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving import convert, heap
from serving.config import ServerConfig
from serving.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.version import jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine

log = logging.getLogger(__name__)

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())

_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Aborted: grpc.StatusCode.CANCELLED,
}

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server behind it
    ("grpc.max_receive_message_length", 4 << 20),  # a million tokens as varints of four bytes
    ("grpc.max_send_message_length", 16 << 20),
    # A caller that vanished without closing its connection is found out, and its requests abort.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_GRACE_S = 1.0  # for last messages to leave once every request has ended


class Server:
    """One engine behind one port. `start`, then `attach` an engine, then `drain`."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.port = 0  # the bound one, after start
        self._draining = False
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._grpc = grpc.aio.server(options=_OPTIONS)
        rpc.add_GenerationServicer_to_server(GenerationService(self), self._grpc)
        rpc.add_AdminServicer_to_server(AdminService(self), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    @property
    def status(self) -> str:
        """`starting`, or what the engine says."""
        if self._draining:
            return "draining"
        return "starting" if self.engine is None else self.engine.status

    @property
    def model_name(self) -> str:
        """Name of the served model; before it is loaded, what the settings say."""
        model = None if self.engine is None else self.engine.model
        return self.config.engine.model if model is None else model.name

    @property
    def address(self) -> str:
        """Where it listens, as a client takes it."""
        return f"{self.config.host}:{self.port}"

    async def start(self) -> None:
        """Listens, NOT_SERVING. Raises OSError where the address cannot be bound."""
        await self._set_health()
        wanted = f"{self.config.host}:{self.config.port}"
        try:
            self.port = self._grpc.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {wanted}: {error}") from None
        await self._grpc.start()

    async def attach(self, engine: "Engine") -> None:
        """Serves with `engine` from now on. The server stops it in `drain` and `stop`."""
        self.engine = engine
        await self._set_health()

    async def drain(self) -> bool:
        """Admits nothing more, lets streams finish up to `drain_timeout_s`, then stops.

        Returns whether all finished in time; the others end with CANCELLED.
        """
        self._draining = True
        await self._health.enter_graceful_shutdown()
        finished = True
        if self.engine is not None:
            finished = await self.engine.drain(self.config.drain_timeout_s)
        await self.stop()
        return finished

    async def stop(self) -> None:
        """Aborts what is left and closes the port."""
        self._draining = True
        await self._health.enter_graceful_shutdown()
        if self.engine is not None:
            await self.engine.stop()
        await self._grpc.stop(_GRACE_S)

    def ready_engine(self) -> "Engine":
        """The engine. Raises Unavailable while it is loading."""
        if self.engine is None:
            raise Unavailable("the server is still loading its model; try again later")
        return self.engine

    @contextlib.asynccontextmanager
    async def answering(self, context: Any) -> AsyncIterator[None]:
        """Turns what is raised inside into a gRPC status; no exception reaches the process."""
        try:
            yield
        except (ServingError, ValueError) as error:
            if isinstance(error, Unavailable):
                await self._set_health()  # the engine may have failed
            await context.abort(_code(error), str(error), _trailing(error))
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    async def _set_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if self.status == "ready" else states.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, status)


def _code(error: Exception) -> grpc.StatusCode:
    return next(code for kind, code in _CODES.items() if isinstance(error, kind))


def _trailing(error: Exception) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, Overloaded):
        return ()
    return (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))),)


class GenerationService(rpc.GenerationServicer):
    """`jmoe.v1.Generation`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Streams one request. A caller that goes away cancels this, which aborts the request."""
        async with self._server.answering(context):
            engine = self._server.ready_engine()
            engine.check_admission()  # an overloaded server does no work on what it refuses
            if request.model and request.model != self._server.model_name:
                served = self._server.model_name
                raise NotFound(f"model {request.model!r} is not served; {served!r} is")
            outputs = engine.generate(
                convert.prompt(request),
                convert.sampling(request.sampling),
                request_id=request.request_id or None,
                allow_brownout=request.allow_brownout or not request.HasField("allow_brownout"),
                priority=convert.priority(request),
                timeout_s=context.time_remaining(),
            )
            # Closed here and now: a generator left to the collector would keep its pages.
            async with contextlib.aclosing(outputs):
                async for out in outputs:
                    await context.write(convert.response(out))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        """Limits and status; answered while loading, too."""
        server, engine = self._server, self._server.engine
        settings = server.config.engine if engine is None else engine.config
        return pb.ServerInfo(
            version=jmoe_version(),
            status=server.status,
            model=server.model_name,
            platform="" if engine is None else _platform(),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            max_queue_len=settings.max_queue_len,
            num_kv_pages=0 if engine is None else engine.stats().kv_pages_total,
            kv_page_size=settings.page_size,
            threshold_buckets_percent=settings.threshold_buckets_percent,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        """Geometry of the served model."""
        async with self._server.answering(context):
            model = self._server.ready_engine().model
            if model is None:
                raise NotFound("this engine runs without a model")
            return convert.model_info(model)


class AdminService(rpc.AdminServicer):
    """`jmoe.v1.Admin`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def GetBrownout(self, request: pb.GetBrownoutRequest, context: Any) -> pb.BrownoutState:
        """Settings in force."""
        async with self._server.answering(context):
            return convert.brownout_state(self._server.ready_engine().get_brownout())

    async def SetBrownout(self, request: pb.SetBrownoutRequest, context: Any) -> pb.BrownoutState:
        """Changes what is present; another way is loaded before this answers."""
        async with self._server.answering(context):
            change = convert.brownout_change(request)
            return convert.brownout_state(await self._server.ready_engine().set_brownout(change))

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.Stats:
        """Counters and gauges now."""
        async with self._server.answering(context):
            return convert.stats(self._server.ready_engine().stats())


def _platform() -> str:
    import jax  # the engine has imported it

    return f"{jax.default_backend()} {jax.devices()[0].device_kind}"


async def serve(config: ServerConfig, start_engine: Callable[[], Awaitable["Engine"]]) -> bool:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once.

    Prints `jmoe ready on HOST:PORT` when requests are served. Returns whether every stream finished
    in time. Raises OSError where the port is taken, and whatever `start_engine` raises.
    """
    server, stopping = Server(config), asyncio.Event()
    await server.start()
    loading = asyncio.ensure_future(start_engine())

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()
        loading.cancel()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    try:
        await server.attach(await loading)
    except asyncio.CancelledError:
        os._exit(0)  # there is nothing to drain, and a compilation cannot be interrupted
    except Exception:
        await server.stop()
        raise
    heap.freeze()
    print(f"jmoe ready on {server.address}", flush=True)
    await stopping.wait()
    log.info("draining for up to %g s", config.drain_timeout_s)
    return await server.drain()
