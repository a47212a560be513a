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
from dataclasses import asdict, fields
from operator import mul, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.errors import shown
from serving.frontend.access import Caller
from serving.frontend.metrics import PHASES, Metrics
from serving.frontend.tracing import RequestSpan
from serving.request import BrownoutChange, BrownoutState, Output, Priority

if TYPE_CHECKING:
    from serving.engine import Engine


log = logging.getLogger(__name__)

LS = Priority.LATENCY_SENSITIVE  # the class whose latencies and SLO violations are counted

_CHANGED = {field.name for field in fields(BrownoutChange)}

NEWS_OF_SPEED = 0.1
"""The status line has the machine's speed where that has changed by more than this share."""


class Counted(NamedTuple):
    """Counters since the engine started, at one moment."""

    at_s: float
    arrived: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    visits: int
    degraded: int
    priced_tokens: int = 0
    expected_loss_nats: float = 0.0

    @classmethod
    def of(cls, engine: "Engine", metrics: "Metrics", at_s: float) -> "Counted":
        """Reads the counters. Each request that arrived is running, waiting, ended or refused; the
        engine's own, which are audits, did not arrive.
        """
        stats, scheduler = engine.stats(), engine.scheduler
        ended = stats.requests_finished + stats.requests_aborted + stats.requests_failed
        there = stats.num_running + stats.num_waiting
        there -= sum(s.request.is_audit for s in (*scheduler.running, *scheduler.waiting))
        return cls(
            at_s=at_s,
            arrived=ended + there + stats.requests_rejected,
            refused=stats.requests_rejected,
            prompt_tokens=metrics.prefill_tokens,
            output_tokens=metrics.generation_tokens,
            visits=stats.expert_visits,
            degraded=stats.degraded_visits,
            priced_tokens=stats.priced_tokens,
            expected_loss_nats=stats.expected_loss_nats,
        )

    def rates_since(self, last: "Counted | None") -> dict[str, float]:
        """Returns the sample's rates since `last`; empty without an earlier sample."""
        if last is None or self.at_s <= last.at_s:
            return {}
        since = Counted._make(map(sub, self, last))
        took_s, visits, priced = since.at_s, since.visits, since.priced_tokens
        return {
            # A request that ends while it is counted may be missing for a moment.
            "requests_per_s": max(0, since.arrived) / took_s,
            "refused_per_s": since.refused / took_s,
            "prompt_tokens_per_s": since.prompt_tokens / took_s,
            "output_tokens_per_s": since.output_tokens / took_s,
            "degraded_share": since.degraded / visits if visits else math.nan,
            "expected_loss": since.expected_loss_nats / priced if priced else math.nan,
        }


# ---- the status line --------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """What the status line tells of one moment, and what it compares with the line before."""

    counted: Counted
    tokens: dict[str, tuple[int, int]]  # by phase: latency-sensitive ones, and the late among them
    state: dict[str, Any]  # fields of the line
    speed: float  # of the machine; 0: not known yet

    @classmethod
    def of(cls, engine: "Engine", metrics: Metrics, at_s: float) -> "Snapshot":
        """Reads the engine's and the metrics' counters."""
        stats, brownout, speed = engine.stats(), engine.get_brownout(), metrics.speed(engine)
        counts, late = (metrics.ttft.count(LS), metrics.itl.count(LS)), metrics.violations
        state = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_pages_used / max(stats.kv_pages_total, 1),
            "strategy": brownout.strategy,
            "way": brownout.way,
            "prefill_threshold_percent": brownout.prefill_threshold_percent,
            "decode_threshold_percent": brownout.decode_threshold_percent,
        }
        return cls(
            Counted.of(engine, metrics, at_s),
            {phase: (count, late[phase]) for phase, count in zip(PHASES, counts, strict=True)},
            state,
            0.0 if math.isnan(speed) else speed,
        )

    def is_news(self, last: "Snapshot") -> bool:
        """Returns whether requests are running or waiting, or anything differs from `last`."""
        counted = self.counted._replace(at_s=last.counted.at_s)
        busy = self.state["running"] or self.state["waiting"]
        return bool(busy) or self._replace(counted=counted) != last


async def log_status(engine: "Engine", metrics: Metrics, interval_s: float) -> None:
    """Logs a line every `interval_s`, by the event loop's clock, while there is work or something
    changed; until it is cancelled.
    """
    clock = asyncio.get_running_loop().time
    last = Snapshot.of(engine, metrics, clock())
    while True:
        await asyncio.sleep(interval_s)
        now = Snapshot.of(engine, metrics, clock())
        if now.is_news(last):
            _log_status(last, now)
        last = now


def _log_status(last: Snapshot, now: Snapshot) -> None:
    rates = now.counted.rates_since(last.counted)
    found = now.state | {
        name: rates[name]
        for name in ("prompt_tokens_per_s", "output_tokens_per_s", "degraded_share")
    }
    for phase in PHASES:
        before, after = last.tokens[phase], now.tokens[phase]
        tokens, late = after[0] - before[0], after[1] - before[1]
        found[f"{phase}_late_share"] = late / tokens if tokens else math.nan
    found["machine_speed"] = now.speed or math.nan
    shares = ("kv_cache_usage", "prefill_late_share", "decode_late_share", "degraded_share")
    is_news = abs((now.speed or 1) - 1) > NEWS_OF_SPEED
    log.info(
        "%(running)d running, %(waiting)d waiting; prompt %(prompt_tokens_per_s).1f tokens/s, "
        "output %(output_tokens_per_s).1f tokens/s; KV cache %(kv_cache_usage)s; threshold prefill "
        "%(prefill_threshold_percent).0f%%, decode %(decode_threshold_percent).0f%%; late prefill "
        "%(prefill_late_share)s, decode %(decode_late_share)s; degraded %(degraded_share)s"
        + (f"; machine speed {now.speed:.2f}" if is_news else ""),
        found | {name: _percent(found[name]) for name in shares},
        extra={"event": "status", **found},
    )


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}%"


