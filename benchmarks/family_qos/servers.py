"""The servers of a size: each model on the whole machine, on a part of it, and all from one pool.

They are up at the same time, and one alternative's have requests at a time; the others idle.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.family_qos.config import NAMES, QosConfig
from serving.bench.launch import LaunchError, running_server, tail
from serving.bench.scrape import free_port, scrape, value
from serving.client import Client

# Few programs, so that starts are quick; no brownout: every request gets its own model.
SETTINGS = {
    "engine.prefill_buckets": "32,128",
    "engine.threshold_buckets_percent": "100",
    "engine.brownout.strategy": "zero",
    "engine.brownout.way": "0",
    "engine.brownout.salc": "false",
    "engine.part_layers": "1000",
    "max_concurrent_calls": "100000",
    "status_interval_s": "0",
}


@dataclass(frozen=True)
class Servers:
    """Clients of the servers of one size."""

    names: tuple[str, ...]
    alone: Mapping[str, Client]  # by model, the whole machine each
    parts: Mapping[str, Client]  # by model, an equal part of the machine each
    family: Client  # all models, all sets resident
    half: Client  # all models, half of the sets resident
    half_metrics_port: int

    @property
    def clients(self) -> list[Client]:
        """All of them."""
        return [*self.alone.values(), *self.parts.values(), self.family, self.half]

    async def swaps(self) -> int:
        """Sets that the server with half of them resident has copied since its start."""
        return int(value(await scrape(self.half_metrics_port), "model_swaps_total"))


def part_of(cores: Sequence[int], number: int, parts: int) -> list[int]:
    """Returns the cores of one of `parts` equal parts; with fewer cores than parts, several share
    one.
    """
    begin, end = (at * len(cores) // parts for at in (number, number + 1))
    return list(cores[begin : max(end, begin + 1)])


def server_settings(slots: int, threads: int) -> dict[str, str]:
    """Of a server that decodes so many sequences together with so many threads of XLA."""
    buckets = sorted({max(1, slots // part) for part in (8, 4, 2, 1)})
    return SETTINGS | {
        "engine.max_num_seqs": str(slots),
        "engine.decode_buckets": ",".join(map(str, buckets)),
        "engine.cpu_threads": str(threads),
    }


async def consolidate(config: QosConfig, names: Sequence[str]) -> Path:
    """Returns the map of the experts that the models share. Raises LaunchError where it cannot be
    made.
    """
    out = config.out / f"family-{len(names)}.json"
    flags = [f"--model={name}={config.family / name}" for name in names]
    flags += [f"--data={name}={config.family / name}.jsonl" for name in names]
    flags += [f"--share={config.share}", f"--rows={config.rows}", f"--out={out}"]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving.cli", "consolidate", *flags), stdout=file, stderr=file
        )
        if await process.wait():
            raise LaunchError(f"the models were not consolidated: {tail(log, 5)}")
    return out


@contextlib.asynccontextmanager
async def servers(config: QosConfig, size: int) -> AsyncIterator[Servers]:
    """Starts all servers of a size; they are gone when the block is left. Raises LaunchError."""
    names, cores = NAMES[:size], sorted(os.sched_getaffinity(0))
    models = {name: config.family / name for name in names}
    family = await consolidate(config, names)
    whole = server_settings(config.slots, config.threads or max(1, len(cores) - 1))
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, models: Mapping[str, Path], own: Mapping[str, str]) -> Client:
            return await stack.enter_async_context(
                _server(config, f"{size}-{name}", models, {**whole, **own})
            )

        alone = {name: await start(f"alone-{name}", {name: models[name]}, {}) for name in names}
        sharing = {"engine.family": str(family), "engine.mixed_models": str(size)}
        everything = await start("family", models, sharing)
        resident = {"engine.resident_sets": str(size // 2), "metrics_port": str(port)}
        half = await start("half", models, sharing | resident)
        parts = {}
        for number, name in enumerate(names):
            own = part_of(cores, number, size)
            with pinned(own):
                parts[name] = await start(
                    f"part-{name}",
                    {name: models[name]},
                    server_settings(config.slots // size, max(1, len(own) - 1)),
                )
        yield Servers(names, alone, parts, everything, half, port)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Returns the processes that are started in the block stay on these cores. Linux."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.asynccontextmanager
async def _server(
    config: QosConfig, name: str, models: Mapping[str, Path], settings: Mapping[str, str]
) -> AsyncIterator[Client]:
    command = ["-m", "serving.cli", "serve", "--config", "demo", "--port", "0"]
    if len(models) == 1:
        (model,) = models
        command += ["--model", str(models[model]), "--served-model-name", model]
    else:
        command += [f"--model={model}={directory}" for model, directory in models.items()]
    command += [word for key, text in settings.items() for word in ("--set", f"{key}={text}")]
    async with (
        running_server(
            [*command, *config.server_args],
            config.out / f"server-{name}.log",
            config.startup_timeout_s,
            failures=(grpc.aio.AioRpcError, TimeoutError, OSError),
        ) as (address, _),
        Client(address) as client,
    ):
        await client.wait_ready(config.startup_timeout_s)
        yield client
