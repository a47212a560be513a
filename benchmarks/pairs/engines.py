"""Engines in this process: reused prefixes, structured outputs, and steps that run in parts."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import jmoe
from benchmarks.pairs.harness import Figures, Play
from benchmarks.pairs.passing_time import BATCH, CONFIG, PROMPT, passing_engine
from jmoe.api import resolve
from jmoe.config import read_config
from jmoe.random_model import random_model
from serving.config import EngineConfig
from serving.engine import Engine
from serving.execution.buckets import FULL_CAPACITY, Key
from serving.request import Priority, SamplingParams, Structure, StructureKind
from serving.telemetry.observer import Observer

SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 1000}
OUTPUTS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": {"ignore_eos": True, "temperature": 1.0},
    "regex": {"structure": Structure(StructureKind.REGEX, "[a-z0-9 +]{1000}")},
    "schema": {"structure": Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))},
}
"""Sampling parameters; the structures last as long as anything asked for here."""


@asynccontextmanager
async def _stopped_at_the_end[K](engines: Mapping[K, Engine]) -> AsyncIterator[Mapping[K, Engine]]:
    """Yields the engines and stops them. Raises RuntimeError if anything was compiled meanwhile."""

    def compilations() -> int:  # each counts those of the whole process
        return max(engine.stats().compilations_since_ready for engine in engines.values())

    try:
        before = compilations()
        yield engines
        if compilations() > before:
            raise RuntimeError("a step was compiled while it was measured")
    finally:
        for engine in engines.values():
            await engine.stop()


def _random_prompts(seed: str, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(length)] for _ in range(count)]


@asynccontextmanager
async def prefixes(settings: Mapping[str, dict[str, Any]], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting, fields of EngineConfig. A play has requests that come together
    and share their first 200 tokens, for TTFT, then 64 at a time that share nothing, for
    throughput.
    """
    model = jmoe.load("bundled", "float32", ways=[])
    num_shared, num_alone = (4, 4) if dry else (32, 4 * BATCH)

    async def answer(engine: Engine, prompt: list[int], new: int) -> tuple[float, int]:
        began, first_s, cached = time.perf_counter(), 0.0, 0
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        async for out in engine.generate(prompt, sampling):
            first_s = first_s or time.perf_counter() - began
            cached = out.usage.cached_tokens
        return first_s, cached

    async def play(name: str, number: int) -> Figures:
        engine = engines[name]
        (prefix,) = _random_prompts(f"prefix {number}", 1, 200)
        own = _random_prompts(f"own {number}", num_shared, 20)
        found = await asyncio.gather(*(answer(engine, prefix + more, 4) for more in own))
        ttft_s, cached = zip(*found, strict=True)
        left = iter(_random_prompts(f"alone {number}", num_alone, 100))
        began, began_cpu = time.perf_counter(), time.process_time()

        async def client() -> None:
            for prompt in left:
                await answer(engine, prompt, 32)

        await asyncio.gather(*(client() for _ in range(BATCH)))
        return {
            "ttft_mean_s": statistics.mean(ttft_s),
            "ttft_p90_s": float(np.percentile(ttft_s, 90)),
            "cached_tokens": statistics.mean(cached),
            "tokens_per_s": num_alone * (100 + 32) / (time.perf_counter() - began),
            "cpu_us_per_token": 1e6 * (time.process_time() - began_cpu) / num_alone / (100 + 32),
        }

    started = {
        name: await Engine.start(replace(CONFIG, **changes), model=model)
        for name, changes in settings.items()
    }
    async with _stopped_at_the_end(started) as engines:
        yield play


async def _step_ms(engine: Engine, rows: int, new_tokens: int, kind: str) -> float:
    """Returns the median milliseconds between two tokens of a request while all are decoding.

    `kind` is a key of OUTPUTS.
    """
    gaps_s: list[float] = []
    decoding = 0  # requests that have their first token and are not done

    async def one(seed: int) -> None:
        nonlocal decoding
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=seed, **OUTPUTS[kind])
        last_at, counts = 0.0, False
        async for output in engine.generate(PROMPT, sampling):
            now = time.perf_counter()
            decoding += not last_at
            if counts and output.finish_reason is None:
                gaps_s.append(now - last_at)
            last_at, counts = now, decoding == rows
        decoding -= 1

    await asyncio.gather(*map(one, range(rows)))
    return 1e3 * statistics.median(gaps_s)


