"""The live page's data: a sample of a server's load, latencies, brownout and KV pages per second,
the last minutes of them, expert load, and the viewers.
"""

import asyncio
import base64
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from serving.errors import ServingError, Unavailable
from serving.frontend.metrics import Metrics, workers_of
from serving.frontend.status import Counted, loadable_ways
from serving.request import BrownoutState, ModelBrownout, Priority
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.frontend.server import Server
    from serving.scheduling.sequence import SequenceState


LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


@dataclass(frozen=True)
class Sample:
    """The values of one second. NaN (null in JSON) means that there is no value.

    Latencies and late shares are those of latency-sensitive requests over the controllers' window
    (`engine.salc.window_s`): the controllers use the same latency samples.
    """

    time_s: float  # Unix time
    status: str
    requests_per_s: float = math.nan  # arrivals, including refused requests
    refused_per_s: float = math.nan
    running_ls: int = 0
    running_be: int = 0
    waiting_ls: int = 0
    waiting_be: int = 0
    prompt_tokens_per_s: float = math.nan  # computed by prefill steps
    output_tokens_per_s: float = math.nan
    ttft_p90_s: float = math.nan
    itl_p90_s: float = math.nan
    ttft_late_share: float = math.nan
    itl_late_share: float = math.nan
    ttft_slo_s: float = math.nan
    itl_slo_s: float = math.nan
    strategy: str = ""
    prefill_threshold_percent: float = math.nan
    decode_threshold_percent: float = math.nan
    degraded_share: float = math.nan  # of this second's expert visits
    expected_loss: float = math.nan  # of this second's tokens, nats a token
    max_expected_loss: float = 0.0  # of a threshold; 0: no bound
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    machine_speed: float = math.nan  # over that of the server's first thousand steps


