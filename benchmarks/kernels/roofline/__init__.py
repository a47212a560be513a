"""What each case of the kernel benchmark should take on an H200, by arithmetic, and why not less.

`predict` counts bytes and operations with the tile that the op chooses, and adds up losses from the
floor to an expected time. Nothing here is measured: `assumptions` has what is taken for granted.
`python -m benchmarks.kernels.roofline` prints all of it.
"""

from benchmarks.kernels.cases import Case, Sizes
from benchmarks.kernels.roofline import attention, gemm, small
from benchmarks.kernels.roofline.parts import Prediction


def predict(case: Case, sizes: Sizes) -> Prediction:
    """Returns the prediction for a case of a grid."""
    if case.op.startswith("grouped_gemm"):
        return gemm.predict(case)
    if case.op in ("paged_attention", "prefill_attention"):
        of_attention = attention.decode if case.op == "paged_attention" else attention.prefill
        return of_attention(case, sizes.page_size)
    return small.routing(case) if case.op == "routing" else small.kv_write(case)
