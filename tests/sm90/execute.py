"""A program's instructions as functions of a warp."""

from typing import Any

import numpy as np

from sm90 import access, alu, asynchronous, sync
from sm90.host import Launch
from sm90.operands import LANES, Lanes, Operands, Run, put, registers
from sm90.program import Instruction, Program, Symbol

_TABLE = {**access.TABLE, **sync.TABLE, **asynchronous.TABLE}
_NOTHING = ("prefetch", "setmaxnreg", "bra", "ret")  # of no effect here, or seen to by `step`


class Code:
    """A program, made executable once."""

    def __init__(self, program: Program, launch: Launch) -> None:
        self.name, self.launch = program.name.removesuffix("_mosaic_gpu_kernel"), launch
        self.instructions, self.labels = program.instructions, program.labels
        self.operands = Operands(program, launch)
        self.names = [frozenset(registers(i.operands)) for i in self.instructions]
        self.written = [frozenset(registers(i.operands[:1])) for i in self.instructions]
        self.functions = [self.build(i) for i in self.instructions]

    def line(self, at: int) -> int:
        """Returns the line of the PTX."""
        return self.instructions[at].line

    def step(self, warp: Any, at: int, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Runs one instruction. Returns where its lanes go on."""
        instruction = self.instructions[at]
        name = instruction.op[0]
        if name != "wgmma":
            warp.check_registers(self.names[at], self.written[at])
        taken = lanes
        if instruction.guard is not None:
            register, is_negated = instruction.guard
            taken = lanes & (warp.values[register] ^ is_negated)
        if name == "bra":
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            return [(self.labels[target.name], taken), (at + 1, lanes & ~taken)]
        if name == "ret":
            return [(at + 1, lanes & ~taken)]
        if taken.any():
            self.functions[at](warp, taken)
        return [(at + 1, lanes)]

    def build(self, instruction: Instruction) -> Run:
        """Makes an instruction executable. Raises NotImplementedError for one that no kernel has
        had yet.
        """
        name = instruction.op[0]
        if name in _NOTHING:
            return lambda warp, lanes: None
        if name in _TABLE:
            return _TABLE[name](self.operands, instruction)
        if name == "mov" and any(type(operand) is tuple for operand in instruction.operands):
            return self.pack(instruction)
        found = alu.function(instruction.op)
        target, *sources = instruction.operands
        if found is None or len(found.operands) != len(sources):
            raise NotImplementedError(f"line {instruction.line}: {instruction.opcode}")
        kinds = zip(sources, found.operands, strict=True)
        values = [self.operands.value(source, kind) for source, kind in kinds]

        def run(warp: Any, lanes: Lanes) -> None:
            with np.errstate(all="ignore"):
                result = np.asarray(found.compute(*(value(warp) for value in values)))
            put(warp, target, result.astype(found.result, copy=False), lanes)

        return run

    def pack(self, instruction: Instruction) -> Run:
        """Makes `mov` of several registers into a wider one, or the other way."""
        target, source = instruction.operands
        wide = np.dtype(alu.TYPES[instruction.op[-1]])
        parts = target if type(target) is tuple else source
        assert type(parts) is tuple
        narrow = np.dtype(f"u{wide.itemsize // len(parts)}")

        def split(warp: Any, lanes: Lanes) -> None:
            columns = self.operands.value(source, wide)(warp).view(narrow).reshape(LANES, -1).T
            for register, column in zip(parts, columns, strict=True):
                put(warp, register, column, lanes)

        def join(warp: Any, lanes: Lanes) -> None:
            columns = [self.operands.value(part, narrow)(warp) for part in parts]
            both = np.stack([np.broadcast_to(column, LANES) for column in columns], axis=1)
            put(warp, target, np.ascontiguousarray(both).view(wide)[:, 0], lanes)

        return split if parts is target else join
