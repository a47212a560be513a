"""Time to readiness of the server process, cold and with compiled programs at hand.

From the start of the process to `jmoe ready`, with the stages its log names. `made`: random weights
are drawn on the device, so no file is read. `checkpoint`: the same weights and one way of united
experts are read from a Hugging Face directory by `jmoe serve`. After readiness requests of every
kind are served, and whatever compiles then is counted: it has to be nothing.
"""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.live import ENGINE, Live, flags, live, requests, settings
from benchmarks.gpu.part import Case, Context, alone
from benchmarks.gpu.sizes import SETTINGS, Sizes
from benchmarks.harness import store
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
    """Runs a case, which starts servers of its own; returns the record."""
    record = _made(context) if case.name == "made" else _checkpoint(context)
    compiled = record["figures"]["compilations_since_ready"]
    if compiled:
        record["failed"] = f"{compiled} programs were compiled while serving; none may be"
    return record


session = alone(run)


def _made(context: Context) -> dict[str, Any]:
    cache = _empty(context.scratch / "startup-cache")
    with live(context, "startup-cold", cache=cache) as server:
        cold = server.started
    with live(context, "startup-warm", cache=cache) as server:
        warm = server.started
        compiled = server.run(_exercise(context.sizes, server))
    return _record({"cold": cold, "warm": warm}, compiled, cache)


def _empty(cache: Path) -> Path:
    shutil.rmtree(cache, ignore_errors=True)
    return cache


def _checkpoint(context: Context) -> dict[str, Any]:
    directory = checkpoint(context)
    cache = _empty(context.scratch / "startup-checkpoint-cache")
    overrides = {**settings(context.sizes, cache), "engine.model": str(directory), "port": 0}
    command = ["-m", "serving.cli", "serve", *flags(overrides)]
    found = {}
    for name in ("first", "warm"):  # the first fills the cache
        with live(context, f"startup-checkpoint-{name}", command) as server:
            found[name] = server.started
            if name == "warm":
                compiled = server.run(_exercise(context.sizes, server))
    size = sum(file.stat().st_size for file in directory.iterdir())
    record = _record(found, compiled, cache)
    return {**record, "checkpoint_bytes": size}


def checkpoint(context: Context) -> Path:
    """Returns the served model as a Hugging Face directory; written by another process unless it is
    there.

    Raises RuntimeError where it cannot be written.
    """
    sizes = context.sizes
    name = f"{sizes.model}-seed{sizes.seed}-skew{sizes.skew:g}-way{max(sizes.ways)}"
    directory = context.scratch / name
    if not (directory / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.gpu.hf_dir", str(directory)]
        command += ["--dry-run"] if sizes.dry else []
        command += [word for pair in context.changes for word in ("--size", pair)]
        done = subprocess.run(command, cwd=store.ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"the checkpoint cannot be written: {done.stderr[-400:]}")
    return directory


def _record(started: dict[str, dict[str, float]], compiled: int, cache: Path) -> dict[str, Any]:
    entries = sum(file.name.endswith("-cache") for file in cache.iterdir())
    warm_s = started["warm"]["ready"]
    return {
        "stages_s": started,
        "figures": {
            **{f"{name}_s": stages["ready"] for name, stages in started.items()},
            "cache_entries": entries,
            "compilations_since_ready": compiled,
        },
        "target": {"warm_s": TARGET_S, "met": warm_s <= TARGET_S},
    }


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
