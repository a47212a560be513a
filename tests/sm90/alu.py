"""Arithmetic: functions of whole warps, a lane an element."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

TYPES = {
    "pred": np.bool_,
    **{
        f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "bu" for bits in (8, 16, 32, 64)
    },
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "bf16x2": np.uint32,
}
_WIDE = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: np.uint32}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


class Function(NamedTuple):
    """What an instruction computes."""

    compute: Callable[..., Any]
    result: Any  # its dtype
    operands: tuple[Any, ...]  # theirs


def function(op: tuple[str, ...]) -> Function | None:
    """Returns the function of an opcode; None where it is no arithmetic."""
    name, *modifiers = op
    kind = TYPES.get(op[-1], np.uint32)
    if name in ("mov", "cvta"):
        return Function(lambda a: a, kind, (kind,))
    if name == "cvt":
        return _convert(modifiers)
    if name == "selp":
        return Function(lambda a, b, p: np.where(p, a, b), kind, (kind, kind, np.bool_))
    if name == "setp":
        return Function(_comparison(modifiers[0], kind), np.bool_, (kind, kind))
    if "wide" in modifiers:
        wide = _WIDE[kind]
        return Function(lambda a, b: a.astype(wide) * b.astype(wide), wide, (kind, kind))
    if name == "mul" and "hi" in modifiers:
        return Function(_high(kind), kind, (kind, kind))
    if name == "fma" and op[-1] == "f32":
        return Function(_fma_down if "rm" in modifiers else _fma, kind, (kind,) * 3)
    if op[-1] == "bf16x2":
        return _pairs(name)
    if name in ("shl", "shr"):
        return Function(_shift(name, kind), kind, (kind, np.uint32))
    if name == "bfe":
        return Function(_field(kind), kind, (kind, np.uint32, np.uint32))
    simple = _SIMPLE.get((name, *(m for m in modifiers if m in ("NaN", "relu"))))
    if simple is None:
        return None
    return Function(simple, kind, (kind,) * simple.__code__.co_argcount)


def _divide(a, b):
    """Divides towards zero; by zero the result is arbitrary."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = np.abs(a.astype(object)) // np.abs(safe.astype(object))
    return (np.sign(a.astype(object)) * np.sign(safe.astype(object)) * quotient).astype(a.dtype)


def _permute(a, b, selector):
    both = np.stack([(x >> (8 * i)) & 0xFF for x in (a, b) for i in range(4)])
    result = np.zeros_like(a)
    for i in range(4):
        pick = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
        assert not np.any(pick & 8), "prmt of signs"
        at = np.broadcast_to(pick, a.shape).astype(np.int64)
        result |= np.take_along_axis(both, at[None], axis=0)[0] << np.uint32(8 * i)
    return result


_SIMPLE: dict[tuple[str, ...], Callable] = {
    ("add",): lambda a, b: a + b,
    ("sub",): lambda a, b: a - b,
    ("mul",): lambda a, b: a * b,
    ("mad",): lambda a, b, c: a * b + c,
    ("div",): lambda a, b: _divide(a, b),
    ("rem",): lambda a, b: a - _divide(a, b) * b,
    ("and",): lambda a, b: a & b,
    ("or",): lambda a, b: a | b,
    ("xor",): lambda a, b: a ^ b,
    ("not",): lambda a: ~a,
    ("neg",): lambda a: -a,
    ("abs",): lambda a: np.abs(a),
    ("max",): lambda a, b: np.fmax(a, b),
    ("min",): lambda a, b: np.fmin(a, b),
    ("max", "NaN"): lambda a, b: np.maximum(a, b),
    ("min", "NaN"): lambda a, b: np.minimum(a, b),
    ("min", "relu"): lambda a, b: np.maximum(np.minimum(a, b), 0).astype(a.dtype),
    ("ex2",): lambda a: np.exp2(a),
    ("lg2",): lambda a: np.log2(a),
    ("rsqrt",): lambda a: np.float32(1) / np.sqrt(a),
    ("rcp",): lambda a: np.float32(1) / a,
    ("prmt",): lambda a, b, selector: _permute(a, b, selector),
}


