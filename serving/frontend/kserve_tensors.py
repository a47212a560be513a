"""Converts between messages of the Open Inference Protocol and the engine's dataclasses.

Tensors and parameters are named as in Triton's vLLM backend. Unknown ones are refused by name. Does
not import jax.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import InvalidRequest, NotFound, shown
from serving.frontend import convert, vllm_names
from serving.proto.inference import inference_pb2 as pb
from serving.request import (
    MAX_REQUEST_ID_CHARS,
    MAX_SALT_CHARS,
    OPTIONS,
    Bounds,
    Output,
    Priority,
    SamplingParams,
    check_count,
)

VERSION = "1"
"""The only version of a served model."""
MAX_SAMPLING_BYTES = 256 << 10
"""Limit for `sampling_parameters`: four times the largest schema or grammar."""
_OTHER_BYTES = 16 << 10  # names, shapes, and other parameters
_MAX_TENSORS, _MAX_PARAMETERS = 32, 64
_MAX_TIMEOUT_US = 2**53

_RETURNS = {
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    **{f"return_{name}": "BOOL" for name in _RETURNS},
}
"""Datatypes of inputs; all but the first are optional, and each has one element."""
OUTPUTS = {"text_output": "BYTES", **_RETURNS}
"""Datatypes of outputs, in the order in which they are sent."""

_CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}
_PRIORITIES = {
    0: None,
    1: Priority.LATENCY_SENSITIVE,
    2: Priority.BEST_EFFORT,
}
"""Triton's priorities: 0 names none, and otherwise a lower number goes first."""
OWN_PARAMETERS = (
    *OPTIONS,
    "priority",
    "timeout",
    "cache_salt",
    "triton_enable_empty_final_response",
)
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


def max_request_bytes(bounds: Bounds) -> int:
    """Returns an upper bound on the bytes of a ModelInferRequest within bounds."""
    return convert.text_bytes(bounds) + MAX_SAMPLING_BYTES + _OTHER_BYTES


# ---- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a ModelInferRequest asks for."""

    prompt: str
    sampling: SamplingParams
    streams: bool  # one response per engine output, instead of one in all
    echoes: bool  # the text begins with the prompt
    outputs: frozenset[str]
    priority: Priority | None  # None: the default
    timeout_s: float | None
    salt: str
    options: dict[str, Any]  # of `serving.request.OPTIONS`, those that are given


def check_version(version: str) -> None:
    """Raises NotFound for a version that is not served."""
    if version not in ("", VERSION):
        raise NotFound(f"version {shown(version)} is not served; {VERSION!r} is, or leave it out")


def read(request: pb.ModelInferRequest, bounds: Bounds) -> Asked:
    """Reads a request. Raises InvalidRequest for anything missing, unknown, or out of bounds."""
    check_version(request.model_version)
    check_count("characters of id", len(request.id), MAX_REQUEST_ID_CHARS)
    given = _inputs(request)
    if "text_input" not in given:
        raise InvalidRequest("the input 'text_input' is missing; send the prompt in it")
    prompt = _text("text_input", given["text_input"])
    if bounds.max_prompt_chars:  # 0: no tokenizer; the engine reports that
        check_count("characters of text_input", len(prompt), bounds.max_prompt_chars)
    if not prompt:
        raise InvalidRequest("the input 'text_input' is empty; send at least one token")
    streams = given.get("stream", False)
    echoes = not given.get("exclude_input_in_output", streams)
    if streams and echoes:
        raise InvalidRequest(
            "exclude_input_in_output is false and stream is true; leave one of them out"
        )
    parameters = _parameters(request.parameters)
    outputs = _outputs(request, given)
    return Asked(
        prompt=prompt,
        sampling=_sampling(given.get("sampling_parameters"), parameters, outputs),
        streams=streams,
        echoes=echoes,
        outputs=outputs,
        priority=_priority(parameters.get("priority", 0)),
        timeout_s=_timeout_s(parameters.get("timeout", 0)),
        salt=_salt(parameters.get("cache_salt", "")),
        options=_options(parameters),
    )


