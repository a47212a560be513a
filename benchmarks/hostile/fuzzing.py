"""Messages nobody should send: noise, valid ones gone wrong, and ones with absurd values."""

import math
import random
import struct
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from serving.frontend.kserve_tensors import INPUTS, OUTPUTS, OWN_PARAMETERS
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

Answer = tuple[str, str, str]
"""Kind, code, and what is wrong with the answer; empty where nothing is."""


@dataclass(frozen=True)
class Fuzz:
    """What is fuzzed. `draw(rng, model)` returns what is sent next, which has a `kind`.

    `connect(facts)` opens a connection and yields the function that sends it and returns all
    answers; `per_connection` senders share one.
    """

    name: str
    draw: Callable[[random.Random, str], Any]
    connect: Callable[
        [Any], AbstractAsyncContextManager[Callable[[Any], Awaitable[Sequence[Answer]]]]
    ]
    per_connection: int = 1


_INT32 = (0, 1, 2, 8, 99, 511, 512, 4096, -1, -(2**31), 2**31 - 1)
_UINT32, _UINT64 = (0, 1, 99, 2**31, 2**32 - 1), (0, 1, 2**32, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 7.0, -1.0, 1e-40, 3e38, math.nan, math.inf, -math.inf)
_STRINGS = (
    *("", "a", "word " * 50, "x" * 20_000, "\0\0", "\u202e\ufeff\ufffd", "👩‍👩‍👧‍👦" * 40),
    *("e" + "\u0301" * 500, "partial", "zero", "jmoe.v1.Generation", "grpc.health.v1.Health"),
    *("../../../etc/passwd", "%s%n{0}{}\r\n", "x" * 128, "x" * 129, "bundled", "1"),
    *(*INPUTS, *OUTPUTS, *OWN_PARAMETERS, "BYTES", "BOOL", "FP32", "shared_memory_region"),
)


def element(data: bytes) -> bytes:
    """Returns the one element of a tensor of bytes."""
    return struct.pack("<I", len(data)) + data


_TEXTS = (b"", b"abc", b"\xff\xfe", b"\0", "é\U0001f600".encode(), b"x" * 9000, b"word " * 300)
_NOT_JSON = (b"{", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"nul", b'{"n": NaN}', b"\xff")
_BYTES = (
    *(b"\0", b"\1", b"\2", b"\5\0\0\0ab", b"\xff" * 9, *map(element, (*_TEXTS, *_NOT_JSON))),
    *_TEXTS,
)
_EDGES: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: (*_INT32, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_STRING: _STRINGS,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
}
_COUNTS = (0, 0, 0, 1, 1, 2, 5, 70)
_DEEPEST = 6

_USUAL = pb.GenerateRequest(text="add 4 + 3 =", sampling=pb.SamplingParams(max_new_tokens=8))
"""What half of the requests to Generate start from, or few would get beyond their prompt."""


def message(rng: random.Random, kind: Any) -> bytes:
    """Returns one message for a method that takes messages of `kind`."""
    chance = rng.random()
    if chance < 0.2:
        return rng.randbytes(rng.choice((1, 2, 7, 40, 300, 5000)))
    valid = _absurd(rng, kind, 0).SerializeToString()
    return valid if chance < 0.6 else mutated(rng, valid)


def _absurd(rng: random.Random, kind: Descriptor, depth: int) -> Any:
    """Returns a message that decodes: some of its fields are set, with values from the edges."""
    made = message_factory.GetMessageClass(kind)()
    share = rng.choice((0.1, 0.3, 0.9))
    if kind is _USUAL.DESCRIPTOR and rng.random() < 0.5:
        made.CopyFrom(_USUAL)
        share = 0.1
    for field in kind.fields:
        if rng.random() < share and depth < _DEEPEST:
            _set(rng, made, field, depth)
    return made


def _value(rng: random.Random, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is not None:
        return _absurd(rng, field.message_type, depth + 1)
    return rng.choice(_EDGES[field.type])


def _set(rng: random.Random, made: Any, field: FieldDescriptor, depth: int) -> None:
    child, at = field.message_type, getattr(made, field.name)
    if child is not None and child.GetOptions().map_entry:
        for _ in range(rng.choice(_COUNTS)):
            key, value = (_value(rng, one, depth) for one in child.fields)
            if child.fields[1].message_type is not None:
                at[key].CopyFrom(value)
            else:
                at[key] = value
    elif child is not None and not field.is_repeated:
        at.CopyFrom(_value(rng, field, depth))
    elif not field.is_repeated:
        setattr(made, field.name, _value(rng, field, depth))
    elif child is not None:
        at.extend([_value(rng, field, depth)] * rng.choice(_COUNTS))
    else:
        count = 3000 if rng.random() < 0.02 else rng.choice(_COUNTS)
        values = [_value(rng, field, depth) for _ in range(min(count, 70))]
        if sum(len(value) for value in values if isinstance(value, str)) > 100_000:
            values = values[:5]  # or they pass gRPC's limit
        whole = bool(values) and isinstance(values[0], int)
        at.extend(values + [0] * max(0, count - 70) * whole)


def spoil(rng: random.Random, made: Any) -> None:
    """Changes a message in one place, at any depth: a value changes, comes, goes or is repeated."""
    at = rng.choice([*_messages(made)])
    field: Any = rng.choice(at.DESCRIPTOR.fields)
    value, is_map = getattr(at, field.name), isinstance(getattr(at, field.name), MutableMapping)
    if field.is_repeated and not is_map and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        if field.message_type is None and rng.random() < 0.7:
            value[index] = _value(rng, field, 0)
        elif rng.random() < 0.5:
            del value[index]
        else:
            value.extend([value[index]] * rng.choice(_COUNTS))
        return
    if rng.random() < 0.5:
        at.ClearField(field.name)
    if rng.random() < 0.8:
        _set(rng, at, field, _DEEPEST - 2)


def _messages(made: Message) -> Iterator[Message]:
    yield made
    for field, value in made.ListFields():
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        for one in value.values() if is_map else value if field.is_repeated else [value]:
            if isinstance(one, Message):
                yield from _messages(one)


def mutated(rng: random.Random, valid: bytes) -> bytes:
    """Returns a message with a few bytes changed, put in, left out or said twice."""
    data = bytearray(valid or b"\x0a\x03abc")
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif change == 2:
            del data[at:]
        elif change == 3:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 200)]
    return bytes(data)