def _comparison(name: str, kind: Any) -> Callable:
    ordered = _COMPARE.get(name)
    if ordered is None:  # with a `u`, true of NaN
        compare = _COMPARE[name.removesuffix("u")]
        return lambda a, b: compare(a, b) | (a != a) | (b != b)
    if name == "ne" and np.dtype(kind).kind == "f":
        return lambda a, b: (a != b) & (a == a) & (b == b)
    return ordered


def _high(kind: Any) -> Callable:
    wide, bits = _WIDE.get(kind, object), 8 * np.dtype(kind).itemsize
    return lambda a, b: (a.astype(wide) * b.astype(wide)) >> bits


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _fma_down(a: Any, b: Any, c: Any) -> Any:
    exact = np.float64(a) * np.float64(b) + np.float64(c)
    rounded = exact.astype(np.float32)
    return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def _shift(name: str, kind: Any) -> Callable:
    """Returns a shift; by the width or more, only the sign is left."""
    bits = 8 * np.dtype(kind).itemsize

    def shift(a: np.ndarray, count: np.ndarray) -> np.ndarray:
        by = np.minimum(count, bits - 1).astype(kind)
        if name == "shr" and np.dtype(kind).kind == "i":
            return a >> by
        return np.where(count >= bits, 0, a << by if name == "shl" else a >> by)

    return shift


def _field(kind: Any) -> Callable:
    def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        bits = a.astype(object) >> start.astype(object) & (1 << length.astype(object)) - 1
        sign = 1 << length.astype(object) - 1
        return (bits ^ sign) - sign if np.dtype(kind).kind == "i" else bits

    return extract


def _pairs(name: str) -> Function:
    """Returns a function of two bfloat16 at once, each rounded once."""
    compute = _SIMPLE[name,] if name != "fma" else _fma
    count = compute.__code__.co_argcount

    def each(*operands: np.ndarray) -> np.ndarray:
        pairs = (np.ascontiguousarray(a) for a in np.broadcast_arrays(*operands))
        wide = compute(*(pair.view(ml_dtypes.bfloat16).astype(np.float32) for pair in pairs))
        return wide.astype(ml_dtypes.bfloat16).view(np.uint32)

    return Function(each, np.uint32, (np.uint32,) * count)


def _convert(modifiers: list[str]) -> Function:
    """Returns a conversion; `modifiers` end with the dtypes of the result and of the operand."""
    into, of = modifiers[-2:]
    if into == "bf16x2":

        def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            halves = np.stack(np.broadcast_arrays(low, high), axis=-1)
            return halves.astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]

        return Function(pack, np.uint32, (np.float32, np.float32))
    if into == "e4m3x2":

        def narrow(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            pair = np.stack(np.broadcast_arrays(low, high), axis=-1)
            finite = np.clip(pair, -448, 448)  # `satfinite`; NaN stays
            return finite.astype(ml_dtypes.float8_e4m3fn).view(np.uint16)[..., 0]

        return Function(narrow, np.uint16, (np.float32, np.float32))
    if into == "f16x2":
        eight = {"e4m3x2": ml_dtypes.float8_e4m3fn}[of]
        return Function(
            lambda pair: pair.view(eight).astype(np.float16).view(np.uint32),
            np.uint32,
            (np.uint16,),
        )
    result, kind = TYPES[into], TYPES[of]
    if "sat" in modifiers:
        return Function(lambda a: np.clip(np.nan_to_num(a), 0, 1), result, (kind,))
    if "rzi" in modifiers:
        low, high = float(np.iinfo(result).min), float(np.iinfo(result).max)
        return Function(lambda a: np.clip(np.nan_to_num(a), low, high), result, (kind,))
    if {"rmi", "rpi", "rni", "rm", "rp"} & set(modifiers):
        raise NotImplementedError(".".join(("cvt", *modifiers)))
    return Function(lambda a: a, result, (kind,))
