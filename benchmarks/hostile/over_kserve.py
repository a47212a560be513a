"""Attempts over the Open Inference Protocol, and its requests with little wrong, to fuzz with.

An attempt is a stream of its own; what is refused is told in a message.
"""

import functools
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from benchmarks.hostile import over_grpc
from benchmarks.hostile.attempts import Attempt, Ended, Facts
from benchmarks.hostile.fuzzing import SCALARS, message, mutated, spoiled
from benchmarks.hostile.over_grpc import MESSAGE_LIMIT, Reply, fuzz_of
from serving.frontend import vllm_names
from serving.frontend.kserve import STREAM_INFER
from serving.frontend.kserve_tensors import (
    INPUTS,
    OUTPUTS,
    OWN_PARAMETERS,
    SEQUENCES,
    set_parameters,
)
from serving.proto.inference import inference_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2


def request(text: str, sampling: dict[str, Any], **fields: Any) -> pb.ModelInferRequest:
    """Returns a request for `text` as one streams it, with other `fields` of the message."""
    made = pb.ModelInferRequest(**fields)
    _add(made, "text_input", "BYTES", _element(text.encode()))
    _add(made, "sampling_parameters", "BYTES", _element(json.dumps(sampling).encode()))
    return made


def _add(made: pb.ModelInferRequest, name: str, datatype: str, raw: bytes) -> None:
    made.inputs.add(name=name, datatype=datatype, shape=[1])
    made.raw_input_contents.append(raw)


