"""What `jmoe bench serve` is told, and what of it can be checked before a server is asked."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from serving.bench import workload
from serving.bench.results import METRICS
from serving.bench.workload import Arrival, WorkloadError, approximate_tokens
from serving.client.connection import Connection
from serving.cluster.addresses import join

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PORTS = {"jmoe": 50051, "openai": 8000}
"""The backends, and where their servers are by default."""

DATASETS = ("sharegpt", "alpaca", "tasks", "random")
RAMPS = ("linear", "exponential")


@dataclass(frozen=True)
class BenchConfig:
    """Flags of `jmoe bench serve`. Those that `vllm bench serve` has, too, are named as there."""

    backend: str = "jmoe"  # one of PORTS: gRPC, or OpenAI's completions over HTTP; vllm is openai
    base_url: str | None = None  # http://, https:// or grpc://HOST:PORT; none: host and port
    host: str = "127.0.0.1"
    port: int | None = None  # none: that of PORTS
    admin_address: str | None = None  # none: where the server says its admin service is
    api_key_env: str | None = None  # variable that has the key; none: JMOE_API_KEY
    tls_ca: str | None = None  # these three: PEM files; none: what the environment names
    tls_cert: str | None = None
    tls_key: str | None = None
    ready_check_timeout_sec: float = 600.0  # for a server that is still starting
    model: str | None = None  # the name that must be served; none: the server's first
    model_mix: tuple[str, ...] = ()  # "NAME=WEIGHT" of models that requests go to, by lot
    dataset_name: str = "random"  # one of DATASETS
    dataset_path: Path | None = None  # none: the bundled tasks; lengths like ShareGPT's or Alpaca's
    tokenizer: Path | None = None  # tokenizer.json that counts a dataset's tokens; none: estimated
    num_prompts: int | None = None  # none: 1000, or as many as the server takes at once
    request_rate: float = math.inf  # per second; infinite: all at once
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; 1: a Poisson process
    ramp_up_strategy: str | None = None  # one of RAMPS, in place of request_rate
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    max_concurrency: int | None = None
    random_input_len: int | None = None  # none: 1024, or what fits the server
    random_output_len: int | None = None  # none: 128, or what fits the server
    random_range_ratio: float = 0.0  # lengths are even within (1 - ratio) and (1 + ratio) times
    ignore_eos: bool = False  # in every request; random prompts' have it anyway
    temperature: float = 0.0
    num_warmups: int = 0  # requests before those that count
    best_effort_share: float = 0.0  # of the requests: best effort, by lot
    seed: int = 0
    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "99"
    goodput: tuple[str, ...] = ()  # "METRIC:MILLISECONDS" of ttft, tpot, e2el
    save_result: bool = False
    save_detailed: bool = False  # every request's lengths, latencies and text too
    result_dir: Path = Path()
    result_filename: str | None = None
    disable_tqdm: bool = False  # no bar
    time_limit_s: float = 3600.0  # requests not answered by then have failed

    @property
    def saves(self) -> bool:
        """Whether a result is written."""
        return self.save_result or self.save_detailed


@dataclass(frozen=True)
class Dataset:
    """Samples in the order in which they are sent, and the counter of their prompts' tokens."""

    samples: list[Arrival]
    count_tokens: Callable[[str], int]


@dataclass(frozen=True)
class LoadPlan:
    """A checked configuration. `dataset` None: prompts are drawn once the server is known."""

    config: BenchConfig
    address: str
    connection: Connection
    metrics: tuple[str, ...]
    percentiles: list[float]
    goodput: dict[str, float]  # milliseconds
    dataset: Dataset | None
    model_mix: Mapping[str, float] = field(default_factory=dict)  # weights by model
    vocab_size: int = 0  # of --tokenizer; 0: none was named


def prepare(config: BenchConfig) -> LoadPlan:
    """Checks all that needs no server, and reads the dataset. Raises WorkloadError, and ValueError
    for a key or certificates that cannot be used.
    """
    if config.backend == "vllm":
        config = replace(config, backend="openai")
    for fault in _faults(config):
        raise WorkloadError(fault)
    tokenizer = _tokenizer(config.tokenizer) if config.tokenizer else None
    plan = LoadPlan(
        config,
        _address(config),
        Connection.of_environment(
            config.api_key_env,
            tls_ca=config.tls_ca,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
        ),
        tuple(config.percentile_metrics.split(",")),
        _percentiles(config.metric_percentiles),
        _goodput(config.goodput),
        _read_dataset(config, tokenizer),
        _model_mix(config),
        tokenizer.get_vocab_size() if tokenizer else 0,
    )
    if config.saves:
        _check_writable((config.result_dir / (config.result_filename or "result")).parent)
    return plan


