"""Every op's kernel on the GPU against float32, at sizes of published models.

The benchmark's problems and judges: fresh inputs, poisoned results, the same bits twice.
"""

import secrets

import pytest

from benchmarks.kernels import judge, problems
from benchmarks.kernels.cases import OPS, Sizes, all_cases
from benchmarks.kernels.inputs import Pools
from benchmarks.kernels.timing import JaxProgram

SIZES = Sizes(
    decode_tokens=(1, 64),
    prefill_tokens=(1024,),
    contexts=(1024,),
    rotated_bytes=0,
    kv_bytes=1 << 30,
)
CASES = [case for case in all_cases(SIZES) if case.skew != "uniform"]


@pytest.fixture(scope="module")
def pools():
    """Yields the pools; a model's weights are drawn once, since its cases follow each other."""
    return Pools()


def test_every_op_is_tried():
    assert {case.op for case in CASES} == set(OPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_op_equals_its_reference(case, pools):
    problem = problems.build(case, SIZES, secrets.randbits(31), pools)
    program = JaxProgram(problem.call, problem.sets, problem.carry)
    # Routing of more rows, experts or picks than its kernel takes is XLA's.
    assert program.has_mosaic or (case.op == "routing" and case.tokens > 512)
    seen = judge.check(program, problem.error, problem.tolerance)
    assert seen.passed, seen
