"""The device's memory, and the boxes that TMA moves between it and shared memory."""

from collections.abc import Sequence

import numpy as np

from sm90.host import TensorMap

_BITS = 40  # of an address inside an argument; those above say which


Place = tuple[int, int, int]
"""A box's argument, its first byte there, and its bytes."""


class Global:
    """The arguments of a kernel, and the bytes of each that were read and written.

    A block may not touch what another one wrote, unless the cluster's barrier came between: TMA,
    ordinary accesses and an mbarrier's arrivals, whose scope is the block, order nothing there.
    """

    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        self.read, self.written = [0] * len(buffers), [0] * len(buffers)
        self.loaded: set[Place] = set()
        self.prefetched: set[Place] = set()
        self.bytes = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        self.writers = [np.zeros(own.size, np.int16) for own in self.bytes]  # a block, from 1 on
        known: dict[int, int] = {}  # aliased arguments have one address
        self.addresses = [
            (known.setdefault(id(buffer), i) + 1) << _BITS for i, buffer in enumerate(buffers)
        ]

    def load(self, addresses: np.ndarray, width: int, block: int) -> np.ndarray:
        """Loads [addresses, width] bytes."""
        index, at = self.place(addresses, width)
        self.read[index] += at.size * width
        return self.get(index, at[:, None] + np.arange(width), block)

    def store(self, addresses: np.ndarray, values: np.ndarray, block: int) -> None:
        """The other way."""
        index, at = self.place(addresses, values.shape[1])
        self.written[index] += values.size
        self.put(index, at[:, None] + np.arange(values.shape[1]), values, block)

    def get(self, index: int, at: np.ndarray, block: int) -> np.ndarray:
        """Returns the bytes of an argument as a block sees them."""
        self._check(index, at, block)
        return self.bytes[index][at]

    def put(self, index: int, at: np.ndarray, values: np.ndarray, block: int) -> None:
        """The other way."""
        self._check(index, at, block)
        self.bytes[index][at] = values
        self.writers[index][at] = block

    def _check(self, index: int, at: np.ndarray, block: int) -> None:
        writers = self.writers[index][at]
        if np.any((writers != 0) & (writers != block)):
            raise ValueError("touches memory that another block wrote, with no barrier between")

    def settle(self, blocks: Sequence[int]) -> None:
        """Makes what these blocks wrote visible to all of their cluster."""
        for writers in self.writers:
            writers[np.isin(writers, blocks)] = 0

    def place(self, addresses: np.ndarray, width: int) -> tuple[int, np.ndarray]:
        """Returns the argument, and where in its bytes each address is."""
        which = np.unique(addresses >> np.uint64(_BITS))
        if len(which) != 1 or not 0 < which[0] <= len(self.bytes):
            raise IndexError(f"{[hex(a) for a in addresses[:4].tolist()]}: in no one argument")
        index = int(which[0]) - 1
        at = (addresses & np.uint64((1 << _BITS) - 1)).astype(np.int64)
        check(at, width, len(self.bytes[index]), f"argument {index}")
        return index, at


def check(at: np.ndarray, width: int, size: int, name: str) -> None:
    """Raises IndexError for accesses past the end or not aligned."""
    if np.any(at + width > size) or np.any(at < 0):
        raise IndexError(f"{name} has {size} bytes: {width} of them at {int(at.max())}")
    if np.any(at % width):
        raise IndexError(f"{name}: {width} bytes at {int(at[at % width != 0][0])}, not aligned")


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Returns where bytes of shared memory lie under a swizzle of so many bytes; 16 is none."""
    rows = span // 16 - 1
    return addresses ^ (((addresses >> 7) & rows) << 4)


class Box:
    """Part of a tensor, and its place in shared memory."""

    def __init__(self, tensor: TensorMap, coordinates: Sequence[int], shared: int) -> None:
        if shared % 128:
            raise ValueError(f"a box at {shared} in shared memory: it takes a multiple of 128")
        starts, item = coordinates[::-1], tensor.item_bytes
        if starts[-1] * item % 16:
            raise ValueError(
                f"a box at {starts[-1] * item} bytes of a row: it takes whole sixteens"
            )
        indices = np.indices(tensor.box, sparse=True)
        inside, at = np.ones(tensor.box, bool), np.zeros(tensor.box, np.int64)
        for index, start, size, stride in zip(
            indices, starts, tensor.sizes, tensor.strides, strict=True
        ):
            inside &= (index + start >= 0) & (index + start < size)
            at += (index + start) * stride
        self.buffer, self.inside = tensor.buffer, inside.reshape(-1)
        self.bytes = self.inside.size * item
        self.size = int(self.inside.sum()) * item  # of it, inside of the tensor
        self.outer = tensor.offset + at.reshape(-1)[:, None] * item + np.arange(item)
        self.place = (self.buffer, int(self.outer[0, 0]), self.size)
        inner = swizzled(shared + np.arange(self.inside.size) * item, tensor.swizzle)
        self.shared = inner[:, None] + np.arange(item)

    def read(self, memory: Global, block: int) -> np.ndarray:
        """Reads [items, bytes]; zeros outside of the tensor."""
        found = np.zeros(self.outer.shape, np.uint8)
        found[self.inside] = memory.get(self.buffer, self.outer[self.inside], block)
        return found

    def write(self, memory: Global, values: np.ndarray, block: int) -> None:
        """Writes what is inside of the tensor."""
        memory.written[self.buffer] += self.size
        memory.put(self.buffer, self.outer[self.inside], values[self.inside], block)
