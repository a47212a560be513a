"""Parts of the engine that a user can write: chosen by name in the settings."""

import hashlib
import importlib
import importlib.util
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.errors import MAX_SHOWN

log = logging.getLogger(__name__)


def make(
    kind: str, name: str, known: Mapping[str, Any], methods: Sequence[str], *args: object
) -> Any:
    """Makes an object of a class in `known`, of `module:Class`, or of `file.py:Class`.

    A module may lie in the working directory.

    Args:
        kind: what it is for, as the settings call it.
        name: as the settings give it.
        known: classes by name.
        methods: what it must have.
        args: what the class is called with.

    Raises ValueError for one that is not there, cannot be made, or lacks a method.
    """
    have = f"module:Class or file.py:Class of a {kind} of your own"
    have = f"{', '.join(known)}, or {have}" if known else have
    if name in known:
        return known[name](*args)
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ValueError(f"{kind} is {name!r}; it must be one of {have}")
    try:
        made = getattr(_imported(module), attribute)(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script that ends the process as it is imported, for one
        reason = _reason(error)
        raise ValueError(f"{kind} {name!r} cannot be made: {reason}; it must be {have}") from error
    missing = [m for m in methods if not callable(getattr(made, m, None))]
    if missing:
        said_by = f"{kind.capitalize()} says what they do"
        raise ValueError(f"{kind} {name!r} has no {', '.join(missing)}; {said_by}")
    return made


def _imported(module: str) -> Any:
    """Imports a module by its name, or from a file by its path, which ends with `.py`."""
    if not module.endswith(".py"):
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())  # last: a file there hides no installed module
        return importlib.import_module(module)
    path = os.path.abspath(module)
    # The same in every process: compiled programs are kept by it.
    name = f"{os.path.basename(path)[:-3]}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # of a name that ends with .py
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def own_strategy(name: str) -> Any:
    """Makes a strategy of brownout of `module:Class` (`jmoe.brownout.OwnStrategy`); returns None
    for a name without a colon. Raises ValueError as `make`.
    """
    return make("strategy", name, {}, ["__call__"]) if ":" in name else None


class Guard:
    """Calls a plugin's methods, so that a faulty one costs no more than its own influence.

    The 1st, 2nd, 4th, 8th, ... fault is logged, and likewise the calls that take too long.
    """

    def __init__(self, name: str, instead: str, slow_s: float = math.inf) -> None:
        """`name` is the plugin's and `instead` what acts when it fails, in the words of the log.
        Calls that take longer than `slow_s` are logged.
        """
        self._name, self._instead, self._slow_s = name, instead, slow_s
        self._num_faults = self._num_slow = 0

    def call[T](self, method: str, own: Callable[[], T], instead: Callable[[], T]) -> T:
        """Returns what `own` returns; what `instead` returns if `own` raises anything but a
        KeyboardInterrupt.
        """
        fault, began = None, time.perf_counter()
        try:
            return own()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # no plugin may end the engine, by SystemExit for one
            fault = error
        finally:
            took_s = time.perf_counter() - began
            if took_s > self._slow_s:
                self._note_slow(method, took_s)
        self._note_fault(method, fault)
        return instead()

    def _note_slow(self, method: str, took_s: float) -> None:
        self._num_slow += 1
        if self._num_slow.bit_count() == 1:
            log.warning(
                "%s: %s took %.3g ms, longer than engine.plugin_slow_ms (%d so far); "
                "every step waits for it",
                self._name,
                method,
                1e3 * took_s,
                self._num_slow,
            )

    def _note_fault(self, method: str, fault: BaseException | None) -> None:
        self._num_faults += 1
        if self._num_faults.bit_count() == 1:
            log.error(
                "%s: %s failed (%d so far); %s goes on: %s",
                self._name,
                method,
                self._num_faults,
                self._instead,
                _reason(fault),
            )


def _reason(error: BaseException | None) -> str:
    try:
        said = " ".join(str(error).split())
    except Exception:  # an error whose text is a fault itself
        said = "it cannot say why"
    return f"{type(error).__name__}: {said[:MAX_SHOWN]}"
