"""Rates of machines that benchmarks reckon with: the one place for all of them.

What the product itself reckons with comes from `jmoe.parallel.cost`. Nothing here was measured by
this project.
"""

from jmoe.parallel.cost import H200, NIC_BYTES_PER_S, NODE, Machine

__all__ = ["A100", "H200", "NIC_BYTES_PER_S", "NODE"]

COPY_BYTES_PER_S = H200.memory_bytes_per_s
"""Device memory, bytes read plus bytes written by a large copy."""

DENSE_FLOPS_PER_S = 790e12
"""A large bfloat16 product by cuBLAS on an H100 or H200: the project's floor; the data sheet
states 989 TFLOP/s. `H200.flops_per_s` is of grouped products on ragged numbers of rows."""

ATTENTION_FLOPS_PER_S = 550e12
"""Causal attention, heads of 128 and some thousand positions: about FlashAttention-3's figures."""

A100 = Machine("A100 80GB", 0.6 * 312e12, 0.9 * 2.039e12, 0.8 * 300e9, 6.25e9, 0.9 * 80e9, 40e-6)
"""Of the paper on asynchronous expert parallelism: the data sheet's 312 TFLOP/s (dense bfloat16),
2,039 GB/s and 600 GB/s of NVLink in both directions together, at the shares that the H200 is taken
at; its p4d instance has 400 Gb/s for eight devices, 6.25 GB/s each."""
