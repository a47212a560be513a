"""Open-loop load generator: plays a workload over gRPC and says how late every token was.

Requests leave when they are due, whether or not earlier ones have been answered, and a time to
first token counts from when the request was due. A slow client or server never hides queueing.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from serving import heap
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.results import METRICS, Record, Run, Sample, summarize
from serving.workload import (
    ALPACA_LENGTHS,
    BUNDLED_TASKS,
    SHAREGPT_LENGTHS,
    Arrival,
    Lengths,
    WorkloadError,
    approximate_tokens,
    load_alpaca,
    load_sharegpt,
    load_tasks,
    poisson_times,
    schedule,
    shuffled,
    synthetic,
)

# -- playing -------------------------------------------------------------------------------------


class _Player:
    """The clock, the deadline and the records of one run."""

    def __init__(self, client: Client, time_limit_s: float) -> None:
        self.client = client
        self.time_limit_s = time_limit_s
        self.records: list[Record] = []
        self.samples: list[Sample] = []
        self._start = time.monotonic()
        self._cpu = time.process_time()

    def now_s(self) -> float:
        return time.monotonic() - self._start

    async def ask(self, arrival: Arrival, at_s: float) -> None:
        """Sends one request and reads it to its end, which the run's time limit bounds."""
        record = Record(arrival.family, at_s, sent_s=self.now_s())
        self.records.append(record)
        left_s = self.time_limit_s - record.sent_s
        if left_s <= 0:
            record.code, record.error = "DEADLINE_EXCEEDED", "the run's time was over"
            return
        sampling = pb.SamplingParams(
            max_new_tokens=arrival.max_new_tokens, ignore_eos=arrival.ignore_eos
        )
        texts: list[str] = []
        last: pb.GenerateResponse | None = None
        clock, start, token_s = time.monotonic, self._start, record.token_s
        try:
            call = self.client.generate(arrival.prompt, sampling, timeout_s=left_s)
            async for last in call:  # the hot loop: thousands of messages a second
                at = clock() - start
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

    async def watch(self, every_s: float, on_sample: Callable[[Sample], None] | None) -> None:
        """Samples the admin service until cancelled, or until the server has none."""
        while True:
            try:
                state, stats = await asyncio.gather(self.client.get_brownout(), self.client.stats())
            except grpc.aio.AioRpcError:
                return
            self.samples.append(_sample(self.now_s(), state, stats))
            if on_sample:
                on_sample(self.samples[-1])
            await asyncio.sleep(every_s - self.now_s() % every_s)  # a missed tick is skipped

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
        None if math.isnan(state.ttft_p90_s) else state.ttft_p90_s,
        None if math.isnan(state.itl_p90_s) else state.itl_p90_s,
        stats.num_running,
        stats.num_waiting,
        stats.expert_visits,
        stats.degraded_visits,
    )


