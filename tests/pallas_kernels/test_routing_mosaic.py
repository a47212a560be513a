"""The routing kernel's own edge cases, interpreted, and its programs for an H200."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest
from routing_contract import (
    MORE,
    ONE,
    Case,
    Static,
    check_route,
    check_tiles,
    compiled,
    draw,
    kernel_of,
    routed,
)
from sm90 import sass

from benchmarks.kernels.shapes import MODELS, QWEN3_30B_A3B, QWEN15_MOE_A27B
from pallas_kernels import routing
from pallas_kernels.backend import references_only
from pallas_kernels.grouped_gemm import BLOCK_M
from pallas_kernels.routing import mosaic
from pallas_kernels.routing.values import Gating
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_launches

pytestmark = pytest.mark.deep
in_a_hurry = pytest.mark.usefixtures("interpreted_in_a_hurry")


def ones(static, **changes):
    """Makes a case: logits equal, rows degradable, united experts of two, half of the visits
    covered.
    """
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


@in_a_hurry
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


@in_a_hurry
@pytest.mark.exhaustive
def test_more_than_64_experts():
    """Two chunks of routed experts, three of logical ones, and a full block of rows."""
    static = Static(rows=64, experts=100, united=50, top_k=8, tiles=ONE)
    check_route("mosaic", static, [draw(1, static, routing.PARTIAL), ones(static)])


@in_a_hurry
@pytest.mark.exhaustive
def test_more_than_128_routed_experts():
    """Sums over them are made in parts, and picks are ranked in two groups."""
    static = Static(rows=9, experts=256, united=64, top_k=16, tiles=ONE)
    check_route("mosaic", static, [draw(1, static, routing.PARTIAL)])


V3 = routing.Grouping(3, 2, 2)
KEEPING = [routing.PARTIAL + routing.BY_WEIGHT, routing.FULL + routing.BY_WEIGHT]


@in_a_hurry
def test_experts_kept_by_weight():
    """One block, with ties of shares, exempt rows and rows of padding among the cases."""
    static = Static()
    cases = [draw(seed, static, KEEPING[seed % 2]) for seed in (1, 2, 3, 5, 6)]
    check_route("mosaic", static, [*cases, ones(static, strategy=np.int32(KEEPING[0]))])


@pytest.mark.exhaustive
@in_a_hurry
@pytest.mark.parametrize(
    "static",
    [
        Static(rows=132, tiles=MORE),
        Static(rows=580, tiles=MORE),
        Static(rows=9, experts=256, united=128, top_k=16, tiles=ONE),
        Static(normalize=False, scoring="sigmoid"),
        Static(scoring="sigmoid", bias=True, grouping=V3, scale=2.5),
    ],
    ids=["three blocks", "turns", "256 experts", "sigmoid", "groups, scaled"],
)
def test_experts_kept_by_weight_emulated(static):
    mine = np.arange(static.experts) % static.rows == np.arange(static.rows)[:, None]
    alike = ones(static, logits=mine.astype(np.float32), strategy=np.int32(KEEPING[0]))
    if static.bias:
        alike = alike._replace(bias=draw(5, static, 0).bias)
    check_route("sm90", static, [draw(5, static, KEEPING[0]), draw(6, static, KEEPING[1]), alike])


@pytest.mark.exhaustive
@in_a_hurry
def test_rows_of_tables():
    """A layer's groups, slots and threshold where they are in the tables of all layers, the last
    row's too.
    """
    static = Static(rows=5, experts=12, united=3, tiles=MORE)
    case = draw(2, static, routing.PARTIAL)._replace(threshold_percent=np.int32(50))
    want = compiled("public", static)(jax.tree.map(jnp.asarray, case))
    ops = {
        context: jax.jit(partial(routed, op, static))
        for context, op in (
            (nullcontext, routing.route),
            (interpreter.interpreted, kernel_of(static)),
        )
    }
    for layer in (0, 2):
        others = np.random.default_rng(layer)
        tables = []
        for row in (case.groups, case.slots, case.threshold_percent.reshape(1)):
            table = others.integers(0, 9, (3, len(row))).astype(np.int32)
            table[layer] = row
            tables.append(routing.TableRow(jnp.asarray(table), jnp.int32(layer)))
        given = case._replace(groups=tables[0], slots=tables[1], threshold_percent=tables[2])
        for context, op in ops.items():
            with context():
                _, _, got = jax.block_until_ready(op(given))
            np.testing.assert_array_equal(got.expert_slot, case.slots)
            np.testing.assert_array_equal(got.row_token, want[2].row_token)
            check_tiles(got, want[2])


MIXER = Static(top_k=2, normalize=False, scoring="sparsemixer", jitter=0.3)


@pytest.mark.exhaustive
@in_a_hurry
def test_sparsemixer():
    """Ties, NaN, brownout by visits and by weight; more picks than two, experts in parts."""
    cases = [draw(seed, MIXER, seed % 3) for seed in (1, 3, 7)]
    check_route("mosaic", MIXER, [*cases, draw(5, MIXER, KEEPING[0]), ones(MIXER)])
    many = MIXER._replace(rows=9, experts=132, united=2, top_k=4, jitter=0.01)
    check_route("mosaic", many, [draw(5, many, routing.PARTIAL)])


@in_a_hurry
@pytest.mark.parametrize("rows", [20, 580], ids=["one block", "turns"])
def test_sparsemixer_emulated(rows):
    static = MIXER._replace(rows=rows, tiles=MORE)
    check_route("sm90", static, [draw(5, static, routing.PARTIAL), draw(6, static, KEEPING[1])])


@pytest.mark.exhaustive
@in_a_hurry
def test_a_layers_row_of_a_table_of_biases():
    static = Static(rows=5, scoring="sigmoid", bias=True, grouping=V3, tiles=MORE)
    case = draw(2, static, routing.PARTIAL)
    table = np.random.default_rng(0).normal(size=(3, static.experts)).astype(np.float32)
    table[2] = case.bias
    bias = routing.TableRow(jnp.asarray(table), jnp.int32(2))
    with interpreter.interpreted():
        op = jax.jit(partial(routed, kernel_of(static), static))
        ids, _, got = jax.block_until_ready(op(case._replace(bias=bias)))
    want = compiled("public", static)(jax.tree.map(jnp.asarray, case))
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_allclose(got.visit_weight, want[2].visit_weight, rtol=1e-6)


@in_a_hurry
@pytest.mark.exhaustive
def test_biased_blocks_that_take_their_rows_in_turns_emulated():
    """The logits of picks are read again before those of the next turn are loaded."""
    static = Static(rows=580, scoring="sigmoid", bias=True, grouping=V3, scale=2.5, tiles=MORE)
    check_route("sm90", static, [draw(5, static, routing.PARTIAL)])


def blocks_of_a_cluster():
    """Runs a step of three blocks, the last not full; `test_steps_of_several_blocks` runs it in a
    process.
    """
    static = Static(rows=132, tiles=MORE)
    cases = [draw(seed, static, seed % 3) for seed in (5, 7)]
    check_route("mosaic", static, [*cases, ones(static, exempt=np.arange(static.rows) >= 64)])


@in_a_hurry
def test_steps_of_several_blocks_emulated():
    static = Static(rows=132, tiles=MORE)
    check_route("sm90", static, [draw(5, static, routing.PARTIAL)])


@in_a_hurry
@pytest.mark.exhaustive
def test_blocks_that_take_their_rows_in_turns_emulated():
    """580 rows are ten times 64: five blocks of two, the last of which has four rows in its second
    turn; the emulator fails on what a turn writes before the one before has let it go."""
    static = Static(rows=580, tiles=MORE)
    exempt = ones(static, exempt=np.arange(static.rows) % 130 >= 64)
    check_route("sm90", static, [draw(5, static, routing.PARTIAL), exempt])


@pytest.mark.exhaustive
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
        {"rows": 4100},
        {"rows": 2052, "experts": 68},
        {"rows": 516, "experts": 132},
        {"rows": 516, "experts": 128, "top_k": 9},
        {"experts": 14},
        {"experts": 260},
        {"experts": 256, "united": 257},
        {"top_k": 17},
        {"block_m": 2},
        {"experts": 128, "top_k": 9, "bias": True},
        {"experts": 128, "top_k": 9, "scoring": "sparsemixer", "normalize": False},
        {"grouping": routing.Grouping(6, 3, 1)},
        {"experts": 36, "grouping": routing.Grouping(9, 3, 1)},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take(changes):
    static = Static(**changes)
    case = jax.tree.map(jnp.asarray, draw(0, static, 0))
    given = case.logits, case.groups, case.slots, Gating(**static.of_gate())
    assert not mosaic.supports(*given, static.block_m, case.bias)


LAYERS = 24


def arguments(shape, num_rows):
    m, united = shape.num_experts, shape.num_experts // 2
    sds = jax.ShapeDtypeStruct
    rows, scalar = sds((num_rows,), jnp.bool_), sds((), jnp.int32)
    return (
        sds((num_rows, m), jnp.float32),
        routing.TableRow(sds((LAYERS, m), jnp.int32), scalar),
        routing.TableRow(sds((LAYERS, m + united), jnp.int32), scalar),
        scalar,
        scalar,
        rows,
        rows,
    )


def route(shape, **of_gate):
    def route(logits, groups, slots, threshold_percent, strategy, valid, exempt, bias=None):
        return routing.route(
            logits,
            top_k=shape.top_k,
            bias=bias,
            **{"normalize": shape is not QWEN15_MOE_A27B, **of_gate},
            groups=groups,
            slots=slots,
            threshold_percent=threshold_percent,
            strategy=strategy,
            valid=valid,
            exempt=exempt,
            block_m=BLOCK_M,
            max_active=shape.num_experts,
            tiles=routing.RowTiles(max(64, min(128, logits.shape[0])), 16),
        )

    return route


LARGEST = replace(QWEN3_30B_A3B, name="largest", num_experts=256, top_k=16)


SIZES = [*((shape, rows) for shape in MODELS for rows in (64, 512, 2048)), (LARGEST, 64)]


@pytest.mark.parametrize(("shape", "num_rows"), SIZES, ids=lambda size: getattr(size, "name", size))
def test_compiled_for_an_h200(capfd, monkeypatch, shape, num_rows):
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, route(shape), *arguments(shape, num_rows)
    )
    assert len(kernels) == 1
    assert kernels[0].spill_bytes == 0
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def scored(name, num_experts, top_k, biased=True, scoring="sigmoid", grouping=None):
    shape = replace(LARGEST, name=name, num_experts=num_experts, top_k=top_k)
    return shape, biased, {"scoring": scoring, "grouping": grouping, "scale": 2.5}


GLM = scored("GLM-4.5-Air", 128, 8)
LARGEST_SCORED = scored("DeepSeek-V3", 256, 8, grouping=routing.Grouping(8, 4, 2))
SCORED = [
    (GLM, 64),
    (GLM, 2048),
    (scored("GLM-4.5", 160, 8), 512),
    (scored("DeepSeek-V2", 160, 6, False, "softmax", routing.Grouping(8, 3, 1)), 512),
    (LARGEST_SCORED, 64),
    (LARGEST_SCORED, 512),
    (scored("softmax", 256, 8, True, "softmax", routing.Grouping(8, 4, 2)), 512),
    (scored("ERNIE-4.5-21B-A3B", 64, 6, scoring="softmax"), 512),
    (scored("two groups", 256, 8, grouping=routing.Grouping(2, 1, 2)), 512),
]


@pytest.mark.parametrize(
    ("model", "num_rows"), SCORED, ids=lambda x: x[0].name if isinstance(x, tuple) else x
)
def test_scored_compiled_for_an_h200(capfd, monkeypatch, model, num_rows):
    shape, biased, of_gate = model
    bias = [jax.ShapeDtypeStruct((shape.num_experts,), jnp.float32)] * biased
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, route(shape, **of_gate), *arguments(shape, num_rows), *bias
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


PHI = replace(LARGEST, name="Phi-3.5-MoE", num_experts=16, top_k=2)
FEW_OF_MANY = replace(LARGEST, name="256 experts", top_k=8)
IN_TURNS = replace(LARGEST, name="128 experts", num_experts=128, top_k=8)
MIXED = [(PHI, 64), (PHI, 512), (PHI, 4096), (FEW_OF_MANY, 512), (IN_TURNS, 2048)]


@pytest.mark.parametrize(("shape", "num_rows"), MIXED, ids=lambda x: getattr(x, "name", x))
def test_sparsemixer_compiled_for_an_h200(capfd, monkeypatch, shape, num_rows):
    mixer = {"scoring": "sparsemixer", "normalize": False, "jitter": 0.01}
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, route(shape, **mixer), *arguments(shape, num_rows)
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_what_blocks_exchange_is_ordered(monkeypatch, tmp_path):
    """Sums by multicasts of a block's own; gaps and tokens by a barrier of the cluster's scope."""
    kernels = sass.disassemble(
        monkeypatch, tmp_path, route(QWEN15_MOE_A27B), *arguments(QWEN15_MOE_A27B, 512)
    )
    names = ("UCGABAR", "MULTICAST", "MEMBAR.ALL.GPU")
    found = [i.opcode for i in kernels["routing"] if any(name in i.opcode for name in names)]
    begin, gaps = ["UCGABAR_ARV", "UCGABAR_WAIT"], ["MEMBAR.ALL.GPU", "UCGABAR_ARV"]
    # Visits, gate weights where experts are kept by them, rows.
    sums = ["UTMALDG.2D.MULTICAST", "UTMALDG.2D.MULTICAST", "UTMALDG.3D.MULTICAST"]
    assert found == [*begin, *gaps, *sums, "UCGABAR_WAIT"]


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    return h200_mesh()


@pytest.mark.exhaustive
def test_launches(mesh):
    """The kernel, and what reads its results; none for the tile map or a layer's row of a table,
    but the one that pads all layers' rows, once a step.

    All that `route` returns takes more: what is degraded, S1 as booleans, a layer's slots, and
    slots of blocks, two.
    """
    shape, num_rows = QWEN15_MOE_A27B, 64

    def needed(*args):
        _, plan, work = route(shape)(*args)
        combined = sum(
            work.visit_weight[:, k] * work.visit_row[:, k].astype(jnp.float32)
            for k in range(shape.top_k)
        )
        degraded = jnp.sum(plan.degraded, axis=1, dtype=jnp.int32)
        table = work.tile_map.table
        return work.row_token, work.expert_rows, work.expert_start, table, combined, degraded

    def count(fn):
        exe = compile_for(mesh, fn, *arguments(shape, num_rows))
        return sum(count_launches(exe.as_text()).values())

    assert count(needed) <= 4
    assert count(route(shape)) <= 7
    with references_only():
        assert 15 <= count(route(shape)) <= 30


ODD = mosaic._odd


@pytest.mark.parametrize("odd", [ODD, lambda vectors: vectors], ids=["as it is", "control"])
@pytest.mark.parametrize(
    ("rows", "united", "picks"), [(512, 8, 4), (65, 30, 4), (512, 8, 2), (4096, 30, 4)]
)
def test_a_blocks_copies_go_by_whole_addresses(odd, rows, united, picks, monkeypatch, tmp_path):
    """They ended with an illegal address on an H100. The control is what was compiled then."""
    monkeypatch.setattr(mosaic, "_odd", odd)
    static = Static(rows=rows, experts=60, united=united, top_k=picks, block_m=BLOCK_M)
    case = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ones(static))
    fn = partial(routed, routing.route, static)
    kernels = sass.disassemble(monkeypatch, tmp_path, fn, case)
    assert bool(sass.short_addresses(kernels["routing"])) == (odd is not ODD)
