"""The same work by libraries, on the same inputs: JAX's own, and PyTorch's.

A library that cannot take a case is skipped, and the reason is kept. Its results are judged like
the op's before it is timed. Sorting rows by expert and making pages contiguous are left out of a
library's time, as the op's plan is left out of the op's.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.cases import Case
from benchmarks.kernels.inputs import LAYER
from benchmarks.kernels.problems import Problem
from benchmarks.kernels.timing import JaxProgram, Program
from pallas_kernels.backend import references_only

MAX_TEMP_BYTES = 72 << 30  # lax.ragged_dot widens rows by the number of experts
MAX_KV_BYTES = 40 << 30


class Skip(Exception):
    """Why a library does not take part in a case."""


Maker = Callable[[Case, Problem], Program]


def of(case: Case) -> Iterator[tuple[str, Maker]]:
    """Yields name and maker of each program to compare a case with; none over a window or latents.
    A maker may raise Skip.
    """
    if not case.window and not (case.shape.latent and case.context):
        yield from _MAKERS[case.op].items()


def on_gpu() -> None:
    """Raises Skip where there is no GPU."""
    if jax.default_backend() != "gpu":
        raise Skip("needs a GPU")


def _bounded(call: Callable[..., Any], sets: list[tuple[Any, ...]]) -> JaxProgram:
    program = JaxProgram(call, sets)
    if program.temp_bytes > MAX_TEMP_BYTES:
        raise Skip(f"needs {program.temp_bytes / 2**30:.0f} GiB of temporary memory")
    return program


# ---- Grouped GEMM ----


def sorted_rows(ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts rows by expert without gaps; returns token of each row, rows an expert, row of each
    visit.
    """
    order = np.argsort(ids.ravel(), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sizes = np.bincount(ids.ravel(), minlength=num_experts)
    token, place = order // ids.shape[1], place.reshape(ids.shape)
    return token.astype(np.int32), sizes.astype(np.int32), place.astype(np.int32)


def moe_sets(problem: Problem) -> list[tuple[jax.Array, ...]]:
    """Returns (x, gate_up, down, token, sizes, place, weights) of each input set."""
    inputs, pool = problem.data
    return [
        (
            one.x,
            *pool.layer(one.layer),
            *map(jnp.asarray, sorted_rows(one.ids, pool.shape.num_experts)),
            jnp.asarray(one.weights),
        )
        for one in inputs
    ]


def _swiglu(h):
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


def _combine(y, place, weights):
    return jnp.einsum("tk,tkd->td", weights, y[place].astype(jnp.float32))


def _ragged(dot: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(x, gate_up, down, token, sizes, place, weights):
        y = dot(_swiglu(dot(x[token], gate_up, sizes)), down, sizes)
        return _combine(y, place, weights)

    return call


def _ragged_dot(case: Case, problem: Problem) -> Program:
    return _bounded(_ragged(jax.lax.ragged_dot), moe_sets(problem))


def _jax_kernel(case: Case, problem: Problem) -> Program:
    """Runs the grouped product among the Hopper examples that come with JAX, one tile for all
    cases.
    """
    on_gpu()
    if case.phase == "decode":
        raise Skip("its tiles are for prefill")
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    def dot(rows, weights, sizes):
        return ragged_dot(
            rows,
            weights,
            group_sizes=sizes,
            block_m=128,
            block_n=128,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=2,
        )

    return _bounded(_ragged(dot), moe_sets(problem))


# ---- Attention ----


def kv_sets(case: Case, problem: Problem) -> list[tuple[jax.Array, ...]]:
    """Returns q [N, T, H, D] and contiguous k, v [N, S, G, D]: as many sets as rotate, or one
    large.
    """
    inputs, k_pages, v_pages = problem.data
    shape, chunks = case.shape, case.chunks()
    one_set = 4 * len(chunks) * case.context * shape.kv_heads * shape.head_dim
    if one_set > MAX_KV_BYTES:
        raise Skip(f"a contiguous cache would take {one_set / 2**30:.0f} GiB")
    count = 1 if one_set > 1 << 30 else len(inputs)
    sets = []
    for one in inputs[:count]:
        q = one.q.reshape(len(chunks), -1, shape.heads, shape.head_dim)
        sets.append((q, _contiguous(k_pages, one.table), _contiguous(v_pages, one.table)))
    return sets


@jax.jit
def _contiguous(pages, table):
    own = pages[LAYER, table].swapaxes(2, 3)  # [N, M, S, G, D]
    return own.reshape(own.shape[0], -1, *own.shape[3:])


def square(case: Case) -> bool:
    """Returns whether there are as many queries as keys: then all meanings of "causal" agree."""
    return all(n == c for n, c in case.chunks())


def _cudnn(case: Case, problem: Problem) -> Program:
    on_gpu()
    causal = case.phase == "prefill"
    if causal and not square(case):
        raise Skip("its causal mask starts at the first key")

    def call(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return out.reshape(-1, *q.shape[2:])

    return _bounded(call, kv_sets(case, problem))


# ---- The op itself: as XLA makes it, and on weights of bfloat16 ----


def _xla(case: Case, problem: Problem) -> Program:
    carry = None if problem.carry is None else jax.tree.map(jnp.copy, problem.data)
    with references_only():
        return JaxProgram(lambda *args: problem.call(*args), problem.sets, carry)


def _bfloat16(case: Case, problem: Problem) -> Program:
    _, pool = problem.data
    sets = [(x, pool.gate_up, pool.down, plan) for x, _, _, plan in problem.sets]
    program = JaxProgram(problem.call, sets)
    program.judged = False  # its weights were not rounded
    return program


def _torch(name: str) -> Maker:
    """Returns a maker of `torch_libraries`, imported only where there are PyTorch and a GPU."""

    def make(case: Case, problem: Problem) -> Program:
        on_gpu()
        if importlib.util.find_spec("torch") is None:
            raise Skip("torch is not installed")
        from benchmarks.kernels import torch_libraries

        return getattr(torch_libraries, name)(case, problem)

    return make


_ATTENTION: dict[str, Maker] = {"cuDNN": _cudnn, "torch SDPA flash": _torch("sdpa_flash")}
_MAKERS: dict[str, dict[str, Maker]] = {
    "grouped_gemm": {
        "lax.ragged_dot": _ragged_dot,
        "jax ragged_dot_mgpu": _jax_kernel,
        "torch._grouped_mm": _torch("grouped_mm"),
    },
    "paged_attention": _ATTENTION,
    "prefill_attention": _ATTENTION,
    "routing": {"XLA reference": _xla},
    "kv_write": {"XLA reference": _xla},
    "grouped_gemm_fp8": {"ours in bfloat16": _bfloat16},
    "grouped_gemm_int4": {"ours in bfloat16": _bfloat16},
}
