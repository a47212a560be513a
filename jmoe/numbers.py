"""Numbers as callers give them: Python's, NumPy's or jax's, and no truth values."""

import operator

import numpy as np


def integer(name: str, value: object) -> int:
    """Returns a whole number as an int. Raises ValueError for anything else: floats, bools and
    text.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{name} is {value!r}; it must be an integer")


def real(name: str, value: object) -> float:
    """Returns a number as a float, which may be infinite or NaN. Raises ValueError for all else,
    bools and text too.
    """
    if not isinstance(value, bool | np.bool_ | str | bytes):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(f"{name} is {value!r}; it must be a number")
