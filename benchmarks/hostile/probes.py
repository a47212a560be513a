"""What is measured beside the load, each by a process of its own, so that none measures its client.

All times are of the monotonic clock, which every process of a machine shares.
"""

import asyncio
import bisect
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_HEALTH_EVERY_S, _MEMORY_EVERY_S, _NAP_S, _LATE_S = 0.01, 0.02, 0.001, 0.02
_TIMEOUT_S, _MOST_CHECKS = 60.0, 16  # under way at once: more would be a load of their own

Samples = list[tuple[float, float]]
"""Pairs of a begin and an end, or of a time and a value."""
_ready: Any = None
_stop: Any = None


def _share(ready: Any, stop: Any) -> None:
    global _ready, _stop
    _ready, _stop = ready, stop


@contextlib.asynccontextmanager
async def probing(
    address: str, max_model_len: int, pid: int
) -> AsyncIterator[dict[str, tuple[Samples, list[str]]]]:
    """Measures while its block runs; when it is left, samples and failures are there, by name."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Semaphore(0), context.Event()
    jobs: dict[str, tuple[Any, ...]] = {"stalls": (_stalls,), "memory": (_memory, pid)}
    jobs |= {"health": (_health, address), "stream": (_stream, address, max_model_len)}
    measured: dict[str, tuple[Samples, list[str]]] = {}
    with ProcessPoolExecutor(len(jobs), context, _share, (ready, stop)) as pool:
        try:
            futures = {name: pool.submit(*job) for name, job in jobs.items()}
            for _ in jobs:
                if not await asyncio.to_thread(ready.acquire, True, _TIMEOUT_S):
                    raise RuntimeError("a probe did not start")
            yield measured
        finally:
            stop.set()
        for name, future in futures.items():
            measured[name] = await asyncio.wrap_future(future)


def _stalls() -> tuple[Samples, list[str]]:
    """Returns the machine's own stalls: naps of 1 ms that lasted 20 ms longer."""
    found: Samples = []
    _ready.release()
    while not _stop.is_set():
        due_at = time.monotonic() + _NAP_S
        time.sleep(_NAP_S)
        if (now := time.monotonic()) - due_at > _LATE_S:
            found.append((due_at, now))
    return found, []


def _memory(pid: int) -> tuple[Samples, list[str]]:
    """Returns time and resident bytes of the server, until it is gone."""
    samples: Samples = []
    _ready.release()
    while not _stop.is_set() and (size := resident_bytes(pid)) is not None:
        samples.append((time.monotonic(), size))
        time.sleep(_MEMORY_EVERY_S)
    return samples, []


def resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process; None where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return sizes[0] if sizes else None  # a process that has ended has none


def num_files(pid: int) -> int:
    """Returns the number of a process's open files, sockets among them."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _health(address: str) -> tuple[Samples, list[str]]:
    """Returns the begin and end of a health check every 10 ms, and what failed; none begins while
    16 are under way.
    """
    samples: Samples = []
    failures: list[str] = []

    async def check(stub: Any) -> None:
        started_at = time.monotonic()
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                failures.append(f"status {reply.status}")
        except grpc.aio.AioRpcError as error:
            failures.append(f"{error.code().name}: {error.details()}")
        samples.append((started_at, time.monotonic()))

    async def checks() -> None:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
            stub = health_pb2_grpc.HealthStub(channel)
            await check(stub)
            samples.clear()  # it connected
            _ready.release()
            due_at, under_way = time.monotonic(), set[Any]()
            while not _stop.is_set():
                if len(under_way) < _MOST_CHECKS:
                    under_way.add(task := group.create_task(check(stub)))
                    task.add_done_callback(under_way.discard)
                due_at = max(due_at + _HEALTH_EVERY_S, time.monotonic())
                await asyncio.sleep(due_at - time.monotonic())

    asyncio.run(checks())
    return samples, failures


def _stream(address: str, max_model_len: int) -> tuple[Samples, list[str]]:
    """Returns every gap between two messages of one polite stream after another."""
    gaps: Samples = []
    failures: list[str] = []
    sampling = pb.SamplingParams(max_new_tokens=min(128, max_model_len // 2), ignore_eos=True)

    async def streams() -> None:
        async with Client(address) as client:
            _ready.release()
            while not _stop.is_set():
                last_at = None
                call = client.generate([1, 2, 3], sampling, timeout_s=_TIMEOUT_S)
                try:
                    async for _ in call:
                        now = time.monotonic()
                        if last_at is not None:
                            gaps.append((last_at, now))
                        last_at = now
                        if _stop.is_set():
                            call.cancel()
                            break
                except (grpc.aio.AioRpcError, asyncio.CancelledError):  # by the server, both
                    failures.append(f"{(await call.code()).name}: {await call.details()}")
                    await asyncio.sleep(0.05)  # a server that is full is left alone for a moment

    asyncio.run(streams())
    return gaps, failures


def between(samples: Samples, begin: float, end: float) -> Samples:
    """Returns the samples that began in this time."""
    return [sample for sample in samples if begin <= sample[0] < end]


def latencies(samples: Samples, stalled: Samples) -> dict[str, Any]:
    """Returns percentiles, in seconds, of the samples that met no stall of the machine."""
    ends, clean = [end for _, end in stalled], []
    for begin, end in samples:
        nearest = bisect.bisect_left(ends, begin)  # the first stall that was not over
        if nearest == len(stalled) or stalled[nearest][0] > end:
            clean.append(end - begin)
    found: dict[str, Any] = {"count": len(clean), "in_stalls": len(samples) - len(clean)}
    if clean:
        ranks = np.percentile(clean, (50, 99, 99.9, 100), method="inverted_cdf")
        found |= zip(("p50_s", "p99_s", "p999_s", "max_s"), map(float, ranks), strict=True)
    return found
