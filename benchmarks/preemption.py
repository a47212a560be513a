"""How long a prompt waits for layers of others, and what running in parts costs, on a deep model.

`python -m benchmarks.preemption [--layers 24] [--out FILE]`: a model of random weights, deeper and
wider than the bundled one, in this process. First best effort alone, its steps whole and in parts
in turn, for throughput. Then best effort keeps every slot busy while latency-sensitive prompts come
one by one: from the moment slot and pages are free, how long until the device begins with one. CPU
figures, about this CPU.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.api import Model, resolve
from jmoe.config import read_config
from jmoe.random_model import random_model
from serving.bench.facts import commit
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.buckets import FULL_CAPACITY, Key
from serving.observer import Observer
from serving.request import Priority, SamplingParams

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
PROMPT_TOKENS, NEW_TOKENS = 24, 32
WIDER = {"d_model": 512, "head_dim": 64, "num_heads": 8, "num_experts": 16, "d_ff_expert": 512}
"""Beside the bundled model's own: its layers are so short that cutting it never pays."""
CONFIG = EngineConfig(
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
    brownout=BrownoutConfig(strategy="zero"),
)


class Waits(Observer):
    """How long the latency-sensitive waited for the device once slot and pages were there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """See Observer."""
        if priority is LS:
            self.waits_s += wait_s.tolist()


async def _ask(engine: Engine, rng: np.random.Generator, new: int, priority: Priority) -> None:
    prompt = rng.integers(3, 500, PROMPT_TOKENS).tolist()
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    async for _ in engine.generate(prompt, sampling, priority=priority):
        pass


async def throughput(engine: Engine, num_requests: int) -> float:
    """Tokens a second of best effort alone, every slot taken."""
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    await asyncio.gather(*(_ask(engine, rng, NEW_TOKENS, BE) for _ in range(num_requests)))
    return num_requests * NEW_TOKENS / (time.perf_counter() - began)


async def preempt(engine: Engine, num_prompts: int, whole_s: float) -> None:
    """Best effort without an end, and one prompt after another that wants one token, each a random
    time of up to four steps after the one before was answered.
    """
    rng, over = np.random.default_rng(1), asyncio.Event()

    async def flood() -> None:
        while not over.is_set():
            await _ask(engine, rng, NEW_TOKENS, BE)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONFIG.max_num_seqs):
            group.create_task(flood())
        for _ in range(num_prompts):
            await asyncio.sleep(rng.uniform(0, 4 * whole_s))
            await _ask(engine, rng, 1, LS)
        over.set()


async def measure(model: Model, rounds: int, num_prompts: int) -> dict[str, Any]:
    """Everything, on one model."""
    waits = Waits()
    engine = await Engine.start(CONFIG, model=model, observer=waits)
    parts = dict(engine.runner.part_layers_by_size)
    whole = await Engine.start(replace(CONFIG, part_layers=model.config.num_layers), model=model)
    runner: Any = engine.runner
    try:
        pairs = []
        for _ in range(rounds):
            found = [await throughput(one, 3 * CONFIG.max_num_seqs) for one in (engine, whole)]
            pairs.append(found[0] / found[1])
        key = Key("decode", CONFIG.max_num_seqs, FULL_CAPACITY)
        (whole_s,) = runner._time(key, [(0, model.config.num_layers)])
        waits.waits_s.clear()
        before = engine.scheduler.num_parks, engine.scheduler.num_joins
        await preempt(engine, num_prompts, whole_s)
        parks, joins = (
            engine.scheduler.num_parks - before[0],
            engine.scheduler.num_joins - before[1],
        )
    finally:
        await engine.stop()
        await whole.stop()
    part_s = whole_s * parts[f"decode {CONFIG.max_num_seqs}"] / model.config.num_layers
    p50_s, p99_s = np.percentile(waits.waits_s, (50, 99))
    return {
        "num_layers": model.config.num_layers,
        "part_layers": parts,
        "whole_decode_step_ms": 1e3 * whole_s,
        "throughput_in_parts_to_whole": pairs,
        "num_prompts": len(waits.waits_s),
        "parks": parks,
        "joins": joins,
        "wait_p50_ms": 1e3 * p50_s,
        "wait_p99_ms": 1e3 * p99_s,
        "wait_p99_in_parts": p99_s / part_s,
        "wait_p99_in_whole_steps": p99_s / whole_s,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of whole and in parts")
    parser.add_argument("--prompts", type=int, default=100, help="that preempt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deep = replace(
        read_config(resolve("bundled")),
        num_layers=args.layers,
        moe_layers=(True,) * args.layers,
        **WIDER,
    )
    result = {"commit": commit()} | asyncio.run(
        measure(random_model(deep), args.rounds, args.prompts)
    )
    pairs = result["throughput_in_parts_to_whole"]
    print(f"layers at once of {args.layers}: {result['part_layers']}")
    print(
        f"best effort alone, tokens/s in parts over whole: median {statistics.median(pairs):.3f}, "
        f"{min(pairs):.3f} to {max(pairs):.3f}"
    )
    print(
        f"{result['num_prompts']} prompts, {result['parks']} parks, {result['joins']} joins; wait "
        f"from free slot to the device: P50 {result['wait_p50_ms']:.1f} ms, P99 "
        f"{result['wait_p99_ms']:.1f} ms, which is {result['wait_p99_in_parts']:.2f} parts and "
        f"{result['wait_p99_in_whole_steps']:.2f} whole decode steps"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
