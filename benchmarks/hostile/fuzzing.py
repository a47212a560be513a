"""Messages nobody should send: noise, valid ones gone wrong, and ones with absurd values."""

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

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
    *("../../../etc/passwd", "%s%n{0}{}\r\n"),
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
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randrange(40))
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


def anything(rng: random.Random, scalars: Sequence[Any], depth: int = 0) -> Any:
    """Returns a value of JSON; its scalars are of those given."""
    chance = rng.random()
    if depth > 3 or chance < 0.7:
        return rng.choice(scalars)
    count = rng.choice((0, 1, 2, 70, 1100) if depth == 0 else (0, 1, 2))
    if chance < 0.85:
        return [anything(rng, scalars, depth + 1) for _ in range(count)]
    return {
        str(rng.choice(scalars)): anything(rng, scalars, depth + 1) for _ in range(min(count, 20))
    }
