"""Open-loop load generator: plays a workload over gRPC and says how late every token was.

Requests leave when they are due, whether or not earlier ones have been answered, and a time to
first token counts from when the request was due. A slow client or server never hides queueing.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc

from serving.bench.results import Record, Run, Sample
from serving.bench.simulated_time import SimulatedLoop
from serving.bench.workload import Arrival
from serving.frontend import gc_freeze
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

FIRST_SAMPLE_S = 10.0  # the longest wait for the first answer of the admin service
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters without effect: no model's own defaults stand for them."""
NEVER_S = 1e9  # deadlines beyond are none; gRPC takes those past 292 years for over


class Target(Protocol):
    """What a workload is played against: `serving.client.Client`, or a dispatcher to several.

    Calls raise `grpc.aio.AioRpcError`.
    """

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        priority: pb.Priority = ...,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterable[pb.GenerateResponse]:
        """See Client."""
        ...

    async def get_brownout(self) -> pb.BrownoutState:
        """See Client."""
        ...

    async def stats(self) -> pb.Stats:
        """See Client."""
        ...


class Steered(Target, Protocol):
    """A target whose brownout can be set, and which says what it is."""

    async def server_info(self) -> pb.ServerInfo:
        """See Client."""
        ...

    async def set_brownout(self, **change: Any) -> pb.BrownoutState:
        """See Client."""
        ...


class _Player:
    """The clock, the deadline and the records of one run."""

    def __init__(self, client: Target, time_limit_s: float, model: str = "") -> None:
        self.client = client
        self.time_limit_s = time_limit_s
        self.model = model
        self.records: list[Record] = []
        self.samples: list[Sample] = []
        self.watched = asyncio.Event()  # there is a sample, or nothing to take one of
        loop = asyncio.get_running_loop()
        is_simulated = isinstance(loop, SimulatedLoop)
        # uvloop's own clock counts whole milliseconds.
        self._clock = loop.time if is_simulated else time.monotonic
        self._start = self._clock()
        self._cpu = math.nan if is_simulated else time.process_time()

    def now_s(self) -> float:
        return self._clock() - self._start

    async def ask(self, arrival: Arrival, at_s: float) -> Record:
        """Sends one request and reads it to its end, which the run's time limit bounds."""
        model = arrival.model or self.model
        record = Record(
            arrival.family, at_s, self.now_s(), best_effort=arrival.best_effort, model=model
        )
        self.records.append(record)
        left_s = self.time_limit_s - record.sent_s
        if left_s <= 0:
            record.code, record.error = "DEADLINE_EXCEEDED", "the run's time was over"
            return record
        sampling = pb.SamplingParams(
            max_new_tokens=arrival.max_new_tokens,
            ignore_eos=arrival.ignore_eos,
            temperature=arrival.temperature,
            **NEUTRAL,
        )
        own: dict[str, Any] = {"priority": pb.BEST_EFFORT} if arrival.best_effort else {}
        texts: list[str] = []
        last: pb.GenerateResponse | None = None
        now, start, token_s = self._clock, self._start, record.token_s
        try:
            call = self.client.generate(
                arrival.prompt,
                sampling,
                model=model,
                timeout_s=left_s if left_s < NEVER_S else None,
                **own,
            )
            async for last in call:  # the hot loop: thousands of messages a second
                at = now() - start
                for _ in last.token_ids:
                    token_s.append(at)
                texts.append(last.text)
        except grpc.aio.AioRpcError as error:
            record.code, record.error = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The server's cancel, which grpc.aio reports as ours; at the deadline both hang up.
            over = self.now_s() >= self.time_limit_s
            record.code = "DEADLINE_EXCEEDED" if over else "CANCELLED"
        record.end_s = self.now_s()
        record.text = "".join(texts)
        if last is not None:
            _take_usage(record, last)
        if arrival.answer is not None:
            record.correct = record.ok and record.text.strip() == arrival.answer.strip()
        return record

    async def watch(self, every_s: float, on_sample: Callable[[Sample], None] | None) -> None:
        """Samples the admin service until cancelled, or until the server has none."""
        while True:
            try:
                state, stats = await asyncio.gather(self.client.get_brownout(), self.client.stats())
            except grpc.aio.AioRpcError:
                self.watched.set()
                return
            self.samples.append(_sample(self.now_s(), state, stats))
            self.watched.set()
            if on_sample:
                on_sample(self.samples[-1])
            # A missed tick is skipped, and so is one that is there but for a rounding error: a
            # clock that is simulated would not move.
            left_s = every_s - self.now_s() % every_s
            await asyncio.sleep(left_s if left_s > 1e-6 else left_s + every_s)

    def result(self) -> Run:
        cpu_s = time.process_time() - self._cpu
        return Run(self.records, self.samples, self.now_s(), cpu_s)


