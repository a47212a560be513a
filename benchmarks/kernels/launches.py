"""Counts what a compiled program starts on a GPU: kernels, library calls and copies.

Read off its HLO (`compiled.as_text()`), so that it needs no GPU (`compile_for`). That text holds
a module for every launch of a kernel: 100 MB for a whole step, so print it once.
"""

import re

# Instructions that move no data and start nothing.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "optimization-barrier",
    "partition-id",
    "replica-id",
}


def count_launches(hlo: str) -> dict[str, int]:
    """Counts launches of a program without loops, by opcode: of its entry computation, a fusion as
    one.

    XLA may put the entry's work into a command buffer: its commands count, the call does not.
    """
    computations, entry = _computations(hlo)
    return _count(computations, entry)


def count_loop_launches(hlo: str) -> dict[str, int]:
    """Counts launches of one iteration of the loop that starts most: the one over layers."""
    computations, _ = _computations(hlo)
    instructions = [i for found in computations.values() for i in found]
    bodies = {body for opcode, body in instructions if opcode == "while"}
    counts = [_count(computations, body) for body in bodies]
    return max(counts, key=lambda count: sum(count.values()))


def _count(computations: dict[str, list[tuple[str, str]]], name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for opcode, called in computations[name]:
        if opcode == "call":
            for inner, number in _count(computations, called).items():
                found[inner] = found.get(inner, 0) + number
        elif opcode not in _FREE and not opcode.endswith("-done"):
            found[opcode] = found.get(opcode, 0) + 1
    return found


def _computations(hlo: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Returns opcode and called computation of every instruction, by computation; and the entry's
    name.
    """
    computations: dict[str, list[tuple[str, str]]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if start := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = start[2]
            computations[name] = []
            entry = name if start[1] else entry
        elif parts := re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = .+? ([\w\-]+)\(", line):
            called = re.search(r"(?:to_apply|calls|body)=%?([\w.\-]+)", line)
            computations[name].append((parts[1], called[1] if called else ""))
    assert entry
    return computations, entry
