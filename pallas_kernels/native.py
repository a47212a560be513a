"""Attention, routing and routed experts for CPUs in C++, compiled on first use.

Weights and pages are in float32 or bfloat16; what is computed of them is in float32 up to the
result. XLA's references are what runs where there is no compiler, for other dtypes and sizes, and
for comparison (`references_only`). The two agree within rounding; each is the same bits in every
batch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.activation import SILU
from pallas_kernels.backend import backend, is_reference_wanted
from pallas_kernels.fp8_pages import Fp8Pages

SOURCE = Path(__file__).with_suffix(".cc")
CACHE = Path("~/.cache/jmoe/native")
LANES = 16
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w")
_TARGETS = ("jmoe_attend", "jmoe_prefill", "jmoe_moe_mlp", "jmoe_route", "jmoe_project")

log = logging.getLogger(__name__)


class Library:
    """The compiled calls. What digests traced code looks into functions, and not into an object: a
    program that is kept depends on `is_there` and on the sources by themselves.
    """

    lanes = 0
    """Floats in a register, once the calls are there."""

    @cached_property
    def is_there(self) -> bool:
        """Whether the calls can be made: compiles and registers them the first time.

        `JMOE_NATIVE=0` turns them off, CXX names another compiler than `c++`. What fails is logged.
        """
        if os.environ.get("JMOE_NATIVE", "1") == "0":
            return False
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            log.info("no C++ compiler is found: attention and experts run on XLA, more slowly")
            return False
        try:
            path = _built(compiler)
            library = ctypes.CDLL(str(path))
            if path.parent != CACHE.expanduser():  # once it is loaded, no file is needed
                shutil.rmtree(path.parent)
            for name in _TARGETS:
                call = jax.ffi.pycapsule(getattr(library, name))
                jax.ffi.register_ffi_target(name, call, platform="cpu")
            self.lanes = ctypes.c_int.in_dll(library, "jmoe_lanes").value
        except (AttributeError, OSError, ValueError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            log.warning("%s does not compile %s; XLA is used: %s", compiler, SOURCE, said[:500])
            return False
        return True


def _built(compiler: str) -> Path:
    """Returns the library, compiled for this processor unless it is kept from before."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    facts = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    parts = (SOURCE.read_text(), metadata.version("jaxlib"), version.stdout, *_FLAGS, *facts)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = CACHE.expanduser()
    kept = folder / f"{digest}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # nothing can be kept: for this process alone
        kept = Path(tempfile.mkdtemp(prefix="jmoe-native-")) / kept.name
    if not kept.exists():
        made = kept.with_suffix(f".{os.getpid()}.tmp")
        words = [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
        subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        made.replace(kept)
    return kept


LIBRARY = Library()


def _runs(*arrays: Array | jax.ShapeDtypeStruct) -> bool:
    dtypes = {array.dtype for array in arrays}
    return (
        backend() == "cpu"
        and jax.default_backend() == "cpu"
        and not is_reference_wanted()
        and len(dtypes) == 1
        and dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
        and LIBRARY.is_there
    )


def attends(q, k_pages, v_pages) -> bool:
    """Returns whether `paged_attention` and `prefill_attention` can be called for such arrays."""
    fp8 = isinstance(k_pages, Fp8Pages)
    pages = [] if fp8 else [each for each in (k_pages, v_pages) if each is not None]
    return q.shape[-1] % LANES == 0 and _runs(q, *pages)


def _parts(*pages) -> list[Array]:
    """Returns what the calls take of pages: numbers of each, then their scales, which those in
    eight bits alone have.
    """
    if isinstance(pages[0], Fp8Pages):
        return [*(one.bits for one in pages), *(one.scales for one in pages)]
    return [*pages, *(jnp.zeros(0, jnp.float32) for _ in pages)]


def paged_attention(
    q, k_pages, v_pages, *, layer, block_table, kv_len, scale, window, sinks, latent
):
    """See `paged_attention.op.paged_attention`."""
    none = jnp.full((), -jnp.inf, jnp.float32)
    sinks = jnp.broadcast_to(none if sinks is None else sinks.astype(jnp.float32), q.shape[:2])
    rows = layer, block_table, kv_len
    return _attended(_TARGETS[0], q, (k_pages, v_pages), sinks, rows, scale, window, latent)


def prefill_attention(
    q, k_pages, v_pages, *, layer, block_table, q_start, kv_len, scale, window, sinks, latent
):
    """See `prefill_attention.op.prefill_attention`."""
    none = jnp.full(q.shape[1], -jnp.inf, jnp.float32)
    sinks = none if sinks is None else sinks.astype(jnp.float32)
    rows = layer, block_table, q_start, kv_len
    return _attended(_TARGETS[1], q, (k_pages, v_pages), sinks, rows, scale, window, latent)


def _attended(target, q, pages, sinks, rows, scale, window, latent):
    keys, values = pages
    layer, *rows = rows
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    parts = _parts(keys, keys if values is None else values)
    options = {"scale": np.float32(scale), "window": np.int32(window)}
    out = call(q.astype(jnp.float32), *parts, sinks, layer, *rows, **options).astype(q.dtype)
    return out[..., :latent] if latent else out


def mixes(x: Float[Array, "T d"], gate_up, down, activation, biases) -> bool:
    """Returns whether `moe_mlp` can be called for such arrays."""
    if activation != SILU or biases is not None or not isinstance(gate_up, jax.Array):
        return False
    return all(size % LANES == 0 for size in down.shape[1:]) and _runs(x, gate_up, down)


def moe_mlp(x, gate_up, down, plan):
    """See `grouped_gemm.op.moe_mlp`."""
    shapes = x.shape, (plan.row_token.shape[0], x.shape[1])  # the result, and one a sorted row
    call = jax.ffi.ffi_call(_TARGETS[2], [jax.ShapeDtypeStruct(one, jnp.float32) for one in shapes])
    out, _ = call(
        x.astype(jnp.float32),
        gate_up,
        down,
        plan.row_token,
        plan.block_slot,
        plan.num_blocks.reshape(1),
        plan.visit_row,
        plan.visit_weight,
    )
    return out.astype(x.dtype)


def routes(weights: Float[Array, "T K"]) -> bool:
    """Returns whether `route` can be called for such gate weights."""
    return weights.dtype == jnp.float32 and _runs(weights)


def route(
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    *,
    groups,
    slots,
    threshold_percent,
    strategy,
    valid,
    exempt,
    scale: float,
    block_m: int,
    num_blocks: int,
) -> tuple[Any, Any]:
    """Computes the fields of `reference.brownout_plan` and of `reference.dispatch` of the plan, bit
    for bit, in one call.
    """
    num_experts, num_logical = groups.shape[0], slots.shape[0]
    shapes = (
        (ids.shape, jnp.int32),
        (ids.shape, jnp.bool_),
        ((num_experts,), jnp.bool_),
        ((num_blocks * block_m,), jnp.int32),
        ((num_blocks,), jnp.int32),
        ((), jnp.int32),
        (ids.shape, jnp.int32),
        (ids.shape, jnp.float32),
        ((num_logical,), jnp.int32),
        ((num_logical,), jnp.int32),
    )
    call = jax.ffi.ffi_call(_TARGETS[3], [jax.ShapeDtypeStruct(*one) for one in shapes])
    setting = threshold_percent.reshape(1), strategy.reshape(1)
    options = {"scale": np.float32(scale), "block_rows": np.int32(block_m)}
    fields = call(ids, weights, groups, slots, *setting, valid, exempt, **options)
    return fields[:3], (*fields[3:], slots)


def most_projected(dtype: Any) -> int:
    """Returns the rows from which on XLA's products gain more than its copy of the weights costs.

    Those in bfloat16 may have units of their own (AMX). With 16 lanes up to 512 rows in float32
    are multiplied as fast as by XLA, or faster.
    """
    return 512 if dtype == jnp.float32 and LIBRARY.lanes == LANES else 32


def projects(x: Array, weights: Array) -> bool:
    """Returns whether `project` can be called, and gains, for such rows and weights, or a stack of
    them.
    """
    if x.ndim != 2 or weights.shape[-1] % LANES or not _runs(x, weights):
        return False
    return x.shape[0] <= most_projected(weights.dtype)


def project(
    x: Float[Array, "T k"], stack: Float[Array, "layers k n"], layer: Int[Array, ""]
) -> Float[Array, "T n"]:
    """Computes `x @ stack[layer]` in float32, and reads the stack in place."""
    shape = jax.ShapeDtypeStruct((x.shape[0], stack.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call(_TARGETS[4], shape, vmap_method="sequential")
    return call(x.astype(jnp.float32), stack, layer.astype(jnp.int32).reshape(1))
