"""Runs Mosaic kernels without a GPU: interpreted with race detection, compiled for an H200 or,
once compiled, emulated instruction by instruction (`sm90`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import pytest
import sm90
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from sm90 import ptxas

from tests.compile_for import compile_for, h200_mesh

ON_SM90 = os.environ.get("KERNELS_ON") == "sm90"
"""Emulates everything that is interpreted by default: too slow for CI."""

_NEEDS_AOT = "compiling for an H200 needs the extra: jmoe[aot]"


@contextmanager
def emulated(**policy) -> Iterator[list]:
    """Emulates kernels on the CPU from the PTX that ptxas is given; yields those that ran
    (`sm90.Ran`). Skips without `aot`.
    """
    pytest.importorskip("jax_plugins.xla_cuda13", reason=_NEEDS_AOT)
    with sm90.emulated(**policy) as ran:
        yield ran


@contextmanager
def interpreted() -> Iterator[None]:
    """Interprets kernels on the CPU; a data race fails the test (it does not raise by itself).

    Block what you compute inside it: races are only known once a kernel has run. Every kernel
    begins with a new record of races and drops the one before, so all of them are kept here.
    """
    if ON_SM90:
        with emulated():
            yield
        return
    records = []

    class Record(gpu_callbacks.GPURaceDetectionState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            records.append(self)

    interpreter.reset_gpu_interpret_mode_state()
    try:
        with (
            mock.patch.object(gpu_callbacks, "GPURaceDetectionState", Record),
            mock.patch.object(
                gpu_callbacks, "AsyncCopyGmemToSmemTask", aligned(_FROM_MEMORY, "src")
            ),
            mock.patch.object(gpu_callbacks, "AsyncCopySmemToGmemTask", aligned(_TO_MEMORY, "dst")),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            yield
        assert records, "no kernel ran"
        assert not any(record.races_found for record in records)
    finally:
        interpreter.reset_gpu_interpret_mode_state()


_FROM_MEMORY, _TO_MEMORY = (
    gpu_callbacks.AsyncCopyGmemToSmemTask,
    gpu_callbacks.AsyncCopySmemToGmemTask,
)


def aligned(task, side):
    """Returns what makes such a copy, and fails where it starts off a multiple of 16 bytes in a row
    of device memory: an illegal instruction to a Hopper GPU, which jax's interpreter lets pass.
    """

    def make(**fields):
        key, access = fields[f"{side}_allocation_key"], fields[f"{side}_access"]
        memory = gpu_callbacks._get_shared_memory()
        item = memory.buffer_shape_and_dtype(key).dtype.itemsize
        first = access.range[-1]
        start = (first.start if isinstance(first, slice) else first) * item
        assert start % 16 == 0, f"a copy starts at {start} bytes of a row: TMA takes whole sixteens"
        return task(**fields)

    return make


def run(fn, *args):
    """Runs `jit(fn)(*args)` interpreted, and waits for it."""
    with interpreted():
        return jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))


def emulate(fn, *args):
    """Runs `jit(fn)(*args)` emulated, and waits for it."""
    with emulated():
        return jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))


def compile_kernels(
    capfd, monkeypatch, fn, *args, **options
) -> tuple[jax.stages.Compiled, list[ptxas.Kernel]]:
    """Compiles for one H200; returns the executable, and every Mosaic kernel in it, after checking
    that no products wait for one another. Skips without `aot`.
    """
    pytest.importorskip("jax_plugins.xla_cuda13", reason=_NEEDS_AOT)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compiled = compile_for(h200_mesh(), fn, *args, **options)
    out, err = capfd.readouterr()
    kernels = ptxas.parse(out + err)
    assert not any(kernel.serialized for kernel in kernels)
    return compiled, kernels
