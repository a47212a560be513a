"""Time to readiness of the server process, cold and with compiled programs at hand.

From the start of the process to `jmoe ready`, with the stages its log names. `made`: random weights
are drawn on the device, so no file is read. `checkpoint`: the same weights and one way of united
experts are read from a Hugging Face directory by `jmoe serve`. After readiness requests of every
kind are served, and whatever compiles then is counted: it has to be nothing.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu.live import ENGINE, Live, live, requests, settings
from benchmarks.gpu.part import Case, Context, alone, in_a_process
from benchmarks.gpu.sizes import SETTINGS, Sizes
from serving.bench.launch import set_flags
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

DEPENDS = (*ENGINE, "benchmarks/gpu/hf_dir.py")
START_S = 1.0
TARGET_S = 60.0  # warm
REPLY_S = 120.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns the cases; each has a cold start and a warm one with the cache that it left."""
    return [
        Case("made", 260.0, {"weights_from": "drawn on the device"}),
        Case("checkpoint", 300.0, {"weights_from": "a Hugging Face directory"}),
    ]


def run(context: Context, case: Case) -> dict[str, Any]:
    """Starts a server twice, the second time with the programs that the first one compiled."""
    cache = context.scratch / f"startup-{case.name}-cache"
    shutil.rmtree(cache, ignore_errors=True)
    command: list[str] = []
    record: dict[str, Any] = {"stages_s": {}, "figures": {}}
    if case.name == "checkpoint":
        directory = checkpoint(context)
        overrides = {**settings(context.sizes, cache), "engine.model": str(directory), "port": 0}
        command = ["-m", "serving.cli", "serve", *set_flags(overrides)]
        record["checkpoint_bytes"] = sum(file.stat().st_size for file in directory.iterdir())
    for start in ("cold", "warm"):
        with live(context, f"startup-{case.name}-{start}", command, cache) as server:
            record["stages_s"][start] = server.started
            record["figures"][f"{start}_s"] = server.started["ready"]
            compiled = server.run(_exercise(context.sizes, server)) if start == "warm" else 0
    record["figures"] |= {
        "cache_entries": sum(1 for _ in cache.rglob("*.bin")),
        "compilations_since_ready": compiled,
    }
    record["target"] = {"warm_s": TARGET_S, "met": record["figures"]["warm_s"] <= TARGET_S}
    if compiled:
        record["failed"] = f"{compiled} programs were compiled while serving; none may be"
    return record


session = alone(run)


def checkpoint(context: Context) -> Path:
    """Returns the served model as a Hugging Face directory; written by another process unless it is
    there.
    """
    from benchmarks.gpu import hf_dir  # not above: it brings jax

    sizes = context.sizes
    name = f"{sizes.model}-seed{sizes.seed}-skew{sizes.skew:g}-way{max(sizes.ways)}"
    directory = context.scratch / name
    if not (directory / "config.json").exists():
        in_a_process(hf_dir.write_served, directory, sizes)
    return directory


async def _exercise(sizes: Sizes, server: Live) -> int:
    """Sends requests of every kind under every setting the model has; returns compilations since
    readiness.
    """
    client, samples = server.client, requests(sizes, sizes.mixes[0], 16)
    have = set((await client.model_info()).united_ways)

    async def ask(number: int) -> None:
        sampling = pb.SamplingParams(max_new_tokens=4, ignore_eos=True)
        if number % 4 == 1:
            sampling.temperature, sampling.top_p, sampling.seed = 0.8, 0.9, number
        if number % 4 == 2:
            sampling.prompt_logprobs = sampling.logprobs = True
        prompt = samples[number].prompt
        call = client.generate(prompt, sampling, allow_brownout=number % 4 != 3, timeout_s=REPLY_S)
        async for _ in call:
            pass

    for setting in SETTINGS:
        if setting.way and setting.way not in have:
            continue
        await server.use(setting)
        await asyncio.gather(*(ask(number) for number in range(len(samples))))
    return (await client.stats()).compilations_since_ready
