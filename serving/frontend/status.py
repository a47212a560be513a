"""What a running server logs: its start, operators' changes, requests, and a status line; and how
any front end makes such a change and notes a request's outputs.

Each record also has its values as fields (`extra`), for JSON logs. Only `log_start` needs jax.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass, fields, replace
from operator import mul
from typing import TYPE_CHECKING, Any

from serving.errors import shown
from serving.frontend.access import Caller
from serving.frontend.metrics import Metrics
from serving.frontend.tracing import RequestSpan
from serving.request import BrownoutChange, BrownoutState, Output, Priority

if TYPE_CHECKING:
    from serving.engine import Engine


log = logging.getLogger(__name__)

LS = Priority.LATENCY_SENSITIVE  # the class whose latencies and SLO violations are counted

_CHANGED = {field.name for field in fields(BrownoutChange)}

NEWS_OF_SPEED = 0.1
"""The status line has the machine's speed where that has changed by more than this share."""


# ---- the status line --------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """Counters since the start, and the settings in force, at one moment."""

    at_s: float
    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    prompt_tokens: int  # computed by prefill steps
    output_tokens: int
    visits: int
    degraded_visits: int
    ended: int  # requests, however they ended, including refused ones
    first_tokens: int
    late_first_tokens: int
    further_tokens: int
    late_further_tokens: int
    strategy: str
    way: int
    prefill_threshold_percent: float
    decode_threshold_percent: float
    speed: float  # of the machine; 0: not known yet

    @classmethod
    def of(cls, engine: "Engine", metrics: Metrics, at_s: float) -> "Snapshot":
        """Reads the engine's and the metrics' counters."""
        stats, brownout = engine.stats(), engine.get_brownout()
        ended = stats.requests_finished + stats.requests_aborted
        return cls(
            at_s=at_s,
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_pages_used=stats.kv_pages_used,
            kv_pages_total=stats.kv_pages_total,
            prompt_tokens=metrics.prefill_tokens,
            output_tokens=metrics.generation_tokens,
            visits=stats.expert_visits,
            degraded_visits=stats.degraded_visits,
            ended=ended + stats.requests_failed + stats.requests_rejected,
            first_tokens=metrics.ttft.count(LS),
            late_first_tokens=metrics.violations["prefill"],
            further_tokens=metrics.itl.count(LS),
            late_further_tokens=metrics.violations["decode"],
            strategy=brownout.strategy,
            way=brownout.way,
            prefill_threshold_percent=brownout.prefill_threshold_percent,
            decode_threshold_percent=brownout.decode_threshold_percent,
            speed=0.0 if math.isnan(speed := metrics.speed(engine)) else speed,
        )

    def is_news(self, last: "Snapshot") -> bool:
        """Returns whether requests are running or waiting, or anything differs from `last`."""
        return bool(self.running or self.waiting) or replace(self, at_s=last.at_s) != last


class StatusLog:
    """Logs a line every `interval_s` while there is work or something changed."""

    def __init__(self, engine: "Engine", metrics: Metrics, interval_s: float) -> None:
        self._engine, self._metrics, self._interval_s = engine, metrics, interval_s

    async def run(self) -> None:
        """Logs until it is cancelled, by the event loop's clock."""
        last = self._look()
        while True:
            await asyncio.sleep(self._interval_s)
            now = self._look()
            if now.is_news(last):
                _log_status(last, now)
            last = now

    def _look(self) -> Snapshot:
        return Snapshot.of(self._engine, self._metrics, asyncio.get_running_loop().time())


