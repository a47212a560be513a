"""What lanes, warps and blocks do together: shuffles and barriers."""

from typing import Any

import numpy as np

from sm90.machine import MBarrier
from sm90.operands import CLUSTER_SHIFT, LANES, Blocked, Lanes, Operands, Run, put, same, together
from sm90.program import Immediate, Instruction


def elect(operands: Operands, instruction: Instruction) -> Run:
    """Makes `elect.sync`: the first lane."""
    leader, predicate, _ = instruction.operands

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        put(warp, leader, np.uint32(0), lanes)
        put(warp, predicate, np.arange(LANES) == 0, lanes)

    return run


def shuffle(operands: Operands, instruction: Instruction) -> Run:
    """Makes `shfl.sync` among all lanes."""
    target, source, by, clamp, members = instruction.operands
    if (clamp, members) != (Immediate(31), Immediate(-1)):
        raise NotImplementedError(str(instruction))
    value, other = operands.value(source, np.uint32), operands.value(by, np.uint32)
    places = {"idx": lambda own, by: by, "bfly": lambda own, by: own ^ by}
    place = places[instruction.op[2]]

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        at = place(np.arange(LANES), np.broadcast_to(other(warp), LANES).astype(np.int64))
        put(warp, target, np.broadcast_to(value(warp), LANES)[at], lanes)

    return run


def bar(operands: Operands, instruction: Instruction) -> Run:
    """Makes `bar.sync` of a block or of some of its warps."""
    if instruction.op[1] == "warp":
        return lambda warp, lanes: together(lanes)
    number, *count = (operands.value(operand, np.uint32) for operand in instruction.operands)

    def run(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        if not warp.is_waiting:
            threads = same(count[0](warp), lanes) if count else operands.launch.threads
            warp.is_waiting = True
            warp.block.meet(same(number(warp), lanes), threads, warp.index)
        if not warp.is_released:
            raise Blocked
        warp.is_waiting = warp.is_released = False

    return run


def cluster_barrier(operands: Operands, instruction: Instruction) -> Run:
    """Makes `barrier.cluster`."""

    def arrive(warp: Any, lanes: Lanes) -> None:
        together(lanes)
        warp.block.cluster.meet(warp)

    def wait(warp: Any, lanes: Lanes) -> None:
        if warp.block.cluster.generation == warp.generation:
            raise Blocked

    return arrive if "arrive" in instruction.op else wait


def mbarrier(operands: Operands, instruction: Instruction) -> Run:
    """Makes `mbarrier`: init, arrive with and without bytes to expect, wait."""
    makers = {"init": _init, "arrive": _arrive, "try_wait": _wait}
    return makers[instruction.op[1]](operands, instruction)


def _init(operands: Operands, instruction: Instruction) -> Run:
    address = operands.address(instruction.operands[0])
    count = operands.value(instruction.operands[1], np.uint32)

    def run(warp: Any, lanes: Lanes) -> None:
        at = warp.block.inside(address(warp)[lanes], 8)
        warp.block.mbarriers[int(at[0])] = MBarrier(same(count(warp), lanes))

    return run


def _arrive(operands: Operands, instruction: Instruction) -> Run:
    _, place, *more = instruction.operands
    address = operands.address(place)
    given = operands.value(more[0], np.uint32) if more else None
    expects = "expect_tx" in instruction.op

    def run(warp: Any, lanes: Lanes) -> None:
        value = 1 if given is None else same(given(warp), lanes)
        places, counts = np.unique(address(warp)[lanes], return_counts=True)
        for at, count in zip(places.tolist(), counts.tolist(), strict=True):
            block = warp.block.peer(at >> CLUSTER_SHIFT)
            barrier = block.mbarrier(at & ((1 << CLUSTER_SHIFT) - 1))
            if expects:
                barrier.bytes += value * count
            barrier.arrive(count if expects else value * count)
            block.events += 1

    return run


def _wait(operands: Operands, instruction: Instruction) -> Run:
    """Makes a wait; a try that fails is not repeated before something happens."""
    done, place, parity, *_ = instruction.operands
    address, phase = operands.address(place), operands.value(parity, np.uint32)

    def run(warp: Any, lanes: Lanes) -> None:
        at = same(address(warp), lanes)
        if warp.block.mbarrier(at).phase % 2 == same(phase(warp), lanes) % 2:
            raise Blocked
        put(warp, done, np.array(True), lanes)

    return run


def map_address(operands: Operands, instruction: Instruction) -> Run:
    """Makes `mapa`: an address in another block's shared memory."""
    target, address, rank = instruction.operands
    place, of = operands.value(address, np.uint32), operands.value(rank, np.uint32)

    def run(warp: Any, lanes: Lanes) -> None:
        put(
            warp, target, (of(warp) + np.uint32(1)) << np.uint32(CLUSTER_SHIFT) | place(warp), lanes
        )

    return run


TABLE = {
    "elect": elect,
    "shfl": shuffle,
    "bar": bar,
    "barrier": cluster_barrier,
    "mbarrier": mbarrier,
    "mapa": map_address,
}
