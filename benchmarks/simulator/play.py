"""Plays a workload against a simulated server."""

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator.device import SimulatedDevice, simulated_model
from benchmarks.simulator.step_times import StepTimes, read_timeline
from jmoe.api import resolve
from jmoe.config import read_config
from jmoe.tokenizer import Tokenizer
from serving import settings
from serving.bench.results import Record, Run, Sample
from serving.bench.workload import BUNDLED_TASKS, Arrival, load_tasks
from serving.config import EngineConfig
from serving.engine import Engine
from serving.errors import ServingError
from serving.execution.fitting import limits_of
from serving.request import Priority, SamplingParams
from serving.simulated_time import SimulatedLoop

Ask = Callable[[Arrival, bool], Awaitable[Record]]
"""Asks for an answer to an arrival, which allows brownout or does not."""

SAMPLE_S = 0.5  # between samples of thresholds, as the demo takes them


@dataclass(frozen=True)
class Machine:
    """The server's sizes and what its steps take."""

    times: StepTimes
    num_layers: int
    visits_per_layer: int
    part_layers: dict[str, int]
    overhead_s: float = 0.0  # from client to engine and back, a token
    speed: float = 1.0
    noise: float = 1.0


@dataclass
class Simulated:
    """A run, and what the engine counted."""

    run: Run
    parks: int
    joins: int
    evictions: int
    busy_s: float  # of the device


def simulate(
    machine: Machine,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    seed: int = 0,
    exempt_share: float = 0.0,
) -> Simulated:
    """Plays `arrivals`, whose prompts are token ids, to the end of the last answer; a share of them
    allows no brownout.

    Requests that the server refuses are records with a code, as a client sees them.
    """

    async def ask_all(ask: Ask) -> list[Record]:
        exempt = np.random.default_rng(seed).random(len(arrivals)) < exempt_share
        return await asyncio.gather(*map(ask, arrivals, ~exempt))

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(_simulate(machine, config, ask_all, seed))


def simulate_full(
    machine: Machine, config: EngineConfig, samples: Sequence[Arrival], duration_s: float
) -> Run:
    """Keeps every slot taken for `duration_s`: the next request is sent when one is answered."""
    waiting = itertools.cycle(samples)

    async def ask_on(ask: Ask) -> list[Record]:
        clock, records = asyncio.get_running_loop().time, []

        async def worker() -> None:
            while clock() < duration_s:
                records.append(await ask(replace(next(waiting), at_s=clock()), True))

        await asyncio.gather(*(worker() for _ in range(config.max_num_seqs)))
        return records

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(_simulate(machine, config, ask_on, 0)).run


async def _simulate(
    machine: Machine,
    config: EngineConfig,
    drive: Callable[[Ask], Awaitable[list[Record]]],
    seed: int,
) -> Simulated:
    clock = asyncio.get_running_loop().time
    limits = limits_of(config, machine.num_layers)
    device = SimulatedDevice(
        limits,
        machine.times,
        machine.visits_per_layer,
        machine.part_layers,
        machine.speed,
        machine.noise,
        seed,
    )
    model = simulated_model(limits, machine.visits_per_layer, config.brownout.way)
    engine = Engine(replace(config, watchdog_s=0), device, model, clock=clock)
    engine.run()
    samples: list[Sample] = []
    watcher = asyncio.create_task(_watch(engine, samples, clock))
    gc.disable()
    try:
        records = await drive(
            lambda arrival, degradable: _ask(
                engine, arrival, bool(degradable), machine.overhead_s, clock
            )
        )
    finally:
        gc.enable()
        watcher.cancel()
        await engine.stop()
    engine.scheduler.check_idle()
    scheduler, end_s = engine.scheduler, clock()
    return Simulated(
        Run(records, samples, end_s, 0.0),
        scheduler.num_parks,
        scheduler.num_joins,
        sum(scheduler.num_evictions.values()),
        device.busy_s,
    )


async def _ask(
    engine: Engine,
    arrival: Arrival,
    degradable: bool,
    overhead_s: float,
    clock: Callable[[], float],
) -> Record:
    await asyncio.sleep(arrival.at_s - clock())
    record = Record(arrival.family, arrival.at_s, clock(), best_effort=arrival.best_effort)
    sampling = SamplingParams(max_new_tokens=arrival.max_new_tokens)
    priority = Priority.BEST_EFFORT if arrival.best_effort else Priority.LATENCY_SENSITIVE
    try:
        async for out in engine.generate(
            arrival.prompt, sampling, priority=priority, allow_brownout=degradable
        ):
            record.token_s.append(clock() + overhead_s)
            record.expert_visits = out.usage.expert_visits
            record.degraded_visits = out.usage.degraded_visits
    except ServingError as error:
        record.code, record.error = type(error).__name__, str(error)
    record.end_s = clock() + overhead_s
    return record


async def _watch(engine: Engine, samples: list[Sample], clock: Callable[[], float]) -> None:
    while True:
        state, stats = engine.get_brownout(), engine.stats()
        samples.append(
            Sample(
                clock(),
                state.prefill_threshold_percent,
                state.decode_threshold_percent,
                state.ttft_p90_s,
                state.itl_p90_s,
                state.predicted_ttft_p90_s,
                state.predicted_itl_p90_s,
                stats.num_running,
                stats.num_waiting,
                stats.expert_visits,
                stats.degraded_visits,
            )
        )
        await asyncio.sleep(SAMPLE_S)


def recorded_server(
    timelines: Sequence[Path], part_layers: dict[str, int]
) -> tuple[Machine, tuple[Arrival, ...]]:
    """The demo's server as timelines show it, and the bundled tasks as it is asked them.

    Raises ValueError for files that are no timelines.
    """
    directory = resolve("bundled")
    cfg, tokenizer = read_config(directory), Tokenizer.load(directory)
    assert tokenizer is not None  # the bundled model has one
    steps = [
        step
        for path in timelines
        for step in read_timeline(path, cfg.num_layers, cfg.experts_per_token)
    ]
    engine = settings.load("demo").engine
    buckets = {"prefill": engine.prefill_buckets, "decode": engine.decode_buckets}
    times = StepTimes.fit(steps, buckets)
    machine = Machine(times, cfg.num_layers, cfg.experts_per_token, part_layers)
    return machine, tuple(as_tokens(load_tasks(BUNDLED_TASKS), tokenizer))


def as_tokens(samples: Sequence[Arrival], tokenizer: Any) -> list[Arrival]:
    """Tasks with prompts of token ids, and answers as long as the right ones and their end."""
    return [
        replace(
            sample,
            prompt=tuple(tokenizer.encode(sample.prompt)),
            max_new_tokens=len(tokenizer.encode(sample.answer)) + 1,
        )
        for sample in samples
    ]
