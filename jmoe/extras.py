"""Says which extra brings a package that is not installed."""

from importlib.util import find_spec
from typing import Any


def need(extra: str, *modules: str) -> None:
    """Raises ModuleNotFoundError that names the extra if one of these modules is not installed."""
    absent = [name for name in modules if not _is_there(name)]
    if absent:
        raise ModuleNotFoundError(
            f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed; install "
            f"with: pip install 'jmoe[{extra}]'",
            name=absent[0],
        )


def pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws to files; raises ModuleNotFoundError where it is not
    installed.
    """
    need("plot", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
