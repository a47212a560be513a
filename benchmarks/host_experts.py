"""What a token takes where experts of its model lie in host memory (Multi-MoE, Table 1).

`python -m benchmarks.host_experts --family DIR [--json FILE]`, after `python -m training.family
--restore DIR`: the bundled model and a variant of it, unshared, one request at a time to the
variant. Of its experts all, half or none are on the device for good, and spare slots are as few as
may be, or a quarter of its experts. Requests that allow stand-ins, and ones that refuse them.
"""

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from jmoe.config import read_config
from serving.bench.facts import commit
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams

NAMES = ("base", "cipher")
HERE_PERCENT = (100, 50, 0)
NEW_TOKENS = 24
PROMPTS = ("fgh bcd", "abc xyz nop", "the cat", "mno")


def settings(family: Path, here_percent: int, spare_share: float) -> EngineConfig:
    """With so many percent of the variant's experts on the device for good."""
    cfg = read_config(family / NAMES[1])
    positions = cfg.num_moe_layers * cfg.num_experts
    spare = max(cfg.num_moe_layers * cfg.experts_per_token, round(spare_share * positions))
    host = {
        "resident_experts": positions + here_percent * positions // 100,
        "spare_experts": spare,
    }
    return EngineConfig(
        models=tuple(f"{name}={family / name}" for name in NAMES),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=128,
        decode_buckets=(4, 8),
        prefill_buckets=(32,),
        max_prefill_tokens=32,
        brownout=BrownoutConfig(strategy="zero", salc=False),
        **(host if here_percent < 100 else {}),
    )


async def ask(engine: Engine, prompt: str, *, refuses: bool) -> dict[str, float]:
    """Milliseconds to the first token and to each further one; percent of visits degraded."""
    began, at_s, degraded = time.perf_counter(), [], 0.0
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    async for out in engine.generate(prompt, sampling, model=NAMES[1], allow_brownout=not refuses):
        at_s.append(time.perf_counter())
        degraded = 100 * out.usage.degraded_visits / max(1, out.usage.expert_visits)
    return {
        "ttft_ms": 1e3 * (at_s[0] - began),
        "token_ms": 1e3 * (at_s[-1] - at_s[0]) / (NEW_TOKENS - 1),
        "degraded_percent": degraded,
    }


async def measure(family: Path, rounds: int) -> list[dict[str, Any]]:
    """A row of medians for each setting; settings are asked in turn, so that all meet the same
    machine.
    """
    cases = [(percent, spare) for percent in HERE_PERCENT for spare in (0.0, 0.25)]
    cases = [case for case in cases if case != (100, 0.25)]
    engines = [await Engine.start(settings(family, *case)) for case in cases]
    found: dict[tuple[int, bool], list[dict[str, float]]] = {}
    try:
        for turn in range(rounds + 1):
            for number, engine in enumerate(engines):
                for refuses in (False, True):
                    for prompt in PROMPTS:
                        one = await ask(engine, prompt, refuses=refuses)
                        if turn:  # the first round fetches what is asked most
                            found.setdefault((number, refuses), []).append(one)
        rows = []
        for (number, refuses), each in found.items():
            fetcher, tokens = engines[number].fetcher, len(PROMPTS) * (rounds + 1) * NEW_TOKENS
            rows.append(
                {
                    "here_percent": cases[number][0],
                    "spare": settings(family, *cases[number]).spare_experts,
                    "refuses": refuses,
                    **{key: statistics.median(one[key] for one in each) for key in each[0]},
                    "passes_again_a_token": fetcher.num_reruns / tokens if refuses else 0.0,
                    "fetched": dict(fetcher.fetches),
                }
            )
        return rows
    finally:
        for engine in engines:
            await engine.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.family, args.rounds))
    table = Table(
        "on the device", "spare", "refuses", "TTFT ms", "ms a token", "degraded %", "again"
    )
    for row in rows:
        table.add_row(
            f"{row['here_percent']} %",
            str(row["spare"]),
            "yes" if row["refuses"] else "no",
            f"{row['ttft_ms']:.1f}",
            f"{row['token_ms']:.2f}",
            f"{row['degraded_percent']:.1f}",
            f"{row['passes_again_a_token']:.2f}",
        )
    Console().print(table)
    if args.json:
        where = {"commit": commit(), "jax": jax.__version__, "cpus": os.cpu_count()}
        write_figures(args.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
