"""Counts what a compiled program starts on a GPU: kernels, library calls and copies."""

import re

import jax

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


def count_launches(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Launches of a program without loops, by opcode: of its entry computation, fusions as one.

    XLA may put the entry's work into a command buffer: its commands count, the call does not.
    """
    computations, entry = _computations(compiled.as_text())
    found: dict[str, int] = {}

    def visit(name: str) -> None:
        for opcode, called in computations[name]:
            if opcode == "call":
                visit(called)
            elif opcode not in _FREE and not opcode.endswith("-done"):
                found[opcode] = found.get(opcode, 0) + 1

    visit(entry)
    return found


def _computations(hlo: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Opcode and called computation of every instruction, by computation; and the entry's name."""
    computations: dict[str, list[tuple[str, str]]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if start := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = start[2]
            computations[name] = []
            entry = name if start[1] else entry
        elif parts := re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = .+? ([\w\-]+)\(", line):
            called = re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", line)
            computations[name].append((parts[1], called[1] if called else ""))
    assert entry
    return computations, entry
