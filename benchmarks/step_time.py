"""Decode step of the bundled model on this CPU: zero brownout against brownout, and host overhead.

Run: `JAX_PLATFORMS=cpu python -m benchmarks.step_time`. The settings are timed in turn, step by
step, so that a machine whose speed drifts does not favour one; ratios are medians of paired steps.
Nothing here speaks of a GPU.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jmoe
from jmoe.packed_rows import pack_row
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.buckets import Key
from serving.execution.ranks import ByRank
from serving.execution.runner import DeviceRunner
from serving.observer import Observer
from serving.plan import StepControl
from serving.request import SamplingParams

BATCH, CONTEXT, WAY = 64, 64, 8
SETTINGS = {"zero": (100, 0), "way 8, t 40": (40, 2), "way 8, t 0": (0, 2), "full, t 0": (0, 1)}


def engine_config() -> EngineConfig:
    """The demo's sizes, with only the programs that are timed."""
    return EngineConfig(
        dtype="float32",
        max_num_seqs=BATCH,
        max_model_len=256,
        page_size=16,
        max_prefill_tokens=256,
        decode_buckets=(BATCH,),
        prefill_buckets=(256,),
        threshold_buckets_percent=(40, 100),
        brownout=BrownoutConfig(strategy="zero", way=WAY),
    )


def prompts(model: jmoe.Model, length: int) -> list[list[int]]:
    """`BATCH` prompts of `length` tokens, cut from the bundled tasks."""
    assert model.tokenizer is not None
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    text = [json.loads(line) for line in lines]
    tokens = [t for item in text for t in model.tokenizer.encode(item["prompt"] + item["answer"])]
    return [tokens[i * length : (i + 1) * length] for i in range(BATCH)]


def step_times(runner: DeviceRunner, rounds: int) -> dict[str, list[float]]:
    """Seconds of one decode step by setting, the settings in turn; the context stays at CONTEXT."""
    model, state = runner.model, runner.device.state
    slots, blocks = state.block_table.shape
    pages = np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
    pages[BATCH:] = 0  # slots that no sequence of these has
    state = state._replace(block_table=jnp.asarray(pages))
    rows = np.stack([pack_row(slot, kv_len=CONTEXT) for slot in range(BATCH)])
    step = ByRank.of_arrays(runner.limits, rows)
    layers = model.config.num_layers
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for n, prompt in enumerate(prompts(model, CONTEXT)):  # real keys, so that routing is real
        state = _prefill(runner, state, n, prompt)
    newest = np.zeros(slots, np.int32)
    newest[:BATCH] = [prompt[-1] for prompt in prompts(model, CONTEXT)]
    for _ in range(rounds):
        for name, control in SETTINGS.items():
            bucket = 40 if control[1] else 100
            state = state._replace(last_token=jnp.array(newest))  # a copy: the state is donated
            key = Key("decode", BATCH, bucket)
            args = runner.device.arrays(key, step, StepControl(*control), stop=layers)
            jax.block_until_ready(state)
            start = time.perf_counter()
            state, out = runner.programs.run(key, state, *args)
            jax.block_until_ready(out)
            times[name].append(time.perf_counter() - start)
    runner.device.state = state
    return times


def _prefill(runner: DeviceRunner, state, slot: int, prompt: list[int]):
    key = Key("prefill", 256, 100)
    rows = np.stack([pack_row(slot, kv_len=len(prompt), q_len=len(prompt))])
    layers = runner.model.config.num_layers
    step = ByRank.of_arrays(runner.limits, rows, tokens=np.array(prompt, np.int32))
    args = runner.device.arrays(key, step, StepControl(100, 0), stop=layers)
    return runner.programs.run(key, state, *args)[0]


class _StepClock(Observer):
    """When each full decode step was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[float] = []

    def step_read(self, step, result, started_at, now) -> None:
        """See Observer."""
        if step.plan.phase == "decode" and len(step.plan.rows) == BATCH:
            self.reads.append(now)


async def engine_step_time(model: jmoe.Model, new_tokens: int) -> float:
    """Median seconds from one full decode step to the next, with a consumer on every stream."""
    clock = _StepClock()
    engine = await Engine.start(engine_config(), model=model, observer=clock)
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    async def consume(prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, sampling):
            pass

    # Contexts pass CONTEXT half way, so that both measurements attend to as much on average.
    await asyncio.gather(*map(consume, prompts(model, CONTEXT - new_tokens // 2)))
    await engine.stop()
    return statistics.median(np.diff(clock.reads))


def main() -> None:
    """Prints the tables and, with --json, writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = jmoe.load("bundled", "float32", ways=[WAY])
    runner = DeviceRunner(model, engine_config())
    runner.start(WAY, (WAY,))
    step_times(runner, 5)
    times = step_times(runner, args.rounds)
    wall_s = asyncio.run(engine_step_time(model, 48))
    after = step_times(runner, args.rounds)
    figures = {"batch": BATCH, "context": CONTEXT, "rounds": args.rounds}
    table = Table(title=f"decode step, batch {BATCH}, context {CONTEXT}, float32 on this CPU")
    for column in ("setting", "median ms", "ratio to zero"):
        table.add_column(column, justify="right")
    for name, seconds in times.items():
        ratio = statistics.median(np.divide(seconds, times["zero"]))
        figures[name] = {"median_ms": statistics.median(seconds) * 1e3, "ratio": ratio}
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.2f}", f"{ratio:.3f}")
    program_s = statistics.median([*times["zero"], *after["zero"]])
    figures["engine_step_ms"] = wall_s * 1e3
    figures["host_overhead"] = 1 - program_s / wall_s
    console = Console()
    console.print(table)
    console.print(
        f"engine step {wall_s * 1e3:.2f} ms, program {program_s * 1e3:.2f} ms: "
        f"host overhead {100 * (1 - program_s / wall_s):.1f} %"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
