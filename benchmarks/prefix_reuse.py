"""What prefix reuse saves, and what it costs where there is nothing to share, in pairs.

`python -m benchmarks.prefix_reuse [--pairs N] [--out benchmarks/prefix_reuse.json]`: engines on the
bundled model, with and without (`engine.prefix_reuse`), in turns.

- Shared: 32 requests that arrive together and begin with the same 200 tokens, new ones in each
  pair; TTFT's mean and P90.
- Nothing shared: 64 requests at a time, each with a prompt of its own; tokens a second.

CPU figures, about this CPU.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import jmoe
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams
from serving.version import jmoe_version

REQUESTS, PREFIX, OWN, NEW = 32, 200, 20, 4
BATCH, ROUNDS, PROMPT, TOKENS = 64, 4, 100, 32


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(500) for _ in range(count)]


async def _answer(engine: Engine, prompt: list[int], count: int) -> tuple[float, int]:
    """Seconds to the first token, and tokens of the prompt that were there already."""
    began_at, first_s, cached = time.perf_counter(), 0.0, 0
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
    async for out in engine.generate(prompt, sampling):
        first_s = first_s or time.perf_counter() - began_at
        cached = out.usage.cached_tokens
    return first_s, cached


async def _shared(engine: Engine, seed: int) -> dict[str, float]:
    """TTFT of requests that begin alike."""
    rng = random.Random(seed)
    prefix = _tokens(rng, PREFIX)
    prompts = [prefix + _tokens(rng, OWN) for _ in range(REQUESTS)]
    found = await asyncio.gather(*(_answer(engine, prompt, NEW) for prompt in prompts))
    times_s = [first_s for first_s, _ in found]
    cached = statistics.mean(count for _, count in found)
    return {
        "ttft_mean_s": statistics.mean(times_s),
        "ttft_p90_s": float(np.percentile(times_s, 90)),
        "cached_tokens": cached,
    }


async def _unshared(engine: Engine, seed: int) -> dict[str, float]:
    """Tokens a second of requests that share nothing."""
    rng = random.Random(f"unshared {seed}")
    prompts = [_tokens(rng, PROMPT) for _ in range(BATCH * ROUNDS)]
    left = iter(prompts)

    async def client() -> None:
        for prompt in left:
            _, cached = await _answer(engine, prompt, TOKENS)
            assert cached == 0

    began_at = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(BATCH)))
    took_s = time.perf_counter() - began_at
    return {"tokens_per_s": len(prompts) * (PROMPT + TOKENS) / took_s}


async def _measure(pairs: int) -> dict[str, Any]:
    model = jmoe.load("bundled", "float32", ways=[])
    engines = {}
    for reuse in ("on", "off"):
        config = EngineConfig(
            dtype="float32",
            max_model_len=256,
            prefix_reuse=reuse,
            brownout=BrownoutConfig(strategy="zero", way=0),
        )
        engines[reuse] = await Engine.start(config, model=model)
    found: list[dict[str, dict[str, float]]] = []
    for pair in range(pairs + 1):  # the first one warms up
        order = ("on", "off") if pair % 2 else ("off", "on")
        of_pair: dict[str, dict[str, float]] = {"on": {}, "off": {}}
        for measure in (_shared, _unshared):
            for reuse in order:
                of_pair[reuse] |= await measure(engines[reuse], seed=pair)
        if pair:
            found.append(of_pair)
    for engine in engines.values():
        assert engine.stats().compilations_since_ready == 0
        await engine.stop()
    result: dict[str, Any] = {"pairs": pairs, "requests": REQUESTS, "prefix_tokens": PREFIX}
    for name in found[0]["on"]:
        for reuse in engines:
            result[f"{name}_{reuse}"] = statistics.median(of[reuse][name] for of in found)
        if name != "cached_tokens":
            result[f"{name}_ratio"] = statistics.median(
                of["on"][name] / of["off"][name] for of in found
            )
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; it must be 1 or more")
    result = asyncio.run(_measure(args.pairs))
    for name, value in result.items():
        print(f"{name:24} {value:.4g}")
    if args.out:
        result |= {
            "cpu_count": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
