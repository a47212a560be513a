"""Tile choices of the grouped GEMM."""

BLOCK_M = 8
"""Rows a block of the XLA reference. Measured on a CPU with benchmarks/expert_op.py: an expert's
blocks share one read of its weights, so taller blocks mostly add padding."""
