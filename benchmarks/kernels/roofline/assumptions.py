"""What the arithmetic takes for granted of an H200. Nothing here was measured by this project.

Where a figure is a range, the middle is taken; what no source gives is marked as an estimate. A
measurement that contradicts a prediction contradicts one of these, or shows a loss that has none.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.mesh import rates

COPY_TB_S = rates.COPY_BYTES_PER_S / 1e12
PRODUCT_TFLOP_S = rates.DENSE_FLOPS_PER_S / 1e12

NUM_SMS = 132
"""Multiprocessors of an H100 SXM or H200 (data sheet)."""

FLOPS_PER_CLOCK = 4096
"""Dense bfloat16 of one multiprocessor: 989.4 TFLOP/s / (132 x 1.83 GHz), NVIDIA's Hopper white
paper. A wgmma of 64 x N x 16 takes N / 2 cycles of it."""

PRODUCT_GHZ = 1e3 * PRODUCT_TFLOP_S / (NUM_SMS * FLOPS_PER_CLOCK)
"""The clock at which tensor cores that never wait make `PRODUCT_TFLOP_S`. The power limit
holds a GPU near it in a long product; cycles of kernels bound by products are counted in it."""

CLOCK_GHZ = 1.7
"""Of other kernels: between that and the 1.98 GHz an H200 reaches at most."""

TRIP_US = 1.0
"""From asking for a line of a busy device memory to having it: what the project's Little's law
takes (4.3 TB/s x 1 us / 132 = 33 KB in flight a multiprocessor)."""

IDLE_TRIP_US = 0.7
"""The same by TMA while little else is asked for. An estimate: published microbenchmarks of Hopper
have some 480 cycles for a load that L2 misses; TMA and its barrier come on top."""

KERNEL_US = 1.5
"""Launch of a kernel that does nothing, as CUPTI counts its duration: 1 to 2 us. An estimate."""

SMEM_BYTES_PER_CLOCK = 128
"""Shared memory of a multiprocessor (CUDA programming guide: 32 banks of 4 bytes). wgmma reads its
operands from there: 64 x 16 and N x 16 elements are (64 + N) / 4 cycles, which below 64 columns
is more than their product takes."""

L2_BYTES_PER_CLOCK = 40
"""What L2 delivers to each multiprocessor while all of them ask: the grouped GEMM's design."""

PORT_BYTES_PER_CLOCK = 64
"""What one multiprocessor can take in from L2: what microbenchmarks of its predecessor found, and
an estimate for this one."""

L2_BYTES = 60 << 20
"""`tests.compile_for.H200`. An intermediate of up to half of it is taken to be read
from L2 by the kernel after the one that wrote it; it is written to memory all the same."""

MUFU_PER_CLOCK = 16
"""Exponentials and reciprocal square roots of a multiprocessor (CUDA programming guide, 9.0)."""

CONVERT_PER_CLOCK = 64
"""Type conversions (the same table)."""

FP32_PER_CLOCK = 128
"""Multiplications and additions in float32 (the same table)."""

INT32_PER_CLOCK = 64
"""Shifts, masks and additions of int32 (the same table)."""

EPILOGUE_CYCLES = 300
"""Of an item of the grouped GEMM beside its elements: waiting for the accumulators, a fence and the
start of the store. An estimate."""

SOFTMAX_CYCLES = 200
"""Of a warpgroup's step of prefill attention beside its elements: sums over lanes, barriers. An
estimate."""

PREFILL_EXPOSED_CYCLES = 450
"""Of a step of prefill attention over keys, that overlap does not hide: barriers, the start of
products, sums over lanes. Fitted to an H100: FlashAttention-3, which overlaps as this kernel does,
takes 2,048 cycles of products and 400 to 450 more at the rate of `PRODUCT_TFLOP_S`."""

TILE_CHAIN_CYCLES = 1500
"""From a tile of keys to the next in paged attention: two products of few columns (270 each), a
softmax of four scores a thread with its sums over warps (500), fences and barriers. An estimate;
three blocks of a multiprocessor overlap theirs."""

CYCLES_PER_INSTRUCTION = 2
"""Of a warp that has its scheduler to itself and depends on what it computed. An estimate."""

BLOCKS_PER_SM = 16
"""One-warpgroup blocks that live on a multiprocessor at most: 2,048 threads."""

TILE_MAP_LAUNCHES = 2
"""What XLA starts for the grouped GEMM's tile map, beside a gather and a combine. This and what
follows is counted in programs compiled for an H200 (`tests/benchmarks/test_roofline.py`)."""

DECODE_PLAN_LAUNCHES = 5
"""What XLA starts to plan decode attention's step; the same for prefill's, below. The benchmark
plans in every call, a step once for all layers."""

PREFILL_PLAN_LAUNCHES = 5
"""Of a step that was not planned before."""

ROUTE_LAUNCHES = 6
"""What XLA starts after the routing kernel, for all results, as the benchmark asks for them."""

ROUTE_REFERENCE_LAUNCHES = 26
"""Routing of more rows than the kernel takes, by XLA."""


DEVICES = {
    "H200": {},
    "H100": {"COPY_TB_S": 3.0},
    "H20": {"COPY_TB_S": 3.6, "PRODUCT_TFLOP_S": 140.0, "NUM_SMS": 78, "FLOPS_PER_CLOCK": 1024},
}
"""What differs on other Hopper GPUs: of data sheets' 3.35 and 4.0 TB/s the share that the H200's
copy is taken to reach; of an H20's 148 TFLOP/s the 95 % of a MoE layer in arXiv 2501.16103."""


@contextmanager
def on(device: str) -> Iterator[str]:
    """Predicts for the GPU whose name, as its driver has it, holds one of `DEVICES`; yields which.
    Of any other they are an H200's.
    """
    name = next((one for one in DEVICES if re.search(rf"\b{one}\b", device)), "H200")
    own = globals()
    before = {key: own[key] for key in (*DEVICES[name], "PRODUCT_GHZ")}
    own.update(DEVICES[name])
    own["PRODUCT_GHZ"] = 1e3 * PRODUCT_TFLOP_S / (NUM_SMS * FLOPS_PER_CLOCK)
    try:
        yield name
    finally:
        own.update(before)


def copy_us(num_bytes: float) -> float:
    """Returns the microseconds that device memory takes for so many bytes."""
    return num_bytes / (1e6 * COPY_TB_S)


def product_us(flops: float) -> float:
    """Returns the microseconds that tensor cores take for so many operations."""
    return flops / (1e6 * PRODUCT_TFLOP_S)


def cycles_us(cycles: float) -> float:
    """Returns the microseconds of so many cycles of a kernel that is bound by products."""
    return float(cycles) / PRODUCT_GHZ / 1e3


def wgmma_cycles(columns: float, registers: bool = False) -> float:
    """Returns the cycles of a 64 x `columns` x 16 product, its operands in shared memory or, A,
    registers.
    """
    operands = columns + (0 if registers else 64)
    return max(columns * 2048 / FLOPS_PER_CLOCK, operands * 32 / SMEM_BYTES_PER_CLOCK)
