from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    LATENCY_SENSITIVE: _ClassVar[Priority]
    BEST_EFFORT: _ClassVar[Priority]
PRIORITY_UNSPECIFIED: Priority
LATENCY_SENSITIVE: Priority
BEST_EFFORT: Priority

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "directory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name", "drain_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    drain_s: float
    def __init__(self, name: _Optional[str] = ..., drain_s: _Optional[float] = ...) -> None: ...

class ServedModels(_message.Message):
    __slots__ = ("names", "num_vacant", "num_ended")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_VACANT_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    num_vacant: int
    num_ended: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., num_vacant: _Optional[int] = ..., num_ended: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "stop", "ignore_eos", "logprobs", "prompt_logprobs", "top_logprobs", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex", "grammar", "min_new_tokens", "include_stop", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logprobs: bool
    prompt_logprobs: bool
    top_logprobs: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    json_schema: str
    regex: str
    grammar: str
    min_new_tokens: int
    include_stop: bool
    skip_special_tokens: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., prompt_logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., min_new_tokens: _Optional[int] = ..., include_stop: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokens", "sampling", "allow_brownout", "priority", "model", "reuse_prefix", "cache_salt", "max_degraded_percent", "allow_audit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ALLOW_BROWNOUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REUSE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_DEGRADED_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_AUDIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokens: TokenIds
    sampling: SamplingParams
    allow_brownout: bool
    priority: Priority
    model: str
    reuse_prefix: bool
    cache_salt: str
    max_degraded_percent: int
    allow_audit: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., allow_brownout: _Optional[bool] = ..., priority: _Optional[_Union[Priority, str]] = ..., model: _Optional[str] = ..., reuse_prefix: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., max_degraded_percent: _Optional[int] = ..., allow_audit: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "expert_visits", "degraded_visits", "cached_tokens", "expected_loss")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_VISITS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_VISITS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LOSS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    expert_visits: int
    degraded_visits: int
    cached_tokens: int
    expected_loss: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., expert_visits: _Optional[int] = ..., degraded_visits: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., expected_loss: _Optional[float] = ...) -> None: ...

class ThresholdSpan(_message.Message):
    __slots__ = ("min_percent", "max_percent")
    MIN_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_PERCENT_FIELD_NUMBER: _ClassVar[int]
    min_percent: int
    max_percent: int
    def __init__(self, min_percent: _Optional[int] = ..., max_percent: _Optional[int] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish_reason", "usage", "prompt_logprobs", "prefill_threshold", "decode_threshold", "top_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DECODE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: str
    usage: Usage
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prefill_threshold: ThresholdSpan
    decode_threshold: ThresholdSpan
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., prefill_threshold: _Optional[_Union[ThresholdSpan, _Mapping]] = ..., decode_threshold: _Optional[_Union[ThresholdSpan, _Mapping]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "status", "model", "platform", "max_num_seqs", "max_model_len", "max_queue_len", "num_kv_pages", "kv_page_size", "threshold_buckets_percent", "admin_port", "policy", "part_layers", "num_programs", "best_effort_wait_s", "models", "admin_host", "implementations")
    class PartLayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ImplementationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_BUCKETS_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ADMIN_PORT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PART_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_HOST_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    status: str
    model: str
    platform: str
    max_num_seqs: int
    max_model_len: int
    max_queue_len: int
    num_kv_pages: int
    kv_page_size: int
    threshold_buckets_percent: _containers.RepeatedScalarFieldContainer[int]
    admin_port: int
    policy: str
    part_layers: _containers.ScalarMap[str, int]
    num_programs: int
    best_effort_wait_s: float
    models: _containers.RepeatedScalarFieldContainer[str]
    admin_host: str
    implementations: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., status: _Optional[str] = ..., model: _Optional[str] = ..., platform: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_queue_len: _Optional[int] = ..., num_kv_pages: _Optional[int] = ..., kv_page_size: _Optional[int] = ..., threshold_buckets_percent: _Optional[_Iterable[int]] = ..., admin_port: _Optional[int] = ..., policy: _Optional[str] = ..., part_layers: _Optional[_Mapping[str, int]] = ..., num_programs: _Optional[int] = ..., best_effort_wait_s: _Optional[float] = ..., models: _Optional[_Iterable[str]] = ..., admin_host: _Optional[str] = ..., implementations: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "num_layers", "d_model", "vocab_size", "num_experts", "experts_per_token", "united_ways", "num_parameters", "dtype", "max_position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNITED_WAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    num_layers: int
    d_model: int
    vocab_size: int
    num_experts: int
    experts_per_token: int
    united_ways: _containers.RepeatedScalarFieldContainer[int]
    num_parameters: int
    dtype: str
    max_position: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., num_layers: _Optional[int] = ..., d_model: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., united_ways: _Optional[_Iterable[int]] = ..., num_parameters: _Optional[int] = ..., dtype: _Optional[str] = ..., max_position: _Optional[int] = ...) -> None: ...

class GetBrownoutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetBrownoutRequest(_message.Message):
    __slots__ = ("strategy", "way", "prefill_threshold_percent", "decode_threshold_percent", "salc_enabled", "ttft_slo_s", "itl_slo_s", "controller", "prefill_company", "keep", "max_expected_loss", "model", "floor_percent", "ceiling_percent")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_THRESHOLD_PERCENT_FIELD_NUMBER: _ClassVar[int]
    DECODE_THRESHOLD_PERCENT_FIELD_NUMBER: _ClassVar[int]
    SALC_ENABLED_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    ITL_SLO_S_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPANY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    MAX_EXPECTED_LOSS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FLOOR_PERCENT_FIELD_NUMBER: _ClassVar[int]
    CEILING_PERCENT_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    way: int
    prefill_threshold_percent: int
    decode_threshold_percent: int
    salc_enabled: bool
    ttft_slo_s: float
    itl_slo_s: float
    controller: str
    prefill_company: bool
    keep: str
    max_expected_loss: float
    model: str
    floor_percent: int
    ceiling_percent: int
    def __init__(self, strategy: _Optional[str] = ..., way: _Optional[int] = ..., prefill_threshold_percent: _Optional[int] = ..., decode_threshold_percent: _Optional[int] = ..., salc_enabled: _Optional[bool] = ..., ttft_slo_s: _Optional[float] = ..., itl_slo_s: _Optional[float] = ..., controller: _Optional[str] = ..., prefill_company: _Optional[bool] = ..., keep: _Optional[str] = ..., max_expected_loss: _Optional[float] = ..., model: _Optional[str] = ..., floor_percent: _Optional[int] = ..., ceiling_percent: _Optional[int] = ...) -> None: ...

