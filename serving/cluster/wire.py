"""Messages between processes as frames: a JSON header, then the bytes of each array.

Each of these is in frames of MAX_FRAME_BYTES, and one behind them that is shorter, maybe empty.

Nothing that comes is ever run, and only types that the receiver names are made. What a message's
header holds, and which frames belong to it, is said by the annotations of its fields alone; both
ends check values against them, and frames against their own sizes. Whether a number makes sense is
for whoever gets the message.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np
from jaxtyping import AbstractArray, Shaped

Array = Shaped[np.ndarray, "..."]
Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 1 << 17
"""What a connection may make its receiver keep before anybody knows whose it is."""
MAX_ARRAY_BYTES = 1 << 30
MOST_FRAMES = 2 * MAX_ARRAY_BYTES // MAX_FRAME_BYTES
"""Of a message."""
_SCALARS = (bool, int, float, str)
_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # `dtype.name` takes longer than a send
_ROW_DTYPES = ("bfloat16", "float16", "float32")


class WireError(ValueError):
    """A message that cannot travel, or frames that are no message."""


class Wire:
    """Messages of some types as frames, and back.

    A message is a NamedTuple or a dataclass. Annotations that its fields may have: bool, int,
    float, str, an array of jaxtyping over np.ndarray with a rank, `Any` for rows (an array [n, d]
    of bfloat16, float16 or float32), another message that has none inside, a list
    of scalars or of such messages; and any of them `| None`.
    """

    def __init__(self, messages: Sequence[type]) -> None:
        """`messages` are the types that travel by themselves.

        Raises WireError for two of one name, and for a field that cannot travel.
        """
        self._kinds = {message.__name__: _Message(message) for message in messages}
        if len(self._kinds) < len(messages):
            names = ", ".join(sorted(message.__name__ for message in messages))
            raise WireError(f"two messages have one name: {names}")

    def encode(self, message: Any) -> list[Buffer]:
        """Returns the frames: of the header, then of each array, whose bytes are copied only where
        they do not lie in order.

        Raises WireError for a message of another type, or with a value that its field cannot have.
        """
        name, arrays = type(message).__name__, list[Array]()
        kind = self._kinds.get(name)
        if kind is None or kind.type is not type(message):
            raise WireError(f"{name} is not among {', '.join(self._kinds)}")
        plain = kind.pack(message, arrays)
        rows = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)
        parts = map(memoryview, (json.dumps([name, plain]).encode(), *rows))
        size = MAX_FRAME_BYTES
        return [part[at : at + size] for part in parts for at in range(0, len(part) + 1, size)]

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """Returns the message. Arrays are copies; rows are a view of their frame, read-only.

        Raises WireError for frames that are no message of these types.
        """
        if not frames:
            raise WireError("a message has no frame")
        incoming = _Incoming(iter(frames))
        try:
            plain = json.loads(bytes(incoming.part() or b""))
        except (ValueError, RecursionError) as error:
            raise WireError(f"a header is not JSON: {error}") from None
        if not (isinstance(plain, list) and len(plain) == 2 and isinstance(plain[0], str)):
            raise WireError(f"a header is {reprlib.repr(plain)}; it must be a name and values")
        name, plain = plain
        if name not in self._kinds:
            raise WireError(f"{reprlib.repr(name)} is not among {', '.join(self._kinds)}")
        message = self._kinds[name].unpack(plain, incoming)
        if extra := sum(1 for _ in incoming.frames):
            raise WireError(f"{name} has {extra} frames too many")
        return message


class _Incoming:
    """Frames that no field has taken yet."""

    def __init__(self, frames: Iterator[Buffer]) -> None:
        self.frames = frames

    def part(self) -> Buffer | None:
        """Returns the bytes of the next part; None behind the last."""
        pieces = list[memoryview]()
        for frame in self.frames:
            pieces.append(memoryview(frame))
            if pieces[-1].nbytes != MAX_FRAME_BYTES:
                break
        return b"".join(pieces) if len(pieces) > 1 else next(iter(pieces), None)

    def view(self, plain: Any) -> Array:
        """Returns the next part as the array that `plain` describes."""
        match plain:
            case [str(name), list(shape)] if name in _DTYPES and all(map(_is_size, shape)):
                dtype = _DTYPES[name]
            case _:
                raise WireError(f"{reprlib.repr(plain)} is no dtype and shape")
        frame = self.part()
        if frame is None:
            raise WireError("its frame is missing")
        size, wanted = memoryview(frame).nbytes, math.prod(shape) * dtype.itemsize
        if size != wanted:
            raise WireError(
                f"its frame has {size} bytes; {name} {reprlib.repr(shape)} has {wanted}"
            )
        try:
            return np.ndarray(shape, dtype, frame)
        except ValueError as error:  # more dimensions than arrays have, or one that is too long
            raise WireError(f"no array is {reprlib.repr(shape)}: {error}") from None


type _Kind = _Scalar | _Array | _Optional | _List | _Message
"""What a field holds. `pack` returns a value's part of the header and appends its arrays, `unpack`
returns the value; both raise WireError for a value that is not of this kind.
"""


class _Scalar:
    def __init__(self, scalar: type) -> None:
        self._type = scalar

    def pack(self, value: Any, arrays: list[Array]) -> Any:
        return self.unpack(value, None)

    def unpack(self, plain: Any, incoming: _Incoming | None) -> Any:
        if type(plain) is int and self._type is float:
            try:
                return float(plain)
            except OverflowError:
                raise WireError(f"{reprlib.repr(plain)} is too much for a float") from None
        if not isinstance(plain, self._type) or (type(plain) is bool) != (self._type is bool):
            raise WireError(f"it is {reprlib.repr(plain)}; it must be of {self._type.__name__}")
        return plain


class _Array:
    def __init__(self, dtypes: Sequence[str], rank: int, *, is_rows: bool = False) -> None:
        self._dtypes, self._rank = frozenset(_DTYPES[name] for name in dtypes), rank
        self._is_rows = is_rows

    def _check(self, array: Any) -> None:
        if array.dtype not in self._dtypes or array.ndim != self._rank:
            wanted = ", ".join(sorted(_NAMES[dtype] for dtype in self._dtypes))
            raise WireError(
                f"it is {array.dtype} {list(array.shape)}; it must have {self._rank} dimensions, "
                f"and be of {wanted}"
            )
        if array.nbytes > MAX_ARRAY_BYTES:
            raise WireError(f"it has {array.nbytes} bytes; an array has {MAX_ARRAY_BYTES} at most")

    def pack(self, value: Any, arrays: list[Array]) -> Any:
        if not isinstance(value, np.ndarray):
            wanted = "rows" if self._is_rows else "an array of NumPy"
            raise WireError(f"it is {reprlib.repr(value)}; it must be {wanted}")
        self._check(value)
        arrays.append(value)
        return [_NAMES[value.dtype], value.shape]

    def unpack(self, plain: Any, incoming: _Incoming) -> Any:
        view = incoming.view(plain)
        self._check(view)
        # A copy is aligned, and of memory of its own.
        return view if self._is_rows else view.copy()


class _Optional:
    def __init__(self, kind: _Kind) -> None:
        self._kind = kind

    def pack(self, value: Any, arrays: list[Array]) -> Any:
        return None if value is None else self._kind.pack(value, arrays)

    def unpack(self, plain: Any, incoming: _Incoming) -> Any:
        return None if plain is None else self._kind.unpack(plain, incoming)


class _List:
    def __init__(self, kind: _Kind) -> None:
        self._kind = kind

    def pack(self, value: Any, arrays: list[Array]) -> Any:
        return [self._kind.pack(each, arrays) for each in _listed(value)]

    def unpack(self, plain: Any, incoming: _Incoming) -> Any:
        return [self._kind.unpack(each, incoming) for each in _listed(plain)]


class _Message:
    def __init__(self, message: type, *, inside: bool = False) -> None:
        if not (is_dataclass(message) or hasattr(message, "_fields")):
            raise WireError(f"{message.__name__} is neither a NamedTuple nor a dataclass")
        self.type, self._fields = message, {}
        for name, annotation in get_type_hints(message).items():
            try:
                self._fields[name] = _kind_of(annotation, inside=inside)
            except WireError as error:
                raise WireError(f"{message.__name__}.{name}: {error}") from None

    def pack(self, value: Any, arrays: list[Array]) -> Any:
        if type(value) is not self.type:
            raise WireError(f"it is {reprlib.repr(value)}; it must be of {self.type.__name__}")
        return self._each(
            {name: getattr(value, name) for name in self._fields},
            lambda kind, given: kind.pack(given, arrays),
        )

    def unpack(self, plain: Any, incoming: _Incoming) -> Any:
        if not isinstance(plain, dict) or plain.keys() != self._fields.keys():
            wanted = ", ".join(self._fields)
            raise WireError(f"{self.type.__name__} is {reprlib.repr(plain)}; it must have {wanted}")
        return self.type(**self._each(plain, lambda kind, given: kind.unpack(given, incoming)))

    def _each(self, values: dict[str, Any], how: Callable[[_Kind, Any], Any]) -> dict[str, Any]:
        done = {}
        for name, kind in self._fields.items():
            try:
                done[name] = how(kind, values[name])
            except WireError as error:
                raise WireError(f"{self.type.__name__}.{name}: {error}") from None
        return done


def _kind_of(annotation: Any, *, inside: bool) -> _Kind:
    """Returns the kind of a field, or of what a list of it holds; `inside`: of a message in another
    one.
    """
    if annotation is Any:
        return _Array(_ROW_DTYPES, 2, is_rows=True)
    if annotation in _SCALARS:
        return _Scalar(annotation)
    origin, given = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and len(given) == 2 and NoneType in given:
        return _Optional(
            _kind_of(next(each for each in given if each is not NoneType), inside=inside)
        )
    if origin is list:
        kind = _kind_of(given[0], inside=inside)
        if isinstance(kind, _Scalar | _Message):
            return _List(kind)
    elif isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        dtypes, of_numpy = annotation.dtypes, annotation.array_type is np.ndarray
        if of_numpy and isinstance(dtypes, tuple) and annotation.index_variadic is None:
            return _Array([name for name in dtypes if name in _DTYPES], len(annotation.dims))
    elif isinstance(annotation, type) and not inside:
        return _Message(annotation, inside=True)
    raise WireError(f"a field of {annotation} does not travel here")


def _is_size(given: Any) -> bool:
    return type(given) is int and given >= 0


def _listed(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise WireError(f"it is {reprlib.repr(given)}; it must be a list")
    return given
