"""What tests look for in the HLO of a compiled program."""

import math
import re

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "s64": 8,
}
# What hands an array on without writing it.
HANDED_ON = {"parameter", "get-tuple-element", "tuple", "while", "bitcast"}
# What writes a few rows into a large array that is its operand.
IN_PLACE = {"scatter", "dynamic-update-slice"}


def large_results(hlo, large):
    """Returns instructions that write an array of `large` bytes or more, computations of fusions
    left out.

    Left out, too, is what is written in place: the result of a kernel that says which operand it
    updates, and a fusion that ends in such a kernel, a scatter or an update of its operand. How
    much memory that takes is for the other half of the test to say.
    """
    head = r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$"
    instruction = r"^\s+(ROOT )?%?[\w.\-]+ = (.+?) ([\w\-]+)\("
    fused = set(re.findall(r"(?:fusion\(.*?calls=|to_apply=)%?([\w.\-]+)", hlo))
    roots, found, computation = {}, [], ""
    for line in hlo.splitlines():
        if start := re.match(head, line):
            computation = start[1]
        elif parts := re.match(instruction, line):
            is_root, result, opcode = parts.groups()
            if is_root:
                roots[computation] = opcode, updated(line)
            if computation not in fused and opcode not in HANDED_ON:
                called = re.search(r"calls=%?([\w.\-]+)", line)
                found.append((opcode, called and called[1], result, updated(line)))
    large_ones = []
    for opcode, called, result, in_place in found:
        root, in_root = roots.get(called, ("", set()))
        arrays = enumerate(re.findall(r"(\w+)\[([\d,]*)\]", result))
        new = [size(array) for i, array in arrays if i not in in_place | in_root]
        if max(new, default=0) >= large and not IN_PLACE & {opcode, root}:
            large_ones.append(f"{opcode} {result}")
    return large_ones


def updated(line):
    """Returns which results of an instruction are operands that it updates."""
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w", line)
    return {int(i) for i in re.findall(r"\{(\d+)\}: ", aliases[1])} if aliases else set()


def size(array):
    kind, dims = array
    return BYTES.get(kind, 8) * math.prod(int(n) for n in dims.split(",") if n)


# ---- Launches: kernels, library calls and copies; a step has 100 MB of text, so print it once ----

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
