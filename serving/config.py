"""Every setting of a server: its default, what it means, what it may be, and its flag.

`jmoe serve --help`, the preset `default`, docs/reference/settings.md and the checks are made from
these fields (`serving.cli.options`, `docs/make_reference.py`, `serving.settings.reading`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import inf
from typing import Any, Literal, cast, get_type_hints

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
NOT_NEGATIVE_OR_AUTO = Range(
    "0 or more, or auto", lambda value: value == "auto" or 0 <= value < inf
)
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
        "What happens to degraded visits: partial sends them to united experts, full drops "
        "them, zero degrades none. auto: partial if the model has united experts, else zero. Or "
        "your own (notebook.md).",
        Range(
            "one of auto, zero, partial, full, module:Class, file.py:Class",
            lambda value: value in ("auto", "zero", "partial", "full") or ":" in value,
        ),
        "Brownout",
        metavar="auto|zero|partial|full|module:Class",
    )
    way: int = setting(
        0,
        "Routed experts that a united expert stands in for. 0: the largest that the model has.",
        NOT_NEGATIVE,
        "Brownout",
        metavar="K",
    )
    ways: tuple[int, ...] = setting(
        (), "Ways that may be switched to while serving. Empty: all.", ASCENDING
    )
    prefill_threshold_percent: int = setting(
        100,
        "Percentage of prefill's visits kept exact, at the start: at least (with keep weight "
        "about), since whole experts stay, and with them those alone in their group.",
        PERCENT,
        "Brownout",
        flag="prefill-threshold",
    )
    decode_threshold_percent: int = setting(
        100,
        "Percentage of decode's visits kept exact, at the start: at least (with keep weight "
        "about), since whole experts stay, and with them those alone in their group.",
        PERCENT,
        "Brownout",
        flag="decode-threshold",
    )
    salc: bool = setting(
        True,
        "A controller moves the thresholds to keep the objectives. false: they stay as set.",
        group="Brownout",
    )
    ttft_slo_s: float = setting(
        1.0,
        "Objective for latency-sensitive requests' P90 time to first token, in seconds.",
        POSITIVE,
        "Brownout",
    )
    itl_slo_s: float = setting(
        0.1,
        "Objective for latency-sensitive requests' P90 inter-token latency, in seconds.",
        POSITIVE,
        "Brownout",
    )
    best_effort_ttft_slo_s: float = setting(
        0.0,
        "Objective for best effort's P90 time to first token. 0: none, so that best effort "
        "moves no threshold.",
        NOT_NEGATIVE,
    )
    best_effort_itl_slo_s: float = setting(
        0.0,
        "Objective for best effort's P90 inter-token latency. 0: none.",
        NOT_NEGATIVE,
    )
    keep: str = setting(
        "weight",
        "Which experts stay exact, of as many: those of most gate weight, or with most visits (the "
        "paper's), which loses more.",
        one_of("visits", "weight"),
        "Brownout",
    )
    levels: bool = setting(
        False,
        "Thresholds are levels of the model's levels.json (evaluation.md): each MoE layer has its "
        "own, of as many active experts together.",
        group="Brownout",
    )
    max_expected_loss: float = setting(
        0.0,
        "Bound on the expected loss of any threshold, in nats a token, by the model's "
        "expected_loss.json (operating.md): none costs more. 0: no bound.",
        NOT_NEGATIVE,
        "Brownout",
    )
    models: tuple[str, ...] = setting(
        (),
        "NAME:KEY=VALUE of what a model of engine.models has of its own: objectives (ttft_slo_s, "
        "itl_slo_s), bounds of its thresholds (floor_percent, ceiling_percent) (families.md).",
    )


@dataclass(frozen=True)
class SalcConfig:
    """SLO-aware latency control. The paper's values for its Algorithm 2: 0.8, 10, 0.8."""

    controller: str = setting(
        "predictive",
        "What moves the thresholds: algorithm2, predictive, or your own module:Class or "
        "file.py:Class (controllers.md).",
        group="Brownout",
    )
    warning_factor: float = setting(
        0.8,
        "Algorithm 2: thresholds grow while latency is below this share of its objective.",
        SHARE_ABOVE_0,
    )
    increment_percent: float = setting(10.0, "Algorithm 2: how much a threshold grows.", POSITIVE)
    shrink_ratio: float = setting(
        0.8,
        "Algorithm 2: factor on a threshold when latency exceeds the objective.",
        SHARE_ABOVE_0,
    )
    interval_s: float = setting(2.0, "Seconds between decisions.", POSITIVE)
    window_s: float = setting(4.0, "Seconds after which a sample no longer counts.", POSITIVE)
    min_samples: int = setting(10, "Samples that a decision needs.", POSITIVE)
    floor_percent: float = setting(0.0, "Lowest threshold.", PERCENT)
    ceiling_percent: float = setting(100.0, "Highest threshold.", PERCENT)


