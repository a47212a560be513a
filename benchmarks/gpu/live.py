"""A running server and its client, kept from one case to the next. No jax."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvloop

from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Mix, Setting, Sizes, hf_config
from serving.bench.demo import wait_idle
from serving.bench.launch import running_server, set_flags
from serving.bench.workload import Arrival, Lengths, synthetic
from serving.client import Client

START_TIMEOUT_S = 480.0
ENGINE = (
    "pallas_kernels",
    "jmoe",
    "serving",
    "configs",
    "benchmarks/gpu/live.py",
    "benchmarks/gpu/models.py",
    "benchmarks/gpu/server.py",
    "benchmarks/gpu/sizes.py",
)
"""What figures of a served model depend on."""


def settings(sizes: Sizes, cache: Path) -> dict[str, Any]:
    """Returns overrides of the default preset: the paper's batch and length, and few programs."""
    batch, tokens = sizes.batch, min(512, sizes.max_model_len)
    buckets = (batch,) if sizes.dry else (batch // 8, batch // 2, batch)
    prefill = (tokens,) if sizes.dry else (tokens // 8, tokens // 2, tokens)
    thresholds = (100,) if sizes.dry else (40, 100)
    return {
        "engine.dtype": sizes.dtype,
        "engine.max_num_seqs": batch,
        "engine.max_model_len": sizes.max_model_len,
        "engine.max_queue_len": 100_000,  # a rate above capacity is what is measured
        "engine.page_size": sizes.page_size,
        "engine.max_prefill_tokens": tokens,
        "engine.decode_buckets": buckets,
        "engine.prefill_buckets": prefill,
        "engine.threshold_buckets_percent": thresholds,
        "engine.compilation_cache": str(cache),
        "engine.brownout.way": max(sizes.ways),
    }


class Live:
    """One server process and a client of it, with an event loop to talk to both."""

    def __init__(self, runner: asyncio.Runner, client: Client, pid: int, stats: Path) -> None:
        self.runner, self.client, self.pid, self._stats = runner, client, pid, stats
        self.started: dict[str, float] = {}  # seconds from launch to each stage of the start
        self._answers = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end."""
        return self.runner.run(work)

    async def probe(self) -> dict[str, Any]:
        """Returns the server's counters now (see benchmarks.gpu.server)."""
        os.kill(self.pid, signal.SIGUSR1)
        self._answers += 1
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    found = json.loads(self._stats.read_text(encoding="utf-8"))
                    if found["answer"] >= self._answers:
                        return found
                await asyncio.sleep(0.01)

    async def use(self, setting: Setting) -> None:
        """Applies a brownout setting once nothing runs."""
        await wait_idle(self.client, 0.2)
        if setting.way:
            percent = setting.threshold_percent
            await self.client.set_brownout(
                strategy="partial",
                way=setting.way,
                prefill_threshold_percent=percent,
                decode_threshold_percent=percent,
            )
        else:
            await self.client.set_brownout(strategy="zero")


@contextlib.contextmanager
def live(
    context: Context,
    name: str,
    command: Sequence[str] = (),
    cache: Path | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Live]:
    """Yields a server that is ready and is stopped at the end. `command` replaces the one with
    random weights; `more` settings are added to those of every part.
    """
    stats = context.scratch / f"{name}.stats.json"
    stats.unlink(missing_ok=True)
    sizes = context.sizes
    overrides = {**settings(sizes, cache or context.cache), **more}
    command = command or [
        "-m",
        "benchmarks.gpu.server",
        "--stats",
        str(stats),
        *(["--dry-run"] if sizes.dry else []),
        *(word for pair in context.changes for word in ("--size", pair)),
        *set_flags(overrides),
    ]
    started: dict[str, float] = {}
    begin = time.monotonic()

    def say(line: str) -> None:
        started.setdefault(line.partition(":")[0][:30], time.monotonic() - begin)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = contextlib.AsyncExitStack()

        async def enter() -> Live:
            log = context.scratch / f"{name}.log"
            found = running_server(command, log, START_TIMEOUT_S, say)
            address, pid = await stack.enter_async_context(found)
            started["ready"] = time.monotonic() - begin
            client = await stack.enter_async_context(Client(address))
            return Live(runner, client, pid, stats)

        try:
            server = runner.run(enter())
            server.started = started
            context.facts["startup"] = started
            kept = {k: v for k, v in overrides.items() if k != "engine.compilation_cache"}
            context.facts["server"] = kept
            yield server
        finally:
            runner.run(stack.aclose())


def on_a_server(
    name: str, measure: Callable[[Case], Callable[[Context, Live, Case], Coroutine[Any, Any, Any]]]
) -> Callable[[Context], contextlib.AbstractContextManager[RunCase]]:
    """Returns the session of a part whose cases share one server; `measure` names what measures a
    case.
    """

    @contextlib.contextmanager
    def session(context: Context) -> Iterator[RunCase]:
        with live(context, name) as server:
            yield lambda case: server.run(measure(case)(context, server, case))

    return session


def requests(sizes: Sizes, mix: Mix, count: int, seed: int = 0) -> list[Arrival]:
    """Returns random prompts with the mix's lengths; outputs run to full length. Times are 0."""
    return synthetic(
        Lengths(mix.mean_input_tokens, mix.mean_output_tokens, mix.sigma),
        count,
        seed=seed,
        vocab_size=hf_config(sizes.model)["vocab_size"],
        max_total_tokens=sizes.max_model_len,
    )


def between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns what the server did between two probes: steps by phase, and how long none was under
    way.
    """
    wall_s = after["at_s"] - before["at_s"]
    found: dict[str, Any] = {"wall_s": wall_s}
    busy_s = 0.0
    for phase in ("prefill", "decode"):
        old, new = before["phases"][phase], after["phases"][phase]
        count = {key: new[key] - old.get(key, 0) for key in new}
        steps = count.get("steps", 0)
        busy_s += count.get("busy_s", 0.0)
        full = count.get("full_steps", 0)
        found[phase] = {
            "steps": steps,
            "tokens": count.get("tokens", 0),
            "rows_a_step": count["rows"] / steps if steps else None,
            "ms_a_step": 1e3 * count["busy_s"] / steps if steps else None,
            "active_experts": count["active_experts"] / steps if steps else None,
            "full_batch_ms": 1e3 * count["full_s"] / full if full else None,
        }
    found["host_idle_share"] = max(0.0, 1 - busy_s / wall_s) if wall_s else None
    found["compilations_since_ready"] = after["compilations_since_ready"]
    return found
