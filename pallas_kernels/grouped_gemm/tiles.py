"""Tile choices of the grouped GEMM. Block heights of the XLA reference, by rows an expert.

Measured on a CPU with benchmarks/expert_op.py: short blocks waste less when experts have few rows,
tall ones reuse a weight matrix more often.
"""

REFERENCE_BLOCK_M = ((8, 8), (24, 16), (float("inf"), 32))
"""(rows an expert at most, block height), first match wins."""
