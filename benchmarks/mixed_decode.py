"""What mixed decode steps bring over steps of one model after another, by experts shared and rows.

`python -m training.family --restore DIR`, then `python -m benchmarks.mixed_decode DIR [--json
FILE]`: the real engine serves the bundled model and one variant of it, each with as many requests
at a time, once with mixed steps and once without, in turn. A ratio is of two such runs that follow
each other; what is printed are medians. Decode steps count in which
three quarters of the requests or more have a row. CPU figures, about this CPU.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from jmoe.family import Family, load_family
from serving.bench.facts import commit
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.runner import DeviceRunner
from serving.observer import Observer
from serving.plan import Phase, StepResult
from serving.request import SamplingParams
from serving.scheduling.batch import ScheduledStep

SHARED_PERCENT = (0, 25, 50, 75, 100)
ROWS = (4, 8, 16, 32)  # of each model
NAMES = ("base", "cipher")
TOKENS = 128


class Decodes(Observer):
    """Rows and seconds of decode steps with three quarters of `wanted` rows or more."""

    def __init__(self) -> None:
        self.rows, self.seconds, self.wanted = 0, 0.0, 0

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """See Observer."""
        if step.plan.phase is Phase.DECODE and len(step.plan.rows) >= 0.75 * self.wanted:
            self.rows += len(step.plan.rows)
            self.seconds += now - started_at

    def take(self) -> float:
        """Tokens a second since it was asked last."""
        rate = self.rows / self.seconds if self.seconds else math.nan
        self.rows, self.seconds = 0, 0.0
        return rate


def share(family: Family, percent: int, seed: int = 0) -> None:
    """Points the second model at the first one's experts, at so many positions of each layer."""
    rng, cfg = np.random.default_rng(seed), family.config
    count = round(percent * cfg.num_experts / 100)
    first = np.asarray(family[0].weights.table.slots)
    weights = family[1].resident.weights
    slots = own_slots(family).copy()
    for layer in range(cfg.num_moe_layers):
        at = rng.permutation(cfg.num_experts)[:count]
        slots[layer, at] = first[layer, at]
    table = weights.table._replace(slots=jnp.asarray(slots))
    family[1].resident.weights = weights._replace(table=table)


def own_slots(family: Family) -> np.ndarray:
    """The second model's table where nothing is shared."""
    routed, _ = family.sharing.slots()
    found = np.array(family[1].weights.table.slots)
    found[:, : family.config.num_experts] = routed[1]
    return found


def settings() -> EngineConfig:
    """A program for each size that is measured."""
    return EngineConfig(
        dtype="float32",
        max_num_seqs=2 * ROWS[-1],
        max_model_len=256,
        decode_buckets=(*ROWS, 2 * ROWS[-1]),
        prefill_buckets=(512,),
        threshold_buckets_percent=(100,),
        mixed_models=2,
        brownout=BrownoutConfig(strategy="zero", salc=False),
    )


async def run(engine: Engine, seen: Decodes, prompts: list[list[str]], *, mixed: bool) -> float:
    """Tokens a second of all requests decoding together."""
    assert isinstance(engine.runner, DeviceRunner)
    rows = len(prompts[0])
    seen.wanted = 2 * rows if mixed else rows
    engine.runner.mixed.pays = lambda counts: mixed and len(counts) == 2

    async def one(model: str, prompt: str) -> None:
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        async for _ in engine.generate(prompt, sampling, model=model):
            pass

    asked = zip(NAMES, prompts, strict=True)
    await asyncio.gather(*(one(name, prompt) for name, own in asked for prompt in own))
    return seen.take()


async def measure(directory: Path, pairs: int) -> list[dict[str, Any]]:
    """A record for each share and number of rows."""
    family = load_family({name: directory / name for name in NAMES}, dtype="float32", ways=[])
    every = [
        [json.loads(line)["prompt"] for line in (directory / f"{name}.jsonl").open()]
        for name in NAMES
    ]
    seen, found = Decodes(), []
    engine = await Engine.start(settings(), model=family, observer=seen)
    assert isinstance(engine.runner, DeviceRunner)
    decides = engine.runner.mixed.pays
    try:
        for percent in SHARED_PERCENT:
            share(family, percent)
            engine.runner.mixed.measure()
            for rows in ROWS:
                prompts = [own[:rows] for own in every]
                rates = []
                for turn in range(pairs + 1):  # the first one warms up
                    order = (True, False) if turn % 2 else (False, True)
                    rate = {m: await run(engine, seen, prompts, mixed=m) for m in order}
                    rates.append((rate[True], rate[False]))
                rates = rates[1:]
                ratio = [mixed / alone for mixed, alone in rates]
                found.append(
                    {
                        "shared_percent": percent,
                        "rows": rows,
                        "mixed_tokens_per_s": statistics.median(mixed for mixed, _ in rates),
                        "alternating_tokens_per_s": statistics.median(one for _, one in rates),
                        "ratio": statistics.median(ratio),
                        "ratio_min": min(ratio),
                        "ratio_max": max(ratio),
                        "pays_as_measured_at_start": decides([rows, rows]),
                    }
                )
                print(found[-1], flush=True)
        assert engine.runner.compilations_since_ready == 0
    finally:
        await engine.stop()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args.directory, args.pairs))
    table = Table("shared, %", *(f"{rows} rows" for rows in ROWS), title="mixed over alternating")
    for percent in SHARED_PERCENT:
        ratios = [one["ratio"] for one in found if one["shared_percent"] == percent]
        table.add_row(str(percent), *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    if args.json:
        where = {"commit": commit(), "jax": jax.__version__, "cpus": os.cpu_count()}
        write_figures(args.json, {**where, "pairs": args.pairs, "settings": found})


if __name__ == "__main__":
    main()
