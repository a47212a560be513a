"""What structured outputs cost of a decode step, at 64 rows, in pairs on the bundled model.

`python -m benchmarks.structured [--pairs N] [--out benchmarks/structured.json]`: an engine decodes
64 requests of 192 tokens each, in turn greedy and plain, sampled and plain, and all under a
grammar: a regular expression, and a JSON schema whose outputs last that long. A step's time is that
between two tokens of a request, the median of all; ratios are of the pair's own plain steps. CPU
figures, about this CPU, where masks are computed on the cores that compute the step, too.

So everything is measured once more over a device whose steps only pass time (`STEPS_MS`), as those
of a GPU do for the host: what a mask costs there is what the forward pass does not hide.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

import jmoe
from benchmarks.host_path import PassingTime
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.fitting import limits_of
from serving.plan import StepResult
from serving.request import SamplingParams, Structure, StructureKind
from serving.version import jmoe_version

BATCH, TOKENS = 64, 192
STEPS_MS = (16.0, 8.0)
PROMPT = "add 47 + 38 and 12 + 9 then say it"
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 1000}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": {"ignore_eos": True, "temperature": 1.0},
    "regex": {"structure": Structure(StructureKind.REGEX, "[a-z0-9 +]{1000}")},
    "schema": {"structure": Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))},
}


class Drawing(PassingTime):
    """Rows whose outputs are structured get the first token that they may have."""

    def __init__(self, limits: Any, step_s: float, tokens: list[int]) -> None:
        super().__init__(limits, step_s, tokens)
        self._allowed: Queue[np.ndarray] = Queue()

    def launch(self, plan: Any, control: Any) -> "Future[StepResult]":
        """See PassingTime. A step that waits is done when its tokens may be drawn, too."""
        if plan.shapes is None or not plan.shapes.waits:
            return super().launch(plan, control)
        self._free_at = max(self._free_at, time.monotonic()) + self.step_s
        ends_at, count = self._free_at, len(plan.rows)

        def read() -> StepResult:
            allowed = self._allowed.get()
            result = self._read(ends_at, count)
            self._free_at = max(self._free_at, time.monotonic())
            at = (allowed != 0).argmax(axis=1)
            words = np.take_along_axis(allowed, at[:, None], 1)[:, 0].view(np.uint32)
            lowest = np.log2(words & -words.view(np.int32)).astype(int)
            return replace(result, tokens=(32 * at + lowest).tolist())

        return self._reader.submit(read)

    def draw(self, allowed: np.ndarray) -> None:
        """See serving.execution.runner.Runner."""
        self._allowed.put(allowed)


async def _step_s(engine: Engine, asked: dict[str, Any]) -> float:
    """Median seconds between two tokens, once all requests decode."""
    gaps: list[float] = []
    decoding, all_there = 0, asyncio.Event()

    async def one(seed: int) -> None:
        nonlocal decoding
        sampling = SamplingParams(max_new_tokens=TOKENS, seed=seed, **asked)
        last, counts = 0.0, False
        async for output in engine.generate(PROMPT, sampling):
            now = time.perf_counter()
            if not last:
                decoding += 1
                if decoding == BATCH:
                    all_there.set()
            elif counts and output.finish_reason is None:
                gaps.append(now - last)
            last, counts = now, all_there.is_set() and decoding == BATCH
        decoding -= 1

    await asyncio.gather(*(one(seed) for seed in range(BATCH)))
    return statistics.median(gaps)


async def _measure(pairs: int, engine: Engine) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for pair in range(pairs + 1):  # the first one warms what the host keeps
        for name, asked in KINDS.items():
            step_s = await _step_s(engine, asked)
            if pair:
                found[name].append(step_s)
    assert engine.stats().compilations_since_ready == 0
    await engine.stop()
    result: dict[str, Any] = {}
    for name, times_s in found.items():
        result[f"{name}_step_ms"] = 1e3 * statistics.median(times_s)
        for plain in ("greedy", "sampled"):
            if name not in ("greedy", plain):
                of_pairs = [own / base for own, base in zip(times_s, found[plain], strict=True)]
                result[f"{name}_over_{plain}"] = statistics.median(of_pairs)
    return result


async def _measure_all(pairs: int) -> dict[str, Any]:
    model = jmoe.load("bundled", "float32", ways=[])
    assert model.tokenizer is not None
    config = EngineConfig(
        dtype="float32", max_model_len=256, brownout=BrownoutConfig(strategy="zero", way=0)
    )
    result: dict[str, Any] = {"batch": BATCH, "output_tokens": TOKENS, "pairs": pairs}
    result["this_cpu"] = await _measure(pairs, await Engine.start(config, model=model))
    tokens = model.tokenizer.encode(PROMPT * 8)[:BATCH]
    for step_ms in STEPS_MS:
        runner = Drawing(limits_of(config), 1e-3 * step_ms, tokens)
        engine = Engine(config, runner, model)
        engine.run()
        result[f"device_of_{step_ms:g}_ms"] = await _measure(pairs, engine)
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}; it must be 1 or more")
    result = asyncio.run(_measure_all(args.pairs))
    for where, found in result.items():
        if isinstance(found, dict):
            print(where)
            for name, value in found.items():
                print(f"    {name:22} {value:.4g}")
    if args.out:
        result |= {
            "cpu_count": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
