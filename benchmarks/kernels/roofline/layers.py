"""Whole layers: the ops of one after the other, and the dense products between them."""

from dataclasses import replace

from benchmarks.kernels.cases import (
    Case,
    count_decode_layer,
    count_moe_layer,
)
from benchmarks.kernels.roofline import assumptions as h200
from benchmarks.kernels.roofline import attention, gemm, small
from benchmarks.kernels.roofline.parts import LAUNCHES, Kernel, Prediction, fixed, joined


def dense(name: str, rows: int, k: int, columns: int) -> Kernel:
    """Predicts a product by cuBLAS, at the floor but for its start and end."""
    floor_us = max(h200.copy_us(2 * k * columns), h200.product_us(2 * rows * k * columns))
    return Kernel(name, floor_us, fixed())


def glue(around: str, num_bytes: int = 0) -> Kernel:
    """Predicts the small kernels of XLA, of whose bytes `num_bytes` are in the layer's floor."""
    launches = h200.GLUE_LAUNCHES[around]
    losses = {LAUNCHES: launches * h200.KERNEL_US}
    return Kernel(f"around {around}", h200.copy_us(num_bytes), losses, launches)


def _moe_kernels(case: Case) -> list[Kernel]:
    shape, rows = case.shape, case.tokens
    d, shared = shape.d_model, shape.d_ff_shared
    kernels = [glue("experts", 4 * rows * d), dense("router", rows, d, shape.num_experts)]
    kernels += small.routing(replace(case, op="routing"), "layer").kernels
    gemm_case = replace(case, op="grouped_gemm", context=0, skew="uniform")
    kernels += gemm.predict(gemm_case, "layer").kernels
    if shared:
        kernels += [
            glue("shared experts"),
            dense("shared gate and up", rows, d, 2 * shared),
            dense("shared down", rows, shared, d),
        ]
    return kernels


def _active(case: Case) -> int:
    return sum(rows > 0 for rows in gemm.rows_of_experts(case.shape, case.tokens, "uniform"))


def moe_layer(case: Case) -> Prediction:
    """Predicts norm, router, routing, routed and shared experts, and residual."""
    return joined(count_moe_layer(case.shape, _active(case), case.tokens), _moe_kernels(case))


def decode_layer(case: Case, page_size: int) -> Prediction:
    """Predicts a whole layer of a decode step."""
    shape, rows = case.shape, case.tokens
    heads = shape.heads + 2 * shape.kv_heads
    kernels = [
        glue("attention"),
        dense("query, key and value", rows, shape.d_model, heads * shape.head_dim),
        *small.kv_write(replace(case, op="kv_write", context=0)).kernels,
        *attention.decode(replace(case, op="paged_attention"), page_size).kernels,
        dense("output", rows, shape.heads * shape.head_dim, shape.d_model),
        *_moe_kernels(case),
    ]
    return joined(count_decode_layer(shape, _active(case), case.chunks()), kernels)
