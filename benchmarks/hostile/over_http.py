"""Attempts over HTTP, such as only HTTP has, and fuzzed HTTP requests that no sane client sends."""

import asyncio
import contextlib
import copy
import functools
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hostile import over_grpc
from benchmarks.hostile.attempts import Attempt, Ended, Facts, sampling_of
from benchmarks.hostile.fuzzing import Answer, Fuzz, anything, conforming, mutated, spoiled
from serving.frontend.openai.app import BODIES
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

PATH, CHAT_PATH, ITEMS_PATH, _TOKENIZE_PATH, _DETOKENIZE_PATH = BODIES
_CODES = {
    **{200: "OK", 400: "INVALID_ARGUMENT", 413: "INVALID_ARGUMENT", 431: "INVALID_ARGUMENT"},
    **{404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED"},
    **{503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"},
}
_ERRORS = {
    **{"deadline_exceeded": "DEADLINE_EXCEEDED", "aborted": "CANCELLED"},
    "unavailable": "UNAVAILABLE",
}
_PAUSE_S, _NUM_PAUSES = 0.05, 20  # of a slow reader
_CLOSED = (asyncio.IncompleteReadError, ConnectionError)
"""What reading an answer raises where the server closed the connection."""


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Returns status, body (of a stream, its events) and lower-case headers of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100 "):
        head = await reader.readuntil(b"\r\n\r\n")
    status, lower = int(head.split(b" ", 2)[1]), head.lower()
    if b"transfer-encoding: chunked" in lower:
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return status, b"".join(parts), lower
    length = re.search(rb"\r\ncontent-length: (\d+)", lower)
    return status, await reader.readexactly(int(length[1]) if length else 0), lower


def _post(path: str, body: Any, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    """Returns one whole request; `body` is bytes or goes as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = b"" if b"content-type" in headers else b"content-type: application/json\r\n"
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\n%b%b" % (method, path.encode(), kind, headers)
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(data), data)


_NESTED = {
    "guided_json": b"%b",
    "structured_outputs": b'{"json":%b}',
    "response_format": b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}',
    "chat_template_kwargs": b"%b",
}
"""Fields that hold objects of any depth, and how."""


def _with_nested(body: bytes, name: str, opening: bytes, inmost: bytes, depth: int) -> bytes:
    """Returns a body of JSON with one more field, of `_NESTED`, so deep."""
    value = opening * depth + inmost + b"}" * depth
    return b'%b,"%b":%b}' % (body[:-1], name.encode(), _NESTED[name] % value)


# ---- attempts ---------------------------------------------------------------------------------


def payload(facts: Facts, request: pb.GenerateRequest, timeout_s: float | None) -> bytes:
    """See Protocol."""
    sampling = request.sampling
    told: dict[str, Any] = {
        "model": request.model or facts.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "request_id": request.request_id or None,
        "timeout_s": timeout_s,
        **sampling_of(sampling),
    }
    kind = request.WhichOneof("prompt")
    if kind is not None:
        told["prompt"] = request.text if kind == "text" else list(request.tokens.ids)
    if sampling.logprobs:
        told["logprobs"] = min(5, sampling.top_logprobs)  # OpenAI's limit for completions
    if request.HasField("allow_brownout"):
        told["allow_brownout"] = request.allow_brownout
    if request.priority:
        named = request.priority in pb.Priority.values()
        told["priority"] = pb.Priority.Name(request.priority).lower() if named else request.priority
    return json.dumps(told).encode()


@functools.cache
def malformed(facts: Facts) -> list[Attempt]:
    """What is malformed over gRPC, and chats: some wrong, others as costly as they come."""
    chat: dict[str, Any] = {
        "model": facts.model,
        "messages": [{"role": "user", "content": "Add these numbers: 3+4 ="}],
        "max_tokens": 8,
    }

    def asking(**changes: Any) -> bytes:
        return json.dumps(chat | changes).encode()

    long = {"max_tokens": 48, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    costly = {
        "chat": asking(),
        "top_logprobs of 8 answers": asking(n=8, **long),
        "top_logprobs of 64 answers": asking(n=64, logprobs=True, top_logprobs=20),
        "names a template may know": asking(chat_template_kwargs={"range": 3, "x": 10**30}),
    }
    for deep in (100, 253, 254, 255, 600, 1020, 1030, 5000):
        for name in ("response_format", "chat_template_kwargs"):
            costly[f"{name} {deep} deep"] = _with_nested(asking(), name, b'{"items":', b"{}", deep)
    wrong = {
        "a template of one's own": asking(chat_template="{{ 9**(9**9) }}"),
        "content nested": asking(messages=[{"role": "user", "content": [[[[]]]]}]),
        "a key given twice": asking().replace(b'"max_tokens"', b'"max_tokens": 1, "max_tokens"'),
        "129 answers": asking(n=129),
        "top_logprobs 21": asking(logprobs=True, top_logprobs=21),
    }
    bad, either = frozenset({"INVALID_ARGUMENT"}), frozenset({"INVALID_ARGUMENT", "OK"})
    return [
        *over_grpc.translated(facts, payload, PATH),
        *(
            Attempt("malformed", kind, body, allowed, path=CHAT_PATH)
            for bodies, allowed in ((costly, either), (wrong, bad))
            for kind, body in bodies.items()
        ),
    ]


@contextlib.asynccontextmanager
async def connect(facts: Facts) -> AsyncIterator[Callable[[Attempt], Awaitable[Ended]]]:
    """See Protocol; each attempt gets a connection of its own."""
    yield functools.partial(_send, facts.http_address)


async def _send(address: str, attempt: Attempt) -> Ended:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        body = b"" if attempt.manner == "empty" else attempt.payload
        whole = _post(attempt.path, body)
        writer.write(whole[: len(whole) - len(body)] if attempt.manner == "silent" else whole)
        if attempt.manner == "half-close":
            writer.write_eof()
        if attempt.leaves:
            with contextlib.suppress(*_CLOSED):
                for _ in range(attempt.stop_after):
                    if b"[DONE]" in await reader.readuntil(b"\n\n"):
                        return Ended("OK")
            return Ended("CANCELLED")
        for _ in range(_NUM_PAUSES if attempt.manner == "slow" else 0):
            transport: Any = writer.transport
            transport.pause_reading()
            await asyncio.sleep(_PAUSE_S)
            transport.resume_reading()
            await asyncio.sleep(0)
        return _ended(attempt.path, *await _read_answer(reader))
    except _CLOSED:
        # A server that has refused what is too large may close while that is being sent.
        gave_up = len(attempt.payload) > 1 << 20
        return Ended("INVALID_ARGUMENT" if gave_up else "UNAVAILABLE", "closed")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _ended(path: str, status: int, answer: bytes, headers: bytes) -> Ended:
    events = [
        json.loads(part.removeprefix(b"data: "))
        for part in answer.split(b"\n\n")
        if part.startswith(b"data: {")
    ]
    if status == 200 and events and "error" in events[-1]:
        error = events[-1]["error"]
        return Ended(_ERRORS.get(error["code"], "INTERNAL"), error["message"])
    code = _CODES.get(status, "INTERNAL")
    if path not in BODIES and status in (404, 405):
        code = "UNIMPLEMENTED"
    details = "" if status == 200 else answer[:300].decode("utf-8", "replace")
    refused = status == 429 and b"retry-after:" in headers
    messages = [
        pb.GenerateResponse(
            request_id=event["id"].removeprefix("cmpl-"),
            text=choice["text"],
            finish_reason=choice["finish_reason"] or "",
        )
        for event in events
        for choice in event["choices"]
    ]
    if messages:  # the usage comes last, and tells the tokens of all
        usage = events[-1]["usage"]
        messages[-1].token_ids.extend([0] * usage["completion_tokens"])
        messages[-1].usage.completion_tokens = usage["completion_tokens"]
        messages[-1].usage.prompt_tokens = usage["prompt_tokens"]
    return Ended(code, details, refused, messages)


# ---- fuzz -------------------------------------------------------------------------------------

_UNSURE_S = 0.05  # how long an answer is waited for where nobody can say whether one comes
_ALLOWED_FAULTS = (503, 504)  # the latter since requests name deadlines
_CALL = {"name": "f", "arguments": "{}"}
_CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "add 4 + 5"}]},
    {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": _CALL}]},
    {"role": "tool", "tool_call_id": "a", "content": "9"},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "add 4 + 5"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "message", "role": "assistant", "content": "I call."},
    {"type": "function_call", "call_id": "a", **_CALL},
    {"type": "function_call_output", "call_id": "a", "output": "9"},
]
_PROMPTS: dict[str, Sequence[dict[str, Any]]] = {
    PATH: [{"prompt": one} for one in ("add 4 + 5", [5, 6, 7], ["add", "say"], [[1], [2, 3]])],
    CHAT_PATH: [{"messages": _CHAT[:1]}, {"messages": _CHAT}],
    ITEMS_PATH: [{"input": "add 4 + 5"}, {"input": _ITEMS[:3]}, {"input": _ITEMS}],
    _TOKENIZE_PATH: [{"prompt": "add 4 + 5"}, {"messages": _CHAT}],
    _DETOKENIZE_PATH: [{"tokens": [5, 6, 7]}],
}
"""What most bodies have, since no schema says which parts go together."""
_SCHEMAS = {path: model.model_json_schema() for path, model in BODIES.items()}
_NAMES = [
    name
    for schema in _SCHEMAS.values()
    for part in (schema, *schema.get("$defs", {}).values())
    for name in part["properties"]
]
_ROUTES = (
    *("/", "/v1", "/v1/models", "/v1/models/bundled", "/v1/models/x/y", "/health", "/version"),
    *("/openapi.json", "/%00%ff", "/v1/models/%2e%2e%2f", "//", "/docs/%2e%2e/x"),
    *("/v1/completions/", "/v1/completions?x=" + "y" * 300, "/" + "z" * 9000),
)
_HEADERS = (
    *(b"x-request-id: %b\r\n" % value for value in (b"", b"a b", b"\xe9" * 20, b"i" * 200)),
    *(b"authorization: %b\r\n" % value for value in (b"", b"Bearer", b"Basic eDp5", b"\xff")),
    *(b"content-type: %b\r\n" % value for value in (b"text/plain", b"multipart/form-data")),
    b"accept-encoding: gzip, br\r\n",
    b"x-forwarded-for: %b\r\n" % (b"1," * 500),
    b"x: %b\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n",
    b"origin: http://evil.example\r\n",
    b"expect: 100-continue\r\n",
)


def _body(rng: random.Random, model: str, path: str = "") -> tuple[str, dict[str, Any]]:
    """Returns a path (the one given) and a body as its schema says, which most often is right."""
    path = path or rng.choice([*BODIES])
    schema, usual = _SCHEMAS[path], copy.deepcopy(rng.choice(_PROMPTS[path]))
    found = conforming(rng, schema, schema.get("$defs", {}))
    found = usual | found if rng.random() < 0.2 else found | usual
    found["model"] = model
    for limit in ("max_tokens", "max_output_tokens"):
        if limit in schema["properties"]:
            found |= {limit: rng.randrange(1, 5), "stream": rng.random() < 0.5}
    return path, found


def _right(rng: random.Random, model: str, path: str = "") -> bytes:
    return _post(*_body(rng, model, path))


def _wrong_values(rng: random.Random, model: str, path: str = "") -> bytes:
    path, found = _body(rng, model, path)
    for _ in range(rng.randrange(1, 4)):
        spoiled(rng, found, rng.choice(([*_SCHEMAS[path]["properties"]], _NAMES)))
    return _post(path, found)


def _mutated(rng: random.Random, model: str) -> bytes:
    path, found = _body(rng, model)
    return _post(path, mutated(rng, json.dumps(found).encode()))


def _bad_utf8(rng: random.Random, model: str) -> bytes:
    bad = rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800"))
    return _post(PATH, b'{"model":"%b","prompt":"%b","max_tokens":1}' % (model.encode(), bad))


def _noise(rng: random.Random, model: str) -> bytes:
    size = rng.choice((0, 1, 2, 20, 200, 2000, 70_000))
    return _post(rng.choice([*BODIES]), rng.randbytes(size))


def _nested(rng: random.Random, model: str) -> bytes:
    deep = rng.choice((10, 200, 1000, 20_000))
    body = rng.choice((b"[" * deep, b'{"a":' * deep, b"[" * deep + b"]" * deep))
    return _post(rng.choice([*BODIES]), body)


def _nested_schema(rng: random.Random, model: str) -> bytes:
    """In a body that is right but for this. No schema is valid, since the device follows none."""
    path, found = _body(rng, model)
    deep = rng.choice((5, 190, 199, 200, 230, 253, 254, 255, 900, 1020, 1024, 5000))
    found.pop(name := rng.choice([*_NESTED]), None)
    return _post(path, _with_nested(json.dumps(found).encode(), name, b'{"type":', b"1", deep))


def _twice(rng: random.Random, model: str) -> bytes:
    path, found = _body(rng, model)
    name = rng.choice([*found])
    again = json.dumps(rng.choice((found[name], anything(rng, 1))))
    return _post(path, f'{json.dumps(found)[:-1]},"{name}":{again}}}'.encode())


def _routes(rng: random.Random, model: str) -> bytes:
    method = rng.choice((b"GET", b"PUT", b"DELETE", b"OPTIONS", b"POST", b"PATCH"))
    return _post(rng.choice(_ROUTES), b"", method=method)


def _headers(rng: random.Random, model: str) -> bytes:
    """Headers that are too large are answered, too; but what follows them is not read."""
    chosen = b"".join(rng.sample(_HEADERS, rng.randrange(1, 4)))
    large = b"y" * rng.choice((10, 4000, 15_000, 17_000, 60_000))
    return _post(*_body(rng, model), chosen.replace(b"x: %b", b"x: " + large))


def _pipelined(rng: random.Random, model: str) -> bytes:
    kinds = (_right, _wrong_values, _mutated)
    return b"".join(rng.choice(kinds)(rng, model) for _ in range(rng.randrange(2, 6)))


def _cut(rng: random.Random, model: str) -> bytes:
    whole = _right(rng, model)
    return whole[: rng.randrange(1, len(whole))]


def _half_closed(rng: random.Random, model: str) -> bytes:
    return rng.choice((_right, _wrong_values, _nested_schema))(rng, model)


def _no_http(rng: random.Random, model: str) -> bytes:
    whole, which = bytearray(_right(rng, model)), rng.randrange(5)
    if which == 0:
        return rng.randbytes(rng.choice((1, 10, 100, 5000)))
    if which == 1:
        for _ in range(rng.randrange(1, 5)):
            whole[rng.randrange(min(len(whole), 120))] = rng.randrange(256)
        return bytes(whole)
    length = rng.choice((b"-1", b"0x10", b"99999999999999999999", b"1, 2", b"5000000", b""))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: fuzz\r\n"
    if which == 2:
        return head + b"content-length: %b\r\n\r\n{}" % length
    chunks = rng.choice((b"5\r\nabc", b"zz\r\n\r\n", b"-1\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"\r\n"))
    coding = rng.choice((b"chunked", b"gzip, chunked", b"chunked, chunked", b"nonsense"))
    extra = b"content-length: 3\r\n" if which == 4 else b""
    return head + extra + b"transfer-encoding: %b\r\n\r\n%b" % (coding, chunks)


_KINDS: dict[str, tuple[int, Callable[[random.Random, str], bytes], str]] = {
    **{f"right {path}": (3, functools.partial(_right, path=path), "read") for path in BODIES},
    **{
        f"wrong values {path}": (8, functools.partial(_wrong_values, path=path), "read")
        for path in BODIES
    },
    "mutated JSON": (15, _mutated, "read"),
    "bad UTF-8": (4, _bad_utf8, "read"),
    "noise": (4, _noise, "read"),
    "nested": (2, _nested, "read"),
    "nested schemas": (3, _nested_schema, "read"),
    "a key twice": (2, _twice, "read"),
    "routes": (5, _routes, "read"),
    "headers": (6, _headers, "read"),
    "pipelined": (4, _pipelined, "read"),
    "cut": (3, _cut, "leave"),
    "left": (3, _right, "leave"),
    "half-closed": (3, _half_closed, "half-close"),
    "no HTTP": (2, _no_http, "unsure"),
}
"""Weight, what is written to a connection at once, and what its sender does then.

"unsure": nobody can say how many answers come.
"""


@dataclass(frozen=True)
class Fuzzed:
    """What is written, and what its sender does then, as `_KINDS` says."""

    kind: str
    data: bytes
    manner: str


def draw(rng: random.Random, model: str) -> Fuzzed:
    """Returns the next one."""
    kind = rng.choices([*_KINDS], [weight for weight, _, _ in _KINDS.values()])[0]
    _, make, manner = _KINDS[kind]
    return Fuzzed(kind, make(rng, model), manner)


_LAST_EVENTS = (
    *(b"data: [DONE]", b'data: {"error"'),
    *(b"event: response.completed\n", b"event: response.incomplete\n"),
)


def flaw(status: int, body: bytes) -> str:
    """Returns what is wrong with an answer; empty where nothing is."""
    if status >= 500 and status not in _ALLOWED_FAULTS:
        return f"status {status}: {body[:300]!r}"
    if body.startswith((b"data: ", b"event: ")):
        last = body.rstrip().rpartition(b"\n\n")[2]
        if status == 200 and last.startswith(_LAST_EVENTS):
            return ""
        return f"a stream with status {status} that ends with {last[-200:]!r}"
    try:
        told = json.loads(body)
        if status < 400 or (status == 503 and "status" in told) or told["error"]["message"]:
            return ""
    except (ValueError, KeyError, TypeError):
        pass
    return f"status {status} with a body that is not as described: {body[:200]!r}"


@contextlib.asynccontextmanager
async def _connect_fuzz(facts: Facts) -> AsyncIterator[Callable[[Fuzzed], Awaitable[list[Answer]]]]:
    """Yields what sends over one connection after another, and judges the answers."""
    host, _, port = facts.http_address.rpartition(":")
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(sent: Fuzzed) -> list[Answer]:
        reader, writer = (
            streams.pop() if streams else await asyncio.open_connection(host, int(port))
        )
        writer.write(sent.data)
        if sent.manner == "half-close":
            writer.write_eof()
        keeps, answers = False, [(sent.kind, "left", "")]
        try:
            if sent.manner != "leave":
                answers, keeps = await _answers(reader, sent)
        finally:
            if keeps and sent.manner == "read":
                streams.append((reader, writer))
            else:  # what else was sent may spoil the next request
                writer.close()
        return answers

    yield send
    for _, writer in streams:
        writer.close()


async def _answers(reader: asyncio.StreamReader, sent: Fuzzed) -> tuple[list[Answer], bool]:
    """Returns the answers, and whether the connection is of more use."""
    answers: list[Answer] = []
    unsure, num_wanted = sent.manner == "unsure", 1
    if sent.kind == "pipelined":
        num_wanted = sent.data.count(b" HTTP/1.1\r\nhost: localhost\r\n")
    for _ in range(num_wanted):
        wrong, status = "", ""
        try:
            async with asyncio.timeout(_UNSURE_S if unsure else None):
                status, body, _ = await _read_answer(reader)
            wrong = flaw(status, body)
        except TimeoutError:
            if not unsure:  # it hangs
                raise
            status = "none"
        except _CLOSED:
            # After `connection: close` or an answer to what is no HTTP, others get none.
            status, wrong = "closed", "" if unsure or num_wanted > 1 else "closed without an answer"
        answers.append((sent.kind, f"{status}", wrong and f"{wrong}; sent {sent.data[:300]!r}"))
        if status in ("none", "closed", 408, 431) or b"connection: close" in sent.data:
            return answers, False
    return answers, True


FUZZ = (Fuzz("HTTP", draw, _connect_fuzz),)
