"""Messages nobody should send: noise, valid ones gone wrong, and ones with absurd values."""

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_INT32 = (0, 1, 2, 8, 99, 511, 512, 4096, -1, -(2**31), 2**31 - 1)
_INT64 = (*_INT32, 2**63 - 1, -(2**63))
_UINT32 = (0, 1, 99, 2**31, 2**32 - 1)
_UINT64 = (0, 1, 2**32, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 7.0, -1.0, 1e-40, 3e38, math.nan, math.inf, -math.inf)
_STRINGS = (
    "",
    "a",
    "word " * 50,
    "x" * 20_000,
    "\0\0",
    "\u202e\ufeff\ufffd",
    "👩‍👩‍👧‍👦" * 40,
    "e" + "\u0301" * 500,
    "partial",
    "zero",
    "jmoe.v1.Generation",
    "grpc.health.v1.Health",
    "../../../etc/passwd",
    "%s%n{0}{}\r\n",
)
_COUNTS = (0, 0, 0, 1, 1, 2, 5, 70)
_DEEPEST = 6

_USUAL = pb.GenerateRequest(text="add 4 + 3 =", sampling=pb.SamplingParams(max_new_tokens=8))
"""What half of the requests to Generate start from, or few would get beyond their prompt."""

_VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.TYPE_INT32: lambda rng: rng.choice(_INT32),
    FieldDescriptor.TYPE_INT64: lambda rng: rng.choice(_INT64),
    FieldDescriptor.TYPE_UINT32: lambda rng: rng.choice(_UINT32),
    FieldDescriptor.TYPE_UINT64: lambda rng: rng.choice(_UINT64),
    FieldDescriptor.TYPE_FLOAT: lambda rng: rng.choice(_FLOATS),
    FieldDescriptor.TYPE_DOUBLE: lambda rng: rng.choice(_FLOATS),
    FieldDescriptor.TYPE_BOOL: lambda rng: rng.random() < 0.5,
    FieldDescriptor.TYPE_STRING: lambda rng: rng.choice(_STRINGS),
    FieldDescriptor.TYPE_BYTES: lambda rng: rng.randbytes(rng.randrange(40)),
    FieldDescriptor.TYPE_ENUM: lambda rng: rng.choice((0, 1, 2, 3, 99, -1, 2**31 - 1)),
}


def message(rng: random.Random, kind: Any) -> bytes:
    """Returns one message for a method that takes messages of `kind`."""
    chance = rng.random()
    if chance < 0.2:
        return rng.randbytes(rng.choice((1, 2, 7, 40, 300, 5000)))
    valid = absurd(rng, kind).SerializeToString()
    return valid if chance < 0.6 else mutated(rng, valid)


def absurd(rng: random.Random, kind: Descriptor, depth: int = 0) -> Any:
    """Returns a message that decodes: some of its fields are present, with values
    from the edges.
    """
    made = message_factory.GetMessageClass(kind)()
    share = rng.choice((0.1, 0.3, 0.9))
    if kind is _USUAL.DESCRIPTOR and rng.random() < 0.5:
        made.CopyFrom(_USUAL)
        share = 0.1
    for field in kind.fields:
        if rng.random() < share and depth < _DEEPEST:
            _set(rng, made, field, depth)
    return made


def _set(rng: random.Random, made: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(rng, getattr(made, field.name), field.message_type, depth)
        return
    if field.message_type is not None:
        child = absurd(rng, field.message_type, depth + 1)
        if field.is_repeated:
            getattr(made, field.name).extend([child] * rng.choice(_COUNTS))
        else:
            getattr(made, field.name).CopyFrom(child)
        return
    draw = _VALUES[field.type]
    if field.is_repeated:
        count = 3000 if rng.random() < 0.02 else rng.choice(_COUNTS)
        short = draw(rng)
        long = isinstance(short, str) and len(short) > 1000  # or 3000 of them pass gRPC's limit
        values = [short] * min(count, 5) if long else [draw(rng) for _ in range(min(count, 70))]
        getattr(made, field.name).extend(values + [0] * max(0, count - 70) * isinstance(short, int))
    else:
        setattr(made, field.name, draw(rng))


def _set_map(rng: random.Random, made: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields
    for _ in range(rng.choice(_COUNTS)):
        name = _VALUES[key.type](rng)
        if value.message_type is not None:
            made[name].CopyFrom(absurd(rng, value.message_type, depth + 1))
        else:
            made[name] = _VALUES[value.type](rng)


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
