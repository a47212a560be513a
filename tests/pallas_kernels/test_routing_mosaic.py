"""The routing kernel's own edge cases, interpreted, and its programs for an H200."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest
from test_routing import Case, Static, check_route, draw

from pallas_kernels import routing
from pallas_kernels.backend import references_only
from pallas_kernels.compile_for import compile_for, h200_mesh
from pallas_kernels.grouped_gemm import BLOCK_M
from pallas_kernels.launches import count_launches
from pallas_kernels.routing import mosaic
from pallas_kernels.shapes import MODELS, QWEN15_MOE_A27B


def ones(static, **changes):
    """All logits equal, all rows degradable, united experts of two, half of the visits covered."""
    m = static.experts
    case = Case(
        logits=np.zeros((static.rows, m), np.float32),
        groups=(np.arange(m) // 2 if static.united else np.full(m, -1)).astype(np.int32),
        slots=np.arange(m + static.united, dtype=np.int32)[::-1].copy(),
        threshold_percent=np.int32(50),
        strategy=np.int32(routing.PARTIAL),
        valid=np.ones(static.rows, bool),
        exempt=np.zeros(static.rows, bool),
    )
    return case._replace(**changes)


def one_expert(static, expert):
    logits = np.zeros((static.rows, static.experts), np.float32)
    logits[:, expert] = 1
    return logits


def test_edges():
    """All alike, none valid, all exempt, one expert holds every row, none covered and all."""
    static = Static()
    check_route(
        "mosaic",
        static,
        [
            ones(static),
            ones(static, valid=np.zeros(static.rows, bool)),
            ones(static, exempt=np.ones(static.rows, bool)),
            ones(static, groups=np.full(static.experts, -1, np.int32)),
            ones(static, groups=np.zeros(static.experts, np.int32), threshold_percent=np.int32(0)),
            ones(static, strategy=np.int32(routing.FULL), threshold_percent=np.int32(0)),
            ones(static, strategy=np.int32(routing.FULL), threshold_percent=np.int32(100)),
        ],
    )
    static = Static(top_k=1)
    check_route("mosaic", static, [ones(static, logits=one_expert(static, e)) for e in (0, 11)])


def test_more_than_64_experts():
    """Two chunks of routed experts, three of logical ones, and a full block of rows."""
    static = Static(rows=64, experts=100, united=50, top_k=8)
    check_route("mosaic", static, [draw(1, static, routing.PARTIAL), ones(static)])


def blocks_of_a_cluster():
    """A step of three blocks, the last not full; run on its own, below."""
    static = Static(rows=132)
    cases = [draw(seed, static, seed % 3) for seed in (5, 7)]
    check_route("mosaic", static, [*cases, ones(static, exempt=np.arange(static.rows) >= 64)])


def test_steps_of_several_blocks_emulated():
    static = Static(rows=132)
    check_route("sm90", static, [draw(5, static, routing.PARTIAL)])


def test_steps_of_several_blocks():
    """Blocks that wait for each other each hold a thread of XLA's pool, so it has to be a large
    one, and its size is read when the process starts.
    """
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[:3])
    env = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    code = "import test_routing_mosaic as cases; cases.blocks_of_a_cluster(); print('passed')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("passed")


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 516},
        {"experts": 14},
        {"experts": 260},
        {"experts": 256, "united": 257},
        {"top_k": 17},
        {"block_m": 2},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take(changes):
    case, static = draw(0, Static(**changes), 0), Static(**changes)
    arrays = (jnp.asarray(a) for a in (case.logits, case.groups, case.slots))
    assert not mosaic.supports(*arrays, static.top_k, static.block_m)


def arguments(shape, num_rows):
    m, united = shape.num_experts, shape.num_experts // 2
    sds = jax.ShapeDtypeStruct
    rows, scalar = sds((num_rows,), jnp.bool_), sds((), jnp.int32)
    return (
        sds((num_rows, m), jnp.float32),
        sds((m,), jnp.int32),
        sds((m + united,), jnp.int32),
        scalar,
        scalar,
        rows,
        rows,
    )


def route(shape):
    def route(logits, groups, slots, threshold_percent, strategy, valid, exempt):
        return routing.route(
            logits,
            top_k=shape.top_k,
            normalize=shape is not QWEN15_MOE_A27B,
            groups=groups,
            slots=slots,
            threshold_percent=threshold_percent,
            strategy=strategy,
            valid=valid,
            exempt=exempt,
            block_m=BLOCK_M,
            max_active=shape.num_experts,
        )

    return route


@pytest.mark.parametrize("num_rows", [64, 512])
@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_compiled_for_an_h200(capfd, monkeypatch, shape, num_rows):
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, route(shape), *arguments(shape, num_rows)
    )
    assert len(kernels) == 1
    assert kernels[0].spill_bytes == 0
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    return h200_mesh()


def test_launches(mesh):
    """The kernel, and what reads its results.

    All that `route` returns takes more: what is degraded, S1 as booleans, and slots of blocks, two;
    and a copy, as an argument cannot be a result.
    """
    shape, num_rows = QWEN15_MOE_A27B, 64

    def needed(*args):
        _, plan, work = route(shape)(*args)
        combined = sum(
            work.visit_weight[:, k] * work.visit_row[:, k].astype(jnp.float32)
            for k in range(shape.top_k)
        )
        degraded = jnp.sum(plan.degraded, axis=1, dtype=jnp.int32)
        return work.row_token, work.expert_rows, work.expert_start, combined, degraded

    def count(fn):
        exe = compile_for(mesh, fn, *arguments(shape, num_rows))
        return sum(count_launches(exe.as_text()).values())

    assert count(needed) <= 3
    assert count(route(shape)) <= 6
    with references_only():
        assert 15 <= count(route(shape)) <= 27
