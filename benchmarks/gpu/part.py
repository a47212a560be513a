"""What a part is: a list of cases, and a session that runs them. No jax here.

Parts whose work happens in other processes must not hold the GPU's memory, so nothing that all of
them import may import jax.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.sizes import Sizes
from benchmarks.kernels import store

WEIGHTS = (
    "random, drawn on the device from a seed; the router's skew is exponential expert popularity, "
    "the most popular expert picked exp(skew) times as often as the least"
)
"""Stands beside every figure: no trained weights are used."""


class Case(NamedTuple):
    """One thing to measure or to check."""

    name: str
    estimate_s: float  # how long it takes, roughly: what is left of the time must hold it
    about: Mapping[str, Any] = MappingProxyType(
        {}
    )  # kept in the record; what tells this case from the others


@dataclass(frozen=True)
class Context:
    """What a session gets."""

    sizes: Sizes
    kept: store.Store
    scratch: Path  # for checkpoints and logs; not kept
    cache: Path  # XLA's compiled programs
    commit: str = "unknown"
    facts: dict[str, Any] = field(default_factory=dict)  # of the session, for all of its records

    def record(self, part: str, name: str) -> dict[str, Any] | None:
        """A stored record of the same sources, that did not fail."""
        return self.kept.records(part).get(name) if self.kept.has(part, name) else None


RunCase = Callable[[Case], dict[str, Any]]
"""Runs a case; the fields of its record. `failed` among them, or an exception, marks a failure."""


class Part(Protocol):
    """A module with these."""

    DEPENDS: Sequence[str]  # folders and files whose contents the figures depend on
    START_S: float  # how long a session takes to begin, roughly

    @staticmethod
    def cases(sizes: Sizes) -> list[Case]:
        """Every case, the worthiest first."""
        ...

    @staticmethod
    def session(context: Context) -> AbstractContextManager[RunCase]:
        """What the cases of one call share: a model, a server."""
        ...


def sources(paths: Sequence[str]) -> str:
    """Digest of the Python, JSON and YAML files at or below `paths` (from the repository root)."""
    digest = hashlib.sha256()
    for path in paths:
        top = store.ROOT / path
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.suffix in (".py", ".json", ".yaml", ".npz") and "__pycache__" not in file.parts:
                name = file.relative_to(store.ROOT).as_posix()
                digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: both become None. Tuples become lists, keys text."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