def _inputs(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Returns each input's single element (bytes or bool) by name.

    Elements are in the tensors' `contents` or in `raw_input_contents`.
    """
    inputs, raw = request.inputs, request.raw_input_contents
    check_count("inputs", len(inputs), _MAX_TENSORS)
    if raw and len(raw) != len(inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} tensors of {len(inputs)} inputs; send one for each"
        )
    found: dict[str, Any] = {}
    for at, tensor in enumerate(inputs):
        name = tensor.name
        if name not in INPUTS:
            raise InvalidRequest(
                f"the input {shown(name)} is unknown; known are {', '.join(INPUTS)}"
            )
        if name in found:
            raise InvalidRequest(f"the input {name!r} is given twice; give it once")
        _check_tensor(tensor, has_raw=bool(raw))
        found[name] = _raw_element(name, raw[at]) if raw else _typed_element(name, tensor.contents)
    return found


def _check_tensor(tensor: pb.ModelInferRequest.InferInputTensor, has_raw: bool) -> None:
    name, shape = tensor.name, tensor.shape
    if tensor.datatype != INPUTS[name]:
        raise InvalidRequest(
            f"the input {name!r} has datatype {shown(tensor.datatype)}; it must be {INPUTS[name]}"
        )
    if not 1 <= len(shape) <= 2 or any(size != 1 for size in shape):
        raise InvalidRequest(
            f"the input {name!r} has shape {shown(list(shape[:8]))}; it must be [1] or [1, 1], "
            "one request a message"
        )
    _refuse_parameters(f"the input {name!r}", tensor.parameters)
    if has_raw and tensor.HasField("contents"):
        raise InvalidRequest(
            f"the input {name!r} has contents beside raw_input_contents; send either"
        )


def _refuse_parameters(what: str, parameters: Mapping[str, Any]) -> None:
    if parameters:
        raise InvalidRequest(
            f"{what} has the parameter {shown(next(iter(parameters)))}; tensors take none here"
        )


def _typed_element(name: str, contents: pb.InferTensorContents) -> Any:
    wanted = _CONTENTS[INPUTS[name]]
    for field, values in contents.ListFields():
        if field.name != wanted:
            raise InvalidRequest(f"the input {name!r} has {field.name}; it must have {wanted}")
        if len(values) == 1:
            return values[0]
    count = len(getattr(contents, wanted))
    raise InvalidRequest(f"the input {name!r} has {count} elements; it must have 1")


def _raw_element(name: str, raw: bytes) -> Any:
    if INPUTS[name] == "BOOL":
        if raw not in (b"\0", b"\1"):
            raise InvalidRequest(f"the input {name!r} is {shown(raw)}; it must be one byte, 0 or 1")
        return raw == b"\1"
    if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
        raise InvalidRequest(
            f"the input {name!r} has {len(raw)} raw bytes, which are no element of BYTES: four "
            "bytes of its length, the lowest first, then itself"
        )
    return raw[4:]


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the input {name!r} is no UTF-8 ({error.reason} at byte {error.start}); encode it so"
        ) from None


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    check_count("parameters", len(given), _MAX_PARAMETERS)
    found: dict[str, Any] = {}
    for name in given:
        if name in _SEQUENCES:
            raise InvalidRequest(f"the parameter {name!r} is not served; requests are independent")
        kind = given[name].WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"the parameter {shown(name)} has no value; give it one")
        found[name] = getattr(given[name], kind)
    # Accepted without effect: the last response always has the final text, and no empty one
    # follows.
    name = "triton_enable_empty_final_response"
    _truth(name, found.get(name, False))
    return found


def _sampling(
    text: bytes | None, parameters: Mapping[str, Any], outputs: frozenset[str]
) -> SamplingParams:
    """Merges the `sampling_parameters` tensor and the request's parameters."""
    given: dict[str, Any] = {}
    if text is not None:
        check_count("bytes of sampling_parameters", len(text), MAX_SAMPLING_BYTES)
        given = vllm_names.read_json(_text("sampling_parameters", text), "sampling_parameters")
    for name, value in parameters.items():
        if name in OWN_PARAMETERS:
            continue
        if name in given:
            raise InvalidRequest(
                f"{shown(name)} is a parameter and in sampling_parameters; give it once"
            )
        given[name] = value
    if outputs & {"logprobs", "cumulative_logprob"} and given.get("logprobs") is None:
        given["logprobs"] = 0
    return vllm_names.sampling(given)


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name} is {shown(value)}; it must be true or false")
    return value


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: parameters[name] for name in OPTIONS if name in parameters}
    for name, value in found.items():
        if name != "max_degraded_percent":  # which the engine checks
            _truth(name, value)
    return found


def _salt(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"the parameter cache_salt is {shown(value)}; it must be text")
    check_count("characters of cache_salt", len(value), MAX_SALT_CHARS)
    return value


def _priority(value: Any) -> Priority | None:
    if isinstance(value, str) and value in list(Priority):
        return Priority(value)
    if isinstance(value, int) and not isinstance(value, bool) and value in _PRIORITIES:
        return _PRIORITIES[value]
    names = " or ".join(repr(str(one)) for one in Priority)
    raise InvalidRequest(
        f"the parameter priority is {shown(value)}; it must be {names}, or 1 for the first of "
        "them, 2 for the other, and 0 for the default"
    )


