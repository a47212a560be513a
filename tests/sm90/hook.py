"""Runs a JAX function on a CPU whose Mosaic GPU kernels are compiled for an H200 and emulated."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.pallas import mpmd
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem

from sm90 import host, machine, program
from sm90.execute import Code
from sm90.memory import Place
from tests.compile_for import compile_for, h200_mesh


class Ran(NamedTuple):
    """A kernel that was emulated: bytes of each argument, outputs last, that it moved."""

    name: str
    read: list[int]
    written: list[int]
    loaded: set[Place]  # boxes that TMA brought to shared memory,
    prefetched: set[Place]  # and those that it was to bring to L2


@contextmanager
def emulated(**policy) -> Iterator[list[Ran]]:
    """Emulates Mosaic kernels that are lowered for a CPU within it. `policy`: see `machine.Policy`.

    Yields a list of those that ran so far.
    """
    ran = []

    def lower(ctx, *args, **params):
        inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in]
        ptx, log = compiled(lambda *args: mpmd.mpmd_map_p.bind(*args, **params), *inputs)
        kernel = Code(program.parse(ptx), host.read(log))
        aliases = dict(params["input_output_aliases"])

        def call(*arrays):
            buffers = arguments(arrays, ctx.avals_out, aliases)
            moved = machine.run(kernel, buffers, machine.Policy(**policy))
            ran.append(Ran(kernel.name, moved.read, moved.written, moved.loaded, moved.prefetched))
            return tuple(buffers[len(arrays) :])

        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]
        called = mlir.lower_fun(lambda *args: jax.pure_callback(call, shapes, *args))
        return called(ctx, *args)

    table = mlir._platform_specific_lowerings["cpu"]
    rule = mlir.LoweringRuleEntry(lower, inline=True)
    with mock.patch.dict(table, {mpmd.mpmd_map_p: rule}):
        yield ran


def compiled(fn: Callable, *specs: jax.ShapeDtypeStruct) -> tuple[str, str]:
    """Compiles the only Mosaic kernel of `fn` for an H200; returns its PTX and the compiler's
    log.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Printing layouts takes time, and nobody reads them.
        unread = mock.patch.object(ConstraintSystem, "__str__", return_value="")
        with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder), unread:
            compile_for(h200_mesh(), fn, *specs)
        (ptx,) = Path(folder).glob("*.ptx")
        return ptx.read_text(), ptx.with_suffix(".mlir-passes.log").read_text()


def arguments(arrays, avals_out, aliases: dict[int, int]) -> list[np.ndarray]:
    """Returns inputs, then outputs; outputs that are not inputs as well are poisoned."""
    inputs = [np.array(array) for array in arrays]
    source = {output: inputs[given] for given, output in aliases.items()}
    outputs = []
    for i, aval in enumerate(avals_out):
        poison = np.full(aval.size * aval.dtype.itemsize, 0xFF, np.uint8)
        outputs.append(source.get(i, poison.view(aval.dtype).reshape(aval.shape)))
    return [*inputs, *outputs]
