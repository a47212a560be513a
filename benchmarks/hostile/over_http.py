"""The same attempts over HTTP: how each is sent, and the code that stands for its end."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from benchmarks.fuzz_http.__main__ import NoAnswer, read_answer
from benchmarks.hostile.attempts import GENERATE, Attempt
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_PATH = "/v1/completions"
_CODES = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    431: "INVALID_ARGUMENT",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_OF_ERRORS = {
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "aborted": "CANCELLED",
    "unavailable": "UNAVAILABLE",
}
_PAUSE_S, _NUM_PAUSES = 0.05, 20  # of a slow reader
_ALSO_RIGHT = {
    "text beyond gRPC's limit": "INVALID_ARGUMENT",  # the server's own limit
    "top_k below 0": "OK",  # -1 is off, as in vLLM
}


def as_http(attempt: Attempt) -> Attempt:
    """The attempt, with the codes that are right over HTTP."""
    also = _ALSO_RIGHT.get(attempt.kind)
    return attempt if also is None else replace(attempt, allowed=attempt.allowed | {also})


def body_of(attempt: Attempt, model: str) -> bytes:
    """The body that asks for what the attempt's message does; a message that is none, as it is."""
    try:
        request = pb.GenerateRequest.FromString(attempt.payload)
    except DecodeError:
        return attempt.payload
    sampling = request.sampling
    told: dict[str, Any] = {
        "model": request.model or model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_new_tokens if sampling.HasField("max_new_tokens") else 128,
        "temperature": sampling.temperature,
    }
    kind = request.WhichOneof("prompt")
    if kind is not None:
        told["prompt"] = request.text if kind == "text" else list(request.tokens.ids)
    for name in ("top_k", "top_p", "ignore_eos"):
        if sampling.HasField(name):
            told[name] = getattr(sampling, name)
    if sampling.logprobs:
        told["logprobs"] = 0
    for name in ("stop", "stop_token_ids"):
        if values := getattr(sampling, name):
            told[name] = list(values)
    if request.HasField("allow_brownout"):
        told["allow_brownout"] = request.allow_brownout
    if request.priority:
        number = request.priority
        named = number in pb.Priority.values()
        told["priority"] = pb.Priority.Name(number).lower() if named else number
    if request.request_id:
        told["request_id"] = request.request_id
    if attempt.timeout_s is not None:
        told["timeout_s"] = attempt.timeout_s
    return json.dumps(told).encode()


async def send(address: str, model: str, attempt: Attempt) -> tuple[str, str, bool, list[Any]]:
    """Code, details, whether it was refused with a time to come back, and a stream's events."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        path = _PATH if attempt.path == GENERATE else attempt.path
        body = b"" if attempt.manner == "empty" else body_of(attempt, model)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        if attempt.manner != "silent":
            writer.write(body)
        if attempt.manner in ("cancel", "close"):
            return await _leave(reader, attempt.stop_after)
        if attempt.manner == "slow":
            await _dawdle(reader, writer)
        try:
            status, answer, headers = await read_answer(reader)
        except NoAnswer:
            # A server that has refused what is too large may close while that is being sent.
            gave_up = len(body) > 1 << 20
            return ("INVALID_ARGUMENT" if gave_up else "UNAVAILABLE"), "closed", False, []
        return _ended(status, answer, headers, attempt.path != GENERATE)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _leave(reader: asyncio.StreamReader, after: int) -> tuple[str, str, bool, list[Any]]:
    """Reads so many events, and goes."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        for _ in range(after):
            event = await reader.readuntil(b"\n\n")
            if b"[DONE]" in event:
                return "OK", "", False, []
    return "CANCELLED", "", False, []


async def _dawdle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes nothing for a while."""
    transport: Any = writer.transport
    for _ in range(_NUM_PAUSES):
        transport.pause_reading()
        await asyncio.sleep(_PAUSE_S)
        transport.resume_reading()
        await asyncio.sleep(0)


def _ended(
    status: int, answer: bytes, headers: bytes, other_path: bool
) -> tuple[str, str, bool, list[Any]]:
    events = [
        json.loads(part.removeprefix(b"data: "))
        for part in answer.split(b"\n\n")
        if part.startswith(b"data: {")
    ]
    if status == 200 and events and "error" in events[-1]:
        error = events[-1]["error"]
        return _OF_ERRORS.get(error["code"], "INTERNAL"), error["message"], False, events
    code = _CODES.get(status, "INTERNAL")
    if other_path and status in (404, 405):
        code = "UNIMPLEMENTED"
    details = "" if status == 200 else answer[:300].decode("utf-8", "replace")
    return code, details, status == 429 and b"retry-after:" in headers, events


def flaw(attempt: Attempt, events: list[Any]) -> str:
    """What is not right about a stream that should be whole; empty where nothing is."""
    request = attempt.request
    if request is None:
        return ""
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    if not reasons or reasons[-1] not in ("stop", "length"):
        return f"{len(events)} events, and the last has no finish_reason"
    usage, most = events[-1]["usage"], request.sampling.max_new_tokens
    count = usage["completion_tokens"]
    if count > most or (request.sampling.ignore_eos and count != most):
        return f"{count} tokens were counted of {most}"
    if len(reasons) > count:
        return f"{len(reasons)} events came for {count} tokens"
    if request.HasField("tokens") and usage["prompt_tokens"] != len(request.tokens.ids):
        return f"{usage['prompt_tokens']} prompt tokens of {len(request.tokens.ids)}"
    if any(event["id"] != f"cmpl-{request.request_id}" for event in events):
        return "an event has another request's id"
    return ""
