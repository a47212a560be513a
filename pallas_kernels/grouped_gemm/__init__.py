"""Grouped GEMM over the expert pool: SwiGLU experts on rows sorted by slot, combined by row."""

from pallas_kernels.grouped_gemm.four_bits import PackedWeights
from pallas_kernels.grouped_gemm.op import BLOCK_M, block_rows, moe_mlp, row_tiles
from pallas_kernels.grouped_gemm.quantized import QuantizedWeights, quantize

__all__ = [
    "BLOCK_M",
    "PackedWeights",
    "QuantizedWeights",
    "block_rows",
    "moe_mlp",
    "quantize",
    "row_tiles",
]
