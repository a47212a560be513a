"""`jmoe bench serve`: plays a workload against a running server and says what it measured."""

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import grpc

from serving.bench import results
from serving.bench.config import BenchConfig, LoadPlan, prepare
from serving.bench.fit import fit
from serving.bench.loadgen import Target, play
from serving.bench.results import Record, Run
from serving.bench.workload import Arrival, WorkloadError
from serving.client import Client
from serving.errors import Unavailable
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

if TYPE_CHECKING:
    from serving.bench.openai import OpenAITarget

ANSWER_TIMEOUT_S = 10.0  # for a host that neither answers nor refuses

Say = Callable[[str], None]
Progress = Callable[[int, int, str], None]


def run_bench(
    config: BenchConfig,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Runs the benchmark and returns (with `save_result`, also writes) its JSON result.

    `say` gets a line on what is played and on failures, `progress` the requests that have ended,
    all of them, and what went wrong.

    Raises WorkloadError for settings or datasets that cannot be used, ConnectionError when no
    server answers, Unavailable for one that does not get ready.
    """
    plan = prepare(config)
    run, model = asyncio.run(_bench(plan, say, progress))
    for text in _failures(run.records):
        say(text)
    now = datetime.now()
    result = _result(plan, run, model, now)
    if config.saves:
        rate = result["request_rate"]
        name = config.result_filename or f"jmoe-{rate}qps-{model}-{now:%Y%m%d-%H%M%S}.json"
        path = config.result_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)  # a model's name may have a slash
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say(f"saved to {path}")
    return result


# -- against the server --------------------------------------------------------------------------


async def _bench(plan: LoadPlan, say: Say, progress: Progress) -> tuple[Run, str]:
    config = plan.config
    async with _client(plan) as client:
        try:
            server = await _ready_server(client, config.ready_check_timeout_sec, say)
            names = _models(plan, server)
            vocab_size = plan.vocab_size
            if isinstance(client, Client):
                infos = [await client.model_info(name) for name in names]
                names, vocab_size = [i.name for i in infos], min(i.vocab_size for i in infos)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(_no_answer(plan, error)) from None
        if plan.dataset is None and not vocab_size:
            raise WorkloadError(
                f"--dataset-name {config.dataset_name} draws token ids, and {plan.address} does "
                "not say how many it knows: name the model's --tokenizer, or a --dataset-path"
            )
        arrivals, words = fit(plan, server, vocab_size)
        await _check_takes(client, arrivals[0])
        await _warm_up(client, arrivals[0], config, say)
        say(words)
        run = await play(
            client,
            arrivals,
            time_limit_s=config.time_limit_s,
            max_concurrency=config.max_concurrency,
            model=config.model or "",
            on_record=None if config.disable_tqdm else _counting(len(arrivals), progress),
        )
    return run, ",".join(names)


def _client(plan: LoadPlan) -> "Client | OpenAITarget":
    config = plan.config
    if config.backend == "jmoe":
        return Client(plan.address, config.admin_address, plan.connection)
    from jmoe.extras import need  # not above: it would bring jax

    need("bench", "aiohttp")
    from serving.bench.openai import OpenAITarget

    return OpenAITarget(plan.address, plan.connection)


def _models(plan: LoadPlan, server: pb.ServerInfo) -> list[str]:
    """Returns the names of the models to send requests to. Raises WorkloadError for one that is not
    served.
    """
    config, served = plan.config, list(server.models) or [server.model]
    have = f"{plan.address} serves {', '.join(served)}"
    if config.model is not None and config.model not in served:
        raise WorkloadError(
            f"--model is {config.model}; {have}: name what is served, or leave --model out"
        )
    for name in plan.model_mix:
        if name not in served:
            raise WorkloadError(f"--model-mix has {name}; {have}")
    return list(plan.model_mix) or [config.model or server.model]


async def _ready_server(
    client: "Client | OpenAITarget", timeout_s: float, say: Say
) -> pb.ServerInfo:
    info = await client.server_info(timeout_s=ANSWER_TIMEOUT_S)
    if info.status == "starting" and timeout_s:
        say(f"waiting for {client.address}, which is starting")
        try:
            await client.wait_ready(timeout_s)
        except TimeoutError:
            raise Unavailable(
                f"{client.address} was still starting after {timeout_s:g} s; wait longer with "
                "--ready-check-timeout-sec"
            ) from None
        info = await client.server_info(timeout_s=ANSWER_TIMEOUT_S)
    if info.status != "ready":
        raise Unavailable(f"the server at {client.address} is not ready, but {info.status}")
    return info


def _no_answer(plan: LoadPlan, error: grpc.aio.AioRpcError) -> str:
    address, kind = plan.address, plan.config.backend
    reason = (error.details() or error.code().name).rpartition(": ")[2].rstrip("]")
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return (
            f"no server answers at {address} ({reason}): start one with `jmoe serve`, or say where "
            "it is with --host and --port"
        )
    what = "jmoe server" if kind == "jmoe" else "server of OpenAI's completions"
    return f"what answers at {address} is no {what} that can be measured ({reason})"


async def _check_takes(client: Target, arrival: Arrival) -> None:
    """Requests one token after a text, which a server without a tokenizer refuses."""
    if not isinstance(arrival.prompt, str):
        return
    try:
        async for _ in client.generate(
            arrival.prompt,
            pb.SamplingParams(max_new_tokens=1),
            model=arrival.model,
            timeout_s=ANSWER_TIMEOUT_S,
        ):
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise WorkloadError(
                f"the server does not take the dataset's texts: {error.details()} "
                "(--dataset-name random needs no tokenizer)"
            ) from None


async def _warm_up(client: Target, arrival: Arrival, config: BenchConfig, say: Say) -> None:
    """Plays the first request `num_warmups` times, as vLLM does; the result has none of it."""
    if not config.num_warmups:
        return
    run = await play(
        client,
        [replace(arrival, at_s=0.0)] * config.num_warmups,
        time_limit_s=config.time_limit_s,
        max_concurrency=config.max_concurrency,
        model=config.model or "",
    )
    for text in _failures(run.records):
        say(f"warming up: {text}")


def _counting(total: int, progress: Progress) -> Callable[[Record], None]:
    done = failed = 0

    def count(record: Record) -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + (not record.ok)
        progress(done, total, f"{failed} failed" if failed else "")

    return count


# -- what it says --------------------------------------------------------------------------------


def _failures(records: Iterable[Record]) -> list[str]:
    """Returns a line for each status that was not OK, with the first reason given."""
    by_code: dict[str, list[Record]] = {}
    for record in records:
        if not record.ok:
            by_code.setdefault(record.code, []).append(record)
    return [
        f"{len(failed)} failed with {code}: {failed[0].error or 'no reason was given'}"
        for code, failed in by_code.items()
    ]


def _result(plan: LoadPlan, run: Run, model: str, now: datetime) -> dict[str, Any]:
    config = plan.config
    summary = results.summarize(
        run, metrics=plan.metrics, percentiles=plan.percentiles, goodput=plan.goodput
    )
    result = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": config.backend,
        "model_id": model,
        "num_prompts": len(run.records),
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": config.max_concurrency,
        **_measured(summary, run.records),
        **results.thresholds_seen(run.records),
        **results.late_shares(run.records, plan.goodput),
    }
    if config.ramp_up_strategy is not None:
        result["ramp_up_strategy"] = config.ramp_up_strategy
        result["ramp_up_start_rps"] = config.ramp_up_start_rps
        result["ramp_up_end_rps"] = config.ramp_up_end_rps
    if config.best_effort_share:
        result["classes"] = {
            words: _of_class([r for r in run.records if r.best_effort == best_effort], plan)
            for words, best_effort in (("latency_sensitive", False), ("best_effort", True))
        }
    if plan.model_mix:
        result["model_mix"] = dict(plan.model_mix)
        result["models"] = {
            name: _of_model([r for r in run.records if r.model == name], plan, run.duration_s)
            for name in plan.model_mix
        }
    return result | _details(run.records) if config.save_detailed else result


def _measured(summary: Mapping[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """Returns a summary with None for the latencies of which there is no sample."""
    found = results.latencies_s(records)
    missing = tuple(f"_{metric}_ms" for metric, samples in found.items() if not samples)
    return {k: None if k.endswith(missing) else value for k, value in summary.items()}


def _of_class(records: list[Record], plan: LoadPlan) -> dict[str, Any]:
    done = sum(r.ok for r in records)
    latencies = results.latency_summary(records, plan.metrics, plan.percentiles) if done else {}
    return {"requests": len(records), "completed": done, **_measured(latencies, records)}


def _of_model(records: list[Record], plan: LoadPlan, duration_s: float) -> dict[str, Any]:
    of_class = _of_class(records, plan)
    num_output = sum(len(r.token_s) for r in records if r.ok)
    rates = {
        "request_throughput": of_class["completed"] / duration_s,
        "output_throughput": num_output / duration_s,
    }
    return of_class | rates


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