def _log_status(last: Snapshot, now: Snapshot) -> None:
    def since(name: str) -> float:
        return getattr(now, name) - getattr(last, name)

    def share(part: str, whole: str) -> float:
        return since(part) / since(whole) if since(whole) else math.nan

    interval_s = now.at_s - last.at_s
    found: dict[str, Any] = {
        "running": now.running,
        "waiting": now.waiting,
        "prompt_tokens_per_s": since("prompt_tokens") / interval_s,
        "output_tokens_per_s": since("output_tokens") / interval_s,
        "kv_cache_usage": now.kv_pages_used / max(now.kv_pages_total, 1),
        "strategy": now.strategy,
        "way": now.way,
        "prefill_threshold_percent": now.prefill_threshold_percent,
        "decode_threshold_percent": now.decode_threshold_percent,
        "prefill_late_share": share("late_first_tokens", "first_tokens"),
        "decode_late_share": share("late_further_tokens", "further_tokens"),
        "degraded_share": share("degraded_visits", "visits"),
        "machine_speed": now.speed or math.nan,
    }
    log.info(
        "%d running, %d waiting; prompt %.1f tokens/s, output %.1f tokens/s; KV cache %.1f%%; "
        "threshold prefill %.0f%%, decode %.0f%%; late prefill %s, decode %s; degraded %s%s",
        now.running,
        now.waiting,
        found["prompt_tokens_per_s"],
        found["output_tokens_per_s"],
        100 * found["kv_cache_usage"],
        now.prefill_threshold_percent,
        now.decode_threshold_percent,
        _percent(found["prefill_late_share"]),
        _percent(found["decode_late_share"]),
        _percent(found["degraded_share"]),
        f"; machine speed {now.speed:.2f}" if abs((now.speed or 1) - 1) > NEWS_OF_SPEED else "",
        extra={"event": "status", **found},
    )


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}%"


# ---- operators --------------------------------------------------------------------------------


def log_way_begun(change: BrownoutChange, before: BrownoutState, peer: str) -> None:
    """Logs that another way of united experts is about to be loaded."""
    if change.way is not None and change.way != before.way:
        extra = {"event": "way_begun", "way": change.way, "way_before": before.way, "peer": peer}
        log.info("loading way %d in place of way %d, for %s", *_ways(extra), peer, extra=extra)


def log_way_left(change: BrownoutChange, before: BrownoutState, peer: str) -> None:
    """Logs that the client which asked for another way disconnected while it is being loaded."""
    if change.way is not None and change.way != before.way:
        extra = {"event": "way_left", "way": change.way, "way_before": before.way, "peer": peer}
        log.warning(
            "%s left before way %d was loaded; the way goes on loading, and what else the call set "
            "is dropped",
            peer,
            change.way,
            extra=extra,
        )


def log_brownout_change(
    change: BrownoutChange, before: BrownoutState, after: BrownoutState, took_s: float, peer: str
) -> None:
    """Logs which settings an operator has changed."""
    if after.way != before.way:
        extra = {"event": "way_loaded", "way": after.way, "way_before": before.way, "peer": peer}
        log.info(
            "way %d in place of way %d after %.3g s, for %s",
            *_ways(extra),
            took_s,
            peer,
            extra={**extra, "took_s": took_s},
        )
    changed, text = changes(change, before, after)
    log.info(
        "brownout set by %s: %s",
        peer,
        text,
        extra={
            "event": "brownout_set",
            "peer": peer,
            "before": {name: was for name, (was, _) in changed.items()},
            "after": {name: is_ for name, (_, is_) in changed.items()},
        },
    )


def changes(
    change: BrownoutChange, before: BrownoutState, after: BrownoutState
) -> tuple[dict[str, tuple[object, object]], str]:
    """Returns the settings that a caller has changed, before and after, and a text of them."""
    was, is_now = _values(before, change.model), _values(after, change.model)
    # A controller may also have moved thresholds; list only those that this caller set.
    changed = {
        name: (was[name], is_now[name])
        for name, value in vars(change).items()
        if name in was and (value is not None or name in ("salc_enabled", "way"))
        if was[name] != is_now[name]
    }
    of = "" if change.model is None else f" of model {shown(change.model)}"
    parts = [f"{name}{of} from {_show(a)} to {_show(b)}" for name, (a, b) in changed.items()]
    return changed, ", ".join(parts) or "nothing changed"


