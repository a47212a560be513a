"""Which functions tests check the types of."""

from beartype import beartype


def unless_local(checked):
    """Wraps what beartype checks; a function inside another would be wrapped at each call of that,
    for a millisecond or two.
    """
    return checked if "<locals>" in getattr(checked, "__qualname__", "") else beartype(checked)
