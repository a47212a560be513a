"""Generates the Python stubs of the protos: `python -m serving.proto.build [DIRECTORY]`.

The include root is the directory above `serving`, so the stubs import each other by the names they
are installed under. Needs grpcio-tools (the `dev` extra).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = (
    "serving/proto/jmoe/v1/jmoe.proto",
    "serving/proto/inference/inference.proto",
)


def build(out: Path = ROOT) -> None:
    """Writes the stubs below `out`. Raises RuntimeError where protoc refuses."""
    from grpc_tools import protoc

    kinds = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *kinds, *PROTOS]):
        raise RuntimeError("protoc failed; its message is above")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
