"""What the host does before a kernel starts: tensor maps, parameters and the size of the grid.

Read from the compiler's log: the last form of the host's function in which its calls are plain.
"""

import re
from typing import NamedTuple

_ITEM_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}  # by Mosaic's code of a dtype


class TensorMap(NamedTuple):
    """What `cuTensorMapEncodeTiled` is told, outermost dimension first."""

    buffer: int  # argument of the kernel
    offset: int  # bytes
    item_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # items
    swizzle: int  # bytes: 16 (none), 32, 64 or 128
    box: tuple[int, ...]

    def check(self) -> None:
        """Raises ValueError where the driver would refuse."""
        inner = self.box[-1] * self.item_bytes
        wrong = [
            message
            for is_wrong, message in (
                (not 1 <= len(self.sizes) <= 5, "one to five dimensions"),
                (self.strides[-1] != 1, "items side by side"),
                (any(not 0 < size <= 2**32 for size in self.sizes), "sizes up to 2^32"),
                (any(not 0 < size <= 256 for size in self.box), "boxes up to 256"),
                (inner % 16 != 0, "rows of a box in 16 bytes"),
                (self.swizzle > 16 and inner > self.swizzle, "rows no wider than the swizzle"),
                (any(s * self.item_bytes % 16 for s in self.strides[:-1]), "strides in 16 bytes"),
                (any(s * self.item_bytes >= 2**40 for s in self.strides), "strides under 2^40"),
                (self.offset % 16 != 0, "an address in 16 bytes"),
            )
            if is_wrong
        ]
        if wrong:
            raise ValueError(f"{self}: the driver takes {', '.join(wrong)}")


class Buffer(NamedTuple):
    """A parameter that points to an argument of the kernel."""

    index: int


Parameter = Buffer | dict[int, TensorMap]  # tensor maps by their offset in bytes


class Launch(NamedTuple):
    """How a kernel is started."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: list[Parameter]


class _Pointer(NamedTuple):
    target: object  # what it points into: ("arg", i) or ("stack", i)
    offset: int = 0  # bytes


def read(log: str) -> Launch:
    """Reads the host's function in a log of MLIR passes. Raises ValueError for unknown code."""
    before = log.rindex("IR Dump Before ConvertToLLVMPass")
    start = log.index("func.func @", before)
    return _Host().run(log[start : log.index("\n  }", start)].splitlines())


