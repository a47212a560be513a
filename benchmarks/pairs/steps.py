"""Programs alone: a decode step of the bundled model, and the routed-expert op of its layer."""

import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from benchmarks.kernels.shapes import BUNDLED as SHAPE
from benchmarks.pairs.harness import Figures, Play
from benchmarks.pairs.passing_time import BATCH, CONFIG
from jmoe.api import Model
from jmoe.brownout import Brownout
from jmoe.packed_rows import pack_row
from jmoe.stepper import Stepper
from pallas_kernels import grouped_gemm, routing
from serving.bench.workload import load_tasks
from serving.config import BrownoutConfig
from serving.execution.buckets import Key
from serving.execution.ranks import ByRank
from serving.execution.runner import DeviceRunner
from serving.plan import Phase, StepControl, StepPlan

CONTEXT, WAY = 64, 8
ENGINE = replace(
    CONFIG,
    page_size=16,
    max_prefill_tokens=256,
    decode_buckets=(BATCH,),
    prefill_buckets=(256,),
    threshold_buckets_percent=(40, 100),
    brownout=BrownoutConfig(strategy="zero", way=WAY),
)
"""The demo's sizes, with only the programs that are timed."""


@asynccontextmanager
async def decode(settings: Mapping[str, tuple[int, int]], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting, threshold and strategy of an engine's program. The figure is the
    median time of a play's runs.
    """
    model = jmoe.load("bundled", "float32", ways=[WAY])
    text = _tokens(model)
    runner = DeviceRunner(model, ENGINE)
    runner.start(WAY, (WAY,))
    time_program = _program(runner, [text[i * CONTEXT :][:CONTEXT] for i in range(BATCH)])

    async def play(name: str, number: int) -> Figures:
        return {"step_ms": 1e3 * statistics.median(map(time_program, [settings[name]] * 5))}

    yield play


def _tokens(model: Model) -> list[int]:
    """Returns the tasks that come with a model, one behind the other."""
    assert model.tokenizer is not None
    texts = [f"{task.prompt}{task.answer}" for task in load_tasks(model.path / "tasks.jsonl")]
    return [token for one in texts for token in model.tokenizer.encode(one)]


@asynccontextmanager
async def formats(
    settings: Mapping[str, tuple[str, str, Brownout | None]], dry: bool
) -> AsyncIterator[Play]:
    """Yields what plays a setting: the dtype of rows, what experts are kept in, and brownout; see
    `_decodes`.
    """
    loaded = {
        kept: _decodes(jmoe.load("bundled", kept[0], ways=[WAY], quantize=kept[1]), dry)
        for kept in dict.fromkeys((dtype, quantize) for dtype, quantize, _ in settings.values())
    }

    async def play(name: str, number: int) -> Figures:
        dtype, quantize, brownout = settings[name]
        return loaded[dtype, quantize](brownout)

    yield play


def _decodes(model: Model, dry: bool) -> Callable[[Brownout | None], Figures]:
    """Returns what runs decode steps under a setting, as `jmoe.generate` runs them, with room for
    all experts, behind exact prompts.

    The figures are the median step, in time and in this process's processor time (which a busy
    machine disturbs less), and a layer's active experts.
    """
    batch = 4 if dry else BATCH
    text = np.array(_tokens(model)[: batch * CONTEXT], np.int32).reshape(batch, CONTEXT)
    stepper = Stepper(model, None, num_slots=batch, max_len=CONTEXT + 1)
    for slot, prompt in enumerate(text):
        rows = np.stack([pack_row(slot, kv_len=CONTEXT, q_len=CONTEXT)])
        stepper.prefill(prompt, rows)
    ends = np.stack([pack_row(slot, kv_len=CONTEXT) for slot in range(batch)])
    rows = np.stack([pack_row(slot, kv_len=CONTEXT + 1) for slot in range(batch)])

    def run(brownout: Brownout | None) -> Figures:
        times, active = [], 0.0
        clocks = time.perf_counter, time.process_time
        for _ in range(1 if dry else 5):
            stepper.use(None)
            jax.block_until_ready(stepper.prefill(text[:, -1], ends))  # all from the same token
            stepper.use(brownout)
            start = [clock() for clock in clocks]
            out = jax.block_until_ready(stepper.decode(rows))
            times.append([1e3 * (clock() - at) for clock, at in zip(clocks, start, strict=True)])
            active = float((np.asarray(out.expert_rows) > 0).sum(axis=1).mean())
        step, cpu = map(statistics.median, zip(*times, strict=True))
        return {"step_ms": step, "cpu_ms": cpu, "active_experts": active}

    return run


@asynccontextmanager
async def caches(settings: Mapping[str, tuple[int, int, str]], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting: rows, context, and what keys and values are kept in.

    The figures are a play's median decode step, and a prefill step of one row's whole context, in
    this process's processor time.
    """
    model = jmoe.load("bundled", "float32", ways=[])
    text = np.array(_tokens(model), np.int32)

    def timed(step: Any, *arrays: np.ndarray) -> float:
        start = time.process_time()
        jax.block_until_ready(step(*arrays).tokens)
        return 1e3 * (time.process_time() - start)

    def prepared(rows: int, context: int, dtype: str) -> tuple[Any, ...]:
        own = model.with_kv_cache_dtype(dtype)
        stepper = Stepper(own, None, num_slots=rows, max_len=context + 1)
        chunks = [np.stack([pack_row(i, kv_len=context, q_len=context)]) for i in range(rows)]
        for slot, chunk in enumerate(chunks):
            stepper.prefill(text[slot * context :][:context], chunk)
        step = np.stack([pack_row(i, kv_len=context + 1) for i in range(rows)])
        return stepper, step, text[:context], chunks[0]

    steppers = {name: prepared(*setting) for name, setting in settings.items()}

    async def play(name: str, number: int) -> Figures:
        stepper, step, prompt, chunk = steppers[name]
        times = range(1 if dry else 5)
        return {
            "decode_ms": statistics.median(timed(stepper.decode, step) for _ in times),
            "prefill_ms": statistics.median(timed(stepper.prefill, prompt, chunk) for _ in times),
        }

    yield play


