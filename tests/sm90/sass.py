"""Machine code (SASS) of kernels compiled for an H200, as nvdisasm prints it.

nvdisasm is a package's (`nvidia-cuda-nvdisasm`); ptxas is the one that XLA finds or has built in.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compile_for import compile_for, h200_mesh

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


def short_addresses(instructions: list[Instruction]) -> list[Instruction]:
    """Returns the bulk copies whose address in memory has no upper half of its own.

    A bulk copy takes a pair of uniform registers; where the upper one was last given a constant,
    ptxas has computed 32 bits of 64 (seen with CUDA 13 on an H100: an illegal address).
    """
    writer: dict[int, Instruction] = {}
    found = []
    for one in instructions:
        is_copy = one.opcode.startswith("UBLKCP")
        if is_copy:
            pairs = re.findall(r"\[UR(\d+)", one.operands)
            upper = int(pairs[0 if ".G.S" in one.opcode else 1]) + 1
            last = writer.get(upper)
            if last and last.opcode == "UMOV" and not re.search(r", UR\d", last.operands):
                found.append(one)
        written = re.match(r"(?:U?P\w+, )*UR(\d+)", one.operands)
        if written and not is_copy:
            writer[int(written[1])] = one
            if ".64" in one.opcode or "WIDE" in one.opcode:
                writer[int(written[1]) + 1] = one
    return found


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
    dump_to(monkeypatch, tmp_path)
    compile_for(h200_mesh(), fn, *args, **options)
    kernels = read(tmp_path)
    assert kernels, "nothing was disassembled"
    return kernels


def dump_to(monkeypatch, folder: Path) -> None:
    """Has kernels that are compiled from now on disassembled there; skips without nvdisasm."""
    root = nvdisasm_root()
    if root is None:
        pytest.skip("reads machine code: install jmoe[dev]")
    from jax.experimental.mosaic.gpu import core  # noqa: F401  # sets the variable itself

    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(root))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))


def read(folder: Path) -> dict[str, list[Instruction]]:
    """Returns the kernels whose machine code was dumped there, by name."""
    dumps = sorted(folder.glob("*.sass*"))
    return {re.sub(r"_\d+$", "", dump.stem): parse(dump.read_text()) for dump in dumps}
