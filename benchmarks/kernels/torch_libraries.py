"""What PyTorch makes of a case. Needs a GPU.

Inputs are the op's own arrays, lent by DLPack. A call runs as PyTorch launches it, operation by
operation; `span_us` is of a CUDA graph, where no launch is waited for.
"""

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.cases import Case
from benchmarks.kernels.libraries import kv_sets, moe_sets, square
from benchmarks.kernels.problems import Problem
from benchmarks.kernels.timing import difference


class TorchProgram:
    """A PyTorch function over input sets of JAX arrays."""

    judged = True  # whether a call returns what the op returns

    def __init__(self, call: Callable[..., torch.Tensor], sets: list[tuple[Any, ...]]) -> None:
        jax.block_until_ready(sets)
        self._arrays = sets  # PyTorch's views live as long as these
        self.sets = [tuple(torch.from_dlpack(a) for a in args) for args in sets]
        self.num_sets, self._call = len(sets), call
        self._graph: tuple[int, Any] | None = None

    @torch.no_grad()
    def __call__(self, i: int) -> torch.Tensor:
        """See timing.Program."""
        return self._call(*self.sets[i % self.num_sets])

    def wait(self, out: Any) -> None:
        """See timing.Program."""
        torch.cuda.synchronize()

    def span_us(self, calls: int) -> float:
        """See timing.Program: CUDA events around replays of a graph of some calls."""
        calls = max(min(calls, 32), self.num_sets)
        if self._graph is None or self._graph[0] != calls:
            self._graph = calls, self._capture(calls)
        times = []
        for replays in (1, 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                self._graph[1].replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return difference(times[0] / 1e3, times[1] / 1e3, calls)

    def _capture(self, calls: int) -> Any:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # a graph may only hold what has run once on its stream
            self(0)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(calls):
                self(i)
        torch.cuda.synchronize()
        return graph


def to_jax(out: torch.Tensor) -> jax.Array:
    """Returns a result as a JAX array that shares its memory."""
    torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(out.contiguous())


# ---- Grouped GEMM ----


def grouped_mm(case: Case, problem: Problem) -> TorchProgram:
    """Runs gather, two grouped products with SwiGLU between them, and the weighted sum."""

    def call(x, gate_up, down, token, sizes, place, weights):
        ends = sizes.cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[token], gate_up, offs=ends)
        gate, up = h.chunk(2, dim=1)
        y = torch._grouped_mm(F.silu(gate) * up, down, offs=ends)
        picks = y[place].transpose(1, 2)
        return torch.bmm(picks, weights[:, :, None].to(y.dtype))[:, :, 0].float()

    return TorchProgram(call, moe_sets(problem))


# ---- Attention ----


def sdpa_flash(case: Case, problem: Problem) -> TorchProgram:
    """Runs PyTorch's own FlashAttention."""
    prefill = case.phase == "prefill"
    ragged = prefill and not square(case)

    def call(q, k, v):
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2]) if ragged else None
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=prefill and not ragged, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)

    return TorchProgram(call, kv_sets(case, problem))