def _faults(config: BenchConfig) -> Iterator[str]:
    """Yields what is wrong with the flags as they are, the first fault first."""
    if config.backend not in PORTS:
        yield (
            f"--backend is {config.backend}; known: jmoe (gRPC) and openai, also called vllm (any "
            "server of OpenAI's completions, over HTTP)"
        )
    if config.backend == "openai" and (config.best_effort_share or config.admin_address):
        given = "--best-effort-share" if config.best_effort_share else "--admin-address"
        yield f"{given} needs --backend jmoe: OpenAI's protocol has none"
    if config.dataset_name not in DATASETS:
        yield f"--dataset-name is {config.dataset_name}; known: {', '.join(DATASETS)}"
    if config.dataset_path is not None and config.dataset_name == "random":
        yield (
            f"--dataset-path is {config.dataset_path}, and --dataset-name random reads none: name "
            "it sharegpt, alpaca or tasks"
        )
    least = {
        "num_prompts": 1,
        "seed": 0,
        "max_concurrency": 1,
        "random_input_len": 1,
        "random_output_len": 1,
        "ready_check_timeout_sec": 0,
        "temperature": 0,
        "num_warmups": 0,
    }
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:
            yield f"{_flag(name)} is {value}; it must be at least {bound}"
    if not 0 <= config.best_effort_share <= 1:
        yield f"--best-effort-share is {config.best_effort_share}; it must be between 0 and 1"
    ratio = config.random_range_ratio
    if not 0 <= ratio < 1:
        yield f"--random-range-ratio is {ratio}; it must be 0 or more, below 1"
    if ratio and config.dataset_name != "random":
        yield (
            "--random-range-ratio is of --dataset-name random, and that is "
            f"{config.dataset_name}: leave one of them out"
        )
    for name in ("time_limit_s", "request_rate", "burstiness"):
        value = getattr(config, name)
        if not value > 0:
            yield f"{_flag(name)} is {value}; it must be above 0"
    yield from _faults_of_ramp(config)
    if unknown := set(config.percentile_metrics.split(",")) - set(METRICS):
        yield f"--percentile-metrics has {', '.join(sorted(unknown))}; known: {', '.join(METRICS)}"


def _faults_of_ramp(config: BenchConfig) -> Iterator[str]:
    strategy = config.ramp_up_strategy
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    if strategy is None:
        if start is not None or end is not None:
            yield (
                "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or "
                "exponential"
            )
        return
    if strategy not in RAMPS:
        yield f"--ramp-up-strategy is {strategy}; known: {', '.join(RAMPS)}"
    if math.isfinite(config.request_rate):
        yield "give --request-rate or --ramp-up-strategy, not both"
    if start is None or end is None or not 0 < start < end < math.inf:
        yield (
            "--ramp-up-strategy needs --ramp-up-start-rps above 0 and a larger --ramp-up-end-rps; "
            f"they are {start} and {end}"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _address(config: BenchConfig) -> str:
    """Returns the server's address, from the URL where there is one: `host:port` or
    `https://host:port`, with `http://`, too, where it speaks HTTP.
    """
    is_http = config.backend == "openai"
    if config.base_url is None:
        port = PORTS[config.backend] if config.port is None else config.port
        if not 0 < port < 65536:
            raise WorkloadError(f"--port is {port}; it must be between 1 and 65535")
        return ("http://" if is_http else "") + join(config.host, port)
    try:
        url = urlsplit(config.base_url)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise WorkloadError(f"--base-url is {config.base_url}: {error}") from None
    known = url.scheme in (("http", "https") if is_http else ("http", "https", "grpc"))
    if not known or not host or not port or url.path not in ("", "/"):
        raise WorkloadError(
            f"--base-url is {config.base_url}; write http://HOST:PORT"
            f"{'' if is_http else ' or grpc://HOST:PORT'}, or https://HOST:PORT where the server "
            "has a certificate"
        )
    scheme = f"{url.scheme}://" if is_http or url.scheme == "https" else ""
    return scheme + join(host, port)


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(percent) for percent in text.split(",")]
    except ValueError:
        raise WorkloadError(f"--metric-percentiles {text!r} is not numbers with commas") from None
    for percent in percentiles:
        if not 0 <= percent <= 100:
            raise WorkloadError(f"--metric-percentiles has {percent:g}; they are from 0 to 100")
    return percentiles


def _goodput(limits: Iterable[str]) -> dict[str, float]:
    parsed = {}
    for limit in limits:
        metric, _, milliseconds = limit.partition(":")
        try:
            parsed[metric] = float(milliseconds)
        except ValueError:
            raise WorkloadError(f"--goodput {limit!r} is not METRIC:MILLISECONDS") from None
        if metric not in ("ttft", "tpot", "e2el"):
            raise WorkloadError(f"--goodput knows ttft, tpot and e2el, not {metric!r}")
        if not parsed[metric] >= 0:
            raise WorkloadError(f"--goodput {limit} is no time; it must be at least 0")
    return parsed


def _model_mix(config: BenchConfig) -> dict[str, float]:
    weights: dict[str, float] = {}
    for given in config.model_mix:
        name, _, weight = given.rpartition("=")
        if not name:
            raise WorkloadError(f"--model-mix {given!r} is not NAME=WEIGHT, such as {given}=1")
        if name in weights:
            raise WorkloadError(f"--model-mix names {name} twice; give it one weight")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not 0 < weights[name] < math.inf:
            raise WorkloadError(
                f"--model-mix {given!r}: a weight is a number above 0, such as {name}=1"
            )
    if weights and config.model is not None:
        raise WorkloadError("give --model or --model-mix, not both")
    return weights


def _read_dataset(config: BenchConfig, tokenizer: "Tokenizer | None") -> Dataset | None:
    name, path = config.dataset_name, config.dataset_path
    if name == "tasks":
        samples = workload.load_tasks(path or workload.BUNDLED_TASKS)
        return Dataset(workload.shuffled(samples, config.seed), approximate_tokens)
    if path is None:
        return None
    count = (
        approximate_tokens if tokenizer is None else lambda text: len(tokenizer.encode(text).ids)
    )
    load = workload.load_sharegpt if name == "sharegpt" else workload.load_alpaca
    return Dataset(workload.shuffled(load(path, count), config.seed), count)


def _tokenizer(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WorkloadError(f"{path} is not a readable tokenizer: {error}") from None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkloadError(f"results cannot go to {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise WorkloadError(f"results cannot go to {folder}: it is not writable")
