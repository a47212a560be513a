"""Copies by TMA, products, and what orders them."""

from typing import Any

import numpy as np

from sm90 import memory
from sm90.machine import Product, Task
from sm90.operands import (
    PARAMETERS,
    Address,
    Blocked,
    Lanes,
    Operands,
    Run,
    listed,
    one_lane,
    same,
    together,
)
from sm90.program import Immediate, Instruction


def copy(operands: Operands, instruction: Instruction) -> Run:
    """Makes `cp.async.bulk`: loads, prefetches, stores, and waiting for stores."""
    opcode = instruction.opcode
    if opcode.startswith("cp.async.bulk.prefetch.tensor"):
        return _tensor_prefetch(operands, instruction)
    if opcode.startswith("cp.async.bulk.commit_group"):
        return _commit_stores
    if opcode.startswith("cp.async.bulk.wait_group"):
        (count,) = instruction.operands
        assert isinstance(count, Immediate)
        return _wait_for_stores(count.value, reads_only=opcode.endswith("read"))
    if "bulk_group" not in opcode:
        return _tensor_load(operands, instruction)
    return (_tensor_store if "tensor" in opcode else _bulk_store)(operands, instruction)


def _commit_stores(warp: Any, lanes: Lanes) -> None:
    for lane in np.flatnonzero(lanes):
        stores = warp.stores[lane]
        stores.committed.append(list(stores.open))
        stores.open.clear()


def _wait_for_stores(count: int, reads_only: bool) -> Run:
    def run(warp: Any, lanes: Lanes) -> None:
        for lane in np.flatnonzero(lanes):
            if not warp.stores[lane].settled(count, reads_only):
                raise Blocked

    return run


class _Tensor:
    """The tensor map and the coordinates of a copy."""

    def __init__(self, operands: Operands, operand: Any) -> None:
        assert isinstance(operand, Address)
        self.parameters = operands.launch.parameters
        self.address = operands.address(operand)
        self.coordinates = [operands.value(c, np.int32) for c in operand.coordinates]

    def box(self, warp: Any, lane: int, shared: int) -> memory.Box:
        place = int(self.address(warp)[lane]) - PARAMETERS
        maps = self.parameters[place >> 20]
        assert isinstance(maps, dict)
        at = [int(np.broadcast_to(c(warp), 32)[lane]) for c in self.coordinates]
        return memory.Box(maps[place & ((1 << 20) - 1)], at, shared)


def _tensor_load(operands: Operands, instruction: Instruction) -> Run:
    target, source, barrier, *members = instruction.operands
    into, signal, tensor = (
        operands.address(target),
        operands.address(barrier),
        _Tensor(operands, source),
    )
    ranks = operands.value(members[0], np.uint16) if members else None

    def run(warp: Any, lanes: Lanes) -> None:
        lane, block = one_lane(lanes), warp.block
        box = tensor.box(warp, lane, int(into(warp)[lane]))
        at = int(signal(warp)[lane])
        blocks = [block]
        if ranks is not None:
            bits = int(np.broadcast_to(ranks(warp), 32)[lane])
            blocks = [other for other in block.cluster.blocks if bits >> other.rank & 1]
        memory = block.cluster.memory
        memory.read[box.buffer] += box.size  # once, for however many blocks
        memory.loaded.add(box.place)
        for other in blocks:
            block.cluster.launch(Task(lambda other=other: other.receive(box, at, block.number)))

    return run


def _tensor_prefetch(operands: Operands, instruction: Instruction) -> Run:
    """Makes a prefetch, which moves nothing: it is recorded, to be compared with later loads."""
    (source,) = instruction.operands
    tensor = _Tensor(operands, source)

    def run(warp: Any, lanes: Lanes) -> None:
        box = tensor.box(warp, one_lane(lanes), 0)
        warp.block.cluster.memory.prefetched.add(box.place)

    return run


