"""What changing a family's set of non-expert weights takes, and what it costs the steps beside it.

`python -m benchmarks.set_swaps [--json FILE]`: three models of one architecture, of which two sets
are on the device. One model decodes throughout; in every second period the other place changes
hands all the time. No tensor is equal in two models, but for norms, so that all of a set is copied.
"""

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from jmoe.api import resolve
from jmoe.config import read_config
from jmoe.family import Family
from jmoe.random_model import random_model, random_params
from jmoe.sharing import Sharing
from jmoe.weights import PoolHolder, ResidentWeights
from serving.bench.facts import commit
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.param_sets import PIECE_BYTES, ParamSets
from serving.observer import Observer
from serving.plan import Phase
from serving.request import SamplingParams

NAMES = ("decodes", "comes", "goes")
ROWS, TOKENS = 4, 400


class Decodes(Observer):
    """Seconds of decode steps."""

    def __init__(self) -> None:
        super().__init__()
        self.took_s: list[float] = []

    def step_read(self, step: Any, result: Any, started_at: float, now: float) -> None:
        """See Observer."""
        super().step_read(step, result, started_at, now)
        if step.plan.phase is Phase.DECODE:
            self.took_s.append(now - started_at)


def family_of(vocab_size: int) -> Family:
    """The bundled model's shape with a larger vocabulary; one pool, and a set a model."""
    cfg = replace(read_config(resolve("bundled")), vocab_size=vocab_size, tie_embeddings=False)
    first = random_model(cfg)
    held, models = PoolHolder(first.pool), []
    for number, name in enumerate(NAMES):
        params = random_params(cfg, jax.random.key(number), first.dtype)
        own = first.weights._replace(params=jax.tree.map(np.array, params))
        models.append(replace(first, name=name, resident=ResidentWeights(own, {}, name, held=held)))
    owners = np.zeros((len(NAMES), cfg.num_moe_layers, cfg.num_experts), np.int32)
    return Family(tuple(models), Sharing(NAMES, owners))


def copy_rate(num_bytes: int, times: int) -> float:
    """Bytes a second that this machine copies to new memory, as every new array is; the median."""
    source, rates = np.ones(num_bytes, np.uint8), []
    for _ in range(times):
        began = time.perf_counter()
        into = np.empty(num_bytes, np.uint8)
        for at in range(0, num_bytes, PIECE_BYTES):
            into[at : at + PIECE_BYTES] = source[at : at + PIECE_BYTES]
        rates.append(num_bytes / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def swap_alone(family: Family, times: int) -> tuple[float, int]:
    """Seconds that a change takes with nothing beside it, the median, and the bytes it copies."""
    sets = ParamSets([model.params for model in family], num_resident=2)
    found, before = [], sets.bytes_copied
    for number in range(times):
        leaving, coming = (1, 2) if number % 2 == 0 else (2, 1)
        began = time.perf_counter()
        sets.replace(leaving, coming).result()
        found.append(time.perf_counter() - began)
    copied = (sets.bytes_copied - before) // times
    _check_copied(sets)
    sets.close()
    return statistics.median(found[1:]), copied


def _check_copied(sets: ParamSets) -> None:
    """Raises AssertionError where a set on the device is the host's memory, or other numbers."""
    for model in sets.resident:
        for host, leaf in zip(sets.host_set(model), jax.tree.leaves(sets[model]), strict=True):
            assert leaf.unsafe_buffer_pointer() != host.ctypes.data
            np.testing.assert_array_equal(leaf, host)


async def steps_beside(family: Family, periods: int) -> dict[str, Any]:
    """Seconds of decode steps with and without changes beside them, period by period."""
    seen = Decodes()
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=ROWS,
        max_model_len=TOKENS + 8,
        decode_buckets=(ROWS,),
        prefill_buckets=(16,),
        threshold_buckets_percent=(100,),
        max_prefill_tokens=16,
        resident_sets=2,
        brownout=BrownoutConfig(strategy="zero", salc=False),
    )
    engine = await Engine.start(config, model=family, observer=seen)

    async def decode(seed: int) -> None:
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, seed=seed)
        async for _ in engine.generate([1, 2, 3], sampling, model=NAMES[0]):
            pass

    pairs, swaps, leaving = [], 0, 1
    try:
        for _ in range(periods):
            pair = {}
            for changing in (False, True):
                seen.took_s.clear()
                rows = asyncio.gather(*map(decode, range(ROWS)))
                while changing and not rows.done():
                    coming = 3 - leaving
                    await asyncio.wrap_future(engine.runner.replace_set(leaving, coming))
                    leaving, swaps = coming, swaps + 1
                await rows
                pair[changing] = list(seen.took_s)
            pairs.append(pair)
        compilations = engine.runner.compilations_since_ready
    finally:
        await engine.stop()
    p95 = [(np.percentile(p[False], 95), np.percentile(p[True], 95)) for p in pairs]
    medians = [(statistics.median(p[False]), statistics.median(p[True])) for p in pairs]
    return {
        "changes": swaps,
        "compilations_since_ready": compilations,
        "p95_ms": [[1e3 * a, 1e3 * b] for a, b in p95],
        "p95_ratio_median": statistics.median(b / a for a, b in p95),
        "median_ratio_median": statistics.median(b / a for a, b in medians),
    }


def measure(vocab_size: int, periods: int) -> dict[str, Any]:
    """All figures."""
    family = family_of(vocab_size)
    took_s, copied = swap_alone(family, 2 * periods + 1)
    rate = copy_rate(copied, periods)
    found = {
        "set_bytes": copied,
        "copy_gb_a_second": rate / 1e9,
        "swap_s": took_s,
        "over_bytes_at_copy_rate": took_s * rate / copied,
    }
    where = {"commit": commit(), "jax": jax.__version__, "cpus": os.cpu_count()}
    return {**where, **found, **asyncio.run(steps_beside(family, periods))}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=262_144)
    parser.add_argument("--periods", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.vocab_size, args.periods)
    table = Table(show_header=False)
    table.add_row("bytes of a set", f"{found['set_bytes'] / 2**20:.0f} MiB")
    table.add_row("a change, alone", f"{1e3 * found['swap_s']:.0f} ms")
    table.add_row("over its bytes at the copy rate", f"{found['over_bytes_at_copy_rate']:.2f}")
    table.add_row("P95 of steps beside changes, over alone", f"{found['p95_ratio_median']:.2f}")
    table.add_row("median of them, over alone", f"{found['median_ratio_median']:.2f}")
    table.add_row("changes", str(found["changes"]))
    table.add_row("compiled meanwhile", str(found["compilations_since_ready"]))
    Console().print(table)
    if args.json:
        write_figures(args.json, found)


if __name__ == "__main__":
    main()