async def play(
    client: Client,
    arrivals: Sequence[Arrival],
    *,
    time_limit_s: float,
    max_concurrency: int | None = None,
    sample_every_s: float = 0.5,
    on_sample: Callable[[Sample], None] | None = None,
) -> Run:
    """Plays `arrivals`, which are in order of time. Returns within `time_limit_s` and a moment.

    With `max_concurrency`, a request is due when it is scheduled and a place is free.
    """
    heap.freeze()  # or a collection would make requests leave late
    player = _Player(client, time_limit_s)
    places = asyncio.Semaphore(max_concurrency or len(arrivals) + 1)

    async def one(arrival: Arrival) -> None:
        at_s = arrival.at_s
        if places.locked():
            await places.acquire()
            at_s = player.now_s()
        else:
            await places.acquire()
        try:
            await player.ask(arrival, at_s)
        finally:
            places.release()

    watcher = asyncio.create_task(player.watch(sample_every_s, on_sample))
    try:
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                if (wait_s := arrival.at_s - player.now_s()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(one(arrival))
        return player.result()
    finally:
        watcher.cancel()


async def saturate(
    client: Client, samples: Iterable[Arrival], *, concurrency: int, duration_s: float
) -> Run:
    """Keeps `concurrency` requests in flight for `duration_s`, then lets them finish."""
    heap.freeze()
    player = _Player(client, time_limit_s=duration_s + 30)
    waiting = iter(samples)

    async def worker() -> None:
        while player.now_s() < duration_s and (arrival := next(waiting, None)):
            await player.ask(arrival, player.now_s())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return player.result()


# -- jmoe bench serve ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchConfig:
    """Flags of `jmoe bench serve`, named as `vllm bench serve` names them."""

    host: str = "127.0.0.1"
    port: int = 50051
    admin_address: str | None = None  # none: where the server says its admin service is
    dataset_name: str = "random"  # "sharegpt" | "alpaca" | "tasks" | "random"
    dataset_path: Path | None = None  # none: the bundled tasks; lengths like ShareGPT's or Alpaca's
    tokenizer: Path | None = None  # tokenizer.json that counts a dataset's tokens; none: estimated
    num_prompts: int = 1000
    request_rate: float = math.inf  # per second; infinite: all at once
    burstiness: float = 1.0  # 1, a Poisson process, is all there is
    max_concurrency: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    seed: int = 0
    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "99"
    goodput: tuple[str, ...] = ()  # "METRIC:MILLISECONDS" of ttft, tpot, e2el
    save_result: bool = False
    save_detailed: bool = False  # every request's lengths, latencies and text too
    result_dir: Path = Path()
    result_filename: str | None = None
    time_limit_s: float = 3600.0  # requests not answered by then have failed


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Runs the benchmark and returns (with `save_result`, also writes) its JSON result.

    Raises WorkloadError for settings or datasets that cannot be used, TimeoutError when no server
    answers.
    """
    metrics = tuple(config.percentile_metrics.split(","))
    if unknown := set(metrics) - set(METRICS):
        raise WorkloadError(f"unknown metrics: {', '.join(sorted(unknown))}; known: {METRICS}")
    if config.burstiness != 1:
        raise WorkloadError("burstiness other than 1 is not offered; arrivals are Poisson")
    percentiles = _parse_percentiles(config.metric_percentiles)
    goodput = _parse_goodput(config.goodput)
    _check_bench(config)
    run, model = asyncio.run(_bench(config))
    rate = config.request_rate if math.isfinite(config.request_rate) else "inf"
    now = datetime.now()
    result = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": "jmoe",
        "model_id": model,
        "num_prompts": config.num_prompts,
        "request_rate": rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        **summarize(run, metrics=metrics, percentiles=percentiles, goodput=goodput),
    }
    if config.save_detailed:
        result |= _details(run.records)
    if _saves(config):
        name = config.result_filename or f"jmoe-{rate}qps-{model}-{now:%Y%m%d-%H%M%S}.json"
        path = config.result_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)  # a model's name may have a slash
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _saves(config: BenchConfig) -> bool:
    return config.save_result or config.save_detailed


def _check_bench(config: BenchConfig) -> None:
    """Raises WorkloadError for what would be found out after the requests were played."""
    least = {"num_prompts": 1, "seed": 0, "max_concurrency": 1}
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise WorkloadError(f"{name} is {value}; it must be at least {bound}")
    if not config.time_limit_s > 0:
        raise WorkloadError(f"time_limit_s is {config.time_limit_s}; it must be above 0")
    if config.dataset_path is not None and config.dataset_name == "random":
        raise WorkloadError(
            f"dataset_path is {config.dataset_path}, and dataset_name random reads none: name it "
            "sharegpt, alpaca or tasks"
        )
    if _saves(config):
        folder = (config.result_dir / (config.result_filename or "result")).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkloadError(f"results cannot go to {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise WorkloadError(f"results cannot go to {folder}: it is not writable")


def _parse_percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(percent) for percent in text.split(",")]
    except ValueError:
        raise WorkloadError(f"metric_percentiles {text!r} is not numbers with commas") from None
    for percent in percentiles:
        if not 0 <= percent <= 100:
            raise WorkloadError(f"metric_percentiles has {percent:g}; they are between 0 and 100")
    return percentiles


async def _bench(config: BenchConfig) -> tuple[Run, str]:
    async with Client(f"{config.host}:{config.port}", config.admin_address) as client:
        await client.wait_ready(timeout_s=60)
        server, model = await asyncio.gather(client.server_info(), client.model_info())
        samples = _bench_samples(config, model.vocab_size, server.max_model_len)
        times_s = poisson_times(len(samples), config.request_rate, config.seed)
        run = await play(
            client,
            schedule(samples, times_s),
            time_limit_s=config.time_limit_s,
            max_concurrency=config.max_concurrency,
        )
    return run, model.name


def _bench_samples(config: BenchConfig, vocab_size: int, max_model_len: int) -> list[Arrival]:
    name, path = config.dataset_name, config.dataset_path
    if name == "tasks":
        return shuffled(load_tasks(path or BUNDLED_TASKS), config.seed, config.num_prompts)
    if path is not None and name in ("sharegpt", "alpaca"):
        load = load_sharegpt if name == "sharegpt" else load_alpaca
        samples = load(
            path, max_total_tokens=max_model_len, count_tokens=_token_counter(config.tokenizer)
        )
        return shuffled(samples, config.seed, config.num_prompts)
    lengths = {
        "sharegpt": SHAREGPT_LENGTHS,
        "alpaca": ALPACA_LENGTHS,
        "random": Lengths(config.random_input_len, config.random_output_len, sigma=0),
    }
    if name not in lengths:
        raise WorkloadError(f"unknown dataset {name!r}: sharegpt, alpaca, tasks or random")
    return synthetic(
        lengths[name],
        config.num_prompts,
        seed=config.seed,
        vocab_size=vocab_size,
        max_total_tokens=max_model_len,
    )


def _token_counter(tokenizer: Path | None) -> Callable[[str], int]:
    if tokenizer is None:
        return approximate_tokens
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WorkloadError(f"{path} is not a readable tokenizer: {error}") from None
    return lambda text: len(backend.encode(text).ids)


def _parse_goodput(limits: Iterable[str]) -> dict[str, float]:
    parsed = {}
    for limit in limits:
        metric, _, milliseconds = limit.partition(":")
        try:
            parsed[metric] = float(milliseconds)
        except ValueError:
            raise WorkloadError(f"goodput {limit!r} is not METRIC:MILLISECONDS") from None
        if metric not in ("ttft", "tpot", "e2el"):
            raise WorkloadError(f"goodput knows ttft, tpot and e2el, not {metric!r}")
    return parsed


def _details(records: Iterable[Record]) -> dict[str, Any]:
    records = list(records)
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [len(r.token_s) for r in records],
        "ttfts": [r.ttft_s if math.isfinite(r.ttft_s) else None for r in records],
        "itls": [r.itls_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }
