"""Requests of the Open Inference Protocol: fine ones, and nearly fine ones to fuzz with."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from benchmarks.hostile.messages import message, mutated
from serving.proto.inference import inference_pb2 as pb

_KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def request(text: str, sampling: dict[str, Any], **fields: Any) -> pb.ModelInferRequest:
    """Returns a request for `text` as one streams it, with other `fields` of the message."""
    made = pb.ModelInferRequest(**fields)
    add(made, "text_input", "BYTES", _element(text.encode()))
    add(made, "sampling_parameters", "BYTES", _element(json.dumps(sampling).encode()))
    return made


def add(made: pb.ModelInferRequest, name: str, datatype: str, raw: bytes) -> None:
    """Returns one more input with one element."""
    made.inputs.add(name=name, datatype=datatype, shape=[1])
    made.raw_input_contents.append(raw)


def set_parameter(made: pb.ModelInferRequest, name: str, value: Any) -> None:
    """Returns a parameter of its value's type."""
    setattr(made.parameters[name], _KINDS[type(value)], value)


def values_of(response: pb.ModelInferResponse) -> dict[str, str | int]:
    """Texts and whole numbers of the outputs, by name; other outputs are left out."""
    found: dict[str, str | int] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            found[output.name] = raw[4:].decode()
        elif output.datatype == "UINT32":
            (found[output.name],) = struct.unpack("<I", raw)
    return found


def _element(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


# ---- fuzz -------------------------------------------------------------------------------------

_NAMES = (
    *("text_input", "stream", "sampling_parameters", "exclude_input_in_output", "image"),
    *("return_finish_reason", "return_logprobs", "return_cumulative_logprob", "text_output"),
    *("return_num_input_tokens", "return_num_output_tokens", "finish_reason", "logprobs"),
)
_DATATYPES = ("BYTES", "BOOL", "INT32", "FP32", "", "bytes", "x" * 3000)
_SIZES = (0, 1, 1, 1, 2, -1, 2**31, 2**63 - 1, -(2**63))
_PARAMETERS = (
    *("priority", "timeout", "allow_brownout", "triton_enable_empty_final_response"),
    *("triton_final_response", "sequence_id", "max_tokens", "temperature", "", "x" * 2000),
)
_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "structured_outputs", "guided_decoding", "n", "best_of", "min_tokens"),
    *("skip_special_tokens", "lora_name", "", "\0", "maxtokens"),
)
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "backend", "")
_SCALARS = (
    *(None, True, False, 0, 1, 3, -1, 2**31, 2**63, 2**64, 10**30, 0.0, 0.5, 1.0, -1.0, 7.5),
    *(1e308, 1e-320, "", "a", "1", "0.5", "true", "nan", "inf", "\ud800", "é" * 40, "x" * 3000),
    *("1_0", " 4 ", "\u0664"),
)
_TEXTS = (b"", b"abc", b"\xff\xfe", b"\0", "é\U0001f600".encode(), b"x" * 9000, b"word " * 300)
_NOT_JSON = (b"", b"{", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"nul", b'{"n": NaN}', b"\xff")
_MOST_CHANGES = 4


def fuzzed(rng: random.Random) -> bytes:
    """Returns noise, absurd messages, and requests of which little is wrong, or nothing."""
    chance = rng.random()
    if chance < 0.25:
        return message(rng, pb.ModelInferRequest.DESCRIPTOR)
    made = request("abc", {"max_tokens": rng.randrange(1, 9)}, id=str(rng.getrandbits(32)))
    if rng.random() < 0.5:
        add(made, "stream", "BOOL", b"\1")
    for _ in range(rng.randrange(_MOST_CHANGES)):
        rng.choice(_CHANGES)(rng, made)
    found = made.SerializeToString()
    return mutated(rng, found) if chance < 0.4 else found


def _any(rng: random.Random, depth: int = 0) -> Any:
    """Returns a JSON value."""
    chance = rng.random()
    if depth > 3 or chance < 0.7:
        return rng.choice(_SCALARS)
    count = rng.choice((0, 1, 2, 70, 1100) if depth == 0 else (0, 1, 2))
    if chance < 0.85:
        return [_any(rng, depth + 1) for _ in range(count)]
    return {str(rng.choice(_SCALARS)): _any(rng, depth + 1) for _ in range(min(count, 20))}


