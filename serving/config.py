"""Every setting of a server: its default, what it means, what it may be, and its flag.

`jmoe serve --help`, the preset `default`, docs/reference/settings.md and the checks are made from
these fields (`serving.cli.options`, `docs/make_reference.py`, `serving.settings.reading`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import inf
from typing import Any, get_type_hints

GROUPS = ("Model", "Network", "Security", "Capacity", "Brownout", "Parallelism", "Log")
"""Of the flags of `jmoe serve --help`, in their order."""


@dataclass(frozen=True)
class Range:
    """Values that a setting may have. `holds` is False for NaN; `choices` names them all."""

    wanted: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What there is to know of a setting beside its key, type and default."""

    help: str
    range: Range | None
    group: str  # in `--help`; empty: it has no flag of its own, but --set
    flag: str  # without dashes; empty: the last part of its key
    metavar: str


def setting[T](
    default: T,
    help: str,
    range: Range | None = None,
    group: str = "",
    *,
    flag: str = "",
    metavar: str = "",
) -> T:
    """Returns a dataclass field whose metadata has the `Setting` under that name."""
    made = field(default=default, metadata={"setting": Setting(help, range, group, flag, metavar)})
    return made  # a Field, which is what a dataclass takes in place of its default


def one_of(*choices: str) -> Range:
    """Returns a range of exactly these values."""
    return Range(f"one of {', '.join(choices)}", lambda value: value in choices, choices)


POSITIVE = Range("above 0", lambda value: 0 < value < inf)
NOT_NEGATIVE = Range("0 or more", lambda value: 0 <= value < inf)
PORT = Range("between 0 and 65535", lambda value: 0 <= value <= 65535)
PORT_OR_OFF = Range("between 0 and 65535, or -1: off", lambda value: -1 <= value <= 65535)
PERCENT = Range("between 0 and 100", lambda value: 0 <= value <= 100)
SHARE = Range("between 0 and 1", lambda value: 0 <= value <= 1)
SHARE_ABOVE_0 = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
ASCENDING = Range(
    "positive and ascending",
    lambda values: list(values) == sorted({value for value in values if value > 0}),
)


