"""Steps of recurrent models compiled for an H200."""

import pytest
from compiled_steps import (
    BATCH,
    LARGE,
    TEMPORARY,
    Case,
    _kernels_are_assembled_well,
    check_copies,
    compile_step,
    int32,
    mesh,
)

from jmoe.packed_rows import NUM_COLUMNS
from jmoe.steps import decode_step, prefill_step
from tests.compiled import count_launches, large_results

pytestmark = [pytest.mark.deep, pytest.mark.exhaustive]

__all__ = ["_kernels_are_assembled_well", "mesh"]  # fixtures

QWEN3_NEXT = Case("Qwen3-Next-80B-A3B-Instruct", 16, (205, 308, 0), depth=4)
"""Three recurrent layers, and one with pages."""
NEMOTRON = Case(
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    16,
    (80, 97, 0),
    changes={"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5},
)
"""A layer of Mamba-2 and experts, one without, and one with pages and experts."""


@pytest.mark.parametrize(
    ("case", "states", "kernels"),
    [
        # Two products a layer; where there are pages, their write, attention and its merge.
        (QWEN3_NEXT, ["fusion f32[64,1,1,32,128,128]"] * 3, 2 * 4 + 3),
        # Routing and two products; likewise.
        (NEMOTRON, ["fusion f32[64,1,1,64,128,64]"] * 2, 3 * 2 + 3),
    ],
    ids=["qwen3-next", "nemotron"],
)
def test_a_decode_step_is_one_graph_and_copies_what_its_rows_keep_alone(
    mesh, case, states, kernels
):
    program = compile_step(
        mesh, case, decode_step, int32(BATCH, NUM_COLUMNS), int32(8, 3), int32(2)
    )
    assert program.memory.temp_size_in_bytes < TEMPORARY
    # The states of the step's rows, once a layer: a gather's result is not fused into its readers.
    assert [one.split("{")[0] for one in large_results(program.hlo, LARGE)] == states
    assert [line[:19] for line in program.plan if not line.startswith(" ")] == [
        "000: kCommandBuffer"
    ]
    assert program.mosaic_kernels == kernels
    assert sum(count_launches(program.hlo).values()) == case.launches[0]


@pytest.mark.parametrize(
    ("case", "recurrent", "kernels"),
    [(QWEN3_NEXT, 3, 2 * 4 + 2), (NEMOTRON, 2, 3 * 2 + 2)],
    ids=["qwen3-next", "nemotron"],
)
def test_a_prefill_step_copies_neither_experts_nor_pages_nor_states(mesh, case, recurrent, kernels):
    program = compile_step(
        mesh,
        case,
        prefill_step,
        int32(512),
        int32(8, NUM_COLUMNS),
        int32(8, 3),
        int32(2),
    )
    check_copies(program)
    alone = [line.split()[1] for line in program.plan if line[:1].isdigit()]
    assert alone.count("kWhile") == recurrent  # over the blocks of each recurrent layer
    assert program.mosaic_kernels == kernels
    assert sum(count_launches(program.hlo).values()) == case.launches[1]