class ModelBrownout(_message.Message):
    __slots__ = ("name", "ttft_slo_s", "itl_slo_s", "floor_percent", "ceiling_percent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    ITL_SLO_S_FIELD_NUMBER: _ClassVar[int]
    FLOOR_PERCENT_FIELD_NUMBER: _ClassVar[int]
    CEILING_PERCENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttft_slo_s: float
    itl_slo_s: float
    floor_percent: int
    ceiling_percent: int
    def __init__(self, name: _Optional[str] = ..., ttft_slo_s: _Optional[float] = ..., itl_slo_s: _Optional[float] = ..., floor_percent: _Optional[int] = ..., ceiling_percent: _Optional[int] = ...) -> None: ...

class BrownoutState(_message.Message):
    __slots__ = ("strategy", "way", "prefill_threshold_percent", "decode_threshold_percent", "salc_enabled", "ttft_slo_s", "itl_slo_s", "warning_factor", "ttft_p90_s", "itl_p90_s", "controller", "prefill_company", "predicted_ttft_p90_s", "predicted_itl_p90_s", "objective_state", "least_ttft_s", "least_itl_s", "keep", "max_expected_loss", "least_threshold_percent", "models")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_THRESHOLD_PERCENT_FIELD_NUMBER: _ClassVar[int]
    DECODE_THRESHOLD_PERCENT_FIELD_NUMBER: _ClassVar[int]
    SALC_ENABLED_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    ITL_SLO_S_FIELD_NUMBER: _ClassVar[int]
    WARNING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    TTFT_P90_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P90_S_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPANY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_P90_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ITL_P90_S_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_STATE_FIELD_NUMBER: _ClassVar[int]
    LEAST_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    LEAST_ITL_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    MAX_EXPECTED_LOSS_FIELD_NUMBER: _ClassVar[int]
    LEAST_THRESHOLD_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    way: int
    prefill_threshold_percent: float
    decode_threshold_percent: float
    salc_enabled: bool
    ttft_slo_s: float
    itl_slo_s: float
    warning_factor: float
    ttft_p90_s: float
    itl_p90_s: float
    controller: str
    prefill_company: bool
    predicted_ttft_p90_s: float
    predicted_itl_p90_s: float
    objective_state: str
    least_ttft_s: float
    least_itl_s: float
    keep: str
    max_expected_loss: float
    least_threshold_percent: int
    models: _containers.RepeatedCompositeFieldContainer[ModelBrownout]
    def __init__(self, strategy: _Optional[str] = ..., way: _Optional[int] = ..., prefill_threshold_percent: _Optional[float] = ..., decode_threshold_percent: _Optional[float] = ..., salc_enabled: _Optional[bool] = ..., ttft_slo_s: _Optional[float] = ..., itl_slo_s: _Optional[float] = ..., warning_factor: _Optional[float] = ..., ttft_p90_s: _Optional[float] = ..., itl_p90_s: _Optional[float] = ..., controller: _Optional[str] = ..., prefill_company: _Optional[bool] = ..., predicted_ttft_p90_s: _Optional[float] = ..., predicted_itl_p90_s: _Optional[float] = ..., objective_state: _Optional[str] = ..., least_ttft_s: _Optional[float] = ..., least_itl_s: _Optional[float] = ..., keep: _Optional[str] = ..., max_expected_loss: _Optional[float] = ..., least_threshold_percent: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelBrownout, _Mapping]]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("model", "num_scored", "num_unscored", "excess_nats", "excess_low_nats", "excess_high_nats", "disagreement", "disagreement_low", "disagreement_high", "is_exempt", "key", "expected_nats")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    EXCESS_NATS_FIELD_NUMBER: _ClassVar[int]
    EXCESS_LOW_NATS_FIELD_NUMBER: _ClassVar[int]
    EXCESS_HIGH_NATS_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_LOW_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_HIGH_FIELD_NUMBER: _ClassVar[int]
    IS_EXEMPT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NATS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_scored: int
    num_unscored: int
    excess_nats: float
    excess_low_nats: float
    excess_high_nats: float
    disagreement: float
    disagreement_low: float
    disagreement_high: float
    is_exempt: bool
    key: str
    expected_nats: float
    def __init__(self, model: _Optional[str] = ..., num_scored: _Optional[int] = ..., num_unscored: _Optional[int] = ..., excess_nats: _Optional[float] = ..., excess_low_nats: _Optional[float] = ..., excess_high_nats: _Optional[float] = ..., disagreement: _Optional[float] = ..., disagreement_low: _Optional[float] = ..., disagreement_high: _Optional[float] = ..., is_exempt: _Optional[bool] = ..., key: _Optional[str] = ..., expected_nats: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "priority", "count")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    key: str
    priority: str
    count: int
    def __init__(self, key: _Optional[str] = ..., priority: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_pages_used", "kv_pages_total", "compilations_since_ready", "requests_finished", "requests_aborted", "requests_rejected", "steps_prefill", "steps_decode", "expert_visits", "degraded_visits", "uptime_s", "requests_failed", "parks", "joins", "evictions", "reused_tokens", "kv_pages_kept", "kept_pages_evicted", "full_decode_step_s", "refused", "audits", "priced_tokens", "expected_loss_nats", "prefix_queries")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_SINCE_READY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    STEPS_DECODE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_VISITS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_VISITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_KEPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    FULL_DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    PRICED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LOSS_NATS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_pages_used: int
    kv_pages_total: int
    compilations_since_ready: int
    requests_finished: int
    requests_aborted: int
    requests_rejected: int
    steps_prefill: int
    steps_decode: int
    expert_visits: int
    degraded_visits: int
    uptime_s: float
    requests_failed: int
    parks: int
    joins: int
    evictions: int
    reused_tokens: int
    kv_pages_kept: int
    kept_pages_evicted: int
    full_decode_step_s: float
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    audits: _containers.RepeatedCompositeFieldContainer[Audit]
    priced_tokens: int
    expected_loss_nats: float
    prefix_queries: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_pages_used: _Optional[int] = ..., kv_pages_total: _Optional[int] = ..., compilations_since_ready: _Optional[int] = ..., requests_finished: _Optional[int] = ..., requests_aborted: _Optional[int] = ..., requests_rejected: _Optional[int] = ..., steps_prefill: _Optional[int] = ..., steps_decode: _Optional[int] = ..., expert_visits: _Optional[int] = ..., degraded_visits: _Optional[int] = ..., uptime_s: _Optional[float] = ..., requests_failed: _Optional[int] = ..., parks: _Optional[int] = ..., joins: _Optional[int] = ..., evictions: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., kv_pages_kept: _Optional[int] = ..., kept_pages_evicted: _Optional[int] = ..., full_decode_step_s: _Optional[float] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ..., audits: _Optional[_Iterable[_Union[Audit, _Mapping]]] = ..., priced_tokens: _Optional[int] = ..., expected_loss_nats: _Optional[float] = ..., prefix_queries: _Optional[int] = ...) -> None: ...