def _values(state: BrownoutState, model: str | None) -> dict[str, Any]:
    """Returns the settings of all models, or what one has of its own."""
    if model is None:
        return vars(state)
    return next((vars(own) for own in state.models if own.name == model), {})


def _ways(extra: dict[str, Any]) -> tuple[int, int]:
    return extra["way"], extra["way_before"]


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else shown(value)


# ---- requests ---------------------------------------------------------------------------------


class RequestEntry:
    """Logs a line about one request, at DEBUG, when its `with` block ends."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._began_at = time.monotonic()
        self._first_at = math.nan
        self._last: Output | None = None

    def note(self, output: Output) -> None:
        """Notes an output of the request, before it is sent."""
        if self._last is None:
            self._first_at = time.monotonic()
        self._last = output

    def __enter__(self) -> "RequestEntry":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        last, took_s = self._last, time.monotonic() - self._began_at
        usage = None if last is None else last.usage
        reason = "" if last is None else last.finish_reason or ""
        if not reason:
            failed = kind is not None and not issubclass(kind, asyncio.CancelledError)
            reason = kind.__name__ if kind is not None and failed else "abort"
        visits = 0 if usage is None else usage.expert_visits
        found: dict[str, Any] = {
            "request_id": self._request_id if last is None else last.request_id,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "output_tokens": 0 if usage is None else usage.completion_tokens,
            "ttft_s": self._first_at - self._began_at,
            "e2e_s": took_s,
            "finish_reason": reason,
            "degraded_share": usage.degraded_visits / visits if usage and visits else math.nan,
        }
        log.debug(
            "request %s: %s prompt tokens, %d output tokens, TTFT %.4g s, E2E %.4g s, %s, "
            "degraded %s",
            shown(found["request_id"]),
            "-" if usage is None else usage.prompt_tokens,
            found["output_tokens"],
            found["ttft_s"],
            took_s,
            reason,
            _percent(found["degraded_share"]),
            extra={"event": "request", **found},
        )


def request_entry(request_id: str) -> RequestEntry | None:
    """Makes a request's log entry; None if DEBUG lines are not logged."""
    return RequestEntry(request_id) if log.isEnabledFor(logging.DEBUG) else None


# ---- the start --------------------------------------------------------------------------------


def log_start(engine: "Engine", served_name: str, took_s: float) -> None:
    """Logs model, capacity and brownout settings, once the engine is ready."""
    _log_model(engine, served_name, took_s)
    _log_workers(engine)
    _log_brownout(engine)


def _log_model(engine: "Engine", served_name: str, took_s: float) -> None:
    from jmoe.display import count, size

    found = {"model": served_name, **_facts(engine), "took_s": took_s}
    log.info(
        "model %s: %s, %s parameters, %s, on %d x %s (%s); weights %s",
        *(served_name, found["architecture"], count(found["num_parameters"]), found["dtype"]),
        *(found["num_devices"], found["device"], found["platform"], size(found["weight_bytes"])),
        extra={"event": "model", **found},
    )
    log.info(
        "capacity: %d sequences of up to %d tokens, %d KV pages of %d tokens (%s, %s); "
        "%d programs; started in %.1f s",
        *(found["max_num_seqs"], found["max_model_len"], found["kv_pages"], found["page_size"]),
        *(size(found["kv_bytes"]), found["kv_cache_dtype"], found["num_programs"], took_s),
        extra={"event": "capacity", **found},
    )


