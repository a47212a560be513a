"""The server: its front ends, in the engine's event loop.

It has the gRPC port for clients, and the front ends of `front_ends.py`, which add services to that
or listen on ports of their own. All of them listen, and say that nothing is served yet, before the
engine is ready. Nothing here imports jax.
"""

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.cluster.addresses import join
from serving.config import ServerConfig
from serving.errors import Unavailable
from serving.frontend import exposure, front_ends, gc_freeze
from serving.frontend.access import Access
from serving.frontend.guard import Guard, Limits
from serving.frontend.health import Health
from serving.frontend.inbox import MAX_MESSAGE_BYTES
from serving.frontend.listen import GrpcPort
from serving.frontend.metrics import Metrics
from serving.frontend.reload import Watched
from serving.frontend.status import log_status, set_brownout
from serving.frontend.tracing import Tracer
from serving.request import BrownoutChange, BrownoutState
from serving.settings.reading import named_models

if TYPE_CHECKING:
    from serving.engine import Engine

log = logging.getLogger(__name__)


LOADING_RETRY_S = 5.0
"""After which to try again, while the model is loaded: how long that takes is not known."""
MAX_EVENTS = 200
MERGED_S = 5.0
"""Within which events of one kind that are counted are one event."""


@dataclass
class Event:
    """Something that happened, for the live page."""

    time_s: float  # Unix time
    kind: str  # settings, models, reloaded, refused, evicted, workers
    text: str
    count: int = 0  # of what is counted
    until_s: float = 0.0  # when that was last


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
        self.failure: str | None = None  # why the engine failed
        self._failed = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()
        self._draining = False
        self._began_at = 0.0
        self.health = Health()
        self.access = Access(Path(config.keys_file) if config.keys_file else None)
        self.certificates = exposure.certificates(config)
        self.metrics.access = self.access
        receiving = max(1, config.max_bytes_in_flight // MAX_MESSAGE_BYTES)
        # By default twice what the engine can hold, so that the engine refuses requests first.
        held = config.engine.max_num_seqs + config.engine.max_queue_len
        max_calls = config.max_concurrent_calls or 2 * held
        limits = Limits(max_calls, receiving, config.message_timeout_s)
        self.guard = Guard(limits, self)
        self.main = GrpcPort(self, self.guard, config.host, config.port, config.max_connections)
        self.front_ends = front_ends.make_all(self)
        self.addresses: dict[str, str] = {}  # of front ends, after start
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    @property
    def status(self) -> str:
        """The server's status: `starting`, `draining`, or the engine's."""
        if self._draining:
            return "draining"
        return "starting" if self.engine is None else self.engine.status

    @property
    def model_names(self) -> Sequence[str]:
        """The names of the models that are served now, which are known before loading."""
        if self.engine is not None:
            return [name for name in self.engine.names if name]
        config = self.config
        if config.engine.models:
            return list(named_models(config.engine.models))
        return [config.served_model_name or self._model_name]

    def readiness(self) -> tuple[bool, str]:
        """Returns whether health is SERVING, and a word that says why. Thread-safe."""
        ready, status = self.health.is_serving, self.status
        if ready:
            return True, "ready"
        return False, "starting" if status == "ready" else status

    @property
    def address(self) -> str:
        """The address of the port for clients."""
        return self.main.address

    @property
    def scheme(self) -> str:
        """The URL scheme of the HTTP ports."""
        return "http" if self.certificates is None else "https"

    async def start(self) -> None:
        """Starts listening, NOT_SERVING at first. Raises OSError if an address cannot be bound."""
        self._began_at = time.monotonic()
        exposure.warn(self.config)
        self.main.bind()
        for name, front_end in self.front_ends.items():
            self.addresses[name] = await front_end.start()
        for watched in self._watched():
            watched.heard = partial(self.happened, "reloaded")
            self.keep_running(watched.watch(), f"jmoe-{watched.what}")
        await self.main.start()

    def happened(self, kind: str, text: str, count: int = 0) -> None:
        """Notes an event; `text` may have `{count}`, and such an event goes on for as long as it
        happens again within seconds.
        """
        now = time.time()
        last = next((one for one in reversed(self.events) if one.kind == kind), None)
        if count and last is not None and now - last.until_s <= MERGED_S:
            last.count, last.until_s = last.count + count, now
            last.text = text.replace("{count}", f"{last.count:,}")
            return
        self.events.append(Event(now, kind, text.replace("{count}", f"{count:,}"), count, now))

    async def set_brownout(self, change: BrownoutChange, peer: str) -> BrownoutState:
        """Changes settings for `peer`, and notes it. Raises what `Engine.set_brownout` raises."""
        after, changes = await set_brownout(self.ready_engine(), change, peer)
        self.happened("settings", f"{peer}: {changes}")
        return after

    def keep_running(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs `work` in a task, until the server stops at most."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        config = self.config
        if config.engine.models or config.served_model_name or engine.family is None:
            names = self.model_names
            engine.names[: len(names)] = names
        self.engine = engine
        engine.request_timeout_s = self.config.request_timeout_s
        if self.config.exit_on_failure:
            engine.on_unresponsive = _exit_at_once
            engine.restart_s = time.monotonic() - self._began_at
        self.metrics.engine = engine
        self.health.set(engine.status == "ready")
        self.keep_running(self._watch_engine(engine), "jmoe-watch-engine")
        if self._logs_status and self.config.status_interval_s:
            status = log_status(engine, self.metrics, self.config.status_interval_s)
            self.keep_running(status, "jmoe-status")

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
        ports = {"main": self.main, **self.front_ends}
        stopping = (port.stop() for port in ports.values())
        ends = await asyncio.gather(*stopping, return_exceptions=True)
        for name, error in zip(ports, ends, strict=True):
            if error is not None:  # the others have stopped all the same
                log.error("front end %s did not stop", name, exc_info=error)
        await self.tracer.close()
        self.guard.close()  # again: HTTP may have noted more

    def ready_engine(self) -> "Engine":
        """Returns the engine. Raises Unavailable while it is loading."""
        if self.engine is None:
            raise Unavailable(
                "the server is still loading its model; try again later", LOADING_RETRY_S
            )
        return self.engine

    async def _watch_engine(self, engine: "Engine") -> None:
        self.failure = await engine.died()
        self.health.set(False)
        log.error("health is NOT_SERVING from now on: the engine failed")
        self._failed.set()


def _exit_at_once(reason: str) -> None:
    """Ends the process: the event loop is stuck, so that no client can be notified any more."""
    log.critical("the server ends at once: %s", reason)
    os._exit(1)


async def serve(
    config: ServerConfig,
    start_engine: Callable[[], Awaitable["Engine"]],
    metrics: Metrics | None = None,
    tracer: Tracer | None = None,
) -> bool:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once.
    SIGHUP reads keys and certificates again.

    Prints `jmoe admin on HOST:PORT`, and likewise of other front ends, when it listens, and
    `jmoe ready on HOST:PORT` when requests are served. Returns whether all streams were delivered
    in time. `metrics` and `tracer`, if given, must be observers of the engine that `start_engine`
    makes.

    Raises OSError if a port is taken, what `start_engine` raises, and Unavailable if the engine
    failed and `exit_on_failure` is set.
    """
    server, stopping = Server(config, metrics, tracer), asyncio.Event()
    try:
        await server.start()
    except OSError:
        await server.stop()
        raise
    for name, where in server.addresses.items():
        if where:
            print(f"jmoe {name} on {where}", flush=True)
    _log_addresses(server)
    loading = asyncio.ensure_future(start_engine())

    def on_signal(received: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(1)
        log.info("%s: no further requests are taken", received.name)
        stopping.set()
        loading.cancel()

    loop = asyncio.get_running_loop()

    def handle_signals() -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, on_signal, name)

    handle_signals()

    def on_hangup() -> None:
        server.keep_running(server.reread(), "jmoe-reread")

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await server.attach(await loading)
    except asyncio.CancelledError:
        os._exit(0)  # there is nothing to drain, and a compilation cannot be interrupted
    except Exception:
        await server.stop()
        raise
    handle_signals()  # again: Ray's, which aborts 3 s after SIGTERM, may have taken their place
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
    http = f"{server.scheme}://{at}/metrics" if config.metrics_port else None
    found = {
        "model": ", ".join(server.model_names),
        "address": server.address,
        "admin_address": server.addresses["admin"],
        "metrics": http,
    }
    log.info(
        "loading %(model)s; listening on %(address)s, admin on %(admin_address)s, metrics %(on)s",
        found | {"on": f"on {http}" if http else "off"},
        extra={"event": "listening", **found},
    )


async def _until_stopping_or_failed(server: Server, stopping: asyncio.Event) -> None:
    waits: list[Awaitable[object]] = [stopping.wait()]
    if server.config.exit_on_failure:
        waits.append(server.failed())
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
