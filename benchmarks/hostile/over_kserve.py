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
from benchmarks.hostile.attempts import Attempt, Ended, Facts, sampling_of
from benchmarks.hostile.fuzzing import element, message, mutated, spoil, spoiled
from benchmarks.hostile.over_grpc import MESSAGE_LIMIT, Reply, fuzz_of
from serving.frontend import vllm_names
from serving.frontend.kserve import STREAM_INFER
from serving.frontend.kserve_tensors import INPUTS, OUTPUTS, OWN_PARAMETERS, set_parameters
from serving.proto.inference import inference_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2


def request(text: str, sampling: dict[str, Any], **fields: Any) -> pb.ModelInferRequest:
    """Returns a request for `text` as one streams it, with other `fields` of the message."""
    made = pb.ModelInferRequest(**fields)
    _add(made, "text_input", "BYTES", element(text.encode()))
    _add(made, "sampling_parameters", "BYTES", element(json.dumps(sampling).encode()))
    return made


def _add(made: pb.ModelInferRequest, name: str, datatype: str, raw: bytes) -> None:
    made.inputs.add(name=name, datatype=datatype, shape=[1])
    made.raw_input_contents.append(raw)


def payload(facts: Facts, wanted: jmoe_pb2.GenerateRequest, timeout_s: float | None) -> bytes:
    """See Protocol."""
    sampling = sampling_of(wanted.sampling)
    told = ["stream", "return_finish_reason", "return_num_output_tokens"]
    if wanted.sampling.logprobs:
        sampling["logprobs"] = wanted.sampling.top_logprobs
        told.append("return_logprobs")
    # Of prompts of tokens only the usual one has a text; the others' is as wrong as they are.
    text = wanted.text or ("abc" if wanted.tokens.ids == [1, 2, 3] else "")
    made = request(text, sampling, id=wanted.request_id, model_name=wanted.model)
    for name in told:
        _add(made, name, "BOOL", b"\1")
    of_request = {"allow_brownout": wanted.allow_brownout, "priority": int(wanted.priority)}
    set_parameters(made, of_request)  # Triton's numbers of priorities are the same
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
        "text of 4 MB": asking("x" * (MESSAGE_LIMIT - 4096)),
        "unknown sampling parameter": asking(max_tokns=4),
        "a schema of 1 MB": asking(structured_outputs={"json": "x" * 1_000_000}),
        "an unknown tensor": changed(lambda made: _add(made, "image", "BYTES", b"")),
        "a tensor too few": changed(lambda made: made.raw_input_contents.pop()),
        "a length beyond the end": changed(
            lambda made: made.raw_input_contents.__setitem__(0, b"\xff\xff\xff\x7fabc")
        ),
        "a shape of 3": changed(lambda made: made.inputs[0].shape.append(3)),
    }

    def one(kind: str, data: bytes, code: str, **how: Any) -> Attempt:
        return Attempt("malformed", kind, data, frozenset({code}), path=STREAM_INFER, **how)

    alike = over_grpc.translated(facts, payload, STREAM_INFER)
    return [
        *(a for a in alike if a.manner == "read" and len(a.payload) <= MESSAGE_LIMIT),
        *(one(kind, data, "INVALID_ARGUMENT") for kind, data in payloads.items()),
        one("half open, silent", b"", "DEADLINE_EXCEEDED", manner="silent", timeout_s=15.0),
        # A stream on which nothing is asked has nothing wrong with it.
        one("half open, empty", b"", "OK", manner="empty", timeout_s=15.0),
    ]


# ---- fuzz -------------------------------------------------------------------------------------

_SAMPLING = (*vllm_names.NAMES, *("json", "regex", "choice", "grammar", "json_object", "backend"))
_TRUTHS = [name for name, datatype in INPUTS.items() if datatype == "BOOL"]
_VALUES = (True, False, 0, 1, 2, -1, 2**53, 0.5, "best_effort", "a", "")
_MOST_CHANGES = 4


def fuzzed(rng: random.Random, kind: Any) -> bytes:
    """Returns noise, absurd messages, and requests of which little is wrong, or nothing."""
    chance = rng.random()
    if kind is not pb.ModelInferRequest.DESCRIPTOR or chance < 0.25:
        return message(rng, kind)
    sampling: dict[str, Any] = {"max_tokens": rng.randrange(1, 9)}
    if rng.random() < 0.1:
        sampling["structured_outputs"] = {"json": {"type": "object"}}
    for _ in range(rng.choice((0, 0, 1, 2))):
        spoiled(rng, sampling, _SAMPLING)
    made = request("abc", sampling, id=str(rng.getrandbits(32)))
    for name in rng.sample(_TRUTHS, rng.randrange(3)):
        _add(made, name, "BOOL", rng.choice((b"\0", b"\1")))
    for name in rng.sample([*OUTPUTS], rng.choice((0, 0, 1, 2))):
        made.outputs.add(name=name)
    for name in rng.sample(OWN_PARAMETERS, rng.choice((0, 0, 1, 2))):
        set_parameters(made, {name: rng.choice(_VALUES)})
    if rng.random() < 0.1:  # as typed contents
        for tensor, raw in zip(made.inputs, made.raw_input_contents, strict=True):
            if tensor.datatype == "BOOL":
                tensor.contents.bool_contents.append(raw == b"\1")
            else:
                tensor.contents.bytes_contents.append(raw[4:])
        del made.raw_input_contents[:]
    for _ in range(rng.randrange(_MOST_CHANGES)):
        spoil(rng, made)
    found = made.SerializeToString()
    return mutated(rng, found) if chance < 0.4 else found


FUZZ = (fuzz_of(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"], fuzzed),)