def _element(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def payload(facts: Facts, wanted: jmoe_pb2.GenerateRequest, timeout_s: float | None) -> bytes:
    """See Protocol."""
    asked = wanted.sampling
    sampling: dict[str, Any] = {"max_tokens": asked.max_new_tokens}
    for name in ("temperature", "top_k", "top_p", "ignore_eos"):
        sampling[name] = getattr(asked, name)
    told = ["stream", "return_finish_reason", "return_num_output_tokens"]
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs
        told.append("return_logprobs")
    made = request(wanted.text, sampling, id=wanted.request_id)
    for name in told:
        _add(made, name, "BOOL", b"\1")
    set_parameters(made, {"allow_brownout": wanted.allow_brownout})
    if wanted.priority == jmoe_pb2.BEST_EFFORT:
        set_parameters(made, {"priority": "best_effort"})
    return made.SerializeToString()


def replies() -> Reply:
    """Reads one call's messages. Tokens are told as a number: as many zeros stand for them."""
    total = 0

    def reply(data: bytes) -> jmoe_pb2.GenerateResponse | Ended:
        nonlocal total
        told = pb.ModelStreamInferResponse.FromString(data)
        response = told.infer_response
        if told.error_message:
            code = response.parameters["status"].string_param
            with_time = "retry_after_ms" in response.parameters
            return Ended(code, told.error_message, code == "RESOURCE_EXHAUSTED" and with_time)
        raw = {
            output.name: one
            for output, one in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        (count,) = struct.unpack("<I", raw["num_output_tokens"])
        reason = raw["finish_reason"][4:].decode()
        total += count
        return jmoe_pb2.GenerateResponse(
            request_id=response.id,
            text=raw["text_output"][4:].decode(),
            token_ids=[0] * count,
            finish_reason="" if reason == "None" else reason,
            usage=jmoe_pb2.Usage(completion_tokens=total),
        )

    return reply


connect = functools.partial(over_grpc.connect, replies=replies)


@functools.cache
def malformed(facts: Facts) -> list[Attempt]:
    """Every malformed attempt there is."""

    def asking(text: str = "abc", **sampling: Any) -> bytes:
        return request(text, sampling).SerializeToString()

    def changed(change: Callable[[pb.ModelInferRequest], Any]) -> bytes:
        made = request("abc", {"max_tokens": 4})
        change(made)
        return made.SerializeToString()

    payloads = {
        "no tensors": b"",
        "empty text": asking(""),
        "text of 4 MB": asking("x" * (MESSAGE_LIMIT - 4096)),
        "temperature below 0": asking(temperature=-1),
        "no new tokens": asking(max_tokens=0),
        "2 ** 31 - 1 new tokens": asking(max_tokens=2**31 - 1),
        "unknown sampling parameter": asking(max_tokns=4),
        "65 stop strings": asking(stop=["stop"] * 65),
        "a schema of 1 MB": asking(structured_outputs={"json": "x" * 1_000_000}),
        "an unknown tensor": changed(lambda made: _add(made, "image", "BYTES", b"")),
        "a tensor too few": changed(lambda made: made.raw_input_contents.pop()),
        "a length beyond the end": changed(
            lambda made: made.raw_input_contents.__setitem__(0, b"\xff\xff\xff\x7fabc")
        ),
        "a shape of 3": changed(lambda made: made.inputs[0].shape.append(3)),
        "priority 99": changed(lambda made: set_parameters(made, {"priority": 99})),
        "id of 1 MB": request("abc", {}, id="r" * 1_000_000).SerializeToString(),
        "unknown model": request("abc", {}, model_name="nobody").SerializeToString(),
        "undecodable: noise": b"\xff" * 4096,
        "undecodable: 1 MB of noise": b"\xff" * 1_000_000,
    }

    def one(kind: str, data: bytes, code: str, **how: Any) -> Attempt:
        return Attempt("malformed", kind, data, frozenset({code}), path=STREAM_INFER, **how)

    return [
        *(
            one(kind, data, "NOT_FOUND" if kind == "unknown model" else "INVALID_ARGUMENT")
            for kind, data in payloads.items()
        ),
        one("half open, silent", b"", "DEADLINE_EXCEEDED", manner="silent", timeout_s=15.0),
        # A stream on which nothing is asked has nothing wrong with it.
        one("half open, empty", b"", "OK", manner="empty", timeout_s=15.0),
    ]


# ---- fuzz -------------------------------------------------------------------------------------

_TENSORS = (*INPUTS, *OUTPUTS, "image")
_DATATYPES = ("BYTES", "BOOL", "INT32", "FP32", "", "bytes", "x" * 3000)
_SIZES = (0, 1, 1, 1, 2, -1, 2**31, 2**63 - 1, -(2**63))
_PARAMETERS = (*OWN_PARAMETERS, *SEQUENCES, "triton_final_response", "temperature", "", "x" * 2000)
_SAMPLING = (
    *vllm_names.NAMES,
    *("json", "regex", "choice", "grammar", "json_object", "backend", ""),
)
_TEXTS = (b"", b"abc", b"\xff\xfe", b"\0", "é\U0001f600".encode(), b"x" * 9000, b"word " * 300)
_NOT_JSON = (b"", b"{", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"nul", b'{"n": NaN}', b"\xff")
_CHANGES = (
    *("sampling", "sampling", "no JSON", "text", "broken raw", "fewer raw", "typed contents"),
    *("odd tensor", "more tensors", "parameters", "outputs", "model", "id"),
)
_MOST_CHANGES = 4


def fuzzed(rng: random.Random, kind: Any) -> bytes:
    """Returns noise, absurd messages, and requests of which little is wrong, or nothing."""
    chance = rng.random()
    if kind is not pb.ModelInferRequest.DESCRIPTOR or chance < 0.25:
        return message(rng, kind)
    made = request("abc", {"max_tokens": rng.randrange(1, 9)}, id=str(rng.getrandbits(32)))
    if rng.random() < 0.5:
        _add(made, "stream", "BOOL", b"\1")
    for _ in range(rng.randrange(_MOST_CHANGES)):
        _change(rng, made, rng.choice(_CHANGES))
    found = made.SerializeToString()
    return mutated(rng, found) if chance < 0.4 else found


def _change(rng: random.Random, made: pb.ModelInferRequest, what: str) -> None:
    raw = made.raw_input_contents
    match what:
        case "sampling":
            given = {"max_tokens": 4, "structured_outputs": {"json": {}}}
            if rng.random() < 0.8:
                del given["structured_outputs"]
            for _ in range(rng.randrange(4)):
                spoiled(rng, given, _SAMPLING)
            _set_raw(made, "sampling_parameters", json.dumps(given).encode())
        case "no JSON":
            _set_raw(made, "sampling_parameters", rng.choice(_NOT_JSON))
        case "text":
            _set_raw(made, "text_input", rng.choice(_TEXTS))
        case "broken raw" if raw:
            broken = rng.choice((b"", b"\1", b"\2", b"\5\0\0\0ab", b"\xff" * 9))
            raw[rng.randrange(len(raw))] = broken
        case "fewer raw":
            del raw[rng.randrange(3) :]
        case "typed contents":
            del raw[:]
            for tensor in made.inputs:
                texts = [rng.choice(_TEXTS)] * rng.choice((0, 1, 1, 2))
                if tensor.datatype == "BOOL":
                    tensor.contents.bool_contents.append(rng.random() < 0.5)
                elif tensor.name == "sampling_parameters":
                    tensor.contents.bytes_contents.append(b'{"max_tokens": 3}')
                else:
                    tensor.contents.bytes_contents.extend(texts)
        case "odd tensor":
            _make_odd(rng, rng.choice(made.inputs))
        case "more tensors":
            for _ in range(rng.choice((1, 1, 2, 40))):
                name = rng.choice(_TENSORS)
                is_bool = name.startswith(("return_", "stream", "exclude"))
                data = rng.choice((b"\0", b"\1")) if is_bool else _element(rng.choice(_TEXTS))
                _add(made, name, "BOOL" if is_bool else "BYTES", data)
        case "parameters":
            for _ in range(rng.choice((1, 1, 2, 70))):
                name = rng.choice(_PARAMETERS) + rng.choice(("", "", "", "x"))
                value = rng.choice(SCALARS)
                if isinstance(value, int) and abs(value) >= 2**63:
                    made.parameters[name].uint64_param = value % 2**64
                elif value is None or value == "\ud800":  # a string of protobuf is text alone
                    made.parameters[name].SetInParent()
                else:
                    set_parameters(made, {name: value})
        case "outputs":
            for _ in range(rng.choice((1, 2, 40))):
                made.outputs.add(name=rng.choice(_TENSORS))
        case "model":
            made.model_name = rng.choice(("counter", "bundled", "nobody", "m" * 3000))
            made.model_version = rng.choice(("", "1", "2"))
        case "id":
            made.id = rng.choice(("", "é", "x" * 128, "x" * 129, "x" * 20_000))


def _set_raw(made: pb.ModelInferRequest, name: str, data: bytes) -> None:
    for at, tensor in enumerate(made.inputs):
        if tensor.name == name and at < len(made.raw_input_contents):
            made.raw_input_contents[at] = _element(data)


def _make_odd(rng: random.Random, tensor: Any) -> None:
    match rng.randrange(4):
        case 0:
            tensor.name = rng.choice(_TENSORS)
        case 1:
            tensor.datatype = rng.choice(_DATATYPES)
        case 2:
            tensor.shape[:] = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 3, 2000)))]
        case 3:
            tensor.parameters["shared_memory_region"].string_param = "x"


FUZZ = (fuzz_of(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"], fuzzed),)
