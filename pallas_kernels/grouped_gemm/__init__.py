"""Grouped GEMM over the expert pool: SwiGLU experts on rows sorted by slot, combined by row."""

from pallas_kernels.grouped_gemm.op import block_m_for, moe_mlp

__all__ = ["block_m_for", "moe_mlp"]
