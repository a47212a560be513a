"""Serving configuration: dataclasses, filled from a YAML preset and overridden key by key."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BrownoutConfig:
    """Brownout at start. Latencies in seconds."""

    strategy: str = "auto"  # partial where the model has united experts, else zero
    way: int = 0  # 0: the largest the model has; without united experts, zero brownout
    ways: tuple[int, ...] = ()  # ways that may be switched to while serving; empty: all
    prefill_threshold_percent: int = 100
    decode_threshold_percent: int = 100
    salc: bool = True  # a controller moves the thresholds; False keeps them
    ttft_slo_s: float = 1.0
    itl_slo_s: float = 0.1
    best_effort_ttft_slo_s: float = 0.0  # 0: best effort has no objective, and moves no threshold
    best_effort_itl_slo_s: float = 0.0


@dataclass(frozen=True)
class SalcConfig:
    """SLO-aware latency control. The paper's values for its Algorithm 2: 0.8, 10, 0.8."""

    controller: str = "algorithm2"  # predictive, or module:Class of your own
    warning_factor: float = 0.8
    increment_percent: float = 10.0
    shrink_ratio: float = 0.8
    interval_s: float = 2.0  # between two updates
    window_s: float = 4.0  # samples older than this do not count
    min_samples: int = 10  # fewer: no change
    floor_percent: float = 0.0
    ceiling_percent: float = 100.0


@dataclass(frozen=True)
class BalanceConfig:
    """Over a mesh: copies of experts that get much of the work, so that all devices get as much.

    Copies are made while a prefill step runs, for its own rows (Libra), and between steps, for what
    was seen lately; the latter stay in spare slots.
    """

    replicas: int = 0  # experts that a device copies for a layer of a prefill step; 0: none
    replicas_per_pair: int = 2  # of them, that one device sends another
    replicas_local_share: float = 0.5  # of them, for what a device's own rows visit most
    predictor: str = (
        "auto"  # of a step's next layer: router, probe; auto: the probe if there is one
    )
    replicas_min_tokens: int = 0  # a device, of the smallest step with copies; 0: by the cost model
    spare_slots: int = 0  # a layer and device, for copies that stay; 0: experts stay where they are
    interval_s: float = 5.0  # between two looks at the load
    half_life_s: float = 3.0  # after which load seen counts half, and for which a copy has to pay
    min_gain: float = 0.02  # of a layer's fullest device: what less is no reason to copy
    load_file: str = ""  # where the load seen is kept over restarts; empty: nowhere


@dataclass(frozen=True)
class AsynchronousConfig:
    """Asynchronous expert parallelism: attention and experts on devices of their own (AMoE)."""

    attention: int = 0  # workers, one a device, that share the requests
    experts: int = 0  # workers, one a device, that share the experts
    workers: str = "threads"  # of the server's process; or processes, or ray: on several hosts
    worker_timeout_s: float = 8.0  # silence after which a process counts as gone
    ray_address: str = ""  # of a cluster that is there, auto finds it; empty: the server starts one
    copies: int = 1  # expert workers that have each expert
    layer_rule: str = "defrag"  # which layer runs next: mtfs, flfs, or module:Class of your own
    min_batch: int = 1  # rows that a layer waits for
    max_wait_s: float = 0.002  # but not longer than this
    max_age_s: float = 0.25  # from which on a layer's rows go before all that are younger