@dataclass(frozen=True)
class AuditConfig:
    """The audit: degraded answers, drawn at random, are scored exactly while nobody waits."""

    share: float = setting(
        0.01,
        "Share of the time in which degraded answers are scored exactly, to measure what brownout "
        "costs (operating.md). 0: none are, as where experts are in host memory, which exact rows "
        "would fetch in the place of others.",
        SHARE,
        "Brownout",
        flag="audit-share",
    )
    max_excess_nats: float = setting(
        0.0,
        "Bound on that cost: as soon as the lower end of its 95 % interval is above it, over 50 "
        "answers at least, the model's new requests are exempt from brownout. 0: no bound.",
        NOT_NEGATIVE,
        "Brownout",
        flag="max-excess",
    )
    retry_s: float = setting(
        600.0, "Seconds after which such a model's brownout is tried again.", POSITIVE
    )


CountOrAuto = int | Literal["auto"]


@dataclass(frozen=True)
class BalanceConfig:
    """Over a mesh: copies of busy experts.

    They are made while a prefill step runs, for its own rows (Libra), and between steps, into spare
    slots, for recent load.
    """

    replicas: int | Literal["auto"] = setting(
        0,
        "Experts that each device copies for a layer of a prefill step. 0: none. auto: as many "
        "as gain most, on a CPU none (expert-parallelism.md).",
        NOT_NEGATIVE_OR_AUTO,
    )
    replicas_per_pair: int = setting(
        2, "Most of these copies from one device to another.", POSITIVE
    )
    replicas_local_share: float = setting(
        0.5, "Share of these copies for experts that a device's own rows visit most.", SHARE
    )
    predictor: str = setting(
        "auto",
        "What predicts the next layer's routing: its router, or the probe of `python -m "
        "training.lookahead`. auto: the probe, if one lies beside the model.",
        one_of("auto", "router", "probe"),
    )
    replicas_min_tokens: int = setting(
        0,
        "Tokens per device from which prefill steps copy experts. 0: on a GPU where the "
        "measured imbalance makes them gain, every step on a CPU.",
        NOT_NEGATIVE,
    )
    spare_slots: int | Literal["auto"] = setting(
        "auto",
        "Slots per layer and device for copies that stay. 0: none. auto: by past load, and by the "
        "memory beside KV pages; on a CPU none (expert-parallelism.md).",
        NOT_NEGATIVE_OR_AUTO,
    )
    interval_s: float = setting(5.0, "Seconds between looks at expert load.", POSITIVE)
    half_life_s: float = setting(
        3.0,
        "Half-life of past load, in seconds, within which a copy has to pay off.",
        POSITIVE,
    )
    min_gain: float = setting(
        0.02,
        "Share of the fullest device's load that a copy must remove.",
        SHARE,
    )
    load_file: str = setting(
        "",
        "File that keeps the observed load across restarts; of several processes, process 0's. "
        "Empty: none.",
    )


