"""The same attempts over HTTP, and such as only HTTP has: how each is sent, and the code that
stands for its end.
"""

import asyncio
import contextlib
import functools
import json
import zlib
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from benchmarks.fuzz_http.__main__ import NoAnswer, read_answer
from benchmarks.hostile.attempts import GENERATE, Attempt, Facts
from benchmarks.hostile.protocols import Jmoe
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_PATH, _CHAT_PATH = "/v1/completions", "/v1/chat/completions"
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


class Http(Jmoe):
    """jmoe's own requests, sent over HTTP, and bodies that only HTTP can have."""

    def malformed(self, facts: Facts) -> list[Attempt]:
        """See Spoken."""
        return _malformed(facts)


@functools.cache
def _malformed(facts: Facts) -> list[Attempt]:
    bad, either = frozenset({"INVALID_ARGUMENT"}), frozenset({"INVALID_ARGUMENT", "OK"})
    chat: dict[str, Any] = {
        "model": facts.model,
        "messages": [{"role": "user", "content": "Add these numbers: 3+4 ="}],
        "max_tokens": 8,
    }

    def one(kind: str, body: bytes, allowed: frozenset[str] = bad) -> Attempt:
        return Attempt("malformed", kind, body, allowed, path=_CHAT_PATH)

    def asking(**changes: Any) -> bytes:
        return json.dumps(chat | changes).encode()

    def with_schema(schema: bytes) -> bytes:
        wanted = b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}'
        return asking(response_format="HERE").replace(b'"HERE"', wanted % schema)

    def nested(depth: int) -> bytes:
        return b'{"items":' * depth + b"{}" + b"}" * depth

    depths = (100, 253, 254, 255, 600, 1020, 1030, 5000)
    return [
        *Jmoe().malformed(facts),
        # Well-formed, and as costly as they come.
        one("chat", asking(), either),
        one(
            "top_logprobs of 8 answers",
            asking(n=8, max_tokens=48, logprobs=True, top_logprobs=20, ignore_eos=True),
            either,
        ),
        one("top_logprobs of 64 answers", asking(n=64, logprobs=True, top_logprobs=20), either),
        *(one(f"schema {n} deep", with_schema(nested(n)), either) for n in depths),
        *(
            one(
                f"chat_template_kwargs {n} deep",
                asking(chat_template_kwargs="HERE").replace(b'"HERE"', nested(n)),
                either,
            )
            for n in depths
        ),
        one("a template of one's own", asking(chat_template="{{ 9**(9**9) }}")),
        one(
            "names a template may know",
            asking(chat_template_kwargs={"range": 3, "x": 10**30}),
            either,
        ),
        one("content nested", asking(messages=[{"role": "user", "content": [[[[]]]]}])),
        one(
            "a key given twice", asking().replace(b'"max_tokens"', b'"max_tokens": 1, "max_tokens"')
        ),
        one("129 answers", asking(n=129)),
        one("top_logprobs 21", asking(logprobs=True, top_logprobs=21)),
    ]


def as_http(attempt: Attempt) -> Attempt:
    """Returns the attempt, with the codes that are right over HTTP. One in twenty of those that are
    read to the end is sent by a client that closes its side once it has asked, as `nc -N` does.
    """
    also = _ALSO_RIGHT.get(attempt.kind)
    if (
        attempt.group == "fine"
        and attempt.manner == "read"
        and not zlib.crc32(attempt.payload) % 20
    ):
        attempt = replace(attempt, kind="half-closing", manner="half-close")
    return attempt if also is None else replace(attempt, allowed=attempt.allowed | {also})


def body_of(attempt: Attempt, model: str) -> bytes:
    """Returns the body that asks for what the attempt's message does; a message that is none, as it
    is.
    """
    if attempt.path == _CHAT_PATH:
        return attempt.payload
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
        told["logprobs"] = min(5, sampling.top_logprobs)  # OpenAI's limit for completions
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
    """Returns code, details, whether it was refused with a time to come back, and a stream's
    events.
    """
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
        if attempt.manner == "half-close":
            writer.write_eof()
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
    """Returns what is not right about a stream that should be whole; empty where nothing is."""
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
