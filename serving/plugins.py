"""Parts of the engine that a user can write: chosen by name in the settings."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def make(
    kind: str, name: str, known: Mapping[str, Any], methods: Sequence[str], *args: object
) -> Any:
    """Makes an object of a class in `known`, or of `module:Class`.

    Args:
        kind: what it is for, as the settings call it.
        name: as the settings give it.
        known: classes by name.
        methods: what it must have.
        args: what the class is called with.

    Raises ValueError for one that is not there, cannot be made, or lacks a method.
    """
    have = f"{', '.join(known)}, or module:Class of a {kind} of your own"
    if name in known:
        return known[name](*args)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{kind} is {name!r}; it must be one of {have}")
    try:
        made = getattr(importlib.import_module(module), attribute)(*args)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{kind} {name!r} cannot be made: {reason}; it must be {have}") from error
    missing = [m for m in methods if not callable(getattr(made, m, None))]
    if missing:
        said_by = f"{kind.capitalize()} says what they do"
        raise ValueError(f"{kind} {name!r} has no {', '.join(missing)}; {said_by}")
    return made
