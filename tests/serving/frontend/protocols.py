"""One request over each protocol, and how a refusal is reported there."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc
import openai
import pytest
from kserve_requests import infer, parameters
from openai_served import HttpSetup
from served import failure

from serving.frontend.openai import answers
from serving.proto.inference import inference_pb2_grpc as inference
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


class Told(NamedTuple):
    """A refusal: `code` is a gRPC status, or a status and a code of OpenAI's API."""

    code: str | tuple[int, str | None]
    words: str
    retry_ms: int | None
    param: str | None = None  # over HTTP


class Protocol(NamedTuple):
    """How a request is sent, and where the metrics count it."""

    refused: Callable[..., Awaitable[Told]]
    counts: str
    route: str
    has_tokens: bool = False  # a prompt may be token ids


SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "zzz"}
CLASSES = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    429: openai.RateLimitError,
}


def metadata(key: str | None):
    return () if key is None else (("authorization", f"Bearer {key}"),)


def ended(error: grpc.aio.AioRpcError) -> Told:
    """Reads the status of a failed call."""
    retry_ms = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
    return Told(error.code().name, error.details() or "", retry_ms and int(retry_ms))


async def over_grpc(s: HttpSetup, prompt="ab", key=None, priority=None, **fields) -> Told:
    """Sends a request to Generate."""
    own = {name: fields.pop(name) for name in SAMPLING & fields.keys()}
    own["max_new_tokens"] = own.pop("max_tokens", 2)
    classes = {None: pb.PRIORITY_UNSPECIFIED, "best_effort": pb.BEST_EFFORT, "urgent": 7}
    classes["latency_sensitive"] = pb.LATENCY_SENSITIVE
    message = pb.GenerateRequest(
        sampling=pb.SamplingParams(**own), priority=classes[priority], **fields
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokens.ids.extend(prompt)
    return ended(await failure(s.stub.Generate(message, metadata=metadata(key))))


def over_http(path: str, *, stream: bool):
    """Makes a sender that uses OpenAI's client, and checks which class of error that raises."""

    async def refused(s: HttpSetup, prompt="ab", key=None, model="counter", **fields) -> Told:
        client = s.client.with_options(api_key=key or "any")
        own = {"model": model, "max_tokens": fields.pop("max_tokens", 2), "stream": stream}
        if path == "completions":
            asked = client.completions.create(prompt=prompt, extra_body=fields, **own)
        else:
            messages = [{"role": "user", "content": prompt}] if prompt else []
            asked = client.chat.completions.create(messages=messages, extra_body=fields, **own)
        with pytest.raises(openai.APIStatusError) as caught:
            await asked
        error, answer = caught.value, caught.value.response
        answers.Error.model_validate(answer.json())
        assert type(error) is CLASSES.get(error.status_code, openai.InternalServerError)
        retry_ms = answer.headers.get("retry-after-ms")
        # The seconds are rounded up, for clients that know no milliseconds.
        seconds = None if retry_ms is None else str(max(1, -(-int(retry_ms) // 1000)))
        assert answer.headers.get("retry-after") == seconds
        # Clients try again by themselves, but not what would take as long again.
        again = "false" if error.status_code == 504 else None
        assert answer.headers.get("x-should-retry") == again
        words = answer.json()["error"]["message"]
        return Told((error.status_code, error.code), words, retry_ms and int(retry_ms), error.param)

    return refused


def over_kserve(*, stream: bool):
    """Makes a sender to ModelInfer, or of one request on ModelStreamInfer."""

    async def refused(
        s: HttpSetup, prompt="ab", key=None, model="", request_id="", priority=None, **fields
    ) -> Told:
        own = {} if priority is None else {"priority": priority}
        request = infer(
            prompt,
            id=request_id,
            model_name=model,
            sampling={"max_tokens": 2} | fields,
            parameters=own,
        )
        stub = inference.GRPCInferenceServiceStub(s.channel)
        if not stream:
            return ended(await failure(stub.ModelInfer(request, metadata=metadata(key))))
        call = stub.ModelStreamInfer(iter([request]), metadata=metadata(key))
        try:
            (response,) = [response async for response in call]
        except grpc.aio.AioRpcError as error:
            return ended(error)
        assert response.infer_response.id == request_id[:1000]
        said = parameters(response.infer_response)
        assert said.pop("triton_final_response") is True
        return Told(said["status"], response.error_message, said.get("retry_after_ms"))

    return refused


INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROTOCOLS = {
    "grpc": Protocol(over_grpc, "grpc", "/jmoe.v1.Generation/Generate", has_tokens=True),
    "completion": Protocol(
        over_http("completions", stream=False), "http", COMPLETIONS, has_tokens=True
    ),
    "completion-stream": Protocol(
        over_http("completions", stream=True), "http", COMPLETIONS, has_tokens=True
    ),
    "chat": Protocol(over_http("chat", stream=False), "http", CHATS),
    "chat-stream": Protocol(over_http("chat", stream=True), "http", CHATS),
    "kserve": Protocol(over_kserve(stream=False), "kserve", INFER),
    "kserve-stream": Protocol(over_kserve(stream=True), "kserve", STREAM_INFER),
}