@dataclass(frozen=True)
class EngineConfig:
    """Everything `jmoe serve` can be told. Sizes are counts; times are seconds."""

    model: str = "bundled"  # a directory, or OWNER/NAME of the Hugging Face Hub
    hub_revision: str = ""  # branch, tag or commit of a model of the Hub; empty: its main branch
    chat_template: str = ""  # file with a Jinja template, in place of the model's own
    models: tuple[str, ...] = ()  # NAME=DIR of each model of a family, in place of model
    family: str = ""  # family.json of jmoe consolidate; empty: the models share no expert
    resident_sets: int = 0  # models whose other weights are on the device at a time; 0: all
    resident_experts: int = 0  # routed ones of a family on the device for good; 0: all
    spare_experts: int = 0  # slots that others, of host memory, can be fetched into
    model_stay_s: float = 0.0  # that a busy one stays there; 0: nine times what a change takes
    mixed_models: int = 2  # whose rows a decode step may have where that pays; 0 or 1: one model's
    dtype: str = "bfloat16"
    mode: str = "auto"  # steps, all devices together; aep, each by itself; auto: what pays
    mesh: str = ""  # ep=N: experts spread over N devices, which share the requests; empty: one
    coordinator: str = ""  # HOST:PORT of process 0, where a mesh spans several processes
    num_processes: int = 0  # of that mesh, with the same number of devices each; 0: one, alone
    process_index: int = -1  # which of them this is; 0 is who serves requests, the others follow
    secret_file: str = ""  # the secret of a server's processes; empty: JMOE_CLUSTER_SECRET, or none
    join_timeout_s: float = 300.0  # at the start, how long processes wait for each other
    peer_timeout_s: float = 30.0  # within which a process notices that another one is gone
    max_num_seqs: int = 64  # sequences decoded together
    max_model_len: int = 0  # positions a sequence, prompt and output; 0: the model's, 2048 at most
    max_queue_len: int = 512  # requests that wait with every slot taken; more are refused
    max_logprobs_per_call: int = 500_000  # answers times tokens times 1 + top_logprobs
    queue_timeout_s: float = 0.0  # a request that waits longer for its first step ends; 0: never
    admission: str = "queue"  # or objective: refuse what would get its first token too late
    page_size: int = 64
    num_pages: int = 0  # 0: on a GPU by memory_fraction; else max_num_seqs full sequences
    memory_fraction: float = 0.9  # of a GPU's memory: weights, what steps need, and KV pages
    max_prefill_tokens: int = 512  # prompt tokens a step: chunk size and largest token bucket
    max_prefill_seqs: int = 16  # chunks a prefill step
    decode_buckets: tuple[int, ...] = ()  # batch sizes compiled for; empty: by device
    prefill_buckets: tuple[int, ...] = ()  # token counts compiled for; empty: by device
    threshold_buckets_percent: tuple[int, ...] = ()  # capacities compiled for; empty: by device
    policy: str = "ls_first"  # fcfs, edf, ls_first, qllm, or module:Class of your own
    plugin_slow_ms: float = 20.0  # of a call of a policy or controller, then logged; 0: never
    part_layers: int = 0  # layers launched at once while best effort is there; 0: as measured
    prefix_reuse: str = "auto"  # prompts begin with pages that others computed: on, off
    prefill_company: bool = True  # prompts wait for others, not for long, while rows decode
    reserved_ls_seqs: int = -1  # slots beside max_num_seqs for latency-sensitive; -1: an eighth
    max_best_effort_queue_len: int = 0  # of best effort that waits; 0: max_queue_len
    best_effort_share: float = 0.05  # of device time, below which no best-effort step is parked
    best_effort_max_wait_s: float = 30.0  # then it counts as latency-sensitive; 0: never
    compilation_cache: str = "~/.cache/jmoe/xla"  # empty: off
    enforce_eager: bool = False  # launch kernel by kernel: no step is a CUDA graph
    cpu_threads: int = 0  # of XLA on a CPU, leaving the others to the host; 0: all
    watchdog_s: float = 60.0  # a step that takes longer has failed, and the engine with it; 0: off
    check_weights: bool = True  # refuse weights that are not finite, by name
    allow_unknown_config: tuple[str, ...] = ()  # keys of config.json that may be ignored
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
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one; it is printed
    http_port: int = 0  # OpenAI's API over HTTP; 0: 8000 or the next free one, printed; -1: off
    metrics_port: int = 0  # /metrics, /healthz, /readyz over HTTP; 0: off
    drain_timeout_s: float = 30.0
    admin_host: str = "127.0.0.1"  # the admin service has a listener of its own
    admin_port: int = 0  # 0: any free one; it is printed
    admin_http_port: int = 0  # the live page, on admin_host; 0: any free one, printed; -1: off
    admin_on_main_port: bool = False  # True: whoever may generate may also set brownout
    keys_file: str = (
        ""  # API keys, as hashes; reread when it changes; empty: anybody may do anything
    )
    tls_cert: str = ""  # PEM, with tls_key: every port for clients is encrypted; reread on a change
    tls_key: str = ""
    tls_client_ca: str = ""  # PEM: clients need a certificate of one of these (mutual TLS)
    request_timeout_s: float = 0.0  # of requests that name none; 0: they have none
    otlp_endpoint: str = ""  # URL that takes OpenTelemetry traces over HTTP; empty: no traces
    exit_on_failure: bool = True  # False: a failed engine leaves a process that is NOT_SERVING
    max_connections: int = 512  # more are closed as they come
    max_concurrent_calls: int = 0  # 0: twice what the engine's slots and queue hold
    max_bytes_in_flight: int = 256 << 20  # of messages being received; 4 MiB are reserved for each
    message_timeout_s: float = 10.0  # from the opening of a call to its message
    served_model_name: str = ""  # what clients call the model; empty: its directory's name
    status_interval_s: float = 10.0  # between lines of the log about load and latency; 0: none
    log_format: str = "text"  # or json: an object a line
    timeline: str = ""  # file that gets a timeline in Chrome's trace format at the end; empty: none
    engine: EngineConfig = field(default_factory=EngineConfig)