@dataclass(frozen=True)
class AsynchronousConfig:
    """Mode aep: attention and experts on devices of their own (AMoE)."""

    attention: int = setting(
        0,
        "Mode aep: attention workers, one a device, which share the requests.",
        NOT_NEGATIVE,
        "Parallelism",
    )
    experts: int = setting(
        0,
        "Mode aep: expert workers, one a device, which share the experts.",
        NOT_NEGATIVE,
        "Parallelism",
    )
    workers: str = setting(
        "threads",
        "Where workers run: threads of the server, processes on this machine, or with Ray on "
        "any machine of a cluster.",
        one_of("threads", "processes", "ray"),
    )
    worker_timeout_s: float = setting(
        8.0,
        "Seconds of silence after which a worker process counts as lost; four times this if "
        "it lives and gets nothing done.",
    )
    ray_address: str = setting(
        "",
        "Address of a Ray cluster; auto finds this machine's. Empty: the server starts its own.",
    )
    copies: int = setting(
        1,
        "Expert workers that hold each expert. With 2, one may fail without affecting requests.",
        POSITIVE,
    )
    layer_rule: str = setting(
        "defrag",
        "Which layer a worker runs next: mtfs, flfs, defrag, or your own module:Class or "
        "file.py:Class (async-expert-parallelism.md).",
    )
    min_batch: int = setting(1, "Rows that a layer waits for.", POSITIVE)
    max_wait_s: float = setting(0.002, "Seconds that a layer waits for rows at most.", NOT_NEGATIVE)
    max_age_s: float = setting(
        0.25, "Seconds after which rows go ahead of all younger ones.", POSITIVE
    )


