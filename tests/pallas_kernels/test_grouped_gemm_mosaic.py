"""Mosaic kernels of the grouped GEMM: their own edge cases, interpreted, and real shapes compiled.

Interpreted results are compared with float64 by hand; a data race fails the test.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest
from jax import lax

from benchmarks.kernels.shapes import MIXTRAL_8X7B, MODELS, QWEN3_30B_A3B, QWEN15_MOE_A27B, Shape
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.activation import ClampedSwiglu, Relu2
from pallas_kernels.grouped_gemm import mosaic, tiles
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile
from pallas_kernels.routing import tile_map

pytestmark = pytest.mark.deep
in_a_hurry = pytest.mark.usefixtures("interpreted_in_a_hurry")

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ATOL = 8 * float(jnp.finfo(jnp.bfloat16).eps)
DECODE = Tile(
    widths=(8, 24),
    cluster=1,
    group=2,
    gate_up=GemmTile(block_k=64, parts=2, consumers=1, stages=2),
    down=GemmTile(block_k=128, parts=1, consumers=1, stages=3),
    visit_dtype=F32,
)
PREFILL = Tile(
    widths=(8, 24),
    cluster=2,
    group=2,
    gate_up=GemmTile(block_k=64, parts=2, consumers=2, stages=3),
    down=GemmTile(block_k=64, parts=2, consumers=2, stages=2),
    visit_dtype=BF16,
)
LEAD = replace(
    PREFILL, gate_up=replace(PREFILL.gate_up, lead=1), down=replace(PREFILL.down, lead=2)
)
TILES = {"decode": DECODE, "prefill": PREFILL, "lead": LEAD}
# Rows of each expert. A tile of 24 or 48 is met exactly and by a row more; 16 rows take a width of
# 24 whose last eight rows are another expert's.
LOADS = {
    "ragged": (24, 0, 25, 1, 48, 16, 3),
    "one holds all": (0, 0, 61),
    "last tile past the end": (3, 33),
}


def plan_of(rows_of, rng):
    """Returns a plan in which expert e has `rows_of[e]` rows of one visit each, in random order."""
    ids = rng.permutation(np.repeat(np.arange(len(rows_of), dtype=np.int32), rows_of))[:, None]
    weights = rng.random(ids.shape).astype(np.float32)
    slots = rng.permutation(len(rows_of) + 1)[: len(rows_of)].astype(np.int32)
    arrays = map(jnp.asarray, (ids, weights, slots))
    plan = jax.jit(routing.dispatch, static_argnames=("block_m", "max_active"))(
        *arrays, block_m=8, max_active=len(rows_of)
    )
    return plan, ids, weights, slots


def inputs(rng, num_rows, num_slots, d, f):
    x = rng.normal(size=(num_rows, d))
    gate_up = rng.normal(size=(num_slots, d, 2 * f)) * d**-0.5
    down = rng.normal(size=(num_slots, f, d)) * f**-0.5
    return [jnp.asarray(a, BF16) for a in (x, gate_up, down)]


def by_hand(x, gate_up, down, slots, ids, weights):
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    out = np.zeros_like(x)
    for t, (e,) in enumerate(ids):
        gate, up = np.split(x[t] @ gate_up[slots[e]], 2)
        out[t] = weights[t, 0] * ((gate / (1 + np.exp(-gate)) * up) @ down[slots[e]])
    return out


def check(tile, rows_of, *, num_blocks, d=256, f=128):
    rng = np.random.default_rng(0)
    plan, ids, weights, slots = plan_of(rows_of, rng)
    arrays = inputs(rng, len(ids), len(rows_of) + 1, d, f)
    run = partial(mosaic.moe_mlp, tile=tile, num_blocks=num_blocks)
    got = interpreter.run(run, *arrays, plan)
    np.testing.assert_allclose(got, by_hand(*arrays, slots, ids, weights), rtol=0, atol=ATOL)


CASES = [
    ("decode", "ragged", 3),
    ("decode", "last tile past the end", 2),
    ("prefill", "ragged", 4),
    ("prefill", "one holds all", 10),  # clusters without work
    ("lead", "ragged", 4),
]


@in_a_hurry
@pytest.mark.parametrize(("tile", "rows_of", "num_blocks"), CASES)
def test_equals_float64(tile, rows_of, num_blocks):
    check(TILES[tile], LOADS[rows_of], num_blocks=num_blocks)


@in_a_hurry
def test_last_columns_overlap_where_a_tile_does_not_divide():
    """1.5 tiles of gate and up, 1.25 of down; the pipeline is longer than an item of down."""
    tile = replace(LEAD, down=replace(LEAD.down, stages=4))
    check(tile, (5, 0, 30), num_blocks=6, d=320, f=192)


def expected_tiles(rows_of, start, slot, block_t, group):
    found = []
    for rows, first_row, s in zip(rows_of, start, slot, strict=True):
        num_tiles = -(-rows // block_t)
        for t in range(num_tiles):
            ahead = t // group * group
            head = len(found) - t + ahead
            size = min(group, num_tiles - ahead)
            found.append((s, first_row + ahead * block_t, first_row + rows, head, size))
    return found


@pytest.mark.parametrize(("block_t", "group"), [(8, 1), (16, 2), (24, 3), (256, 8)])
def test_tile_map_lists_every_tile(block_t, group):
    rows_of = (16, 0, 17, 1, 48, 9, 0)
    plan, *_ = plan_of(rows_of, np.random.default_rng(1))
    got = routing.map_tiles(plan, routing.RowTiles(block_t, group))
    want = expected_tiles(
        rows_of, np.asarray(plan.expert_start), np.asarray(plan.expert_slot), block_t, group
    )
    assert len(want) <= len(got)
    np.testing.assert_array_equal(got[: len(want), :-1], want)
    assert (np.asarray(got[:, tile_map.COUNT]) == len(want)).all()


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_every_step_has_a_tile(shape):
    for num_rows in (1, 2, 7, 8, 33, 64, 65, 128, 256, 1000, 4096, 16384):
        tile = tiles.choose(num_rows, shape.top_k, shape.num_experts, shape.d_model, shape.d_ff)
        assert tiles.fits(tile, shape.d_model, shape.d_ff)
        assert list(tile.widths) == sorted(tile.widths)
        assert all(width % 8 == 0 and width <= 256 for width in tile.widths)
        assert min(tile.gate_up.stages, tile.down.stages) >= 3
        # What an expert may have at most is one tile, and reads its weights once.
        assert num_rows > 128 or tile.block_t >= num_rows


@pytest.mark.parametrize(("d", "f"), [(2048, 704), (2880, 2880), (2048, 1472)])
def test_multiples_of_64_have_two_consumers_in_prefill(d, f):
    tile = tiles.choose(16384, 4, 32, d, f)
    assert tile.gate_up.consumers == tile.down.consumers == 2
    assert tiles.fits(tile, d, f)


def test_few_rows_an_expert_take_decode_tiles():
    """Prefill's from where an expert of a skewed router has more rows than decode's tile."""
    clusters = [tiles.choose(t, 2, 8, 4096, 14336).cluster for t in (64, 128, 129, 256, 1024)]
    assert clusters == [1, 1, 2, 2, 2]


@in_a_hurry
def test_odd_sizes_have_a_plain_tile():
    tile = tiles.choose(16384, 8, 8, 192, 320)
    assert tiles.fits(tile, 192, 320)
    check(tiles.plain(PREFILL), (60,), num_blocks=2, d=64, f=192)


def test_what_is_not_supported():
    plan, *_ = plan_of((3, 4), np.random.default_rng(2))
    x, gate_up, down = inputs(np.random.default_rng(3), 7, 3, 64, 64)
    assert mosaic.supports(x, gate_up, down, plan)
    assert not mosaic.supports(x.astype(jnp.float16), gate_up, down, plan)
    assert not mosaic.supports(x[:, :32], gate_up[:, :32], down[:, :, :32], plan)
    assert not mosaic.supports(x, gate_up[:, :, :96], down[:, :48], plan)
    assert not mosaic.supports(x, gate_up[:, :, :64], down, plan, Relu2())
    x, gate_up, down = inputs(np.random.default_rng(3), 7, 3, 64, 256)
    assert mosaic.supports(x, gate_up[:, :, :256], down, plan, Relu2())


def step(shape, num_rows):
    """Returns a layer's dispatch and experts as a function, and the types of its arguments."""
    d, f, m = shape.d_model, shape.d_ff, shape.num_experts

    def layer(x, gate_up, down, ids, weights, slots):
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=m)
        return grouped_gemm.moe_mlp(x, gate_up, down, work)

    visits = (num_rows, shape.top_k)
    types = [((num_rows, d), BF16), ((m + 2, d, 2 * f), BF16), ((m + 2, f, d), BF16)]
    types += [(visits, jnp.int32), (visits, F32), ((m,), jnp.int32)]
    return layer, [jax.ShapeDtypeStruct(*t) for t in types]


