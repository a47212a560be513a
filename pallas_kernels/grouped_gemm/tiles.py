"""Tile choices of the grouped GEMM."""

BLOCK_M = 8
"""Rows a block of the XLA reference. Measured on a CPU with benchmarks/expert_op.py: an expert's
blocks share one read of its weights, so up to some hundred rows a step taller blocks only add
padding; at 512 rows a height of 16 is about a tenth faster."""