@dataclass(frozen=True)
class EngineConfig:
    """The engine. Sizes are counts; times are seconds."""

    model: str = setting(
        "bundled",
        "An unmodified Hugging Face directory, OWNER/NAME of the Hub, or bundled, jmoe's "
        "small model.",
    )
    hub_revision: str = setting(
        "",
        "Branch, tag or commit of a Hub model. Empty: its main branch.",
        group="Model",
        metavar="REVISION",
    )
    chat_template: str = setting(
        "",
        "File with a Jinja chat template, in place of the model's own.",
        group="Model",
        metavar="FILE",
    )
    generation_config: str = setting(
        "auto",
        "auto: requests that leave out temperature, top_k, top_p, min_p, repetition_penalty or "
        "most new tokens take those of the model's generation_config.json. none: they do not.",
        one_of("auto", "none"),
        "Model",
    )
    models: tuple[str, ...] = setting(
        (),
        "NAME=DIR of each model of a family, in place of engine.model (families.md).",
    )
    family: str = setting(
        "",
        "family.json of `jmoe consolidate`: which experts models share.",
        group="Model",
        metavar="FILE",
    )
    resident_sets: int = setting(
        0,
        "Models whose non-expert weights are on the device; others' are copied there on "
        "demand. 0: all.",
    )
    resident_experts: int = setting(
        0,
        "Distinct routed experts of a family that stay on the device; the others are in host "
        "memory, and a sibling's expert stands in for them. 0: all.",
    )
    spare_experts: int = setting(
        0,
        "Further slots, into which experts are fetched from host memory or rebuilt from a "
        "difference; at least as many as a token can visit.",
    )
    spare_models: int = setting(
        0,
        "Further places for models of engine.models' architecture, which LoadModel of the admin "
        "service fills while others are served; each takes slots for all experts of a model.",
        NOT_NEGATIVE,
    )
    model_stay_s: float = setting(
        0.0,
        "Seconds that a busy model keeps its place on the device. 0: nine times what a swap "
        "takes, so that copying takes at most a tenth of the time.",
    )
    mixed_models: int = setting(
        2,
        "Models whose rows may share a decode step, if the start measures that as faster; "
        "each number has its own programs. 0 or 1: one model a step.",
        NOT_NEGATIVE,
    )
    dtype: str = setting(
        "bfloat16",
        "Data type of weights, activations and KV cache.",
        one_of("bfloat16", "float16", "float32"),
        "Model",
    )
    quantize: str = setting(
        "auto",
        "fp8: keep routed and united experts in eight bits; int4, mxfp4: in four "
        "(quantization.md). auto: as the files have them, on a CPU none, which is faster there.",
        one_of("auto", "none", "fp8", "int4", "mxfp4"),
        "Model",
    )
    mode: str = setting(
        "auto",
        "steps: all devices run each step together. aep, experimental: attention and experts on "
        "devices of their own (async-expert-parallelism.md). auto: steps, unless workers are asked "
        "for and the forecast favours aep.",
        one_of("auto", "steps", "aep"),
        "Parallelism",
    )
    mesh: str = setting(
        "",
        "Spread experts and requests over N devices. Empty: one device (expert-parallelism.md).",
        group="Parallelism",
        metavar="ep=N",
    )
    exchange: str = setting(
        "auto",
        "How rows reach experts over a mesh, where a step copies none. all-gather: all go to all; "
        "halves: so, in two parts; direct, or forwarded by nodes: to the devices that need them. "
        "auto: as reckoned fastest (expert-parallelism.md).",
        one_of("auto", "all-gather", "halves", "direct", "forwarded"),
        "Parallelism",
    )
    coordinator: str = setting(
        "",
        "Address of process 0 of a mesh over several processes. Give this and the next two to "
        "every process, or to none.",
        group="Parallelism",
        metavar="HOST:PORT",
    )
    num_processes: int = setting(
        0, "Server processes in the mesh, with equally many devices each.", group="Parallelism"
    )
    process_index: int = setting(
        -1, "Index of this process: 0 serves requests, the others follow it.", group="Parallelism"
    )
    secret_file: str = setting(
        "",
        "File with the secret that processes of one server share, readable by owner (and "
        "group) only. Empty: JMOE_CLUSTER_SECRET of the environment, or no secret "
        "(security.md).",
        group="Security",
        metavar="FILE",
    )
    join_timeout_s: float = setting(
        300.0,
        "Seconds that processes wait for each other at the start; for a worker, without "
        "progress in loading and compiling.",
        POSITIVE,
    )
    peer_timeout_s: float = setting(
        30.0,
        "Seconds of silence after which a process counts as lost.",
        POSITIVE,
    )
    max_num_seqs: int = setting(
        64,
        "Sequences decoded together, over all devices. Of each, recurrent layers keep what `jmoe "
        "info` says.",
        POSITIVE,
        "Capacity",
    )
    max_model_len: int = setting(
        0,
        "Most tokens of prompt and output together. 0: the model's own, at most 2048. More "
        "than the model has is an error.",
        NOT_NEGATIVE,
        "Capacity",
    )
    max_queue_len: int = setting(
        512,
        "Requests that may wait for a slot; further ones are refused.",
        POSITIVE,
        "Capacity",
    )
    max_logprobs_per_call: int = setting(
        500_000,
        "Most log-probabilities of one call: over its answers (prompts times n), max_tokens "
        "times 1 + top_logprobs, and the prompt's where asked for. Each takes about 70 bytes "
        "until the answer is sent.",
        POSITIVE,
    )
    queue_timeout_s: float = setting(
        0.0,
        "Seconds within which a request's first step must begin, or it ends with "
        "DEADLINE_EXCEEDED. 0: no limit.",
        NOT_NEGATIVE,
    )
    admission: str = setting(
        "auto",
        "queue: requests wait. objective: a latency-sensitive request whose first token would "
        "come later than ttft_slo_s is refused, and told when to retry. auto: objective if "
        "`jmoe serve` is given a ttft_slo_s other than the default, or SetBrownout sets one; "
        "else queue.",
        one_of("auto", "queue", "objective"),
    )
    page_size: int = setting(64, "Tokens in a KV page.", POSITIVE, "Capacity")
    num_pages: int = setting(
        0,
        "KV pages. 0: on a GPU what memory_fraction leaves, on a CPU what max_num_seqs full "
        "sequences need.",
        NOT_NEGATIVE,
        "Capacity",
    )
    memory_fraction: float = setting(
        0.9,
        "Fraction of a GPU's memory for weights, steps and KV pages. XLA_CLIENT_MEM_FRACTION "
        "of the environment overrides it.",
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
        (), "Batch sizes compiled for. Empty: by device.", ASCENDING
    )
    late_decode_buckets: tuple[int, ...] = setting(
        (),
        "Batch sizes compiled once the server is ready, on an idle core; until then a larger one "
        "runs. Empty: by device, where decode_buckets are.",
        ASCENDING,
    )
    prefill_buckets: tuple[int, ...] = setting(
        (), "Token counts compiled for. Empty: by device.", ASCENDING
    )
    late_prefill_buckets: tuple[int, ...] = setting(
        (),
        "Token counts compiled once the server is ready, as late_decode_buckets are. Empty: by "
        "device, where prefill_buckets are.",
        ASCENDING,
    )
    hybrid_steps: str = setting(
        "auto",
        "Decode beside prompts in one step, where that takes less than a step of each and nothing "
        "is degraded (architecture.md). auto: on GPUs.",
        one_of("auto", "on", "off"),
    )
    threshold_buckets_percent: tuple[int, ...] = setting(
        (),
        "Thresholds compiled for; the last is 100. Empty: by device.",
        ASCENDING,
    )
    policy: str = setting(
        "ls_first",
        "Which request is served next: fcfs, edf, ls_first, qllm, or your own module:Class or "
        "file.py:Class (priorities.md).",
        group="Capacity",
    )
    plugin_slow_ms: float = setting(
        20.0,
        "Milliseconds from which calls of a policy or controller are logged by name, since "
        "every step waits for them. 0: none.",
        NOT_NEGATIVE,
    )
    part_layers: int = setting(
        0,
        "Layers launched at once while there are best-effort requests. 0: as measured at the "
        "start. All layers: whole steps.",
        NOT_NEGATIVE,
    )
    prefix_reuse: str = setting(
        "auto",
        "Whether prompts reuse other requests' KV pages (prefixes.md). auto: on, but for "
        "models with recurrent layers (linear attention, Mamba, convolutions).",
        one_of("auto", "on", "off"),
    )
    prefill_company: bool = setting(
        True, "A prompt waits briefly for others while rows are decoding."
    )
    reserved_ls_seqs: int = setting(
        -1,
        "Slots beside max_num_seqs for latency-sensitive requests only. -1: an eighth of "
        "max_num_seqs.",
        Range("0 or more, or -1: by max_num_seqs", lambda value: value >= -1),
    )
    max_best_effort_queue_len: int = setting(
        0, "Best-effort requests that may wait. 0: max_queue_len.", NOT_NEGATIVE
    )
    best_effort_share: float = setting(
        0.05,
        "Share of device time below which no best-effort step is parked; in mode aep, share of "
        "positions below which best-effort rows are as urgent as others.",
        SHARE,
    )
    best_effort_max_wait_s: float = setting(
        30.0,
        "Seconds after which a waiting best-effort request counts as latency-sensitive. 0: never.",
        NOT_NEGATIVE,
    )
    compilation_cache: str = setting(
        "~/.cache/jmoe/xla",
        "Folder for compiled programs. Loading one executes it: nobody else should be able to "
        "write there. Empty: no cache.",
    )
    enforce_eager: bool = setting(False, "On a GPU: no CUDA graphs.")
    cpu_threads: int = setting(0, "XLA's threads on a CPU. 0: one per core.", NOT_NEGATIVE)
    watchdog_s: float = setting(
        60.0,
        "Seconds after which a step that has not ended fails the engine; time in which the "
        "process was stopped does not count. 0: no watchdog.",
        NOT_NEGATIVE,
    )
    check_weights: bool = setting(
        True, "Refuse weights with NaN or infinite values, and name them."
    )
    allow_unknown_config: tuple[str, ...] = setting(
        (),
        "Unknown keys of config.json that change nothing. The flag may be repeated.",
        group="Model",
        metavar="KEY",
    )
    brownout: BrownoutConfig = field(default_factory=BrownoutConfig)
    salc: SalcConfig = field(default_factory=SalcConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    kv_cache_dtype: str = setting(
        "auto",
        "fp8 (fp8_e4m3): keep keys and values in eight bits (quantization.md). auto: in dtype.",
        one_of("auto", "fp8", "fp8_e4m3"),
        "Model",
    )

    @property
    def reuses_prefixes(self) -> bool:
        """Whether pages are shared."""
        return self.prefix_reuse != "off"


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, and what callers may take."""

    host: str = setting("127.0.0.1", "Address for callers, over gRPC and HTTP.", group="Network")
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
        "127.0.0.1", "Address of the admin service and the live page.", group="Network"
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
    frontends: tuple[str, ...] = setting(
        (), "Further protocols: module:Class or file.py:Class of each front end of your own."
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins, as https://chat.example.com, whose pages may use OpenAI's API from a browser; "
        "*: any.",
        group="Security",
    )
    keys_file: str = setting(
        "",
        "File with hashed API keys (`jmoe keys`), read again when it changes and at SIGHUP. "
        "Empty: anybody may do anything.",
        group="Security",
        metavar="FILE",
    )
    tls_cert: str = setting(
        "",
        "PEM file with the server's certificate; turns on TLS for every port for clients. "
        "Reread like keys_file.",
        group="Security",
        metavar="FILE",
    )
    tls_key: str = setting("", "PEM file with its private key.", group="Security", metavar="FILE")
    tls_client_ca: str = setting(
        "",
        "PEM file with CAs; clients then need a certificate of one (mutual TLS).",
        group="Security",
        metavar="FILE",
    )
    request_timeout_s: float = setting(
        0.0, "Timeout of requests that set none, in seconds. 0: none.", NOT_NEGATIVE
    )
    otlp_endpoint: str = setting(
        "",
        "URL for OpenTelemetry traces, such as http://127.0.0.1:4318/v1/traces "
        "(deploying.md). Empty: no traces.",
    )
    exit_on_failure: bool = setting(
        True,
        "A failed engine ends the process with status 1. false: it stays, NOT_SERVING.",
    )
    max_connections: int = setting(
        512, "Open connections; further ones are closed at once.", POSITIVE
    )
    max_concurrent_calls: int = setting(
        0,
        "Calls in progress; further ones get RESOURCE_EXHAUSTED. 0: twice max_num_seqs plus "
        "max_queue_len.",
        NOT_NEGATIVE,
    )
    max_bytes_in_flight: int = setting(
        256 << 20,
        "Bytes for messages being received, each of which reserves 4 MiB. Open streams of "
        "KServe have a second budget of this size.",
        Range(f"{4 << 20} or more: one message", lambda value: value >= 4 << 20),
    )
    message_timeout_s: float = setting(
        10.0, "Seconds from the opening of a call to the end of its message.", POSITIVE
    )
    served_model_name: str = setting(
        "",
        "The model's name for clients. Empty: its directory's name, or OWNER/NAME.",
        group="Model",
        metavar="NAME",
    )
    tool_call_parser: str = setting(
        "",
        "Format of models' tool calls: hermes, mistral, openai (gpt-oss), glm45, glm47, "
        "deepseek_v3, kimi_k2, minimax_m2, qwen3_coder, ernie45, or your own module:Class or "
        "file.py:Class (http.md). Empty: by the chat template.",
        group="Model",
    )
    reasoning_parser: str = setting(
        "",
        "Format in which models think before they answer: qwen3, deepseek_r1, glm45, "
        "minimax_m2, kimi_k2, ernie45 (all `<think>`), openai_gptoss, or your own module:Class or "
        "file.py:Class (http.md); none leaves thoughts in the answer. Empty: by the chat template.",
        group="Model",
    )
    status_interval_s: float = setting(
        10.0,
        "Seconds between status lines of the log. 0: none.",
        NOT_NEGATIVE,
        "Log",
    )
    log_format: str = setting(
        "text", "Format of the log; json is one object a line.", one_of("text", "json"), "Log"
    )
    timeline: str = setting(
        "",
        "File for the last 100,000 launches, steps and requests over time, written when the "
        "server stops, for Perfetto.",
        group="Log",
        metavar="FILE",
    )
    capture: str = setting(
        "",
        "File that the token ids of some requests and answers are added to, for `jmoe distill "
        "--data FILE`: united experts of what is really asked (distillation.md). They are as good "
        "as the text (security.md).",
        group="Brownout",
        metavar="FILE",
    )
    capture_share: float = setting(
        0.01,
        "Share of the requests, drawn at random, that are captured; never those with allow_audit "
        "false.",
        SHARE,
    )
    capture_max_mib: float = setting(
        64.0, "Size of the file, in MiB, at which capturing stops.", POSITIVE
    )
    engine: EngineConfig = field(default_factory=EngineConfig)


def _leaves(kind: type, before: str = "") -> Iterator[tuple[str, Any, Setting]]:
    """Yields the dotted key of each setting below `before`, with its type."""
    hints = get_type_hints(kind)
    for made in fields(kind):
        key, hint = f"{before}{made.name}", hints[made.name]
        if is_dataclass(hint):
            yield from _leaves(cast(type, hint), f"{key}.")
        else:
            yield key, hint, made.metadata["setting"]


@cache
def keys(kind: type = ServerConfig) -> dict[str, Any]:
    """Returns all dotted keys of a settings dataclass, with their types."""
    return {key: hint for key, hint, _ in _leaves(kind)}


@cache
def described() -> dict[str, Setting]:
    """Returns the `Setting` of each dotted key, in the order of the fields."""
    return {key: setting for key, _, setting in _leaves(ServerConfig)}
