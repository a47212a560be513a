"""Operands of instructions: where a warp finds them, and how it keeps results."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sm90.host import Launch
from sm90.program import Address, Immediate, Operand, Program, Register, Symbol

LANES = 32
PARAMETERS = 1 << 60  # where a kernel's parameters lie, a megabyte each
SHARED = 1024  # where a block's shared memory starts: the first kilobyte is the system's
CLUSTER_SHIFT = 24  # from this bit on, an address of a cluster says which block, plus one

Lanes = np.ndarray  # bool, of those that an instruction is for
Run = Callable[[Any, Lanes], None]  # an instruction, of a `machine.Warp`


class Blocked(Exception):
    """The instruction cannot go on yet."""


class Operands:
    """Turns operands of a program into functions of a warp."""

    def __init__(self, program: Program, launch: Launch) -> None:
        self.program, self.launch = program, launch

    def value(self, operand: Operand, kind: Any) -> Callable[[Any], np.ndarray]:
        """Returns a function of all lanes' values as `kind`, or one for all."""
        kind = np.dtype(kind)
        if isinstance(operand, Immediate):
            constant = _constant(operand.value, kind)
            return lambda warp: constant
        if isinstance(operand, Symbol):
            place = np.array(self.symbol(operand.name)).astype(kind)
            return lambda warp: place
        assert isinstance(operand, Register), operand
        name = operand.name
        if name in _SPECIAL:
            special = _SPECIAL[name]
            return lambda warp: np.asarray(special(warp, self.launch)).astype(kind)
        return lambda warp: _low(warp.values[name], kind)

    def address(self, operand: Operand) -> Callable[[Any], np.ndarray]:
        """Returns a function of all lanes' addresses."""
        assert isinstance(operand, Address), operand
        offset = np.uint64(operand.offset & (2**64 - 1))
        base = operand.base
        if isinstance(base, Register):
            name = base.name
            return lambda warp: warp.values[name].astype(np.uint64) + offset
        assert isinstance(base, Symbol)
        place = np.full(LANES, self.symbol(base.name), np.uint64) + offset
        return lambda warp: place

    def symbol(self, name: str) -> int:
        """Returns the address of a parameter, or of shared memory."""
        if name in self.program.parameters:
            return PARAMETERS + (self.program.parameters.index(name) << 20)
        return SHARED


def registers(operands: tuple[Operand, ...]) -> Iterator[str]:
    """Yields the names of all registers in some operands."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Address):
            yield from registers((operand.base, *operand.coordinates))
        elif type(operand) is tuple:
            yield from registers(operand)


def listed(operand: Operand) -> tuple[Operand, ...]:
    """Returns the registers in braces, or one alone."""
    return operand if type(operand) is tuple else (operand,)


def put(warp: Any, register: Operand, values: np.ndarray, lanes: Lanes) -> None:
    """Writes a register's lanes. It is kept as booleans, or as the unsigned of its size."""
    assert isinstance(register, Register)
    if register.name == "_":
        return
    values = np.ascontiguousarray(np.broadcast_to(values, LANES))
    if values.dtype != np.bool_:
        values = values.view(f"u{values.dtype.itemsize}")
    if not lanes.all():
        old = warp.values.get(register.name)
        if old is None:
            old = np.full_like(values, np.array(-1).astype(values.dtype))
        values = np.where(lanes, values, old)
    warp.values[register.name] = values


def same(values: np.ndarray, lanes: Lanes) -> int:
    """Returns the value that all lanes have."""
    found = np.unique(np.broadcast_to(values, LANES)[lanes])
    if len(found) != 1:
        raise ValueError(f"lanes differ: {found}")
    return int(found[0])


def together(lanes: Lanes) -> None:
    """Raises ValueError where a warp's lanes have parted."""
    if not lanes.all():
        raise ValueError("a warp's lanes have parted")


def one_lane(lanes: Lanes) -> int:
    """Returns the only lane."""
    found = np.flatnonzero(lanes)
    if len(found) != 1:
        raise ValueError(f"{len(found)} lanes of a warp start a copy")
    return int(found[0])


def _low(values: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Returns a register as `kind`; of a wider one, the lower bits."""
    if values.dtype.itemsize > kind.itemsize:
        values = values.astype(f"u{kind.itemsize}")
    return values.view(kind)


def _constant(bits: int, kind: np.dtype) -> np.ndarray:
    if kind == np.bool_:
        return np.array(bits != 0)
    return np.array(bits & ((1 << 8 * kind.itemsize) - 1), f"u{kind.itemsize}").view(kind)


def _axes(name: str, of: Callable[[Any, Launch, int], Any]) -> dict[str, Callable]:
    return {
        f"{name}.{axis}": lambda warp, launch, i=i: of(warp, launch, i)
        for i, axis in enumerate("xyz")
    }


_SPECIAL: dict[str, Callable[[Any, Launch], Any]] = {
    **_axes("%ctaid", lambda warp, _, i: warp.block.at[i]),
    **_axes("%nctaid", lambda _, launch, i: launch.grid[i]),
    **_axes("%cluster_ctaid", lambda warp, launch, i: warp.block.at[i] % launch.cluster[i]),
    **_axes("%cluster_nctaid", lambda _, launch, i: launch.cluster[i]),
    **_axes("%ntid", lambda _, launch, i: (launch.threads, 1, 1)[i]),
    **_axes("%tid", lambda warp, _, i: warp.index * LANES + np.arange(LANES) if i == 0 else 0),
    "%cluster_ctarank": lambda warp, _: warp.block.rank,
    "%laneid": lambda *_: np.arange(LANES),
}
