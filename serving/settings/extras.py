"""Imported first, says which extra brings the packages that serving needs, if any is missing."""

from importlib.util import find_spec

_NEEDED = (
    "fastapi",
    "google.protobuf",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "httptools",
    "jiter",
    "llguidance",
    "orjson",
    "prometheus_client",
    "pydantic",
    "rich",
    "typer",
    "uvicorn",
    "uvloop",
    "yaml",
)


def _has(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


if _absent := [name for name in _NEEDED if not _has(name)]:
    raise ModuleNotFoundError(
        f"jmoe's server and command line need packages that are not installed "
        f"({', '.join(_absent)}); install them with: pip install 'jmoe[serve]', or 'jmoe[all]' for "
        "all commands",
        name=_absent[0],
    )