@dataclass(frozen=True)
class BrownoutConfig:
    """Brownout: which expert visits may be degraded, and the latency that it defends."""

    strategy: str = setting(
        "auto",
        "What happens to degraded expert visits: partial sends them to united experts, full drops "
        "them, zero degrades none. auto: partial if the model has united experts, else zero.",
        one_of("auto", "zero", "partial", "full"),
        "Brownout",
    )
    way: int = setting(
        0,
        "Number of routed experts that a united expert stands in for. 0: the largest that the "
        "model has.",
        NOT_NEGATIVE,
        "Brownout",
        metavar="K",
    )
    ways: tuple[int, ...] = setting(
        (), "Ways that may be switched to while serving. Empty: all that the model has.", ASCENDING
    )
    prefill_threshold_percent: int = setting(
        100,
        "Percentage of expert visits kept exact in prefill, at the start.",
        PERCENT,
        "Brownout",
        flag="prefill-threshold",
    )
    decode_threshold_percent: int = setting(
        100,
        "Percentage of expert visits kept exact in decode, at the start.",
        PERCENT,
        "Brownout",
        flag="decode-threshold",
    )
    salc: bool = setting(
        True,
        "Let a controller move the thresholds so that the objectives are kept. Without it they "
        "stay as set.",
        None,
        "Brownout",
    )
    ttft_slo_s: float = setting(
        1.0,
        "Objective for the P90 time to first token of latency-sensitive requests, in seconds.",
        POSITIVE,
        "Brownout",
    )
    itl_slo_s: float = setting(
        0.1,
        "Objective for the P90 inter-token latency of latency-sensitive requests, in seconds.",
        POSITIVE,
        "Brownout",
    )
    best_effort_ttft_slo_s: float = setting(
        0.0,
        "Objective for the P90 time to first token of best-effort requests. 0: none, so that best "
        "effort never moves a threshold.",
        NOT_NEGATIVE,
    )
    best_effort_itl_slo_s: float = setting(
        0.0,
        "Objective for the P90 inter-token latency of best-effort requests. 0: none.",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class SalcConfig:
    """SLO-aware latency control. The paper's values for its Algorithm 2: 0.8, 10, 0.8."""

    controller: str = setting(
        "algorithm2",
        "What moves the thresholds: algorithm2, predictive, or module:Class or file.py:Class of "
        "your own (controllers.md).",
        None,
        "Brownout",
    )
    warning_factor: float = setting(
        0.8,
        "Algorithm 2: a threshold grows while latency is below this share of its objective.",
        SHARE_ABOVE_0,
    )
    increment_percent: float = setting(10.0, "Algorithm 2: by how much it grows.", POSITIVE)
    shrink_ratio: float = setting(
        0.8,
        "Algorithm 2: what a threshold is multiplied by when latency exceeds the objective.",
        SHARE_ABOVE_0,
    )
    interval_s: float = setting(2.0, "Seconds between two decisions of the controller.", POSITIVE)
    window_s: float = setting(4.0, "Seconds after which a sample no longer counts.", POSITIVE)
    min_samples: int = setting(
        10, "Samples that a decision needs; with fewer, thresholds stay.", POSITIVE
    )
    floor_percent: float = setting(0.0, "Lowest value of a threshold.", PERCENT)
    ceiling_percent: float = setting(100.0, "Highest value of a threshold.", PERCENT)


@dataclass(frozen=True)
class BalanceConfig:
    """Over a mesh: copies of experts that get much of the work, so that all devices get as much.

    Copies are made while a prefill step runs, for its own rows (Libra), and between steps, for what
    was seen lately; the latter stay in spare slots.
    """

    replicas: int = setting(
        0,
        "Number of experts that each device copies for each layer of a prefill step. 0: none "
        "(expert-parallelism.md).",
        NOT_NEGATIVE,
    )
    replicas_per_pair: int = setting(
        2, "Of these copies, how many one device sends to another at most.", POSITIVE
    )
    replicas_local_share: float = setting(
        0.5, "Share of these copies for the experts that a device's own rows visit most.", SHARE
    )
    predictor: str = setting(
        "auto",
        "What predicts the next layer's routing: its router, or the probe that `python -m "
        "training.lookahead` trains. auto: the probe, if there is one beside the model.",
        one_of("auto", "router", "probe"),
    )
    replicas_min_tokens: int = setting(
        0,
        "Tokens per device of the smallest prefill step that copies experts. 0: chosen by the cost "
        "model on a GPU, every step on a CPU.",
        NOT_NEGATIVE,
    )
    spare_slots: int = setting(
        0,
        "Slots per layer and device for copies of experts that stay busy. 0: experts stay where "
        "they are.",
        NOT_NEGATIVE,
    )
    interval_s: float = setting(5.0, "Seconds between two looks at expert load.", POSITIVE)
    half_life_s: float = setting(
        3.0,
        "Half-life of past load in seconds, and the time within which a copy has to pay off.",
        POSITIVE,
    )
    min_gain: float = setting(
        0.02,
        "Share of the most loaded device's load that a new placement must remove.",
        SHARE,
    )
    load_file: str = setting("", "File that keeps the observed load across restarts. Empty: none.")


@dataclass(frozen=True)
class AsynchronousConfig:
    """Mode aep: attention and experts on devices of their own (AMoE)."""

    attention: int = setting(
        0,
        "Mode aep: number of attention workers, one a device, which share the requests.",
        NOT_NEGATIVE,
        "Parallelism",
    )
    experts: int = setting(
        0,
        "Mode aep: number of expert workers, one a device, which share the experts.",
        NOT_NEGATIVE,
        "Parallelism",
    )
    workers: str = setting(
        "threads",
        "Where workers run: in threads of the server, in processes on this machine, or with ray on "
        "any machine of a cluster.",
        one_of("threads", "processes", "ray"),
    )
    worker_timeout_s: float = setting(
        8.0,
        "Seconds of silence after which a worker process counts as lost. One that dies is noticed "
        "at once, and one that gets nothing done after four times this.",
    )
    ray_address: str = setting(
        "",
        "Address of a Ray cluster; auto finds this machine's. Empty: the server starts its own.",
    )
    copies: int = setting(
        1,
        "Number of expert workers that hold each expert. With 2, one worker may fail without "
        "affecting requests.",
        POSITIVE,
    )
    layer_rule: str = setting(
        "defrag",
        "Which layer a worker runs next: mtfs, flfs, defrag, or module:Class or file.py:Class of "
        "your own.",
    )
    min_batch: int = setting(1, "Number of rows that a layer waits for.", POSITIVE)
    max_wait_s: float = setting(0.002, "Seconds that it waits for them at most.", NOT_NEGATIVE)
    max_age_s: float = setting(
        0.25, "Seconds after which a layer's rows go ahead of all younger ones.", POSITIVE
    )


@dataclass(frozen=True)
class EngineConfig:
    """The engine. Sizes are counts; times are seconds."""

    model: str = setting(
        "bundled",
        "Model: an unmodified Hugging Face directory, OWNER/NAME of the Hub, or bundled, the small "
        "model that comes with jmoe.",
    )
    hub_revision: str = setting(
        "",
        "Branch, tag or commit of a model of the Hub. Empty: its main branch.",
        None,
        "Model",
        metavar="REVISION",
    )
    chat_template: str = setting(
        "",
        "File with a Jinja chat template, used in place of the model's own.",
        None,
        "Model",
        metavar="FILE",
    )
    models: tuple[str, ...] = setting(
        (),
        "NAME=DIR of each model of a family, in place of engine.model (families.md).",
    )
    family: str = setting(
        "",
        "family.json of `jmoe consolidate`: which experts several models share. Empty: none.",
        None,
        "Model",
        metavar="FILE",
    )
    resident_sets: int = setting(
        0,
        "Number of models whose non-expert weights are on the device at a time; the others' are "
        "copied there on demand. 0: all.",
    )
    resident_experts: int = setting(
        0,
        "Number of distinct routed experts of a family that stay on the device; the others are in "
        "host memory, and a sibling's expert stands in for them. 0: all.",
    )
    spare_experts: int = setting(
        0,
        "Further slots, into which experts are fetched from host memory or rebuilt from a "
        "difference. As many as a token can visit, or more.",
    )
    model_stay_s: float = setting(
        0.0,
        "Seconds that a busy model keeps its place on the device before another may take it. 0: "
        "nine times what a swap takes, so that copying takes a tenth of the time at most.",
    )
    mixed_models: int = setting(
        2,
        "Number of models whose rows may share a decode step, if a measurement at the start finds "
        "that faster. Each number up to this has its own programs. 0 or 1: one model a step.",
        NOT_NEGATIVE,
    )
    dtype: str = setting(
        "bfloat16",
        "Data type of weights, activations and KV cache.",
        one_of("bfloat16", "float16", "float32"),
        "Model",
    )
    mode: str = setting(
        "auto",
        "steps: all devices run each step together. aep: attention and experts run on devices of "
        "their own (async-expert-parallelism.md). auto: steps, unless workers are asked for and "
        "the forecast favours aep.",
        one_of("auto", "steps", "aep"),
        "Parallelism",
    )
    mesh: str = setting(
        "",
        "Spread the experts over N devices, each of which serves its part of the requests. Empty: "
        "one device (expert-parallelism.md).",
        None,
        "Parallelism",
        metavar="ep=N",
    )
    coordinator: str = setting(
        "",
        "Address of process 0 of a mesh that spans several processes. Give this and the next two "
        "to every process, or to none.",
        None,
        "Parallelism",
        metavar="HOST:PORT",
    )
    num_processes: int = setting(
        0,
        "Number of server processes in the mesh, with equally many devices each.",
        None,
        "Parallelism",
    )
    process_index: int = setting(
        -1,
        "Index of this process: 0 serves requests, the others follow it.",
        None,
        "Parallelism",
    )
    secret_file: str = setting(
        "",
        "File with the secret that the processes of one server share, readable by its owner (and "
        "group) only. Empty: JMOE_CLUSTER_SECRET of the environment, or no secret (security.md).",
        None,
        "Security",
        metavar="FILE",
    )
    join_timeout_s: float = setting(
        300.0,
        "Seconds that processes wait for each other at the start; a worker, for as long as it gets "
        "nothing done while it loads and compiles.",
        POSITIVE,
    )
    peer_timeout_s: float = setting(
        30.0,
        "Seconds within which a process notices that another has gone silent. One that dies is "
        "noticed at once.",
        POSITIVE,
    )
    max_num_seqs: int = setting(
        64, "Number of sequences decoded together, over all devices.", POSITIVE, "Capacity"
    )
    max_model_len: int = setting(
        0,
        "Most tokens of a sequence, prompt and output together. 0: the model's own, at most 2048. "
        "More than the model has is an error.",
        NOT_NEGATIVE,
        "Capacity",
    )
    max_queue_len: int = setting(
        512,
        "Number of requests that may wait for a slot; further ones are refused.",
        POSITIVE,
        "Capacity",
    )
    max_logprobs_per_call: int = setting(
        500_000,
        "Log-probabilities that one call may ask for: over its answers (prompts times n), "
        "max_tokens times 1 + top_logprobs, and the prompt's tokens where it asks for theirs. An "
        "answer that is not streamed holds about 70 bytes for each until it is sent.",
        POSITIVE,
    )
    queue_timeout_s: float = setting(
        0.0,
        "Seconds within which a request's first step must begin; else it ends with "
        "DEADLINE_EXCEEDED. 0: no limit.",
        NOT_NEGATIVE,
    )
    admission: str = setting(
        "queue",
        "queue: every request waits for its turn. objective: a latency-sensitive request that "
        "would get its first token later than ttft_slo_s is refused, and told when to retry.",
        one_of("queue", "objective"),
    )
    page_size: int = setting(64, "Number of tokens in a KV page.", POSITIVE, "Capacity")
    num_pages: int = setting(
        0,
        "Number of KV pages. 0: on a GPU what memory_fraction leaves, on a CPU what max_num_seqs "
        "full sequences need (operating.md, Sizing).",
        NOT_NEGATIVE,
        "Capacity",
    )
    memory_fraction: float = setting(
        0.9,
        "Fraction of a GPU's memory for weights, working memory of steps, and KV pages. "
        "XLA_CLIENT_MEM_FRACTION of the environment overrides it.",
        SHARE_ABOVE_0,
        "Capacity",
    )
    max_prefill_tokens: int = setting(
        512, "Most prompt tokens in a prefill step.", POSITIVE, "Capacity"
    )
    max_prefill_seqs: int = setting(
        16, "Most prompts, or parts of one, in a prefill step.", POSITIVE
    )
    decode_buckets: tuple[int, ...] = setting(
        (), "Batch sizes that decode is compiled for. Empty: by device.", ASCENDING
    )
    prefill_buckets: tuple[int, ...] = setting(
        (), "Token counts that prefill is compiled for. Empty: by device.", ASCENDING
    )
    threshold_buckets_percent: tuple[int, ...] = setting(
        (),
        "Thresholds whose capacities are compiled for; the last one is 100. Empty: by device.",
        ASCENDING,
    )
    policy: str = setting(
        "ls_first",
        "Which request is served next: fcfs, edf, ls_first, qllm, or module:Class or file.py:Class "
        "of your own (priorities.md).",
        None,
        "Capacity",
    )
    plugin_slow_ms: float = setting(
        20.0,
        "Calls of a policy or controller that take longer than this many milliseconds are logged "
        "by name, since every step waits for them. 0: none.",
        NOT_NEGATIVE,
    )
    part_layers: int = setting(
        0,
        "Number of layers launched at once while there are best-effort requests. 0: as measured at "
        "the start. As many as the model has: whole steps.",
        NOT_NEGATIVE,
    )
    prefix_reuse: str = setting(
        "auto",
        "Whether prompts reuse KV pages that other requests have computed (prefixes.md). auto: on, "
        "except in mode aep.",
        one_of("auto", "on", "off"),
    )
    prefill_company: bool = setting(
        True, "A prompt waits a short time for other prompts while rows are decoding."
    )
    reserved_ls_seqs: int = setting(
        -1,
        "Slots beside max_num_seqs that only latency-sensitive requests get. -1: an eighth of "
        "max_num_seqs.",
    )
    max_best_effort_queue_len: int = setting(
        0, "Number of best-effort requests that may wait. 0: max_queue_len.", NOT_NEGATIVE
    )
    best_effort_share: float = setting(
        0.05,
        "Share of device time; while best effort gets less than this, none of its steps is parked.",
        SHARE,
    )
    best_effort_max_wait_s: float = setting(
        30.0,
        "Seconds after which a waiting best-effort request is served like a latency-sensitive one. "
        "0: never.",
        NOT_NEGATIVE,
    )
    compilation_cache: str = setting(
        "~/.cache/jmoe/xla",
        "Folder for compiled programs. Loading a program executes it, so nobody else should be "
        "able to write there. Empty: no cache.",
    )
    enforce_eager: bool = setting(
        False, "On a GPU, launch kernels one by one, without CUDA graphs."
    )
    cpu_threads: int = setting(0, "XLA's threads on a CPU. 0: one per core.", NOT_NEGATIVE)
    watchdog_s: float = setting(
        60.0,
        "Seconds after which a step that has not ended means that the engine has failed. Time in "
        "which the process was stopped does not count. 0: no watchdog.",
        NOT_NEGATIVE,
    )
    check_weights: bool = setting(
        True, "Refuse weights with NaN or infinite values, and name them."
    )
    allow_unknown_config: tuple[str, ...] = setting(
        (),
        "Keys of config.json that jmoe does not know and that change nothing. The flag may be "
        "repeated.",
        None,
        "Model",
        metavar="KEY",
    )
    brownout: BrownoutConfig = field(default_factory=BrownoutConfig)
    salc: SalcConfig = field(default_factory=SalcConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether pages are shared; those of asynchronous workers are not."""
        return self.prefix_reuse != "off" and self.mode != "aep"


@dataclass(frozen=True)
class ServerConfig:
    """Everything that `jmoe serve` can be told: where it listens, what callers may take."""

    host: str = setting(
        "127.0.0.1", "Address that callers connect to, over gRPC and HTTP.", None, "Network"
    )
    port: int = setting(50051, "Port for gRPC. 0: any free one.", PORT, "Network")
    http_port: int = setting(
        0,
        "Port for OpenAI's API over HTTP. 0: 8000, or the next free one. -1: off.",
        PORT_OR_OFF,
        "Network",
    )
    metrics_port: int = setting(
        0, "Port for /metrics, /healthz and /readyz over HTTP. 0: off.", PORT, "Network"
    )
    drain_timeout_s: float = setting(
        30.0, "Seconds that streams may take to end after SIGTERM.", NOT_NEGATIVE
    )
    admin_host: str = setting(
        "127.0.0.1", "Address of the admin service and the live page.", None, "Network"
    )
    admin_port: int = setting(
        0, "Port of the admin service, over gRPC. 0: any free one.", PORT, "Network"
    )
    admin_http_port: int = setting(
        0, "Port of the live page. 0: any free one. -1: off.", PORT_OR_OFF, "Network"
    )
    admin_on_main_port: bool = setting(
        False, "Offer the admin service on the main port, too, to whoever can reach it."
    )
    keys_file: str = setting(
        "",
        "File with API keys as hashes (`jmoe keys`), read again when it changes and at SIGHUP. "
        "Empty: anybody may do anything.",
        None,
        "Security",
        metavar="FILE",
    )
    tls_cert: str = setting(
        "",
        "PEM file with the server's certificate; turns on TLS for every port for clients. Read "
        "again when it changes and at SIGHUP.",
        None,
        "Security",
        metavar="FILE",
    )
    tls_key: str = setting("", "PEM file with its private key.", None, "Security", metavar="FILE")
    tls_client_ca: str = setting(
        "",
        "PEM file with CAs; clients then need a certificate of one of them (mutual TLS).",
        None,
        "Security",
        metavar="FILE",
    )
    request_timeout_s: float = setting(
        0.0, "Timeout of requests that set none, in seconds. 0: no timeout.", NOT_NEGATIVE
    )
    otlp_endpoint: str = setting(
        "",
        "URL that takes OpenTelemetry traces over HTTP, such as http://127.0.0.1:4318/v1/traces "
        "(deploying.md, Traces). Empty: no traces.",
    )
    exit_on_failure: bool = setting(
        True,
        "A failed engine ends the process with status 1. Without it the process stays, and is "
        "NOT_SERVING.",
    )
    max_connections: int = setting(
        512, "Number of open connections; further ones are closed at once.", POSITIVE
    )
    max_concurrent_calls: int = setting(
        0,
        "Number of calls in progress; further ones get RESOURCE_EXHAUSTED. 0: twice the sum of "
        "max_num_seqs and max_queue_len.",
        NOT_NEGATIVE,
    )
    max_bytes_in_flight: int = setting(
        256 << 20,
        "Memory for messages being received, of which each reserves 4 MiB. Open streams of KServe "
        "have a second budget of this size.",
    )
    message_timeout_s: float = setting(
        10.0, "Seconds from the opening of a call to the end of its message.", POSITIVE
    )
    served_model_name: str = setting(
        "",
        "Name that clients call the model. Empty: its directory's name, or OWNER/NAME.",
        None,
        "Model",
        metavar="NAME",
    )
    status_interval_s: float = setting(
        10.0,
        "Seconds between lines of the log about load and latency. 0: none.",
        NOT_NEGATIVE,
        "Log",
    )
    log_format: str = setting(
        "text", "Format of the log; json is one object a line.", one_of("text", "json"), "Log"
    )
    timeline: str = setting(
        "",
        "File that gets the last 100,000 launches, steps and requests over time when the server "
        "stops, for Perfetto. Empty: none.",
        None,
        "Log",
        metavar="FILE",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)


@cache
def keys(kind: type = ServerConfig) -> dict[str, Any]:
    """Returns all dotted keys of a settings dataclass, with their types."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        below = keys(hint) if is_dataclass(hint) else None
        found |= {name: hint} if below is None else {f"{name}.{k}": t for k, t in below.items()}
    return found


@cache
def described(kind: type = ServerConfig) -> dict[str, Setting]:
    """Returns the `Setting` of each dotted key, in the order of the fields."""
    found: dict[str, Setting] = {}
    hints = get_type_hints(kind)
    for made in fields(kind):
        if is_dataclass(hints[made.name]):
            below = described(hints[made.name])
            found |= {f"{made.name}.{key}": setting for key, setting in below.items()}
        else:
            found[made.name] = made.metadata["setting"]
    return found
