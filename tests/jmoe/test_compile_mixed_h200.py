"""A mixed decode step of real models, compiled for an H200 that is not there."""

from functools import partial

import jax
import pytest
from compiled_steps import (
    BATCH,
    MIXTRAL,
    QWEN3,
    Program,
    _kernels_are_assembled_well,
    abstract_model,
    abstract_state,
    check_copies,
    int32,
    mesh,
)

from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.packed_rows import NUM_COLUMNS
from jmoe.steps import served
from pallas_kernels.backend import traced_for
from pallas_kernels.routing.parts import MAX_LOGICAL, MAX_ROUTED
from tests.compile_for import compile_for
from tests.equal_kernels import equal_kernels_are_compiled_once

pytestmark = pytest.mark.deep

__all__ = ["_kernels_are_assembled_well", "equal_kernels_are_compiled_once", "mesh"]  # fixtures

ROWS = BATCH // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [MIXTRAL._replace(depth=2), QWEN3._replace(depth=2)], ids=lambda case: case.name
)
def test_a_mixed_step_copies_neither_experts_nor_pages(mesh, case):
    """And none of its kernels spills."""
    one, cfg = abstract_model(case), case.config
    with traced_for("cuda"):
        _, options = served({"segments": ()})
        params = jax.eval_shape(lambda params: served(params)[0], one.params)
    weights = MixedWeights(one.pool, (params, params), (one.table, one.table))
    step = partial(mixed_decode_step, cfg, max_active=2 * cfg.num_experts)
    rows = int32(2 * ROWS, NUM_COLUMNS), int32(2 * ROWS, 3), int32(4)
    held = weights, abstract_state(case)
    exe = compile_for(mesh, step, *held, *rows, donate_argnums=1, options=options)
    program = Program(exe.as_text(), exe.memory_analysis(), None)
    check_copies(program)
    # A KV write for each model; attention and its merge, routing, two products.
    assert 2 * cfg.num_experts <= MAX_ROUTED
    assert 2 * case.num_slots <= MAX_LOGICAL
    assert program.mosaic_kernels == (2 + 5) * cfg.num_layers
