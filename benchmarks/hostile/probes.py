"""What is measured beside the load, each by a process of its own, so that none measures its client.

All times are of the monotonic clock, which every process of a machine shares.
"""

import asyncio
import bisect
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

HEALTH_EVERY_S, MEMORY_EVERY_S = 0.01, 0.02
NAP_S, LATE_S = 0.001, 0.02
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _CALL_TIMEOUT_S = 60.0, 90.0, 60.0
_MOST_CHECKS = 500  # under way at once

Samples = list[tuple[float, float]]
"""Pairs of a begin and an end, or of a time and a value."""


class Probe:
    """A process that measures until it is told to stop. `target(ready, stop, *args)` returns it."""

    def __init__(self, target: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._name, self._stop = target.__name__, context.Event()
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_measure, args=(target, results, self._stop, args), daemon=True
        )
        self._process.start()
        results.close()  # the child's end: where it dies, reading ends

    async def ready(self) -> None:
        """Returns once it measures."""
        await asyncio.to_thread(self._next, _START_TIMEOUT_S)

    async def finish(self) -> Any:
        """Stops it; what it measured."""
        self._stop.set()
        try:
            return await asyncio.to_thread(self._next, _STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it, whatever it does."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _next(self, timeout_s: float) -> Any:
        try:
            if self._results.poll(timeout_s):
                return self._results.recv()
        except EOFError:
            raise RuntimeError(f"the probe {self._name!r} ended before its time") from None
        raise RuntimeError(f"the probe {self._name!r} said nothing for {timeout_s:g} s")


def _measure(target: Callable[..., Any], results: Any, stop: Any, args: tuple[Any, ...]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        results.send(target(lambda: results.send(None), stop, *args))


def stalls(ready: Callable[[], None], stop: Any) -> Samples:
    """Returns the begin and end of the machine's own stalls: naps of 1 ms that lasted 20 ms
    longer.
    """
    found = []
    ready()
    while not stop.is_set():
        due_at = time.monotonic() + NAP_S
        time.sleep(NAP_S)
        if (now := time.monotonic()) - due_at > LATE_S:
            found.append((due_at, now))
    return found


def memory(ready: Callable[[], None], stop: Any, pid: int) -> Samples:
    """Returns time and resident bytes of a process, until it is gone."""
    samples: Samples = []
    ready()
    while not stop.is_set():
        if (size := resident_bytes(pid)) is None:
            break
        samples.append((time.monotonic(), size))
        time.sleep(MEMORY_EVERY_S)
    stop.wait()
    return samples


def resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process; None where it is gone or cannot be seen."""
    if Path("/proc/self/status").exists():
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return None
        sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
        return sizes[0] if sizes else None  # a process that has ended has none
    try:
        import psutil  # where there is no /proc

        return psutil.Process(pid).memory_info().rss
    except Exception:  # not installed, or no such process
        return None


def health(ready: Callable[[], None], stop: Any, address: str) -> tuple[Samples, list[str]]:
    """Returns the begin and end of a health check every 10 ms, late ones or not;
    and what failed.
    """
    return asyncio.run(_health(ready, stop, address))


async def _health(ready: Callable[[], None], stop: Any, address: str) -> tuple[Samples, list[str]]:
    samples: Samples = []
    failures: list[str] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def check() -> None:
            started_at = time.monotonic()
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_S)
                if reply.status != health_pb2.HealthCheckResponse.SERVING:
                    failures.append(f"status {reply.status}")
            except grpc.aio.AioRpcError as error:
                failures.append(f"{error.code().name}: {error.details()}")
            samples.append((started_at, time.monotonic()))

        await check()
        samples.clear()  # it connected
        ready()
        under_way: set[asyncio.Task[None]] = set()
        due_at = time.monotonic()
        while not stop.is_set():
            if len(under_way) < _MOST_CHECKS:
                task = asyncio.create_task(check())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            due_at = max(due_at + HEALTH_EVERY_S, time.monotonic())
            await asyncio.sleep(due_at - time.monotonic())
        await asyncio.gather(*under_way)
    return samples, failures


def stream(
    ready: Callable[[], None], stop: Any, address: str, max_model_len: int
) -> tuple[Samples, list[str]]:
    """Returns the begin and end of every gap between two messages of one polite stream after
    another.
    """
    return asyncio.run(_stream(ready, stop, address, max_model_len))


async def _stream(
    ready: Callable[[], None], stop: Any, address: str, max_model_len: int
) -> tuple[Samples, list[str]]:
    gaps: Samples = []
    failures: list[str] = []
    sampling = pb.SamplingParams(max_new_tokens=min(128, max_model_len // 2), ignore_eos=True)
    async with Client(address) as client:
        ready()
        while not stop.is_set():
            last_at = None
            call = client.generate([1, 2, 3], sampling, timeout_s=_CALL_TIMEOUT_S)
            try:
                async for _ in call:
                    now = time.monotonic()
                    if last_at is not None:
                        gaps.append((last_at, now))
                    last_at = now
                    if stop.is_set():
                        call.cancel()
                        break
            except (grpc.aio.AioRpcError, asyncio.CancelledError):  # by the server, both
                failures.append(f"{(await call.code()).name}: {await call.details()}")
                await asyncio.sleep(0.05)  # a server that is full is left alone for a moment
    return gaps, failures


def between(samples: Samples, begin: float, end: float) -> Samples:
    """Returns the samples that began in this time."""
    return [sample for sample in samples if begin <= sample[0] < end]


def apart(samples: Samples, stalled: Samples) -> tuple[list[float], list[float]]:
    """Returns how long each sample took: those that met no stall of the machine, and those that
    did.
    """
    ends, clean, met = [end for _, end in stalled], [], []
    for begin, end in samples:
        nearest = bisect.bisect_left(ends, begin)  # the first stall that was not over
        overlaps = nearest < len(stalled) and stalled[nearest][0] <= end
        (met if overlaps else clean).append(end - begin)
    return clean, met


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns nearest rank. There must be values."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
