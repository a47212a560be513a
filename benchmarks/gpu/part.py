"""What a part is: a list of cases, and a session that runs them. No jax here.

Parts whose work happens in other processes must not hold the GPU's memory, so nothing that all of
them import may import jax.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.sizes import Sizes
from benchmarks.harness import store

WEIGHTS = (
    "random, drawn on the device from a seed; the router's skew is exponential expert popularity, "
    "the most popular expert picked exp(skew) times as often as the least"
)
"""Stands beside every figure: no trained weights are used."""


class Case(NamedTuple):
    """One thing to measure or to check."""

    name: str
    estimate_s: float  # how long it takes, roughly: what is left of the time must hold it
    about: Mapping[str, Any] = MappingProxyType({})
    """Kept in the record; what tells this case from the others."""


@dataclass(frozen=True)
class Context:
    """What a session gets."""

    sizes: Sizes
    kept: store.Store
    scratch: Path  # for checkpoints and logs; not kept
    cache: Path  # XLA's compiled programs
    facts: dict[str, Any] = field(default_factory=dict)  # of the session, for all of its records
    changes: Sequence[str] = ()  # of the full sizes, as the command line has them
    wanted: Sequence["Case"] = ()  # that this call may run

    def record(self, part: str, name: str) -> dict[str, Any] | None:
        """Returns a stored record of the same sources that did not fail; None without one."""
        return self.kept.records(part).get(name) if self.kept.has(part, name) else None

    def needed(self, part: str, name: str) -> dict[str, Any]:
        """Returns the same; raises RuntimeError without one."""
        found = self.record(part, name)
        if found is None:
            raise RuntimeError(f"{part} {name} is not measured; run its case first")
        return found


PLANT = "JMOE_GPU_PLANT"
"""Environment variable: PART/CASE=hang or =abort, of `light` also =wrong, with commas; to test the
harness."""


def planted(name: str) -> str:
    """Returns the fault that `PLANT` asks of a case, PART/CASE; or nothing."""
    faults = [one.rpartition("=") for one in os.environ.get(PLANT, "").split(",")]
    return next((fault for of, _, fault in faults if of == name), "")


def plant(name: str) -> None:
    """Hangs or aborts here if that is asked of the case."""
    fault = planted(name)
    if fault == "hang":
        time.sleep(3600)
    elif fault == "abort":
        os.abort()


RunCase = Callable[[Case], dict[str, Any]]
"""Runs a case and returns the fields of its record. `failed` among them, or an exception, marks a
failure.
"""


def alone(
    run: Callable[[Context, Case], dict[str, Any]],
) -> Callable[[Context], AbstractContextManager[RunCase]]:
    """Returns the session of a part whose cases share nothing: `run` runs one."""
    return lambda context: nullcontext(partial(run, context))


def in_a_process[T](function: Callable[..., T], *args: Any) -> T:
    """Returns what a function does in a process of its own, which gives the GPU's memory back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


class Part(Protocol):
    """The functions that a module of a part has."""

    DEPENDS: Sequence[str]  # folders and files whose contents the figures depend on
    START_S: float  # how long a session takes to begin, roughly

    @staticmethod
    def cases(sizes: Sizes) -> list[Case]:
        """Returns every case, the most important first."""
        ...

    @staticmethod
    def session(context: Context) -> AbstractContextManager[RunCase]:
        """Returns a context manager of what the cases of one call share, such as a model or a
        server.
        """
        ...
