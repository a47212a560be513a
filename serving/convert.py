"""Between the messages of `jmoe.v1` and the engine's dataclasses."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import (
    BrownoutChange,
    BrownoutState,
    EngineStats,
    Output,
    Priority,
    SamplingParams,
    ThresholdSpan,
)

if TYPE_CHECKING:
    from jmoe.api import Model

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.LATENCY_SENSITIVE,
    pb.LATENCY_SENSITIVE: Priority.LATENCY_SENSITIVE,
    pb.BEST_EFFORT: Priority.BEST_EFFORT,
}


def prompt(request: pb.GenerateRequest) -> str | list[int]:
    """The prompt. Raises InvalidRequest where it is missing or empty."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the prompt is missing; set text or tokens")
    found = request.text if kind == "text" else list(request.tokens.ids)
    if not found:
        raise InvalidRequest(f"the prompt is empty; send at least one token in {kind}")
    return found


def sampling(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults. Raises InvalidRequest for a value out of range."""
    # Only fields that are present are listed; the repeated ones come as containers.
    given = {field.name: value for field, value in message.ListFields()}
    for name in ("stop_token_ids", "stop"):
        given[name] = tuple(given.get(name, ()))
    return SamplingParams(**given)


def priority(request: pb.GenerateRequest) -> Priority:
    """Service class of a request. Raises InvalidRequest for a number the proto does not name."""
    try:
        return _PRIORITIES[request.priority]
    except KeyError:
        raise InvalidRequest(f"priority {request.priority} is unknown") from None


def response(out: Output) -> pb.GenerateResponse:
    """One message for one output; called for every token."""
    usage = out.usage
    return pb.GenerateResponse(
        request_id=out.request_id,
        text=out.text,
        token_ids=out.token_ids,
        logprobs=out.logprobs,
        finish_reason=out.finish_reason or "",
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            expert_visits=usage.expert_visits,
            degraded_visits=usage.degraded_visits,
        ),
        prompt_logprobs=out.prompt_logprobs,
        prefill_threshold=_span(out.prefill_threshold),
        decode_threshold=_span(out.decode_threshold),
    )


def _span(span: ThresholdSpan | None) -> pb.ThresholdSpan | None:
    if span is None:
        return None
    return pb.ThresholdSpan(min_percent=span.min_percent, max_percent=span.max_percent)


def brownout_change(request: pb.SetBrownoutRequest) -> BrownoutChange:
    """Absent fields are None."""
    return BrownoutChange(**{field.name: value for field, value in request.ListFields()})


def brownout_state(state: BrownoutState) -> pb.BrownoutState:
    """Field by field; the names are the same."""
    return pb.BrownoutState(**asdict(state))


def stats(found: EngineStats) -> pb.Stats:
    """Field by field; the names are the same."""
    return pb.Stats(**asdict(found))


def model_info(model: "Model") -> pb.ModelInfo:
    """What a caller may want to know of a loaded model."""
    cfg = model.config
    return pb.ModelInfo(
        name=model.name,
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
