"""Grouped GEMM over the expert pool: SwiGLU experts on rows sorted by slot, combined by row."""

from pallas_kernels.grouped_gemm.op import BLOCK_M, moe_mlp

__all__ = ["BLOCK_M", "moe_mlp"]