def _take_usage(record: Record, last: pb.GenerateResponse) -> None:
    record.finish_reason = last.finish_reason
    record.prompt_tokens = last.usage.prompt_tokens
    record.expert_visits = last.usage.expert_visits
    record.degraded_visits = last.usage.degraded_visits
    for phase in ("prefill_threshold", "decode_threshold"):
        if last.HasField(phase):
            span = getattr(last, phase)
            setattr(record, phase, (span.min_percent, span.max_percent))


def _sample(at_s: float, state: pb.BrownoutState, stats: pb.Stats) -> Sample:
    return Sample(
        at_s,
        state.prefill_threshold_percent,
        state.decode_threshold_percent,
        _known(state.ttft_p90_s),
        _known(state.itl_p90_s),
        _known(state.predicted_ttft_p90_s),
        _known(state.predicted_itl_p90_s),
        stats.num_running,
        stats.num_waiting,
        stats.expert_visits,
        stats.degraded_visits,
        _known(stats.full_decode_step_s or math.nan),  # 0: of a server that does not say
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


async def play(
    client: Target,
    arrivals: Sequence[Arrival],
    *,
    time_limit_s: float,
    max_concurrency: int | None = None,
    model: str = "",
    sample_every_s: float = 0.5,
    on_sample: Callable[[Sample], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Plays `arrivals`, which are in order of time. Returns within `time_limit_s` and a moment.

    With `max_concurrency`, a request is due when it is scheduled and a place is free. `model` is
    what requests name that have no model of their own; none: whatever is served. `on_record` gets
    each request when it has ended.
    """
    gc_freeze.freeze()  # or a collection would make requests leave late
    player = _Player(client, time_limit_s, model)
    places = asyncio.Semaphore(max_concurrency or len(arrivals) + 1)

    async def one(arrival: Arrival) -> None:
        waits = places.locked()
        async with places:
            record = await player.ask(arrival, player.now_s() if waits else arrival.at_s)
        if on_record:
            on_record(record)

    watcher = asyncio.create_task(player.watch(sample_every_s, on_sample))
    try:
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                if (wait_s := arrival.at_s - player.now_s()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(one(arrival))
        run = player.result()
        with contextlib.suppress(TimeoutError):  # a short run has a sample, too
            await asyncio.wait_for(player.watched.wait(), FIRST_SAMPLE_S)
        return run
    finally:
        watcher.cancel()


async def saturate(
    client: Target, samples: Iterable[Arrival], *, concurrency: int, duration_s: float
) -> Run:
    """Keeps `concurrency` requests in flight for `duration_s`, then lets them finish. As many are
    sent even where the machine pauses for all of that time.
    """
    gc_freeze.freeze()
    player = _Player(client, time_limit_s=duration_s + 30)
    waiting = iter(samples)

    async def worker() -> None:
        while (arrival := next(waiting, None)) is not None:
            await player.ask(arrival, player.now_s())
            if player.now_s() >= duration_s:
                break

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return player.result()