class Sampler:
    """Takes samples of one server, in its event loop."""

    def __init__(
        self,
        server: "Server",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the engine's."""
        self._server, self._clock, self._wall = server, clock, wall
        self._last: Counted | None = None

    def take(self) -> Sample:
        """Takes a sample of the server's current state."""
        server, engine, wall_s = self._server, self._server.engine, self._wall()
        if engine is None:
            return Sample(wall_s, server.status)
        counted = Counted.of(engine, server.metrics, self._clock())
        rates, self._last = counted.rates_since(self._last), counted
        stats, state, scheduler = engine.stats(), engine.get_brownout(), engine.scheduler
        running = Counter(s.request.priority for s in scheduler.running)
        return Sample(
            time_s=wall_s,
            status=server.status,
            running_ls=running[LS],
            running_be=running[BE],
            waiting_ls=len(scheduler.queues[LS]),
            waiting_be=len(scheduler.queues[BE]),
            ttft_slo_s=state.ttft_slo_s,
            itl_slo_s=state.itl_slo_s,
            strategy=state.strategy,
            prefill_threshold_percent=state.prefill_threshold_percent,
            decode_threshold_percent=state.decode_threshold_percent,
            max_expected_loss=state.max_expected_loss,
            kv_pages_used=stats.kv_pages_used,
            kv_pages_total=stats.kv_pages_total,
            machine_speed=server.metrics.speed(engine),
            **_latencies(engine, state, counted.at_s),
            **rates,
        )


def _latencies(engine: "Engine", state: BrownoutState, now: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, phase, slo_s in (
        ("ttft", engine.slo.ls.prefill, state.ttft_slo_s),
        ("itl", engine.slo.ls.decode, state.itl_slo_s),
    ):
        p90_s = phase.window.p90(now, -math.inf, 1)
        late_share = phase.window.late_share(now, slo_s, 1)
        found[f"{name}_p90_s"] = math.nan if p90_s is None else p90_s
        found[f"{name}_late_share"] = math.nan if late_share is None else late_share
    return found


def about(server: "Server") -> dict[str, Any]:
    """Returns what rarely changes: version, models, and the settings to choose from."""
    engine, strategy = server.engine, server.config.engine.brownout.strategy
    return {
        "version": jmoe_version(),
        "models": list(server.model_names),
        "ways": [] if engine is None else list(loadable_ways(engine)),
        "controllers": [] if engine is None else _controllers(engine),
        "own_strategy": strategy if ":" in strategy else "",
        "window_s": server.config.engine.salc.window_s,
    }


def _controllers(engine: "Engine") -> list[str]:
    from serving.control.guarded import CONTROLLERS  # imports jax, as the engine did

    return list(dict.fromkeys((*CONTROLLERS, engine.config.salc.controller)))


def now(server: "Server") -> dict[str, Any]:
    """Returns what is shown without a history: status, settings, models, workers."""
    engine = server.engine
    found: dict[str, Any] = {"status": _word(server), "failure": server.failure or ""}
    if engine is None:
        nothing = {"models": [], "workers": [], "audits": [], "oldest": [], "uptime_s": math.nan}
        return found | {"brownout": None, **nothing}
    stats = engine.stats()
    return found | {
        "brownout": asdict(engine.get_brownout()),
        "models": _models(engine, server.metrics),
        "workers": [worker._asdict() for worker in workers_of(engine) or ()],
        "audits": [asdict(audit) for audit in stats.audits if audit.num_scored],
        "oldest": _oldest(engine),
        "uptime_s": stats.uptime_s,
    }


def _word(server: "Server") -> str:
    """Returns the server's status; `overloaded` in place of `ready` if no threshold keeps the
    objectives, or requests are refused for it.
    """
    engine = server.engine
    if engine is None or server.status != "ready":
        return server.status
    state = engine.get_brownout()
    kept = math.isnan(state.least_ttft_s) and math.isnan(state.least_itl_s)
    refuses = state.objective_state.startswith("overloaded")
    return "ready" if kept and not refuses else "overloaded"


def _models(engine: "Engine", metrics: Metrics) -> list[dict[str, Any]]:
    """Returns, for each model of a family, its residency, numbers of requests, and what it has of
    its own.
    """
    if len(engine.names) < 2:
        return []
    scheduler, finished = engine.scheduler, metrics.by_model.finished

    def count(sequences: "Iterable[SequenceState]") -> Counter[str]:
        return Counter(s.request.model_name for s in sequences)

    running, waiting = count(scheduler.running), count(scheduler.waiting)
    own = {one.name: one for one in engine.get_brownout().models}
    return [
        {
            "name": name,
            "resident": scheduler.models is None or number in scheduler.models,
            "running": running[name],
            "waiting": waiting[name],
            "finished": finished[name],
        }
        | asdict(own.get(name, ModelBrownout(name)))
        for number, name in enumerate(engine.names)
        if name
    ]


OLDEST = 10


def _oldest(engine: "Engine") -> list[dict[str, Any]]:
    """Returns the callers' requests that have been running for longest."""
    now = time.monotonic()
    callers = (one for one in engine.scheduler.running if not one.request.is_audit)
    oldest = nsmallest(OLDEST, callers, key=lambda one: one.arrived_at)
    return [
        {
            "id": one.request.request_id,
            "key": one.request.key,
            "model": one.request.model_name,
            "class": one.request.priority,
            "age_s": now - one.arrived_at,
            "prompt_tokens": len(one.prompt),
            "output_tokens": len(one.tokens),
            "degraded_share": one.degraded_visits
            / max(1, one.visited_tokens * one.visits_per_token),
        }
        for one in oldest
    ]


WHO_EVERY_S = 10.0
WHO_ROWS = 30


class Who:
    """Whose requests were late, degraded or refused in the last five minutes."""

    def __init__(self, server: "Server", clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        nothing: dict[tuple[str, str], Counter[str]] = {}
        self._past = deque([(-math.inf, nothing)])

    def look(self) -> list[dict[str, Any]]:
        """Returns a row for each key and model with requests, the busiest first."""
        metrics, now = self._server.metrics, self._clock()
        counts = {who: load.copy() for who, load in metrics.by_caller.items()}
        for who, count in metrics.calls.refused().items():
            counts.setdefault(who, Counter())["refused"] = count
        if now - self._past[-1][0] >= WHO_EVERY_S:
            self._past.append((now, counts))
            while len(self._past) > 1 and self._past[1][0] <= now - HISTORY * INTERVAL_S:
                self._past.popleft()
        past, rows = self._past[0][1], []
        for who, load in counts.items():
            recent = load - past.get(who, Counter())
            requests, visits, refused = recent["requests"], recent["visits"], recent["refused"]
            if requests or refused:
                row = {"key": who[0], "model": who[1], "requests": requests, "refused": refused}
                late_share = recent["late"] / requests if requests else math.nan
                share = recent["degraded"] / visits if visits else math.nan
                rows.append(row | {"late_share": late_share, "degraded_share": share})
        rows.sort(key=lambda row: (-row["requests"] - row["refused"], row["key"], row["model"]))
        return rows[:WHO_ROWS]


class Watcher:
    """Notes as events what counters and workers show between two samples."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._counts: dict[str, int] = {}  # by kind of event
        self._up: dict[str, bool] = {}

    def look(self) -> None:
        """Compares with the last look."""
        server, engine = self._server, self._server.engine
        if engine is None:
            return
        evicted = sum(engine.scheduler.num_evictions.values())
        for kind, count, text in (
            ("refused", engine.stats().requests_rejected, "{count} refused for load"),
            ("evicted", evicted, "{count} evicted, to be run again"),
        ):
            if (more := count - self._counts.get(kind, count)) > 0:
                server.happened(kind, text, more)
            self._counts[kind] = count
        up = {worker.name: worker.is_up for worker in workers_of(engine) or ()}
        for name in up.keys() & self._up.keys():
            if up[name] != self._up[name]:
                server.happened("workers", f"{name} is {'there again' if up[name] else 'lost'}")
        self._up = up


log = logging.getLogger(__name__)

INTERVAL_S = 1.0
HISTORY = 300
"""Samples that are kept for pages opened later and for readers that fall behind."""
EXPERTS_EVERY = 4
"""Expert load, the only large part of the data, is updated once in so many samples."""
RECHECK_EVERY = 10
"""A stream's key is checked again after so many messages."""
MAX_EVENTS = 60
"""Newest events of the last minutes that viewers get."""
MAX_VIEWERS = 32
"""Concurrent streams. One whose client does not read counts until its connection ends."""
RETRY_AFTER_S = 5.0


class Live:
    """Samples a server once a second, even without viewers, so that later ones see the history.

    Samples are encoded once for all viewers.
    """

    def __init__(self, server: "Server", clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the engine's."""
        self._server = server
        self._sampler = Sampler(server, clock)
        self._load = ExpertLoad(clock)
        self._watcher, self._who = Watcher(server), Who(server, clock)
        self._history: deque[bytes] = deque(maxlen=HISTORY)
        self._now = b""  # server state at the newest sample, as JSON
        self._experts, self._experts_at = b"null", 0  # newest load, and `count` at that time
        self.count = 0  # samples so far
        self._next = asyncio.Event()  # set, and replaced, at the next sample
        self._closed = False
        self._num_faults = 0
        self.num_viewers = 0

    async def run(self) -> None:
        """Takes samples until it is cancelled, which also ends every stream."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        try:
            while True:
                self._tick_or_log()
                # The next whole interval, but no sooner than half an interval after this sample,
                # which is late if the event loop was blocked: rates over less would be noise.
                late_s = loop.time() - due_at
                due_at += INTERVAL_S * math.ceil(late_s / INTERVAL_S + 0.5)
                await asyncio.sleep(due_at - loop.time())
        finally:
            self._closed = True
            self._next.set()

    def _tick_or_log(self) -> None:
        try:
            self.tick()
        except Exception:  # the page must not stop the server or flood the log
            self._num_faults += 1
            if self._num_faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                log.exception("the live page's sample failed (%d so far)", self._num_faults)

    def tick(self) -> None:
        """Takes a sample and wakes all viewers."""
        self._history.append(orjson.dumps(self._sampler.take()))
        self._watcher.look()
        self._now = orjson.dumps(self._state())
        if self.count % EXPERTS_EVERY == 0:
            self._look_at_experts()
        self.count += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    def _state(self) -> dict[str, Any]:
        since = time.time() - HISTORY * INTERVAL_S
        events = [asdict(one) for one in self._server.events if one.until_s >= since]
        return now(self._server) | {"events": events[-MAX_EVENTS:], "who": self._who.look()}

    def _look_at_experts(self) -> None:
        engine = self._server.engine
        if engine is None or engine.model is None:
            return
        load = self._load.look(self._server.metrics.expert_rows, engine.model.config.num_experts)
        if load is not None:
            self._experts, self._experts_at = orjson.dumps(load), self.count + 1

    def state(self) -> bytes:
        """Returns the server's state as a JSON object: newest sample, settings, expert load."""
        return self._message(self._newest(1), whole=True)

    async def stream(self, check: Callable[[], object]) -> AsyncIterator[bytes]:
        """Yields lines of JSON: first the whole state, then updates once a second, and whole again
        with other models. Ends with `run`.

        A reader that takes longer than a second gets the samples it missed with the next line, as
        far as the history goes. `check` is called regularly; a ServingError from it ends the
        stream.
        """
        seen, served = self.count, self._served()
        yield self._message(self._newest(HISTORY), whole=True)
        for number in itertools.count(1):
            waiting = self._next
            if seen == self.count:
                await waiting.wait()
            if self._closed:
                return
            try:
                if number % RECHECK_EVERY == 0:
                    check()
            except ServingError:  # the page learns why when it reconnects
                return
            samples, last, seen = self._newest(self.count - seen), seen, self.count
            before, served = served, self._served()
            yield self._message(samples, whole=served != before, experts=self._experts_at > last)

    def _served(self) -> tuple[object, list[str]]:
        return self._server.engine, list(self._server.model_names)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Counts a viewer within the block. Raises Unavailable if there are `MAX_VIEWERS`
        already.
        """
        if self.num_viewers >= MAX_VIEWERS:
            raise Unavailable(
                f"{MAX_VIEWERS} pages are open on this server already; close one", RETRY_AFTER_S
            )
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1

    def _newest(self, count: int) -> Sequence[bytes]:
        have = len(self._history)
        return [self._history[at] for at in range(max(0, have - count), have)]

    def _message(
        self, samples: Sequence[bytes], *, whole: bool = False, experts: bool = False
    ) -> bytes:
        current = orjson.dumps(self._state()) if whole else self._now
        parts = [b'"samples":[' + b",".join(samples) + b"]", b'"now":' + current]
        if whole:
            parts.append(b'"about":' + orjson.dumps(about(self._server)))
        if whole or experts:
            parts.append(b'"experts":' + self._experts)
        return b"{" + b",".join(parts) + b"}\n"


LEVELS = 255


class ExpertLoad:
    """Rows that experts computed between two calls of `look`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, np.ndarray] | None = None

    def look(self, rows: np.ndarray | None, num_routed: int) -> dict[str, Any] | None:
        """Returns the load since the last call; None on the first, or before any step was read.

        `rows [layers, E]` are counts since the start; the first `num_routed` experts are the routed
        ones. `load` is base64 of a byte per expert, layer by layer: LEVELS * sqrt(rows / largest),
        rounded up, so that only an idle expert has 0.
        """
        if rows is None:
            return None
        now = self._clock()
        last, self._last = self._last, (now, rows)
        if last is None or last[1].shape != rows.shape or now <= last[0]:
            return None
        since, took_s = rows - last[1], now - last[0]
        most = int(since.max(initial=0))
        levels = np.ceil(LEVELS * np.sqrt(since / max(1, most))).astype(np.uint8)
        layers, experts = rows.shape
        return {
            "layers": layers,
            "experts": experts,
            "routed": min(num_routed, experts),
            "most_rows_per_s": most / took_s,
            "load": base64.b64encode(levels.tobytes()).decode(),
        }
