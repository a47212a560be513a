"""Ordinary loads and stores, and those of 8 x 8 matrices."""

from typing import Any

import numpy as np

from sm90.alu import TYPES
from sm90.host import Buffer
from sm90.operands import Address, Lanes, Operands, Run, Symbol, listed, put, together
from sm90.program import Instruction


class _Access:
    """What a load or store moves."""

    def __init__(self, op: tuple[str, ...]) -> None:
        spaces = [part.split("::")[0] for part in op]
        self.space = next((s for s in spaces if s in ("global", "shared", "param")), "generic")
        self.count = next((int(part[1]) for part in op if part in ("v2", "v4")), 1)
        self.kind = np.dtype(TYPES[op[-1]])
        self.width = self.count * self.kind.itemsize

    def load(self, warp: Any, addresses: np.ndarray) -> np.ndarray:
        """Loads [lanes, width] bytes."""
        block = warp.block
        if self.space == "shared":
            at = block.inside(addresses, self.width)
            return block.shared[at[:, None] + np.arange(self.width)]
        return block.cluster.memory.load(addresses, self.width, block.number)

    def store(self, warp: Any, addresses: np.ndarray, values: np.ndarray) -> None:
        block = warp.block
        if self.space == "shared":
            at = block.inside(addresses, self.width)[:, None] + np.arange(self.width)
            block.shared[at] = values
            block.writers[at] = warp.index + 1
        else:
            block.cluster.memory.store(addresses, values, block.number)


def load(operands: Operands, instruction: Instruction) -> Run:
    """Makes `ld`."""
    access = _Access(instruction.op)
    targets, source = listed(instruction.operands[0]), instruction.operands[1]
    if access.space == "param":
        return _parameter(operands, targets[0], source)
    address = operands.address(source)
    is_signed = access.kind.kind == "i"

    def run(warp: Any, lanes: Lanes) -> None:
        found = np.zeros((len(lanes), access.width), np.uint8)
        found[lanes] = access.load(warp, address(warp)[lanes])
        values = found.view(access.kind)
        for i, target in enumerate(targets):  # whose register may be wider
            bits = {"%rd": 8, "%rs": 2}.get(target.name[:3], 4)  # type: ignore[union-attr]
            wide = np.dtype(f"{'i' if is_signed else 'u'}{bits}")
            column = np.ascontiguousarray(values[:, i])
            wider = bits > access.kind.itemsize
            put(warp, target, column.astype(wide) if wider else column, lanes)

    return run


def _parameter(operands: Operands, target: Any, source: Any) -> Run:
    assert isinstance(source, Address)
    assert isinstance(source.base, Symbol)
    index = operands.program.parameters.index(source.base.name)
    parameter = operands.launch.parameters[index]
    assert isinstance(parameter, Buffer)

    def run(warp: Any, lanes: Lanes) -> None:
        put(warp, target, np.uint64(warp.block.cluster.memory.addresses[parameter.index]), lanes)

    return run


def store(operands: Operands, instruction: Instruction) -> Run:
    """Makes `st`."""
    access = _Access(instruction.op)
    values = [operands.value(s, access.kind) for s in listed(instruction.operands[1])]
    address = operands.address(instruction.operands[0])

    def run(warp: Any, lanes: Lanes) -> None:
        columns = [np.broadcast_to(value(warp), len(lanes))[lanes] for value in values]
        packed = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
        access.store(warp, address(warp)[lanes], packed)

    return run


def matrix(operands: Operands, instruction: Instruction) -> Run:
    """Makes `ldmatrix` and `stmatrix`: 8 x 8 tiles of 16 bits, a row's address from each lane."""
    is_load = instruction.op[0] == "ldmatrix"
    held, place = instruction.operands if is_load else instruction.operands[::-1]
    assert type(held) is tuple
    address, is_transposed = operands.address(place), "trans" in instruction.op

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        starts = warp.block.inside(address(warp), 16).reshape(4, 8)
        lane = np.arange(len(lanes))
        row, column = lane // 4, 2 * (lane % 4)
        for own, register in zip(starts, held, strict=False):
            pair = np.arange(2)
            if is_transposed:
                at = own[column[:, None] + pair] + 2 * row[:, None]
            else:
                at = own[row][:, None] + 2 * (column[:, None] + pair)
            places = at[..., None] + pair  # [lane, half, byte]
            if is_load:
                found = np.ascontiguousarray(warp.block.shared[places])
                put(warp, register, found.reshape(-1, 4).view(np.uint32)[:, 0], lanes)
            else:
                value = warp.values[register.name].view(np.uint8)
                warp.block.shared[places] = value.reshape(places.shape)
                warp.block.writers[places] = warp.index + 1

    return run


TABLE = {"ld": load, "st": store, "ldmatrix": matrix, "stmatrix": matrix}