class _Host:
    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.stacks: list[dict[int, object]] = []
        self.launch: Launch | None = None

    def run(self, lines: list[str]) -> Launch:
        arguments = re.findall(r"(%\w+): !llvm.ptr", lines[0])
        self.buffers = arguments[-1]
        for name in arguments:
            self.values[name] = _Pointer(("argument", name))
        for line in lines[1:]:
            self.step(re.sub(r" loc\(.*", "", line).strip())
        if self.launch is None:
            raise ValueError("the host starts no kernel")
        return self.launch

    def step(self, line: str) -> None:
        name, _, body = line.rpartition(" = ") if line.startswith("%") else ("", "", line)
        if line.startswith("%"):
            name, body = line.split(" = ", 1)
        op = body.split("(", 1)[0].split()[0]
        operands = re.findall(r"%[\w]+", body)
        method = {
            "llvm.mlir.constant": self.constant,
            "llvm.mlir.undef": lambda *_: {},
            "llvm.alloca": self.alloca,
            "llvm.getelementptr": self.element,
            "llvm.store": self.store,
            "llvm.load": self.load,
            "llvm.insertvalue": self.insert,
            "call": self.call,
        }.get(op)
        if method is not None:
            result = method(body, operands)
        elif op in _SAME:
            result = self.values[operands[0]]
            if "offset: [" in body and "offset: [0]" not in body:
                raise ValueError(line)
        elif op in ("return", "memref.assume_alignment"):
            result = None
        else:
            raise ValueError(f"the host's {line!r}")
        if name:
            self.values[name] = result

    def constant(self, body: str, _):
        found = re.search(r"constant\((-?\d+)", body)
        if not found:
            raise ValueError(body)
        return int(found[1])

    def alloca(self, body: str, _):
        self.stacks.append({})
        return _Pointer(("stack", len(self.stacks) - 1))

    def element(self, body: str, operands):
        pointer = self.values[operands[0]]
        assert isinstance(pointer, _Pointer)
        found = re.search(r"\[([^\]]*)\] : \((?:[^)]*)\) -> !llvm.ptr, (.*)$", body)
        if not found:
            raise ValueError(body)
        indices = [int(i) for i in found[1].split(",")]
        if found[2].startswith("!llvm.struct"):  # of parameters: a place each
            return pointer._replace(offset=pointer.offset + indices[1] * 2**20)
        size = {"i8": 1, "i64": 8, "!llvm.ptr": 8, "i32": 4}[found[2]]
        return pointer._replace(offset=pointer.offset + indices[0] * size)

    def store(self, _, operands):
        value, place = (self.values[name] for name in operands)
        assert isinstance(place, _Pointer)
        self.stack(place)[place.offset] = value

    def stack(self, place: _Pointer) -> dict[int, object]:
        kind, index = place.target
        assert kind == "stack"
        return self.stacks[index]

    def load(self, _, operands):
        place = self.values[operands[0]]
        assert isinstance(place, _Pointer)
        if place.target == ("argument", self.buffers):
            return _Pointer(("buffer", place.offset // 8))
        return dict(self.stack(place))

    def insert(self, body: str, operands):
        pointer = self.values[operands[0]]
        known = self.values[operands[1]]
        return pointer if isinstance(pointer, _Pointer) else known

    def call(self, body: str, operands):
        values = [self.values[name] for name in operands]
        if "@mosaic_gpu_init_tma_desc" in body:
            self.tensor_map(values)
        elif "@mosaic_gpu_launch_kernel" in body:
            self.start(values)
        else:
            raise ValueError(body)

    def numbers(self, place) -> tuple[int, ...]:
        stack = self.stack(place)
        return tuple(stack[at] for at in sorted(stack))  # type: ignore[misc]

    def tensor_map(self, values) -> None:
        place, base, dtype, rank, sizes, strides, swizzle, box = values
        kind, buffer = base.target
        assert kind == "buffer"
        arrays = [self.numbers(array) for array in (sizes, strides, box)]
        assert all(len(array) == rank for array in arrays)
        made = TensorMap(
            buffer, base.offset, _ITEM_BYTES[dtype], arrays[0], arrays[1], swizzle, arrays[2]
        )
        made.check()
        self.stack(place)[place.offset] = made

    def start(self, values) -> None:
        _, *sizes, shared, _, _, listed = values
        grid, cluster, block = sizes[:3], sizes[3:6], sizes[6:9]
        places = self.stack(listed)
        parameters: list[Parameter] = []
        for at in sorted(places):
            place = places[at]
            assert isinstance(place, _Pointer)
            value = self.stack(place).get(place.offset)
            if isinstance(value, _Pointer):
                kind, index = value.target
                assert kind == "buffer"
                parameters.append(Buffer(index))
            else:
                assert isinstance(value, dict)
                parameters.append(value)
        cluster = [max(1, size) for size in cluster]
        self.launch = Launch(
            tuple(grid), tuple(cluster), block[0] * block[1] * block[2], shared, parameters
        )


_SAME = (
    "builtin.unrealized_conversion_cast",
    "memref.transpose",
    "memref.reinterpret_cast",
    "memref.extract_aligned_pointer_as_index",
    "memref.expand_shape",
    "memref.collapse_shape",
    "memref.cast",
    "llvm.inttoptr",
    "llvm.trunc",
    "llvm.sext",
    "arith.index_cast",
)