def _some_sampling(rng: random.Random, made: pb.ModelInferRequest) -> None:
    given = {rng.choice(_SAMPLING): _any(rng) for _ in range(rng.randrange(4))}
    if rng.random() < 0.2:
        given["structured_outputs"] = {rng.choice(_STRUCTURES): _any(rng)}
    text = json.dumps({"max_tokens": 4, **given}).encode()
    _set_raw(rng, made, "sampling_parameters", _element(text))


def _no_sampling(rng: random.Random, made: pb.ModelInferRequest) -> None:
    _set_raw(rng, made, "sampling_parameters", _element(rng.choice(_NOT_JSON)))


def _other_text(rng: random.Random, made: pb.ModelInferRequest) -> None:
    _set_raw(rng, made, "text_input", _element(rng.choice(_TEXTS)))


def _set_raw(rng: random.Random, made: pb.ModelInferRequest, name: str, raw: bytes) -> None:
    for at, tensor in enumerate(made.inputs):
        if tensor.name == name and at < len(made.raw_input_contents):
            made.raw_input_contents[at] = raw


def _broken_raw(rng: random.Random, made: pb.ModelInferRequest) -> None:
    if made.raw_input_contents:
        at = rng.randrange(len(made.raw_input_contents))
        made.raw_input_contents[at] = rng.choice((b"", b"\1", b"\2", b"\5\0\0\0ab", b"\xff" * 9))


def _fewer_raw(rng: random.Random, made: pb.ModelInferRequest) -> None:
    del made.raw_input_contents[rng.randrange(3) :]


def _typed(rng: random.Random, made: pb.ModelInferRequest) -> None:
    del made.raw_input_contents[:]
    for tensor in made.inputs:
        if tensor.datatype == "BOOL":
            tensor.contents.bool_contents.append(rng.random() < 0.5)
        elif tensor.name == "sampling_parameters":
            tensor.contents.bytes_contents.append(b'{"max_tokens": 3}')
        else:
            tensor.contents.bytes_contents.extend([rng.choice(_TEXTS)] * rng.choice((0, 1, 1, 2)))


def _odd_tensor(rng: random.Random, made: pb.ModelInferRequest) -> None:
    tensor = rng.choice(made.inputs)
    change = rng.randrange(4)
    if change == 0:
        tensor.name = rng.choice(_NAMES)
    elif change == 1:
        tensor.datatype = rng.choice(_DATATYPES)
    elif change == 2:
        tensor.shape[:] = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 3, 2000)))]
    else:
        tensor.parameters["shared_memory_region"].string_param = "x"


def _more_tensors(rng: random.Random, made: pb.ModelInferRequest) -> None:
    for _ in range(rng.choice((1, 1, 2, 40))):
        name = rng.choice(_NAMES)
        is_bool = name.startswith(("return_", "stream", "exclude"))
        raw = rng.choice((b"\0", b"\1")) if is_bool else _element(rng.choice(_TEXTS))
        add(made, name, "BOOL" if is_bool else "BYTES", raw)


def _parameter(rng: random.Random, made: pb.ModelInferRequest) -> None:
    for _ in range(rng.choice((1, 1, 2, 70))):
        name, value = rng.choice(_PARAMETERS) + rng.choice(("", "", "", "x")), _any(rng, 9)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
            made.parameters[name].uint64_param = value % 2**64
        elif value is None or value == "\ud800":  # of a string the protocol takes text alone
            made.parameters[name].SetInParent()
        else:
            set_parameter(made, name, value)


def _outputs(rng: random.Random, made: pb.ModelInferRequest) -> None:
    for _ in range(rng.choice((1, 2, 40))):
        made.outputs.add(name=rng.choice(_NAMES))


def _model(rng: random.Random, made: pb.ModelInferRequest) -> None:
    made.model_name = rng.choice(("counter", "nobody", "m" * 3000))
    made.model_version = rng.choice(("", "1", "2"))


def _id(rng: random.Random, made: pb.ModelInferRequest) -> None:
    made.id = rng.choice(("", "é", "x" * 128, "x" * 129, "x" * 20_000))


_CHANGES: tuple[Callable[[random.Random, pb.ModelInferRequest], None], ...] = (
    *(_some_sampling, _some_sampling, _no_sampling, _other_text, _broken_raw, _fewer_raw),
    *(_typed, _odd_tensor, _more_tensors, _parameter, _outputs, _model, _id),
)
