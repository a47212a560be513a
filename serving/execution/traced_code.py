"""Identifies the Python code that a traced function is made of, as it is loaded now.

A compiled program may be used again while the code that it was traced from is the same. That code
is what this process has in memory, not what its files say: a notebook patches functions. So the
functions themselves are digested, from the given ones on: their bytecode, constants and defaults,
and those of all that they name.
"""

import enum
import hashlib
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "scipy", "flax", "jaxtyping", "beartype"}
"""Known by version: of these a name is taken, and not looked into."""


def digest(roots: Iterable[object]) -> str:
    """Returns a digest of the code of functions and classes, and of all that they name."""
    walk = _Walk()
    for root in roots:
        walk.visit(root)
    return hashlib.sha256("\n".join(sorted(walk.lines)).encode()).hexdigest()


class _Walk:
    """Visits each object once and writes a line about it."""

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self._seen: dict[int, object] = {}  # objects are kept: an id is theirs as long as they live

    def visit(self, value: object) -> None:
        """Writes about a value and visits what it consists of."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType | staticmethod | classmethod):
            self._all((value.__func__,))
        elif isinstance(value, property):
            self._all((value.fget,))
        elif isinstance(value, Mapping):
            self.lines.add(
                f"mapping {sorted(f'{_plain(k)}: {_plain(v)}' for k, v in value.items())}"
            )
            self._all(value.values())
        elif isinstance(value, tuple | list | set | frozenset):
            self.lines.add(f"values {sorted(map(_plain, value))}")
            self._all(value)
        elif isinstance(value, FunctionType | type) and not _is_library(value):
            self._function(value) if isinstance(value, FunctionType) else self._class(value)
        else:
            self.lines.add(_name(value))
        if not _is_library(value):  # jit, custom derivatives, decorators
            self._all(getattr(value, name, None) for name in ("__wrapped__", "fun", "fwd", "bwd"))

    def _all(self, values: Iterable[object]) -> None:
        for value in values:
            self.visit(value)

    def _function(self, function: FunctionType) -> None:
        names: set[str] = set()
        text = _code(function.__code__, names)
        plain = [_plain(v) for v in function.__defaults__ or ()]
        plain += [f"{k}={_plain(v)}" for k, v in sorted((function.__kwdefaults__ or {}).items())]
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        plain += map(_plain, cells)
        self.lines.add(f"{_name(function)} {text} {plain}")
        self._all((function.__defaults__ or (), function.__kwdefaults__ or {}, *cells))
        self._all(v for v in function.__annotations__.values() if isinstance(v, type))
        for name in names:
            if name in function.__globals__:
                self._resolve(name, function.__globals__[name], names)
            elif name in sys.modules:  # imported in the function's body
                self._resolve(name, sys.modules[name], names)

    def _resolve(
        self, name: str, value: object, names: set[str], within: tuple[object, ...] = ()
    ) -> None:
        """Writes about a value that a function names and visits it; of a module, visits what the
        function names in it.
        """
        self.lines.add(f"{name} is {_plain(value)}")
        if not isinstance(value, ModuleType):
            self.visit(value)
        elif value not in within:
            for inner in names & vars(value).keys():
                if not inner.startswith("__"):
                    path = f"{value.__name__}.{inner}"
                    self._resolve(path, vars(value)[inner], names, (*within, value))

    def _class(self, kind: type) -> None:
        own = {k: v for k, v in vars(kind).items() if k not in _BOOKKEEPING}
        self.lines.add(f"{_name(kind)} {[(k, _plain(v)) for k, v in sorted(own.items())]}")
        self._all(own.values())
        self._all(kind.__bases__)


_PLAIN = (int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum)
_BOOKKEEPING = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"} | {
    "__firstlineno__",
    "__static_attributes__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__annotate__",
}


def _code(code: CodeType, names: set[str]) -> str:
    """Returns bytecode and constants, those of inner functions too; adds all names that occur."""
    names.update(code.co_names)
    constants = [_code(c, names) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    digest = hashlib.sha256(code.co_code).hexdigest()
    return f"{digest} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"


def _plain(value: object) -> str:
    """Returns a value's text where it is plain, else its name, but never an address."""
    if isinstance(value, frozenset | set):
        return f"{sorted(map(_plain, value))}"
    if isinstance(value, tuple | list):
        return f"{[_plain(v) for v in value]}"
    return repr(value) if isinstance(value, _PLAIN) else _name(value)


def _name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def _is_library(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    root = str(module).partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not yet
        return False