# ---- JSON -------------------------------------------------------------------------------------

_NUMBERS = (
    *(0, 1, -1, 2, 5, 20, 64, 65, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, -1.5, 7.5, 100.0, 1e10),
)
_JSON_TEXTS = (
    *("", "a", "\0", "\n" * 40, "é" * 50, "\U0001f600", "\ud800", "../../etc/passwd", "%s%n{0}"),
    *("x" * 3000, "[" * 200, "1", "0.5", "1_0", " 4 ", "\u0664", "true", "nan", "inf"),
    *("auto", "none", "text", "json_object", "best_effort", "default", "user", "bundled"),
)
_SCALARS = (None, True, False, *_NUMBERS, *_JSON_TEXTS)
_WORDS = ("a", "add", "f-1")
"""Strings that every length and pattern of the server's schemas allows."""


def conforming(rng: random.Random, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """Returns a value that a JSON schema allows, with few of the fields that may be left out.

    `defs` has the schemas that it refers to. A field that may be null is not, unless it must be.
    """
    match schema:
        case {"$ref": name}:
            return conforming(rng, defs[name.rpartition("/")[2]], defs)
        case {"anyOf": kinds}:
            others = [kind for kind in kinds if kind.get("type") != "null"]
            return conforming(rng, rng.choice(others), defs)
        case {"const": value}:
            return value
        case {"enum": values}:
            return rng.choice(values)
        case {"type": "object"}:
            fields, required = schema.get("properties", {}), schema.get("required", [])
            optional = [name for name in fields if name not in required]
            chosen = rng.sample(optional, min(len(optional), rng.randrange(3)))
            return {name: conforming(rng, fields[name], defs) for name in (*required, *chosen)}
        case {"type": "array", "items": items}:
            count = max(schema.get("minItems", 1), rng.randrange(4))
            count = min(count, schema.get("maxItems", count))
            return [conforming(rng, items, defs) for _ in range(count)]
        case {"type": "integer"}:
            least = schema.get("minimum", 0)
            return min(rng.randrange(least, least + 5), schema.get("maximum", least + 5))
        case {"type": "number"}:
            drawn = max(rng.choice((0.5, 1.0)), schema.get("minimum", 0.5))
            return min(drawn, schema.get("maximum", drawn))
        case {"type": "null"}:
            return None
    values = {"boolean": (True, False), "string": _WORDS}
    return rng.choice(values[schema["type"]] if "type" in schema else (None, 1, *_WORDS))


def spoiled(rng: random.Random, value: Any, names: Sequence[str]) -> None:
    """Changes an object or list in one place, at any depth.

    What stands there becomes any other value, goes, is repeated or gets another of the `names`.
    """
    within = [*_containers(value)]
    at = rng.choice((value, rng.choice(within)))
    if isinstance(at, list):
        start = rng.randrange(len(at) + 1)
        new = rng.choice(([], [anything(rng)], at * rng.choice((1, 40))))
        at[start : start + rng.randrange(2)] = new
        return
    name = rng.choice(
        (*[rng.choice([*at] or names), rng.choice(names)] * 3, rng.choice(_JSON_TEXTS))
    )
    change = rng.random()
    if change < 0.8:
        at[name] = anything(rng, 1)
    elif name in at:
        gone = at.pop(name)
        if change < 0.9:
            at[rng.choice(names)] = gone


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _containers(one)


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Returns a value of JSON."""
    chance = rng.random()
    if depth > 3 or chance < 0.7:
        return rng.choice(_SCALARS)
    count = rng.choice((0, 1, 2, 70, 1100) if depth == 0 else (0, 1, 2))
    if chance < 0.85:
        return [anything(rng, depth + 1) for _ in range(count)]
    return {str(rng.choice(_SCALARS)): anything(rng, depth + 1) for _ in range(min(count, 20))}
