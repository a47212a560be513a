"""A parameter: the tensors of a Hugging Face file that it is made of, and what is made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_gemm.four_bits import PackedWeights, packed_codes

Kind = Literal["matrix", "laid out", "mxfp4", "embedding", "router", "norm", "bias", "gate"]
"""What a parameter is; who draws weights chooses by it how each one begins. A matrix that is laid
out lies in the file as in memory; one of MXFP4 in four bits, in groups with a scale.
"""

MXFP4_GROUP = 32
"""Elements of a row that share a scale (OCP Microscaling Formats 1.0)."""
MXFP4_NAN = 255
"""The scale that is no number."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.stack(np.meshgrid(*2 * [np.concatenate([_E2M1, -_E2M1])]), axis=-1).reshape(256, 2)
"""The two elements of a byte, the lower four bits first."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, of a layer, or of an expert."""

    names: tuple[str, ...]  # Hugging Face tensors, joined along the output axis
    stored: tuple[tuple[int, ...], ...]  # their shapes in the file, `[out, in]`, without `part`
    kind: Kind = "matrix"
    float32: bool = False  # whatever the model's dtype is
    part: tuple[int, int] | None = None  # its place along a first axis of the file, of how many
    swapped: bool = False  # the file may have rows and columns the other way round, too
    in_turn: bool = False  # the file's columns are those of the two halves in turn
    paired: int = 0
    """Of a file whose heads turn two neighbours together, the elements of one: all tensors but the
    last have their heads' halves in turn.
    """
    woven: tuple[tuple[int, ...], ...] = ()
    """Of a file whose first tensors have several things head by head, how many rows of each in
    turn; in memory each of them is together.
    """
    offset: float = 0.0  # what is added to the file's numbers

    @property
    def transposed(self) -> bool:
        """Whether the file has it `[out, in]` and jmoe `[in, out]`."""
        return self.kind in ("matrix", "router")

    @property
    def is_row(self) -> bool:
        """Whether the file has a vector as a matrix of one row."""
        return self.kind == "gate" or (self.kind == "bias" and len(self.stored[0]) == 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, without a layer axis."""
        if self.transposed:
            return self.stored[0][1], sum(shape[0] for shape in self.stored)
        if self.kind == "mxfp4":
            columns, groups, _ = self.stored[0]
            return groups * MXFP4_GROUP, columns
        if self.is_row:
            return self.stored[0][1:]
        return sum(shape[0] for shape in self.stored), *self.stored[0][1:]

    @property
    def in_file(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the file."""
        lead = () if self.part is None else self.part[1:]
        return tuple((*lead, *shape) for shape in self.stored)

    def assemble(self, tensors: Sequence[Any]) -> Any:
        """Returns the parameter of its tensors; where those are NumPy's, it is too. Of MXFP4 they
        are as in the file, and it is float32.
        """
        if self.kind == "mxfp4":
            tensors = [_dequantized(*tensors).T]
        if self.in_turn:
            return _halves(*tensors)
        if self.offset:
            return tensors[0] + tensors[0].dtype.type(self.offset)
        tensors = [*map(_apart, tensors, self.woven), *tensors[len(self.woven) :]]
        if self.paired:
            tensors = [*(self._swapped(one, -1, 2) for one in tensors[:-1]), tensors[-1]]
        if self.transposed:
            tensors = [tensor.T for tensor in tensors]
        if self.is_row:
            tensors = [tensor[0] for tensor in tensors]
        if len(tensors) == 1:
            return tensors[0]
        return _of(tensors[0]).concatenate(tensors, axis=-1)

    def kept(self, blocks: Any, scales: Any) -> PackedWeights:
        """Returns a parameter of MXFP4 as an expert pool keeps it; its tensors are NumPy's."""
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
        if self.in_turn:
            codes, scales = (np.concatenate([x[::2], x[1::2]]) for x in (codes, scales))
        values = packed_codes(codes)
        return PackedWeights(values, scales.T, k=codes.shape[1], group=MXFP4_GROUP)

    def split(self, parameter: Any) -> dict[str, Any]:
        """Returns tensors by name, as the file has them: the inverse of `assemble`."""
        if self.is_row:
            return {self.names[0]: parameter[None]}
        if self.kind == "mxfp4":
            raise ValueError(f"{self.names[0]} is not written: jmoe does not quantize to MXFP4")
        xp = _of(parameter)
        if self.in_turn:
            turns = xp.stack(xp.split(parameter, 2, axis=-1), axis=-1)
            return {self.names[0]: turns.reshape(parameter.shape)}
        if self.offset:
            return {self.names[0]: parameter - parameter.dtype.type(self.offset)}
        ends = np.cumsum([shape[0] for shape in self.stored])[:-1].tolist()
        parts = xp.split(parameter, ends, axis=-1 if self.transposed else 0)
        if self.transposed:
            parts = [part.T for part in parts]
        if self.paired:
            parts = [*(self._swapped(one, 2, -1) for one in parts[:-1]), parts[-1]]
        parts = [*map(_woven, parts, self.woven), *parts[len(self.woven) :]]
        return dict(zip(self.names, parts, strict=True))

    def _swapped(self, tensor: Any, *sizes: int) -> Any:
        """Returns rows of heads, each cut into `sizes`, of which the second comes first."""
        heads = (len(tensor) // self.paired, *sizes, *tensor.shape[1:])
        return tensor.reshape(heads).swapaxes(1, 2).reshape(tensor.shape)


def _of(array: Any) -> Any:
    """Returns the module whose array it is: NumPy, or jax's."""
    return np if isinstance(array, np.ndarray) else jnp


def _halves(x: Any) -> Any:
    """Returns the even columns, then the odd ones."""
    return _of(x).concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _apart(tensor: Any, sizes: tuple[int, ...]) -> Any:
    """Returns the rows of each of the things that a tensor has in turn, one thing after another."""
    by_head = tensor.reshape(-1, sum(sizes), *tensor.shape[1:])
    parts = _of(tensor).split(by_head, np.cumsum(sizes)[:-1].tolist(), axis=1)
    return _of(tensor).concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _woven(tensor: Any, sizes: tuple[int, ...]) -> Any:
    """Returns the rows as a file has them: the inverse of `_apart`."""
    heads = len(tensor) // sum(sizes)
    ends = (heads * np.cumsum(sizes))[:-1].tolist()
    parts = _of(tensor).split(tensor, ends)
    each = zip(parts, sizes, strict=True)
    by_head = [part.reshape(heads, size, *tensor.shape[1:]) for part, size in each]
    return _of(tensor).concatenate(by_head, axis=1).reshape(tensor.shape)


def _dequantized(blocks: Any, scales: Any) -> Any:
    """Returns float32 [rows, k] of MXFP4: uint8 blocks [rows, groups, 16] of two elements a byte,
    and the groups' exponents [rows, groups], uint8, 127 too high.
    """
    xp = _of(blocks)
    pairs = xp.asarray(_PAIRS)[blocks]
    with np.errstate(over="ignore", invalid="ignore"):  # of NaN, which is looked for later
        scale = xp.ldexp(xp.ones(scales.shape, xp.float32), scales.astype(xp.int32) - 127)
        return (pairs * scale[..., None, None]).reshape(blocks.shape[0], -1)


Layout = dict[str, Parameter]
"""Parameters by key; the order is that in which random weights are drawn."""
