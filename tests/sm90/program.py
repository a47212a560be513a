"""PTX text as a list of instructions."""

import re
from typing import NamedTuple


class Register(NamedTuple):
    """A register of a thread, or a special one (`%tid.x`)."""

    name: str


class Immediate(NamedTuple):
    """A constant: an integer, or the bits of a float."""

    value: int


class Symbol(NamedTuple):
    """A label, a parameter or a variable in shared memory."""

    name: str


class Address(NamedTuple):
    """`[base + offset]`; of a tensor also its coordinates."""

    base: "Register | Immediate | Symbol"
    offset: int
    coordinates: tuple = ()


Operand = Register | Immediate | Symbol | Address | tuple


class Instruction(NamedTuple):
    """`@guard opcode operands`; `op` is the opcode cut at its dots."""

    op: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None  # register, and whether it is negated
    line: int

    @property
    def opcode(self) -> str:
        """As it was written."""
        return ".".join(self.op)


class Program(NamedTuple):
    """One kernel."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: list[str]


class _Scope(NamedTuple):
    """Braces around inline assembly, whose labels and registers are its own."""

    number: int
    registers: set[str]

    def own(self, name: str) -> str:
        return f"{name}@{self.number}" if self.number else name

    def declare(self, statement: str) -> None:
        for name in statement.split(None, 2)[2].split(","):
            stem, _, count = name.strip().rstrip(">").partition("<")
            self.registers.update([stem + str(i) for i in range(int(count))] if count else [stem])


def parse(text: str) -> Program:
    """Parses the only kernel of a PTX module. Raises ValueError for unknown syntax."""
    head, name, parameters, body = _split(text)
    first_line = head.count("\n") + 1
    instructions, labels, scopes = [], {}, [_Scope(0, set())]
    seen_scopes = 0
    for statement, line in _statements(body, first_line):
        scope = scopes[-1]
        if statement == "{":
            seen_scopes += 1
            scopes.append(_Scope(seen_scopes, set()))
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            labels[scope.own(statement[:-1])] = len(instructions)
        elif statement.startswith(".reg"):
            scope.declare(statement)
        elif not statement.startswith("."):
            instructions.append(_instruction(statement, line, scope))
    return Program(name, instructions, labels, parameters)


def _split(text: str) -> tuple[str, str, list[str], str]:
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(r"\.entry\s+(\w+)\((.*?)\)(.*?)\{", text, re.DOTALL)
    if not found:
        raise ValueError("no kernel in this PTX")
    parameters = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", found[2].strip())
    end = text.index(".section") if ".section" in text else len(text)
    body = text[found.end() : text.rindex("}", 0, end)]
    return text[: found.end()], found[1], parameters, body


def _statements(body: str, line: int):
    """Yields braces, labels and statements, each with its line."""
    at = 0
    pattern = re.compile(r"\s*(?:([{}])|([\w$]+:)|([^;{}]*(?:\{[^{};]*\}[^;{}]*)*);)")
    while at < len(body):
        if not body[at:].strip():
            return
        match = pattern.match(body, at)
        directive = re.compile(r"\s*(\.(?:loc|pragma|file)[^\n]*)\n").match(body, at)
        match = directive or match
        if match is None:
            raise ValueError(f"line {line}: {body[at : at + 80]!r}")
        text = next(group for group in match.groups() if group is not None)
        started = line + body[at : match.start(match.lastindex)].count("\n")
        line += body[at : match.end()].count("\n")
        at = match.end()
        if text.strip():
            yield text.strip(), started


def _instruction(statement: str, line: int, scope: _Scope) -> Instruction:
    guard = None
    found = re.match(r"@(!?)(%?\w+)\s+", statement)
    if found:
        guard = (found[2] if found[2].startswith("%") else scope.own(found[2]), bool(found[1]))
        statement = statement[found.end() :]
    opcode, *rest = statement.split(None, 1)
    operands = tuple(_operand(text, scope) for text in _parts(rest[0] if rest else ""))
    return Instruction(tuple(opcode.split(".")), operands, guard, line)


def _parts(text: str) -> list[str]:
    """Splits operands at commas outside brackets."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter in ",|" and not depth:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [part.strip() for part in [*parts, part] if part.strip()]


def _operand(text: str, scope: _Scope) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part, scope) for part in _parts(text[1:-1]))
    if text.startswith("["):
        base, *coordinates = _parts(text[1:-1])
        base, _, offset = base.partition("+")
        place = _operand(base.strip(), scope)
        assert isinstance(place, Register | Immediate | Symbol)
        listed = _operand(coordinates[0], scope) if coordinates else ()
        return Address(place, int(offset or 0), listed)
    if text.startswith("%") or text == "_":
        return Register(text)
    if text in scope.registers:
        return Register(scope.own(text))
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?\d\w*", text):
        return Immediate(int(text.rstrip("U"), 0))
    return Symbol(text if text.startswith("$") else scope.own(text))