def _program(runner: DeviceRunner, prompts: list[list[int]]) -> Any:
    """Returns a function that times a decode step of all slots under (threshold, strategy).

    Slots hold keys of real text, so that routing is real; their length stays CONTEXT.
    """
    layers, state = runner.model.config.num_layers, runner.device.state
    slots, blocks = state.block_table.shape
    pages = np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
    pages[BATCH:] = 0  # slots that no sequence of these has
    state = state._replace(block_table=jnp.asarray(pages))
    for slot, prompt in enumerate(prompts):
        rows = np.stack([pack_row(slot, kv_len=CONTEXT, q_len=CONTEXT)])
        plan = StepPlan(Phase.PREFILL, rows, tokens=np.array(prompt, np.int32), stop_layer=layers)
        key = Key("prefill", 256, 100)
        step = ByRank.of(plan, runner.limits)
        args = runner.device.arrays(key, step, StepControl(100, 0))
        state = runner.programs.run(key, state, *args)[0]
    rows = np.stack([pack_row(slot, kv_len=CONTEXT) for slot in range(BATCH)])
    step = ByRank.of(StepPlan(Phase.DECODE, rows, stop_layer=layers), runner.limits)
    newest = np.zeros(slots, np.int32)
    newest[:BATCH] = [prompt[-1] for prompt in prompts]

    def run(control: tuple[int, int]) -> float:
        nonlocal state
        state = state._replace(last_token=jnp.array(newest))  # a copy: the state is donated
        key = Key("decode", BATCH, 40 if control[1] else 100)
        args = runner.device.arrays(key, step, StepControl(*control))
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, out = runner.programs.run(key, state, *args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return run


def spread(num_rows: int, active: int, seed: int) -> np.ndarray:
    """Returns int32 [rows, picks]: distinct picks a row, every one of `active` experts about as
    often.
    """
    chosen = np.random.default_rng(seed).permutation(SHAPE.num_experts)[:active]
    first = np.arange(num_rows)[:, None] * SHAPE.top_k + np.arange(SHAPE.top_k)
    return chosen[first % active].astype(np.int32)


@asynccontextmanager
async def expert_op(settings: Mapping[str, int], dry: bool) -> AsyncIterator[Play]:
    """Yields what plays a setting, the number of experts that 64 rows visit, in the bundled model's
    layer in float32.
    """
    rng = np.random.default_rng(0)
    d, f, m = SHAPE.d_model, SHAPE.d_ff, SHAPE.num_experts
    sizes = (BATCH, d), (m, d, 2 * f), (m, f, d)
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    weights, slots = jnp.ones((BATCH, SHAPE.top_k), jnp.float32), jnp.arange(m, dtype=jnp.int32)
    op = jax.jit(grouped_gemm.moe_mlp)

    def run(active: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(op(*arrays, works[active]))
        return 1e6 * (time.perf_counter() - start)

    works = {
        active: routing.dispatch(
            jnp.asarray(spread(BATCH, active, active)),
            weights,
            slots,
            block_m=grouped_gemm.BLOCK_M,
            max_active=m,
        )
        for active in settings.values()
    }

    async def play(name: str, number: int) -> Figures:
        return {"us": statistics.median(map(run, [settings[name]] * 5))}

    yield play
