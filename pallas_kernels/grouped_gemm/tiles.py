"""Tile choices of the grouped GEMM."""

BLOCK_M = 8
"""Rows a block of the XLA reference. Measured on a CPU with benchmarks/expert_op.py: since an
expert's blocks share one read of its weights, taller blocks only add padding."""