GPT_OSS = Shape("gpt-oss", 2880, 2880, 32, 4, 64, 8, 64)


@pytest.mark.parametrize("num_rows", [8, 128, 4096])
def test_biases_and_a_clamped_activation_cost_no_spill(capfd, monkeypatch, num_rows):
    """Of sizes that are no multiple of 128."""
    _, args = step(GPT_OSS, num_rows)
    d, f, m = GPT_OSS.d_model, GPT_OSS.d_ff, GPT_OSS.num_experts

    def layer(x, gate_up, down, ids, weights, slots, *biases):
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=m)
        return grouped_gemm.moe_mlp(x, gate_up, down, work, ClampedSwiglu(), biases)

    biases = [jax.ShapeDtypeStruct((m + 2, n), BF16) for n in (2 * f, d)]
    _, kernels = interpreter.compile_kernels(capfd, monkeypatch, layer, *args, *biases)
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]


NEMOTRON = Shape("nemotron", 2688, 1856, 128, 6, 64, 8, 64)


@pytest.mark.parametrize("num_rows", [8, 256, 16384])
def test_a_first_product_without_a_gate_costs_no_spill(capfd, monkeypatch, num_rows):
    _, (x, _, *others) = step(NEMOTRON, num_rows)
    d, f, m = NEMOTRON.d_model, NEMOTRON.d_ff, NEMOTRON.num_experts
    up = jax.ShapeDtypeStruct((m + 2, d, f), BF16)

    def layer(x, up, down, ids, weights, slots):
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=m)
        return grouped_gemm.moe_mlp(x, up, down, work, Relu2())

    _, kernels = interpreter.compile_kernels(capfd, monkeypatch, layer, x, up, *others)
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]


