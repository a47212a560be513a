"""Converts between the messages of `jmoe.v1` and the engine's dataclasses."""

import uuid
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest, shown
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import (
    MAX_LOGIT_BIASES,
    MAX_REQUEST_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURE_CHARS,
    Bounds,
    BrownoutChange,
    BrownoutState,
    EngineStats,
    Output,
    Priority,
    SamplingParams,
    Structure,
    StructureKind,
    check_count,
)

if TYPE_CHECKING:
    from jmoe.api import Model

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: None,
    pb.LATENCY_SENSITIVE: Priority.LATENCY_SENSITIVE,
    pb.BEST_EFFORT: Priority.BEST_EFFORT,
}


_BYTES_PER_ID, _BYTES_PER_CHAR = 16, 4  # upper bounds: an unpacked negative id has 11; UTF-8
_BYTES_PER_BIAS = 24  # tags, an id, a float
_OTHER_BYTES = 16 << 10  # names, numbers and tags


def max_request_bytes(bounds: Bounds) -> int:
    """Returns an upper bound on the bytes of a GenerateRequest within bounds."""
    prompt = max(_BYTES_PER_ID * bounds.max_prompt_tokens, text_bytes(bounds))
    stops = MAX_STOP_STRINGS * _BYTES_PER_CHAR * MAX_STOP_CHARS + _BYTES_PER_ID * MAX_STOP_TOKEN_IDS
    shaping = _BYTES_PER_BIAS * MAX_LOGIT_BIASES + _BYTES_PER_CHAR * MAX_STRUCTURE_CHARS
    return prompt + stops + shaping + _OTHER_BYTES


def text_bytes(bounds: Bounds) -> int:
    """Returns the most bytes that a prompt's text can have."""
    return _BYTES_PER_CHAR * bounds.max_prompt_chars


def prompt(request: pb.GenerateRequest, bounds: Bounds) -> str | list[int]:
    """Returns the prompt. Raises InvalidRequest if it is missing, empty, or too long."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the prompt is missing; set text or tokens")
    if kind == "text":
        found = request.text
        if bounds.max_prompt_chars:  # 0: no tokenizer; the engine reports that
            check_count("characters of text", len(found), bounds.max_prompt_chars)
    else:
        check_count("prompt tokens", len(request.tokens.ids), bounds.max_prompt_tokens)
        found = list(request.tokens.ids)
    if not found:
        raise InvalidRequest(f"the prompt is empty; send at least one token in {kind}")
    return found


def salt(request: pb.GenerateRequest) -> str:
    """Returns the request's own cache salt. Raises InvalidRequest if it is too long."""
    check_count("characters of cache_salt", len(request.cache_salt), MAX_SALT_CHARS)
    return request.cache_salt


def request_id(request: pb.GenerateRequest) -> str:
    """Returns the request's id, or a generated one. Raises InvalidRequest if it is too long."""
    check_count("characters of request_id", len(request.request_id), MAX_REQUEST_ID_CHARS)
    return request.request_id or uuid.uuid4().hex


def sampling(message: pb.SamplingParams) -> SamplingParams:
    """Converts sampling parameters; absent fields take the model's defaults, else the proto's.

    Raises InvalidRequest for a value out of range.
    """
    check_count("stop strings", len(message.stop), MAX_STOP_STRINGS)
    check_count("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    # Only fields that are present are listed; the repeated ones come as containers.
    given = {field.name: value for field, value in message.ListFields()}
    for name in ("stop_token_ids", "stop"):
        given[name] = tuple(given.get(name, ()))
    check_count("tokens in logit_bias", len(message.logit_bias), MAX_LOGIT_BIASES)
    given["logit_bias"] = tuple(message.logit_bias.items())
    if (kind := message.WhichOneof("structure")) is not None:
        given["structure"] = Structure(StructureKind(kind), given.pop(kind))
    return SamplingParams.of(given)


def priority(request: pb.GenerateRequest) -> Priority | None:
    """Returns the request's service class; None if it names none. Raises InvalidRequest for an
    unknown enum value.
    """
    try:
        return _PRIORITIES[request.priority]
    except KeyError:
        raise InvalidRequest(f"priority {shown(request.priority)} is unknown") from None


def response(out: Output) -> pb.GenerateResponse:
    """Converts an output to a message; called for every token, and so field by field, which takes
    a third of the time that the constructors take.
    """
    made = pb.GenerateResponse()
    made.request_id, made.text = out.request_id, out.text
    made.token_ids.extend(out.token_ids)
    usage, counts = made.usage, out.usage
    usage.prompt_tokens, usage.completion_tokens = counts.prompt_tokens, counts.completion_tokens
    usage.expert_visits, usage.degraded_visits = counts.expert_visits, counts.degraded_visits
    usage.cached_tokens = counts.cached_tokens
    if not isnan(counts.expected_loss):
        usage.expected_loss = counts.expected_loss
    if out.finish_reason is not None:
        made.finish_reason = out.finish_reason
    for span, found in (
        (made.prefill_threshold, out.prefill_threshold),
        (made.decode_threshold, out.decode_threshold),
    ):
        if found is not None:
            span.min_percent, span.max_percent = found.min_percent, found.max_percent
    if out.logprobs or out.prompt_logprobs:
        made.logprobs.extend(out.logprobs)
        made.prompt_logprobs.extend(out.prompt_logprobs)
    for likeliest in out.top_logprobs:
        top = made.top_logprobs.add()
        for token, logprob in likeliest:
            top.token_ids.append(token)
            top.logprobs.append(logprob)
    return made


def brownout_change(request: pb.SetBrownoutRequest) -> BrownoutChange:
    """Converts a change of settings; absent fields are None."""
    return BrownoutChange(**{field.name: value for field, value in request.ListFields()})


def brownout_state(state: BrownoutState) -> pb.BrownoutState:
    """Converts a BrownoutState, whose fields have the same names."""
    return pb.BrownoutState(**asdict(state))


def stats(found: EngineStats) -> pb.Stats:
    """Converts EngineStats, whose fields have the same names."""
    return pb.Stats(**asdict(found))


def model_info(name: str, model: "Model") -> pb.ModelInfo:
    """Describes a loaded model to clients, under the name that it is served as."""
    cfg = model.config
    return pb.ModelInfo(
        name=name,
        architecture=cfg.architecture,
        num_layers=cfg.num_layers,
        d_model=cfg.d_model,
        vocab_size=cfg.vocab_size,
        num_experts=cfg.num_experts,
        experts_per_token=cfg.experts_per_token,
        united_ways=sorted(model.united),
        num_parameters=model.num_parameters,
        dtype=str(model.dtype),
        max_position=cfg.max_position,
    )
