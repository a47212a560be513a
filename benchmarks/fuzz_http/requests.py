"""HTTP requests that no sane client sends. The same seed draws the same ones."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")
_NUMBERS = (0, 1, -1, 2, 5, 20, 64, 65, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
_REALS = (0.0, -0.0, 0.5, 1e-300, 1e300, -1.5, 100.0, 1e10)
_STRINGS = (
    *("", "a", "\0", "\n" * 40, "é" * 50, "\U0001f600", "../../etc/passwd", "%s%n{0}", "x" * 3000),
    *(
        "auto",
        "none",
        "text",
        "json_object",
        "best_effort",
        "default",
        "user",
        "bundled",
        "[" * 200,
    ),
)
_SHARED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 2,
    "seed": 3,
    "stop": ["x"],
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "stream_options": {"include_usage": True},
    "user": "u",
    "top_k": 3,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "priority": "best_effort",
    "allow_brownout": True,
    "timeout_s": 20.0,
    "response_format": {"type": "text"},
}
_OWN: dict[str, dict[str, Any]] = {
    PATHS[0]: {"echo": True, "logprobs": 0, "best_of": 1, "suffix": None},
    PATHS[1]: {
        "logprobs": True,
        "chat_template_kwargs": {},
        "metadata": {},
        "store": False,
        "tool_choice": "none",
        "service_tier": "auto",
        "tools": None,
    },
}


@dataclass(frozen=True)
class Fuzzed:
    """What is written to a connection at once. `num_answers` None: nobody can say how many come;
    `leaves`: its sender closes the connection instead of reading; `half_closes`: it closes its side
    and then reads.
    """

    kind: str
    data: bytes
    num_answers: int | None = 1
    leaves: bool = False
    half_closes: bool = False


def draw(rng: random.Random, model: str) -> Fuzzed:
    """Returns the next one."""
    kind = rng.choices([*_KINDS], [weight for weight, _ in _KINDS.values()])[0]
    return _KINDS[kind][1](rng, model, kind)


def body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """Returns a path, and a body that is right for it."""
    path = rng.choice(PATHS)
    found: dict[str, Any] = {
        "model": model,
        "max_tokens": rng.randrange(1, 5),
        "stream": rng.random() < 0.5,
    }
    if path == PATHS[0]:
        found["prompt"] = rng.choice(("add 4 + 5", [5, 6, 7], ["add", "say"], [[1], [2, 3]]))
    else:
        found["messages"] = [{"role": "user", "content": rng.choice(("hi", "add 4 + 5"))}]
    fields = [*(_SHARED | _OWN[path]).items()]
    found |= dict(rng.sample(fields, rng.randrange(4)))
    if not found["stream"]:
        found.pop("stream_options", None)
    return path, found


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Returns a value of JSON."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(_STRINGS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}
    plain = (None, True, False, rng.choice(_NUMBERS), rng.choice(_REALS), rng.choice(_STRINGS))
    return plain[kind]


def request(path: str, payload: bytes, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    """Returns one whole request."""
    kind = b"" if b"content-type" in headers else b"content-type: application/json\r\n"
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\n%b%b" % (method, path.encode(), kind, headers)
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(payload), payload)


def _right(rng: random.Random, model: str, kind: str) -> Fuzzed:
    path, found = body(rng, model)
    return Fuzzed(kind, request(path, json.dumps(found).encode()))


def _wrong_values(rng: random.Random, model: str, kind: str) -> Fuzzed:
    path, found = body(rng, model)
    names = [*(found | _SHARED | _OWN[path]), "unknown", *_STRINGS]
    for _ in range(rng.randrange(1, 4)):
        found[rng.choice(names)] = anything(rng)
    return Fuzzed(kind, request(path, json.dumps(found).encode()))


def _wrong_parts(rng: random.Random, model: str, kind: str) -> Fuzzed:
    """Returns right on the surface, wrong within."""
    path, found = body(rng, model)
    if path == PATHS[1]:
        message = {"role": "user", "content": anything(rng), rng.choice(_STRINGS): anything(rng)}
        found["messages"] = [message] * rng.randrange(1, 40)
    else:
        found["prompt"] = [anything(rng) for _ in range(rng.randrange(1, 300))]
    name = rng.choice(("response_format", "structured_outputs", "stream_options", "logit_bias"))
    found[name] = {rng.choice(("type", "json", "15", "include_usage")): anything(rng)}
    return Fuzzed(kind, request(path, json.dumps(found).encode()))


def _mutated(rng: random.Random, model: str, kind: str) -> Fuzzed:
    path, found = body(rng, model)
    payload = bytearray(json.dumps(found).encode())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(payload))
        payload[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return Fuzzed(kind, request(path, bytes(payload)))


def _bad_utf8(rng: random.Random, model: str, kind: str) -> Fuzzed:
    bad = rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800"))
    payload = b'{"model":"%b","prompt":"%b","max_tokens":1}' % (model.encode(), bad)
    return Fuzzed(kind, request(PATHS[0], payload))


def _noise(rng: random.Random, model: str, kind: str) -> Fuzzed:
    size = rng.choice((0, 1, 2, 20, 200, 2000, 70_000))
    return Fuzzed(kind, request(rng.choice(PATHS), rng.randbytes(size)))


def _nested(rng: random.Random, model: str, kind: str) -> Fuzzed:
    depth = rng.choice((10, 200, 1000, 20_000))
    payload = rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))
    return Fuzzed(kind, request(rng.choice(PATHS), payload))


def _routes(rng: random.Random, model: str, kind: str) -> Fuzzed:
    method = rng.choice((b"GET", b"PUT", b"DELETE", b"OPTIONS", b"POST", b"PATCH"))
    path = rng.choice(
        (
            *("/", "/v1", "/v1/models", f"/v1/models/{model}", "/v1/models/x/y", "/health"),
            *(
                "/version",
                "/openapi.json",
                "/%00%ff",
                "/v1/models/%2e%2e%2f",
                "//",
                "/docs/%2e%2e/x",
            ),
            *("/v1/completions/", "/v1/completions?x=" + "y" * 300, "/" + "z" * 9000),
        )
    )
    return Fuzzed(kind, request(path, b"", method=method))


def _headers(rng: random.Random, model: str, kind: str) -> Fuzzed:
    path, found = body(rng, model)
    lines = (
        *(b"x-request-id: %b\r\n" % value for value in (b"", b"a b", b"\xe9" * 20, b"i" * 200)),
        *(b"authorization: %b\r\n" % value for value in (b"", b"Bearer", b"Basic eDp5", b"\xff")),
        *(b"content-type: %b\r\n" % value for value in (b"text/plain", b"multipart/form-data")),
        b"accept-encoding: gzip, br\r\n",
        b"x-forwarded-for: %b\r\n" % (b"1," * 500),
        b"x: %b\r\n" % (b"y" * rng.choice((10, 4000, 15_000, 17_000, 60_000))),
        b"connection: close\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n",
        b"origin: http://evil.example\r\n",
        b"expect: 100-continue\r\n",
    )
    chosen = b"".join(rng.sample(lines, rng.randrange(1, 4)))
    # Headers that are too large are answered, too; but what follows them is not read.
    return Fuzzed(kind, request(path, json.dumps(found).encode(), chosen))


def _pipelined(rng: random.Random, model: str, kind: str) -> Fuzzed:
    several = [
        rng.choice((_right, _wrong_values, _mutated))(rng, model, kind).data
        for _ in range(rng.randrange(2, 6))
    ]
    return Fuzzed(kind, b"".join(several), len(several))


def _cut(rng: random.Random, model: str, kind: str) -> Fuzzed:
    whole = _right(rng, model, kind).data
    return Fuzzed(kind, whole[: rng.randrange(1, len(whole))], 0, leaves=True)


def _left(rng: random.Random, model: str, kind: str) -> Fuzzed:
    return Fuzzed(kind, _right(rng, model, kind).data, 0, leaves=True)


def _no_http(rng: random.Random, model: str, kind: str) -> Fuzzed:
    whole = bytearray(_right(rng, model, kind).data)
    which = rng.randrange(5)
    if which == 0:
        return Fuzzed(kind, rng.randbytes(rng.choice((1, 10, 100, 5000))), None)
    if which == 1:
        for _ in range(rng.randrange(1, 5)):
            whole[rng.randrange(min(len(whole), 120))] = rng.randrange(256)
        return Fuzzed(kind, bytes(whole), None)
    length = rng.choice((b"-1", b"0x10", b"99999999999999999999", b"1, 2", b"5000000", b""))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: fuzz\r\n"
    if which == 2:
        return Fuzzed(kind, head + b"content-length: %b\r\n\r\n{}" % length, None)
    chunks = rng.choice((b"5\r\nabc", b"zz\r\n\r\n", b"-1\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"\r\n"))
    coding = rng.choice((b"chunked", b"gzip, chunked", b"chunked, chunked", b"nonsense"))
    extra = b"content-length: 3\r\n" if which == 4 else b""
    return Fuzzed(kind, head + extra + b"transfer-encoding: %b\r\n\r\n%b" % (coding, chunks), None)


def _nested_schema(rng: random.Random, model: str, kind: str) -> Fuzzed:
    """In a body that is right but for this. No schema is valid, since the device follows none."""
    path, found = body(rng, model)
    depth = rng.choice((5, 190, 199, 200, 230, 253, 254, 255, 900, 1020, 1024, 5000))
    value = b'{"type":' * depth + b"1" + b"}" * depth
    name, format_ = rng.choice(
        (
            ("guided_json", b"%b"),
            ("structured_outputs", b'{"json":%b}'),
            ("response_format", b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}'),
            ("chat_template_kwargs", b"%b"),
        )
    )
    found.pop(name, None)
    payload = json.dumps(found).encode()[:-1] + b',"%b":%b}' % (name.encode(), format_ % value)
    return Fuzzed(kind, request(path, payload))


def _twice(rng: random.Random, model: str, kind: str) -> Fuzzed:
    path, found = body(rng, model)
    name = rng.choice([*found])
    payload = json.dumps(found).encode()[:-1] + b',"%b":%b}' % (
        name.encode(),
        json.dumps(rng.choice((found[name], anything(rng)))).encode(),
    )
    return Fuzzed(kind, request(path, payload))


def _half_closed(rng: random.Random, model: str, kind: str) -> Fuzzed:
    made = rng.choice((_right, _wrong_values, _nested_schema))(rng, model, kind)
    return Fuzzed(kind, made.data, half_closes=True)


_KINDS: dict[str, tuple[int, Callable[[random.Random, str, str], Fuzzed]]] = {
    "right": (10, _right),
    "wrong values": (30, _wrong_values),
    "wrong parts": (12, _wrong_parts),
    "mutated JSON": (15, _mutated),
    "bad UTF-8": (4, _bad_utf8),
    "noise": (4, _noise),
    "nested": (2, _nested),
    "nested schemas": (3, _nested_schema),
    "a key twice": (2, _twice),
    "routes": (5, _routes),
    "headers": (6, _headers),
    "pipelined": (4, _pipelined),
    "cut": (3, _cut),
    "left": (3, _left),
    "half-closed": (3, _half_closed),
    "no HTTP": (2, _no_http),
}
