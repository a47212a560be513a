"""Messages no sane client sends: random bytes, broken messages, valid ones with absurd values.

`messages(rng, message_type)` draws one; the same `random.Random` seed draws the same ones.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (0, 1, -1, 2, 7, 100, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan)
_TEXTS = (
    *("", "a", "\0", "\n" * 40, "é" * 50, "\U0001f600", "../../etc/passwd", "%s%n{0}", "a" * 3000),
    *("bundled", "partial", "full", "zero", "jmoe.v1.Generation", ".", "..", "jmoe.v1."),
)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def messages(rng: random.Random, message_type: type[Message]) -> bytes:
    """Draws bytes that a caller might send where a `message_type` is expected."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200, 2000)))
    valid = absurd(rng, message_type).SerializeToString()
    if kind == 1:
        return valid[: rng.randrange(len(valid) + 1)]
    if kind == 2:
        return mutated(rng, valid)
    if kind == 3:
        return valid + mutated(rng, valid)
    return valid


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Returns data with a few bytes changed, removed, inserted or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 4)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 4))
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 30)]
    return bytes(changed)


def absurd(rng: random.Random, message_type: type[Message]) -> Message:
    """Draws a message that parses, with random fields missing and absurd values."""
    message = message_type()
    _fill(rng, message, message.DESCRIPTOR, depth=4)
    return message


def _fill(rng: random.Random, message: Any, descriptor: Descriptor, depth: int) -> None:
    for field in descriptor.fields:
        if rng.random() < 0.4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            keys, values = field.message_type.fields
            entries = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 3, 1100))):
                key = _value(rng, keys)
                if values.message_type is None:
                    entries[key] = _value(rng, values)
                elif depth:
                    _fill(rng, entries[key], values.message_type, depth - 1)
        elif field.message_type is not None:
            if depth:
                inner = getattr(message, field.name)
                for part in [inner.add() for _ in range(2)] if field.is_repeated else [inner]:
                    part.SetInParent()
                    _fill(rng, part, field.message_type, depth - 1)
        elif field.is_repeated:
            count = rng.choice((0, 1, 3, 70, 1100, 5000))
            value = _value(rng, field)
            # Many of one value are as hard to take as many values, and quicker to make.
            getattr(message, field.name).extend([value] * count)
        else:
            setattr(message, field.name, _value(rng, field))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return rng.choice([n for n in _INTEGERS if low <= n <= high] + [rng.randint(low, high)])
    makers: dict[int, Callable[[], Any]] = {
        FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(_FLOATS),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(_FLOATS),
    }
    if kind in makers:
        return makers[kind]()
    text = rng.choice(_TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
