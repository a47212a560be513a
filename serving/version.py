"""The version of jmoe."""

import importlib.metadata


def jmoe_version() -> str:
    """Returns the installed version; "source" if jmoe runs from a checkout without installation."""
    try:
        return importlib.metadata.version("jmoe")
    except importlib.metadata.PackageNotFoundError:
        return "source"