def _timeout_s(value: Any) -> float | None:
    """Converts Triton's timeout, in microseconds, to seconds; 0 means none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TIMEOUT_US:
        raise InvalidRequest(
            f"the parameter timeout is {shown(value)}; it must be a whole number of microseconds, "
            f"{_MAX_TIMEOUT_US} at most (0: none)"
        )
    return value / 1e6 if value else None


def _outputs(request: pb.ModelInferRequest, given: Mapping[str, Any]) -> frozenset[str]:
    """Returns the outputs that are named (default: the text) or requested by a `return_` input."""
    check_count("outputs", len(request.outputs), _MAX_TENSORS)
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest(
                f"the output {shown(output.name)} is unknown; known are {', '.join(OUTPUTS)}"
            )
        _refuse_parameters(f"the output {output.name!r}", output.parameters)
    named = {output.name for output in request.outputs} or {"text_output"}
    return frozenset(named | {name for name in _RETURNS if given.get(f"return_{name}")})


# ---- responses --------------------------------------------------------------------------------


class Answer:
    """Makes the responses to one request."""

    def __init__(
        self,
        request_id: str,
        model: str,
        asked: Asked,
        decode: Callable[[int], str] | None,
    ) -> None:
        """`decode` returns the text of a token; None if the model has no tokenizer."""
        self._request_id, self._model, self._asked, self._decode = request_id, model, asked, decode
        self._texts = [asked.prompt] if asked.echoes else []
        self._num_tokens = 0
        self._logprobs = bytearray()  # their JSON so far, which is a list's without brackets
        self._cumulative_logprob = 0.0

    def add(self, out: Output) -> pb.ModelInferResponse | None:
        """Returns the response to send for an output.

        If the request does not stream, returns None until the last output, and then a single
        response.
        """
        self._texts.append(out.text)
        self._num_tokens += len(out.token_ids)
        self._cumulative_logprob += sum(out.logprobs)
        if "logprobs" in self._asked.outputs:
            for entry in self._entries(out):
                self._logprobs += b", " if self._logprobs else b""
                self._logprobs += json.dumps(entry).encode()
        if out.finish_reason is None and not self._asked.streams:
            return None
        response = self._response(out)
        self._texts.clear()
        self._num_tokens = 0
        self._logprobs.clear()
        return response

    def _response(self, out: Output) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(
            model_name=self._model, model_version=VERSION, id=self._request_id
        )
        for name, datatype in OUTPUTS.items():
            if name in self._asked.outputs:
                response.outputs.add(name=name, datatype=datatype, shape=[1])
                response.raw_output_contents.append(self._element(name, out))
        parameters: dict[str, Any] = {"triton_final_response": out.finish_reason is not None}
        if out.finish_reason is not None:
            parameters |= _degraded(out)
        set_parameters(response, parameters)
        return response

    def _element(self, name: str, out: Output) -> bytes:
        match name:
            case "text_output":  # an unpaired surrogate has no UTF-8
                return _with_length("".join(self._texts).encode("utf-8", "replace"))
            case "finish_reason":
                return _with_length(str(out.finish_reason).encode())  # unfinished: as in Triton
            case "cumulative_logprob":
                return struct.pack("<f", self._cumulative_logprob)
            case "logprobs":
                return _with_length(b"[%b]" % self._logprobs)
            case "num_input_tokens":
                return struct.pack("<I", out.usage.prompt_tokens)
            case _:
                return struct.pack("<I", self._num_tokens)

    def _entries(self, out: Output) -> Iterator[dict[int, dict[str, Any]]]:
        """Yields, for each token, the log-probabilities of it and the likeliest tokens, by id."""
        top = out.top_logprobs or ((),) * len(out.token_ids)
        for token, logprob, likeliest in zip(out.token_ids, out.logprobs, top, strict=True):
            ranked = {
                other: self._entry(other, value, rank)
                for rank, (other, value) in enumerate(likeliest, 1)
            }
            yield {token: self._entry(token, logprob, None), **ranked}

    def _entry(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": logprob if math.isfinite(logprob) else None,
            "rank": rank,
            "decoded_token": None if self._decode is None else self._decode(token),
        }


def _with_length(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _degraded(out: Output) -> dict[str, Any]:
    """Returns parameters that say how brownout (and prefix reuse) affected the request."""
    usage = out.usage
    found: dict[str, Any] = {
        "expert_visits": usage.expert_visits,
        "degraded_visits": usage.degraded_visits,
    }
    if usage.cached_tokens:
        found["cached_tokens"] = usage.cached_tokens
    if usage.expert_visits:
        found["degraded_share"] = usage.degraded_visits / usage.expert_visits
    if not math.isnan(usage.expected_loss):
        found["expected_loss"] = usage.expected_loss
    for phase, span in (("prefill", out.prefill_threshold), ("decode", out.decode_threshold)):
        if span is not None:
            found[f"{phase}_threshold_min_percent"] = span.min_percent
            found[f"{phase}_threshold_max_percent"] = span.max_percent
    return found


def set_parameters(
    message: pb.ModelInferRequest | pb.ModelInferResponse, values: Mapping[str, Any]
) -> None:
    """Sets a message's parameters, each with the type of its value."""
    kinds = {
        bool: "bool_param",
        int: "int64_param",
        float: "double_param",
        str: "string_param",
    }
    for name, value in values.items():
        setattr(message.parameters[name], kinds[type(value)], value)
