"""What the load is spoken in: jmoe's own service, or the Open Inference Protocol.

A protocol turns a well-formed `GenerateRequest` into a call, and what comes back into
`GenerateResponse`s, so that all of them are judged alike.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.hostile import attempts, tensors
from benchmarks.hostile.attempts import Attempt, Facts
from serving.frontend.kserve import STREAM_INFER
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


@dataclass(frozen=True)
class Refusal:
    """An answer that says how a request ended, where its call does not."""

    code: str
    details: str
    with_time: bool  # to come back


Reply = pb.GenerateResponse | Refusal


class Spoken(Protocol):
    """One protocol. `path` is the method that well-formed requests go to."""

    path: str
    takes_tokens: bool  # as prompts; else texts alone

    def payload(self, request: pb.GenerateRequest) -> bytes:
        """Returns a well-formed request as a message."""
        ...

    def replies(self) -> Callable[[bytes], Reply]:
        """Reads one call's messages in turn."""
        ...

    def malformed(self, facts: Facts) -> list[Attempt]:
        """Every malformed attempt there is."""
        ...


class Jmoe:
    """`jmoe.v1.Generation/Generate`."""

    path, takes_tokens = attempts.GENERATE, True

    def payload(self, request: pb.GenerateRequest) -> bytes:
        """See Spoken."""
        return request.SerializeToString()

    def replies(self) -> Callable[[bytes], Reply]:
        """See Spoken."""
        return pb.GenerateResponse.FromString

    def malformed(self, facts: Facts) -> list[Attempt]:
        """See Spoken."""
        return attempts.malformed(facts)


class Kserve:
    """ModelStreamInfer, a stream for each request. What is refused is told in a message."""

    path, takes_tokens = STREAM_INFER, False

    def payload(self, request: pb.GenerateRequest) -> bytes:
        """See Spoken."""
        asked = request.sampling
        sampling = {
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "ignore_eos": asked.ignore_eos,
        }
        told = ["stream", "return_finish_reason", "return_num_output_tokens"]
        if asked.logprobs:
            sampling["logprobs"] = asked.top_logprobs
            told.append("return_logprobs")
        made = tensors.request(request.text, sampling, id=request.request_id)
        for name in told:
            tensors.add(made, name, "BOOL", b"\1")
        tensors.set_parameter(made, "allow_brownout", request.allow_brownout)
        if request.priority == pb.BEST_EFFORT:
            tensors.set_parameter(made, "priority", "best_effort")
        return made.SerializeToString()

    def replies(self) -> Callable[[bytes], Reply]:
        """See Spoken. Tokens are told as a number: as many zeros stand for them."""
        total = 0

        def reply(payload: bytes) -> Reply:
            nonlocal total
            message = inference_pb2.ModelStreamInferResponse.FromString(payload)
            response = message.infer_response
            if message.error_message:
                code = response.parameters["status"].string_param
                with_time = "retry_after_ms" in response.parameters
                return Refusal(code, message.error_message, with_time)
            values = tensors.values_of(response)
            count, reason = int(values["num_output_tokens"]), str(values["finish_reason"])
            total += count
            return pb.GenerateResponse(
                request_id=response.id,
                text=str(values["text_output"]),
                token_ids=[0] * count,
                finish_reason="" if reason == "None" else reason,
                usage=pb.Usage(completion_tokens=total),
            )

        return reply

    def malformed(self, facts: Facts) -> list[Attempt]:
        """See Spoken."""
        return _malformed(facts)


@functools.cache
def _malformed(facts: Facts) -> list[Attempt]:
    bad = frozenset({"INVALID_ARGUMENT"})

    def one(kind: str, payload: bytes, allowed: frozenset[str] = bad) -> Attempt:
        return Attempt("malformed", kind, payload, allowed, path=STREAM_INFER)

    def asking(**sampling: object) -> bytes:
        return tensors.request("abc", sampling).SerializeToString()

    def changed(change: Callable[[inference_pb2.ModelInferRequest], object]) -> bytes:
        made = tensors.request("abc", {"max_tokens": 4})
        change(made)
        return made.SerializeToString()

    wide = "x" * (attempts.MESSAGE_LIMIT - 4096)
    nobody = tensors.request("abc", {}, model_name="nobody").SerializeToString()
    found = [
        one("no tensors", b""),
        one("empty text", tensors.request("", {}).SerializeToString()),
        one("text of 4 MB", tensors.request(wide, {}).SerializeToString()),
        one("temperature below 0", asking(temperature=-1)),
        one("no new tokens", asking(max_tokens=0)),
        one("2 ** 31 - 1 new tokens", asking(max_tokens=2**31 - 1)),
        one("unknown sampling parameter", asking(max_tokns=4)),
        one("65 stop strings", asking(stop=["stop"] * 65)),
        one("a schema of 1 MB", asking(structured_outputs={"json": "x" * 1_000_000})),
        one("an unknown tensor", changed(lambda m: tensors.add(m, "image", "BYTES", b""))),
        one("a tensor too few", changed(lambda m: m.raw_input_contents.pop())),
        one("a length beyond the end", changed(_overlong)),
        one("a shape of 3", changed(lambda m: m.inputs[0].shape.append(3))),
        one("priority 99", changed(lambda m: tensors.set_parameter(m, "priority", 99))),
        one("id of 1 MB", tensors.request("abc", {}, id="r" * 1_000_000).SerializeToString()),
        one("unknown model", nobody, frozenset({"NOT_FOUND"})),
        one("undecodable: noise", b"\xff" * 4096),
        one("undecodable: 1 MB of noise", b"\xff" * 1_000_000),
    ]
    silent = Attempt(
        *("malformed", "half open, silent", b"", frozenset({"DEADLINE_EXCEEDED"}), "silent"),
        path=STREAM_INFER,
        timeout_s=15.0,
    )
    # A stream on which nothing is asked has nothing wrong with it.
    empty = Attempt(
        *("malformed", "half open, empty", b"", frozenset({"OK"}), "empty"),
        path=STREAM_INFER,
        timeout_s=15.0,
    )
    return [*found, silent, empty]


def _overlong(made: inference_pb2.ModelInferRequest) -> None:
    made.raw_input_contents[0] = b"\xff\xff\xff\x7fabc"


PROTOCOLS: dict[str, Spoken] = {"grpc": Jmoe(), "kserve": Kserve()}
"""By the name that `--protocol` takes."""
