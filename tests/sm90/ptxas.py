"""What ptxas reports of the kernels it assembles."""

import re
from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel. `serialized`: each of its products waits for the one before."""

    name: str
    registers: int
    spill_bytes: int
    serialized: bool


def parse(text: str) -> list[Kernel]:
    """Returns the kernels of a report (`MOSAIC_GPU_DUMP_PTXAS=1`), in order.

    A process compiles equal kernels once, so that one compiled before is not in it.
    """
    found = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    slow = set(re.findall(r"wgmma\.mma_async instructions are serialized .*'(\S+)'", text))
    return [
        Kernel(name, int(registers), int(stores) + int(loads), name in slow)
        for name, stores, loads, registers in found
    ]
