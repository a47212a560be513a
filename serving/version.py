"""Which jmoe this is."""

import importlib.metadata


def jmoe_version() -> str:
    """The installed version; "source" where jmoe runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("jmoe")
    except importlib.metadata.PackageNotFoundError:
        return "source"
