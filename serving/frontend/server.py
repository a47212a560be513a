"""The server: its gRPC and HTTP ports, in the engine's event loop.

There are two gRPC ports, one for clients and one for operators with the admin service, and up to
three HTTP ports: OpenAI's API, the live page, and metrics and probes. All of them listen, and say
that nothing is served yet, before the engine is ready. Nothing here imports jax.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from grpc_health.v1 import health, health_pb2_grpc

from serving.cluster.addresses import join
from serving.config import ServerConfig
from serving.errors import Unavailable
from serving.frontend import (
    access,
    convert,
    exposure,
    gc_freeze,
    kserve,
    kserve_tensors,
    reflection,
)
from serving.frontend.access import Access, Caller
from serving.frontend.bounded_http import HttpLimits
from serving.frontend.guard import SMALL_MESSAGE_BYTES, Guard, Limits
from serving.frontend.health import Health
from serving.frontend.inbox import MAX_MESSAGE_BYTES
from serving.frontend.listen import bind, make_server
from serving.frontend.metrics import Metrics
from serving.frontend.openai.app import make_app as make_openai
from serving.frontend.page.app import make_app as make_page
from serving.frontend.page.live import Live
from serving.frontend.reload import Watched
from serving.frontend.services import (
    GENERATE,
    METHODS,
    SERVICES,
    AdminService,
    GenerationService,
)
from serving.frontend.status import StatusLog
from serving.frontend.tracing import Tracer
from serving.frontend.web import Listener, routes_of
from serving.proto.inference import inference_pb2_grpc as inference_rpc
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.settings.reading import named_models

if TYPE_CHECKING:
    from serving.engine import Engine

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for sending last messages after every request has ended
_ADMIN_CONNECTIONS, _ADMIN_CALLS = 128, 1024
_FIRST_HTTP_PORT = 8000  # as vLLM's
_ADMIN_METHODS = f"/{SERVICES[1]}/"


class Server:
    """Serves one engine. Call `start`, then `attach` with an engine, then `drain`."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`metrics` and `tracer` are observers of the engine.

        Without `metrics` no status line is logged; without `tracer` no request is traced.
        """
        self.config = config
        # As jmoe.api.name_of, which the front end must not import, since that imports jax.
        model = Path(config.engine.model)
        self._model_name = model.absolute().name if model.is_dir() else config.engine.model
        self.tracer = tracer or Tracer()
        self.metrics = metrics or Metrics()
        self._logs_status = metrics is not None
        self.engine: Engine | None = None
        self.port = self.admin_port = 0  # the bound ones, after start
        self.failure: str | None = None  # why the engine failed
        self._failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http: WSGIServer | None = None
        self._draining = False
        self.health = Health(SERVICES)
        receiving = max(1, config.max_bytes_in_flight // MAX_MESSAGE_BYTES)
        timeout_s = config.message_timeout_s
        self.access = Access(Path(config.keys_file) if config.keys_file else None)
        self.certificates = exposure.certificates(config)
        self.metrics.access = self.access
        ended = self._grpc_door()
        self.guard = Guard(
            Limits(max_calls(config), receiving, timeout_s),
            self._admit,
            self._max_message_bytes,
            lasting=(kserve.STREAM_INFER,),
            identify=self._identify,
            ended=ended,
        )
        self._admin_guard = Guard(
            Limits(_ADMIN_CALLS, receiving, timeout_s),
            identify=self._identify,
            ended=ended,
        )
        self._main = make_server(self.guard, config.max_connections)
        self._admin = make_server(self._admin_guard, _ADMIN_CONNECTIONS)
        self._add_services()
        self.web: Listener | None = None  # OpenAI's API
        self.page: Listener | None = None
        if config.http_port >= 0:
            limits = HttpLimits(config.max_connections, timeout_s)
            app, port = make_openai(self), config.http_port
            counted = self.metrics.calls.door("http", routes_of(app), "500")
            self.web = Listener(app, config.host, port, limits, counted, first=_FIRST_HTTP_PORT)
        self.live = Live(self)
        if config.admin_http_port >= 0:
            limits = HttpLimits(_ADMIN_CONNECTIONS, timeout_s)
            port, page = config.admin_http_port, make_page(self, self.live)
            counted = self.metrics.calls.door("page", routes_of(page), "500")
            self.page = Listener(page, config.admin_host, port, limits, counted, prefix="admin-")

    def _grpc_door(self) -> Callable[[str, str], None]:
        """Returns a function that counts an ended gRPC call under the protocol of its service."""
        calls, failed = self.metrics.calls, "INTERNAL"
        generation, admin, inference = SERVICES
        any_other = calls.door("grpc", [*METHODS[generation], "other"], failed)
        of_inference = [*METHODS[inference], kserve.STREAM_REQUEST]
        doors = {
            admin: calls.door("admin", METHODS[admin], failed),
            inference: calls.door("kserve", of_inference, failed),
        }

        def ended(method: str, code: str) -> None:
            doors.get(method[1:].partition("/")[0], any_other)(method, code)

        return ended

    def _add_services(self) -> None:
        generation, admin, inference = SERVICES
        on_main = [generation, inference] + [admin] * self.config.admin_on_main_port
        inference_rpc.add_GRPCInferenceServiceServicer_to_server(
            kserve.InferenceService(self), self._main
        )
        rpc.add_GenerationServicer_to_server(GenerationService(self), self._main)
        if self.config.admin_on_main_port:
            rpc.add_AdminServicer_to_server(AdminService(self), self._main)
        rpc.add_AdminServicer_to_server(AdminService(self), self._admin)
        for server, names in ((self._main, on_main), (self._admin, [admin])):
            health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
            reflection.add(server, (*names, health.SERVICE_NAME))

    @property
    def status(self) -> str:
        """The server's status: `starting`, `draining`, or the engine's."""
        if self._draining:
            return "draining"
        return "starting" if self.engine is None else self.engine.status

    @property
    def model_names(self) -> Sequence[str]:
        """The served models' names, which are known before loading."""
        config = self.config
        if config.engine.models:
            return list(named_models(config.engine.models))
        if config.served_model_name:
            return [config.served_model_name]
        family = None if self.engine is None else self.engine.family
        if family is not None:
            return family.names
        return [self._model_name]

    def readiness(self) -> tuple[bool, str]:
        """Returns whether health is SERVING, and a word that says why. Thread-safe."""
        ready, status = self.health.is_serving, self.status
        if ready:
            return True, "ready"
        return False, "starting" if status == "ready" else status

    @property
    def address(self) -> str:
        """The address of the port for clients."""
        return join(self.config.host, self.port)

    @property
    def scheme(self) -> str:
        """The URL scheme of the HTTP ports."""
        return "http" if self.certificates is None else "https"

    @property
    def admin_address(self) -> str:
        """The address of the admin service."""
        return join(self.config.admin_host, self.admin_port)

    async def start(self) -> None:
        """Starts listening, NOT_SERVING at first. Raises OSError if an address cannot be bound."""
        exposure.warn(self.config)
        config, tls = self.config, self.certificates
        of_grpc = [None, None] if tls is None else [tls.for_grpc(), tls.for_grpc()]
        self.port = bind(self._main, config.host, config.port, tls=of_grpc[0])
        self.admin_port = bind(
            self._admin, config.admin_host, config.admin_port, prefix="admin-", tls=of_grpc[1]
        )
        context = None if tls is None else lambda: tls.context
        if config.metrics_port:
            self._http, _ = self.metrics.serve(
                config.host, config.metrics_port, self.readiness, context
            )
        for listener in self._listeners():
            await listener.start(context)
        for watched in self._watched():
            watching = asyncio.create_task(watched.watch(), name=f"jmoe-{watched.what}")
            self._tasks.append(watching)
        if self.page is not None:
            self._tasks.append(asyncio.create_task(self.live.run(), name="jmoe-live"))
        await self._main.start()
        await self._admin.start()

    async def reread(self) -> None:
        """Reads keys and certificates now; says in the log what was read."""
        if not (watched := self._watched()):
            log.info("nothing to read again: keys_file and tls_cert are not set")
        for each in watched:
            await each.reread()

    def _watched(self) -> "list[Watched[Any]]":
        both = self.access, self.certificates
        return [one for one in both if one is not None and one.paths]

    async def attach(self, engine: "Engine") -> None:
        """Starts serving with `engine`, which `drain` and `stop` will stop."""
        self.engine = engine
        engine.names = tuple(self.model_names)
        engine.request_timeout_s = self.config.request_timeout_s
        if self.config.exit_on_failure:
            engine.on_unresponsive = _exit_at_once
        self.metrics.engine = engine
        self.health.set(engine.status == "ready")
        self._tasks.append(
            asyncio.create_task(self._watch_engine(engine), name="jmoe-watch-engine")
        )
        if self._logs_status and self.config.status_interval_s:
            status = StatusLog(engine, self.metrics, self.config.status_interval_s)
            self._tasks.append(asyncio.create_task(status.run(), name="jmoe-status"))

    async def failed(self) -> str:
        """Waits until the engine has failed, and returns why."""
        await self._failed.wait()
        return self.failure or ""

    async def drain(self) -> bool:
        """Stops admitting requests, lets streams finish for up to `drain_timeout_s`, then stops.

        Returns whether all messages were delivered in time. Streams that were not finished end with
        CANCELLED.
        """
        self._draining = True
        self.health.close()
        until = time.monotonic() + self.config.drain_timeout_s
        finished = (
            self.engine is None
            or self.failure is not None
            or await self.engine.drain(self.config.drain_timeout_s)
        )
        # Slow clients may still have to read what the engine has finished.
        delivered = finished and await self.guard.idle(max(0.0, until - time.monotonic()))
        await self.stop()
        return delivered

    async def stop(self) -> None:
        """Aborts the remaining requests and closes the ports."""
        self._draining = True
        self.health.close()
        for task in self._tasks:
            task.cancel()
        if self.engine is not None:
            await self.engine.stop()
        self.guard.streams.close()
        await asyncio.gather(
            self._main.stop(_GRACE_S),
            self._admin.stop(_GRACE_S),
            *(listener.stop() for listener in self._listeners()),
            asyncio.to_thread(self._stop_http),
        )
        await self.tracer.close()
        self.guard.close()
        self._admin_guard.close()

    def _listeners(self) -> list[Listener]:
        return [one for one in (self.web, self.page) if one is not None]

    def _stop_http(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def ready_engine(self) -> "Engine":
        """Returns the engine. Raises Unavailable while it is loading."""
        if self.engine is None:
            raise Unavailable("the server is still loading its model; try again later")
        return self.engine

    def _identify(self, method: str, authorization: str | None) -> Caller:
        """Returns the caller of a gRPC method. Admin methods need an admin key on every port."""
        caller = self.access.caller(authorization)
        if method.startswith(_ADMIN_METHODS):
            caller.require_admin()
        return caller

    def _admit(self, method: str) -> None:
        if method in (GENERATE, kserve.INFER):
            # Refuse early, without wasted work, if the server is overloaded or a key's limit is
            # reached.
            self.ready_engine().check_admission()
            access.current.get().check_room()
        elif method == kserve.STREAM_INFER:
            self.ready_engine()  # overload is checked for each request of the stream

    def _max_message_bytes(self, method: str) -> int:
        sizes = {
            GENERATE: convert.max_request_bytes,
            kserve.INFER: kserve_tensors.max_request_bytes,
            kserve.STREAM_INFER: kserve_tensors.max_request_bytes,
        }
        if method not in sizes or self.engine is None:
            return SMALL_MESSAGE_BYTES
        return min(MAX_MESSAGE_BYTES, sizes[method](self.engine.bounds))

    async def _watch_engine(self, engine: "Engine") -> None:
        self.failure = await engine.died()
        self.health.set(False)
        log.error("health is NOT_SERVING from now on: the engine failed")
        self._failed.set()


def _exit_at_once(reason: str) -> None:
    """Ends the process: the event loop is stuck, so that no client can be notified any more."""
    log.critical("the server ends at once: %s", reason)
    os._exit(1)


def max_calls(config: ServerConfig) -> int:
    """Returns the limit of concurrent calls.

    By default it is twice what the engine can hold, so that the engine refuses requests first.
    """
    engine = config.engine
    return config.max_concurrent_calls or 2 * (engine.max_num_seqs + engine.max_queue_len)


async def serve(
    config: ServerConfig,
    start_engine: Callable[[], Awaitable["Engine"]],
    metrics: Metrics | None = None,
    tracer: Tracer | None = None,
) -> bool:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once.
    SIGHUP reads keys and certificates again.

    Prints `jmoe admin on HOST:PORT` when it listens, and `jmoe ready on HOST:PORT` when requests
    are served. Returns whether all streams were delivered in time. `metrics` and `tracer`, if
    given, must be observers of the engine that `start_engine` makes.

    Raises OSError if a port is taken, what `start_engine` raises, and Unavailable if the engine
    failed and `exit_on_failure` is set.
    """
    server, stopping = Server(config, metrics, tracer), asyncio.Event()
    await server.start()
    print(f"jmoe admin on {server.admin_address}", flush=True)
    for what, listener in (("http", server.web), ("page", server.page)):
        if listener is not None:
            print(f"jmoe {what} on {server.scheme}://{listener.address}", flush=True)
    _log_addresses(server)
    loading = asyncio.ensure_future(start_engine())

    def on_signal(received: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(1)
        log.info("%s: no further requests are taken", received.name)
        stopping.set()
        loading.cancel()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal, name)
    rereading = set[asyncio.Task[None]]()

    def on_hangup() -> None:
        task = asyncio.create_task(server.reread(), name="jmoe-reread")
        rereading.add(task)
        task.add_done_callback(rereading.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await server.attach(await loading)
    except asyncio.CancelledError:
        os._exit(0)  # there is nothing to drain, and a compilation cannot be interrupted
    except Exception:
        await server.stop()
        raise
    gc_freeze.freeze()
    log.info("ready on %s", server.address, extra={"event": "ready", "address": server.address})
    print(f"jmoe ready on {server.address}", flush=True)
    await _until_stopping_or_failed(server, stopping)
    if server.failure is not None and config.exit_on_failure and not stopping.is_set():
        await server.drain()  # clients learn how their streams ended
        raise Unavailable(f"the engine failed: {server.failure}; start the server again")
    log.info("draining for up to %g s", config.drain_timeout_s)
    delivered = await server.drain()
    log.log(
        logging.INFO if delivered else logging.WARNING,
        "stopped; %s",
        "every stream was delivered" if delivered else "streams were cut off at drain_timeout_s",
        extra={"event": "stopped", "delivered": delivered},
    )
    return delivered


def _log_addresses(server: Server) -> None:
    config = server.config
    at = join(config.host, config.metrics_port)
    http = f"{server.scheme}://{at}/metrics" if config.metrics_port else ""
    log.info(
        "loading %s; listening on %s, admin on %s, metrics %s",
        *(", ".join(server.model_names), server.address, server.admin_address),
        f"on {http}" if http else "off",
        extra={
            "event": "listening",
            "model": ", ".join(server.model_names),
            "address": server.address,
            "admin_address": server.admin_address,
            "metrics": http or None,
        },
    )


async def _until_stopping_or_failed(server: Server, stopping: asyncio.Event) -> None:
    waits: list[Awaitable[object]] = [stopping.wait()]
    if server.config.exit_on_failure:
        waits.append(server.failed())
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
