"""Parts of the engine that a user can write: chosen by name in the settings."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any


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
    have = f"{', '.join(known)}, or module:Class or file.py:Class of a {kind} of your own"
    if name in known:
        return known[name](*args)
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ValueError(f"{kind} is {name!r}; it must be one of {have}")
    try:
        made = getattr(_imported(module), attribute)(*args)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
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
    spec = importlib.util.spec_from_file_location(f"jmoe_part_{abs(hash(path))}", path)
    assert spec is not None  # of a name that ends with .py
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