@asynccontextmanager
async def outputs(settings: Mapping[str, tuple[float, str]], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting: the milliseconds of a step, 0 for those of this CPU, and a key
    of OUTPUTS. A play decodes a full batch; its figure is the median time between two tokens of a
    request.
    """
    model = jmoe.load("bundled", "float32", ways=[])
    rows, new_tokens = (4, 24) if dry else (BATCH, 192)

    async def play(name: str, number: int) -> Figures:
        step_ms, kind = settings[name]
        return {"step_ms": await _step_ms(engines[step_ms], rows, new_tokens, kind)}

    started = {
        step_ms: passing_engine(step_ms / 1e3)
        if step_ms
        else await Engine.start(CONFIG, model=model)
        for step_ms in dict.fromkeys(step_ms for step_ms, _ in settings.values())
    }
    async with _stopped_at_the_end(started) as engines:
        yield play


DEEP = EngineConfig(
    dtype="float32",
    max_num_seqs=16,
    max_model_len=128,
    page_size=16,
    max_prefill_tokens=64,
    max_prefill_seqs=4,
    decode_buckets=(4, 16),
    prefill_buckets=(32, 64),
    threshold_buckets_percent=(100,),
    max_queue_len=10_000,
    cpu_threads=1,
    brownout=CONFIG.brownout,
)
WIDER = {"d_model": 512, "head_dim": 64, "num_heads": 8, "num_experts": 16, "d_ff_expert": 512}
"""The bundled model's own layers take so little time that cutting a step never pays."""


@dataclass
class _Waits(Observer):
    """Records how long latency-sensitive requests waited for the device once they had a slot."""

    waits_s: list[float] = field(default_factory=list)

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """See Observer."""
        if priority is Priority.LATENCY_SENSITIVE:
            self.waits_s += wait_s.tolist()


@asynccontextmanager
async def parts(settings: Mapping[str, int], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting, a value of `engine.part_layers`, on 24 layers of random weights.

    A play has best effort alone, for throughput; then best effort keeps every slot busy while
    latency-sensitive prompts come one by one, up to four steps after the answer before.
    """
    layers, prompts, new_tokens = (4, 3, 4) if dry else (24, 80, 32)
    cfg = read_config(resolve("bundled"))
    sizes = {"num_layers": layers, "moe_layers": (True,) * layers} | ({} if dry else WIDER)
    sizes |= {"layer_attention": cfg.layer_attention[:1] * layers}
    model = random_model(replace(cfg, **sizes))
    rng = np.random.default_rng(0)

    async def ask(engine: Engine, new: int, priority: Priority) -> None:
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        prompt = rng.integers(3, 500, 24).tolist()
        async for _ in engine.generate(prompt, sampling, priority=priority):
            pass

    async def play(name: str, number: int) -> Figures:
        engine, waits_s, over = engines[name], observers[name].waits_s, asyncio.Event()
        runner: Any = engine.executor
        decode, prefill = (runner.part_layers_by_size[key] for key in ("decode 16", "prefill 64"))
        key = Key("decode", DEEP.max_num_seqs, FULL_CAPACITY)
        step_s, part_s = runner._time(key, [(0, layers)], [(0, decode)])
        began, count = time.perf_counter(), 3 * DEEP.max_num_seqs
        low = Priority.BEST_EFFORT
        await asyncio.gather(*(ask(engine, new_tokens, low) for _ in range(count)))
        tokens_per_s = count * new_tokens / (time.perf_counter() - began)
        waits_s.clear()
        parks = engine.scheduler.num_parks

        async def flood() -> None:
            while not over.is_set():
                await ask(engine, new_tokens, low)

        async with asyncio.TaskGroup() as group:
            for _ in range(DEEP.max_num_seqs):
                group.create_task(flood())
            for _ in range(prompts):
                await asyncio.sleep(rng.uniform(0, 4 * step_s))
                await ask(engine, 1, Priority.LATENCY_SENSITIVE)
            over.set()
        p50_s, p99_s = np.percentile(waits_s, (50, 99))
        return {
            "tokens_per_s": tokens_per_s,
            "decode_part_layers": decode,
            "prefill_part_layers": prefill,
            "part_ms": 1e3 * part_s,
            "step_ms": 1e3 * step_s,
            "parks": engine.scheduler.num_parks - parks,
            "wait_p50_ms": 1e3 * p50_s,
            "wait_p99_ms": 1e3 * p99_s,
        }

    observers = {name: _Waits() for name in settings}
    started = {
        name: await Engine.start(
            replace(DEEP, part_layers=min(at_once, layers)), model=model, observer=observers[name]
        )
        for name, at_once in settings.items()
    }
    async with _stopped_at_the_end(started) as engines:
        yield play