# With the scan below, every kind of tile that `tiles.choose` has.
STEPS = [
    (QWEN3_30B_A3B, 256),
    (MIXTRAL_8X7B, 128),
    (QWEN3_30B_A3B, 16384),
]


@pytest.mark.parametrize(("shape", "num_rows"), STEPS, ids=lambda v: getattr(v, "name", v))
def test_compiles_for_an_h200_without_spills(capfd, monkeypatch, shape, num_rows):
    layer, args = step(shape, num_rows)
    compiled, kernels = interpreter.compile_kernels(capfd, monkeypatch, layer, *args)
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]
    # Rows before, between and after the products; tables and indices are small beside them.
    padded = num_rows * shape.top_k + 8 * shape.num_experts + 512
    row_bytes = 2 * shape.d_model + 2 * shape.d_ff + 4 * shape.d_model
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * padded * row_bytes + 2**20


def test_a_scan_over_layers_copies_no_weights(capfd, monkeypatch):
    shape, layers, num_rows = QWEN15_MOE_A27B, 24, 64
    layer, (x, gate_up, down, ids, weights, _) = step(shape, num_rows)

    def model(x, gate_up, down, ids, weights):
        def one(x, index):
            own = index * shape.num_experts + jnp.arange(shape.num_experts, dtype=jnp.int32)
            return x + layer(x, gate_up, down, ids, weights, own).astype(x.dtype), None

        return lax.scan(one, x, jnp.arange(layers, dtype=jnp.int32))[0]

    pool = [
        jax.ShapeDtypeStruct((layers * shape.num_experts, *w.shape[1:]), BF16)
        for w in (gate_up, down)
    ]
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, model, x, *pool, ids, weights
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > 23 * 2**30
    assert memory.temp_size_in_bytes < 12 * 2**20  # an expert has 16.5 MiB


@pytest.mark.exhaustive
def test_weights_of_an_expert_are_read_once():
    """For each tile of its rows, which is one in decode; by a cluster for both of its blocks.
    Rows that are an expert's, in eights, are all that is written.
    """
    d, f, item = 256, 128, 2
    for tile, rows_of in ((DECODE, (8, 0, 24, 3)), (PREFILL, (96, 0, 25))):
        rng = np.random.default_rng(2)
        plan, *_ = plan_of(rows_of, rng)
        arrays = inputs(rng, sum(rows_of), len(rows_of) + 1, d, f)
        run = jax.jit(partial(mosaic.moe_mlp, tile=tile, num_blocks=4))
        with interpreter.emulated() as ran:
            jax.block_until_ready(run(*arrays, plan))
        up, down = ran
        num_tiles = sum(-(-rows // tile.block_t) for rows in rows_of)
        assert [up.name, down.name] == ["grouped_gemm_gate_up", "grouped_gemm_down"]
        assert up.read[2] == num_tiles * d * 2 * f * item
        assert down.read[2] == num_tiles * f * d * item
        # L2 is asked for what each block of `down` will load first, except by clusters.
        asked = {place[1:] for place in up.prefetched}
        assert len(asked) == (0 if tile.cluster > 1 else 4 * tile.down.parts)
        assert asked <= {place[1:] for place in down.loaded if place[0] == 2}
        stored = sum(-(-rows // 8) * 8 for rows in rows_of)
        assert up.written[-1] == stored * f * item
        assert down.written[-1] == stored * d * jnp.dtype(tile.visit_dtype).itemsize