def _facts(engine: "Engine") -> dict[str, Any]:
    import jax

    from jmoe.attention import page_bytes

    model, runner, config, family = engine.model, engine.executor, engine.config, engine.family
    assert model is not None
    assert family is not None
    limits, device = engine.scheduler.limits, jax.devices()[0]
    page_sizes = page_bytes(model.config, config.page_size, model.dtype)
    kv_bytes = sum(map(mul, limits.group_pages, page_sizes))
    in_fp8 = any(getattr(kind, "fp8", False) for kind in model.config.attention_kinds)
    return {
        "path": str(model.path),
        "architecture": model.config.architecture,
        "num_parameters": model.num_parameters,
        "dtype": str(model.dtype),
        "device": device.device_kind,
        "num_devices": limits.num_ranks + config.asynchronous.experts,
        "platform": device.platform,
        "weight_bytes": family.weight_bytes,
        "kv_bytes": limits.num_ranks * kv_bytes,
        "kv_cache_dtype": "fp8" if in_fp8 else str(model.dtype),
        "kv_pages": limits.num_pages,
        "page_size": config.page_size,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "num_programs": runner.num_programs,
    }


def _log_workers(engine: "Engine") -> None:
    """Logs the workers, in mode aep."""
    own = engine.config.asynchronous
    if engine.config.mode == "aep":
        log.info(
            "asynchronous: %d workers with attention, %d with experts, each expert on %d; %s, "
            "layer rule %s",
            *(own.attention, own.experts, own.copies, own.workers, own.layer_rule),
            extra={"event": "workers", **asdict(own)},
        )


def loadable_ways(engine: "Engine") -> tuple[int, ...]:
    """Returns the ways of united experts that may be switched to while serving, ascending."""
    settings, model = engine.config.brownout, engine.model
    return settings.ways or tuple(sorted(model.united if model else ()))


def _log_brownout(engine: "Engine") -> None:
    state, ways = engine.get_brownout(), loadable_ways(engine)
    log.info(
        "brownout %s by %s, way %d (ways %s); thresholds prefill %g%%, decode %g%%; SALC %s; "
        "SLO TTFT %g s, ITL %g s",
        state.strategy,
        state.keep,
        state.way,
        ", ".join(map(str, ways)) or "none",
        state.prefill_threshold_percent,
        state.decode_threshold_percent,
        _show(state.salc_enabled),
        state.ttft_slo_s,
        state.itl_slo_s,
        extra={
            "event": "brownout",
            "ways": list(ways),
            **{name: have for name, have in vars(state).items() if name in _CHANGED},
        },
    )


async def set_brownout(engine: "Engine", change: BrownoutChange, peer: str) -> BrownoutState:
    """Changes settings and logs that `peer` did so; if the way changes, waits until it is loaded.

    If cancelled while a way is loading, the engine goes on loading it, and the other changes are
    dropped. Raises what `Engine.set_brownout` raises.
    """
    before, began_at = engine.get_brownout(), time.monotonic()
    setting = asyncio.ensure_future(engine.set_brownout(change))
    try:
        await asyncio.sleep(0)
        if not setting.done():  # otherwise it was refused, or needed no loading
            log_way_begun(change, before, peer)
        after = await setting
    except asyncio.CancelledError:
        setting.cancel()
        log_way_left(change, before, peer)
        raise
    log_brownout_change(change, before, after, time.monotonic() - began_at, peer)
    return after


@contextlib.asynccontextmanager
async def noted(
    outputs: AsyncGenerator[Output], request_id: str, caller: Caller, span: RequestSpan
) -> AsyncIterator[Callable[[Output], None]]:
    """Yields a function to call with each output before it is sent.

    It notes the output in the trace and the log, and charges the caller's key for new tokens (for
    the prompt with the first output). At the end `outputs` is closed at once: a generator left to
    the garbage collector would keep its KV pages.
    """
    entry = request_entry(request_id)
    charged = 0

    def note(out: Output) -> None:
        nonlocal charged
        span.note(out)
        if entry is not None:
            entry.note(out)
        total = out.usage.prompt_tokens + out.usage.completion_tokens
        caller.used(total - charged)
        charged = total

    async with contextlib.aclosing(outputs):
        with entry or contextlib.nullcontext():
            yield note
