"""Takes the live page's samples of a server. Does not import jax.

Samples only read counters that the engine keeps anyway; rates are differences of two samples.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.frontend.status import loadable_ways
from serving.request import BrownoutState, Priority
from serving.settings.composes import why_not
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.execution.executor import Executor
    from serving.frontend.metrics import Metrics
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
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    machine_speed: float = math.nan  # over that of the server's first thousand steps


class Counted(NamedTuple):
    """Counters since the engine started, at one moment."""

    at_s: float
    arrived: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    visits: int
    degraded: int

    @classmethod
    def of(cls, engine: "Engine", metrics: "Metrics", at_s: float) -> "Counted":
        """Reads the counters. Each request that arrived is running, waiting, ended or refused."""
        stats = engine.stats()
        ended = stats.requests_finished + stats.requests_aborted + stats.requests_failed
        return cls(
            at_s=at_s,
            arrived=ended + stats.num_running + stats.num_waiting + stats.requests_rejected,
            refused=stats.requests_rejected,
            prompt_tokens=metrics.prefill_tokens,
            output_tokens=metrics.generation_tokens,
            visits=stats.expert_visits,
            degraded=stats.degraded_visits,
        )

    def rates_since(self, last: "Counted | None") -> dict[str, float]:
        """Returns the sample's rates since `last`; empty without an earlier sample."""
        if last is None or self.at_s <= last.at_s:
            return {}
        took_s, visits = self.at_s - last.at_s, self.visits - last.visits
        # A step that runs in parts counts degraded visits with each part, and visits at its end.
        share = min(1.0, (self.degraded - last.degraded) / visits) if visits else math.nan
        return {
            # A request that ends while it is counted may be missing for a moment.
            "requests_per_s": max(0, self.arrived - last.arrived) / took_s,
            "refused_per_s": (self.refused - last.refused) / took_s,
            "prompt_tokens_per_s": (self.prompt_tokens - last.prompt_tokens) / took_s,
            "output_tokens_per_s": (self.output_tokens - last.output_tokens) / took_s,
            "degraded_share": share,
        }


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
    engine = server.engine
    return {
        "version": jmoe_version(),
        "models": list(server.model_names),
        "ways": [] if engine is None else list(loadable_ways(engine)),
        "controllers": [] if engine is None else _controllers(engine),
        "window_s": server.config.engine.salc.window_s,
    }


def _controllers(engine: "Engine") -> list[str]:
    from serving.control.guarded import CONTROLLERS  # imports jax, as the engine did

    config = engine.config
    names = dict.fromkeys((*CONTROLLERS, config.salc.controller))
    return [name for name in names if not why_not(config, f"engine.salc.controller={name}")]


def now(server: "Server") -> dict[str, Any]:
    """Returns what is shown without a history: status, settings, models, workers."""
    engine = server.engine
    found: dict[str, Any] = {"status": _word(server), "failure": server.failure or ""}
    if engine is None:
        return found | {"brownout": None, "models": [], "workers": [], "uptime_s": math.nan}
    return found | {
        "brownout": asdict(engine.get_brownout()),
        "models": _models(engine, server.metrics),
        "workers": _workers(engine.executor),
        "uptime_s": engine.stats().uptime_s,
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


def _models(engine: "Engine", metrics: "Metrics") -> list[dict[str, Any]]:
    """Returns, for each model of a family, its residency and numbers of requests."""
    if len(engine.names) < 2:
        return []
    scheduler, finished = engine.scheduler, metrics.by_model.finished

    def count(sequences: "Iterable[SequenceState]") -> Counter[int]:
        return Counter(s.request.model for s in sequences)

    running, waiting = count(scheduler.running), count(scheduler.waiting)
    return [
        {
            "name": name,
            "resident": scheduler.models is None or number in scheduler.models,
            "running": running[number],
            "waiting": waiting[number],
            "finished": finished[number],
        }
        for number, name in enumerate(engine.names)
    ]


def _workers(executor: "Executor") -> list[dict[str, Any]]:
    """Returns the state of the workers in mode aep; otherwise empty."""
    from serving.execution.executor import HasWorkers  # imports jax, as the engine did

    return [seen._asdict() for seen in executor.seen()] if isinstance(executor, HasWorkers) else []