def _tensor_store(operands: Operands, instruction: Instruction) -> Run:
    target, source = instruction.operands
    tensor, place = _Tensor(operands, target), operands.address(source)

    def run(warp: Any, lanes: Lanes) -> None:
        lane = one_lane(lanes)
        box = tensor.box(warp, lane, int(place(warp)[lane]))
        device, number = warp.block.cluster.memory, warp.block.number
        warp.start_store(lane, box.shared, lambda values: box.write(device, values, number))

    return run


def _bulk_store(operands: Operands, instruction: Instruction) -> Run:
    """Makes a store of contiguous bytes: whole sixteens, from and to a multiple of sixteen."""
    target, source, size = instruction.operands
    into, place = operands.address(target), operands.address(source)
    count = operands.value(size, np.uint32)

    def run(warp: Any, lanes: Lanes) -> None:
        lane = one_lane(lanes)
        length = int(np.broadcast_to(count(warp), 32)[lane])
        if length % 16:
            raise ValueError(f"a bulk copy of {length} bytes: it takes whole sixteens")
        shared = warp.block.inside(place(warp)[lane : lane + 1], 16) + np.arange(length)
        device, first = warp.block.cluster.memory, into(warp)[lane : lane + 1]
        device.place(first, 16)
        addresses = first + np.arange(0, length, 16, dtype=np.uint64)
        number = warp.block.number
        write = lambda values: device.store(addresses, values.reshape(-1, 16), number)  # noqa: E731
        warp.start_store(lane, shared, write)

    return run


def fence(operands: Operands, instruction: Instruction) -> Run:
    """Makes a fence: TMA and products may read what the warp stored before it."""
    if not instruction.opcode.startswith("fence.proxy.async"):
        return lambda warp, lanes: None

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        writers = warp.block.writers
        writers[writers == warp.index + 1] = 0

    return run


def wgmma(operands: Operands, instruction: Instruction) -> Run:
    """Makes products of bfloat16, and waits for them. ptxas adds the fences that registers need."""
    kind = instruction.op[1]
    if kind == "mma_async":
        return _multiply(operands, instruction)
    if kind == "wait_group":
        (count,) = instruction.operands
        assert isinstance(count, Immediate)
        return lambda warp, lanes: _wait_for_products(warp, lanes, count.value)

    def commit(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        warp.commits.append(warp.group.issued[warp.index % 4])

    return commit if kind == "commit_group" else lambda warp, lanes: together(lanes)


def _wait_for_products(warp: Any, lanes: Lanes, count: int) -> None:
    together(lanes)
    needed = warp.commits[-1 - count] if len(warp.commits) > count else 0
    if warp.group.performed < needed:
        raise Blocked
    warp.settle(needed)


def _multiply(operands: Operands, instruction: Instruction) -> Run:
    shape, *types = instruction.op[4:]
    if types != ["f32", "bf16", "bf16"]:
        raise NotImplementedError(instruction.opcode)
    width = int(shape.split("n")[1].split("k")[0])
    result, left, *rest = instruction.operands
    if type(left) is tuple:
        matrices, (accumulates, *signs, transposed) = rest[:1], rest[1:]
    else:
        matrices, (accumulates, *signs, _, transposed) = [left, rest[0]], rest[1:]
    is_transposed = (bool(rest[-2].value), bool(transposed.value))  # type: ignore[union-attr]
    assert signs == [Immediate(1), Immediate(1)], instruction
    places = [operands.value(operand, np.uint64) for operand in matrices]
    adds = operands.value(accumulates, np.bool_)
    result = tuple(register.name for register in listed(result))  # type: ignore[union-attr]
    lent = tuple(r.name for r in left) if type(left) is tuple else ()  # type: ignore[union-attr]
    assert len(result) == width // 2, instruction

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        descriptors = tuple(same(place(warp), lanes) for place in places)
        product = Product(
            width, descriptors, is_transposed, result, lent, bool(same(adds(warp), lanes))
        )
        warp.multiply(product)

    return run


TABLE = {"cp": copy, "fence": fence, "wgmma": wgmma}