# ---- operators --------------------------------------------------------------------------------


async def set_brownout(
    engine: "Engine", change: BrownoutChange, peer: str
) -> tuple[BrownoutState, str]:
    """Changes settings and logs that `peer` did so; if the way changes, waits until it is loaded.
    Returns the settings in force then, and a text of what has changed.

    If cancelled while a way is loading, the engine goes on loading it, and the other changes are
    dropped. Raises what `Engine.set_brownout` raises.
    """
    before, began_at = engine.get_brownout(), time.monotonic()
    loads = change.way is not None and change.way != before.way
    about = {"way": change.way, "way_before": before.way, "peer": peer}
    setting = asyncio.ensure_future(engine.set_brownout(change))
    try:
        await asyncio.sleep(0)
        if loads and not setting.done():  # otherwise it was refused, or needed no loading
            log.info(
                "loading way %d in place of way %d, for %s",
                *(change.way, before.way, peer),
                extra={"event": "way_begun", **about},
            )
        after = await setting
    except asyncio.CancelledError:
        setting.cancel()
        if loads:
            log.warning(
                "%s left before way %d was loaded; the way goes on loading, and what else the call "
                "set is dropped",
                *(peer, change.way),
                extra={"event": "way_left", **about},
            )
        raise
    if after.way != before.way:
        took_s = time.monotonic() - began_at
        log.info(
            "way %d in place of way %d after %.3g s, for %s",
            *(after.way, before.way, took_s, peer),
            extra={"event": "way_loaded", **about, "way": after.way, "took_s": took_s},
        )
    changed, text = _changes(change, before, after)
    log.info(
        "brownout set by %s: %s",
        *(peer, text),
        extra={
            "event": "brownout_set",
            "peer": peer,
            "before": {name: was for name, (was, _) in changed.items()},
            "after": {name: is_ for name, (_, is_) in changed.items()},
        },
    )
    return after, text


def _changes(
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


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else shown(value)


# ---- requests ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def noted(
    outputs: AsyncGenerator[Output], request_id: str, caller: Caller, span: RequestSpan
) -> AsyncIterator[Callable[[Output], None]]:
    """Yields a function to call with each output before it is sent.

    It notes the output in the trace and, at DEBUG, the log, and charges the caller's key for new
    tokens (for the prompt with the first output). At the end `outputs` is closed at once: a
    generator left to the garbage collector would keep its KV pages.
    """
    began_at, first_at, charged = time.monotonic(), math.nan, 0
    last: Output | None = None
    failure = ""

    def note(out: Output) -> None:
        nonlocal first_at, charged, last
        span.note(out)
        if last is None:
            first_at = time.monotonic()
        last = out
        total = out.usage.prompt_tokens + out.usage.completion_tokens
        caller.used(total - charged)
        charged = total

    async with contextlib.aclosing(outputs):
        try:
            yield note
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                failure = type(error).__name__
            raise
        finally:
            if log.isEnabledFor(logging.DEBUG):
                ttft_s, e2e_s = first_at - began_at, time.monotonic() - began_at
                _log_request(request_id, last, ttft_s, e2e_s, failure)


def _log_request(
    request_id: str, last: Output | None, ttft_s: float, e2e_s: float, failure: str
) -> None:
    """Logs a line about a request whose newest output is `last`."""
    usage = None if last is None else last.usage
    visits = 0 if usage is None else usage.expert_visits
    found: dict[str, Any] = {
        "request_id": request_id,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "output_tokens": 0 if usage is None else usage.completion_tokens,
        "ttft_s": ttft_s,
        "e2e_s": e2e_s,
        "finish_reason": (last and last.finish_reason) or failure or "abort",
        "degraded_share": usage.degraded_visits / visits if usage and visits else math.nan,
    }
    log.debug(
        "request %s: %s prompt tokens, %d output tokens, TTFT %.4g s, E2E %.4g s, %s, degraded %s",
        shown(request_id),
        "-" if usage is None else usage.prompt_tokens,
        *(found["output_tokens"], ttft_s, e2e_s, found["finish_reason"]),
        _percent(found["degraded_share"]),
        extra={"event": "request", **found},
    )


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
    listed = ", ".join(map(str, ways)) or "none"
    log.info(
        "brownout %(strategy)s by %(keep)s, way %(way)d (ways %(ways)s); thresholds prefill "
        "%(prefill_threshold_percent)g%%, decode %(decode_threshold_percent)g%%; "
        "controller (SALC) %(salc)s; SLO TTFT %(ttft_slo_s)g s, ITL %(itl_slo_s)g s",
        vars(state) | {"ways": listed, "salc": _show(state.salc_enabled)},
        extra={
            "event": "brownout",
            "ways": list(ways),
            **{name: have for name, have in vars(state).items() if name in _CHANGED},
        },
    )
