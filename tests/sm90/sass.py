"""Machine code (SASS) of kernels compiled for an H200, as nvdisasm prints it.

nvdisasm is a package's (`nvidia-cuda-nvdisasm`); ptxas is the one that XLA finds or has built in.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from pallas_kernels.compile_for import compile_for, h200_mesh

_LINE = re.compile(r"^\s*\S*:?\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\d+)\s+)?([A-Z][\w.]*)(.*)$")


class Instruction(NamedTuple):
    """One instruction; `opcode` with its modifiers, as `HGMMA.64x128x16.F32.BF16`."""

    address: int
    predicate: str  # such as `@!P0`; empty where it always runs
    opcode: str
    operands: str


def parse(text: str) -> list[Instruction]:
    """Returns the instructions in the order of their addresses."""
    found = map(_LINE.match, text.splitlines())
    return [Instruction(int(m[1], 16), m[2] or "", m[3], m[4].strip()) for m in found if m]


def nvdisasm_root() -> Path | None:
    """Returns the package's folder with `bin/nvdisasm`; None where it is not installed."""
    import nvidia  # a namespace package; there is none without `aot` or `dev`

    roots = (Path(path) / "cu13" for path in nvidia.__path__)
    return next((root for root in roots if (root / "bin/nvdisasm").exists()), None)


def disassemble(monkeypatch, tmp_path: Path, fn, *args, **options) -> dict[str, list[Instruction]]:
    """Compiles `fn(*args)` for one H200 and returns its Mosaic kernels by name.

    Skips without jax's CUDA plugin or nvdisasm. Not for tests under `equal_kernels`: a kernel that
    is not compiled again is not dumped again.
    """
    reason = "reads machine code: install jmoe[dev,aot]"
    pytest.importorskip("jax_plugins.xla_cuda13", reason=reason)
    pytest.importorskip("nvidia", reason=reason)
    root = nvdisasm_root()
    if root is None:
        pytest.skip(reason)
    from jax.experimental.mosaic.gpu import core  # noqa: F401  # sets the variable itself

    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(root))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compile_for(h200_mesh(), fn, *args, **options)
    dumps = sorted(tmp_path.glob("*.sass*"))
    assert dumps, "nothing was disassembled"
    return {re.sub(r"_\d+$", "", dump.stem): parse(dump.read_text()) for dump in dumps}
