"""The Mosaic kernels of paged decode attention: their edge cases interpreted, and compiled."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import paged
import pytest
from jax import lax
from sm90 import ptxas, sass

from benchmarks.kernels.shapes import MODELS, QWEN3_30B_A3B, Shape
from pallas_kernels.backend import NUM_SMS
from pallas_kernels.fp8_pages import Fp8Pages
from pallas_kernels.paged_attention import common, paged_attention, schedule, tiles
from pallas_kernels.paged_attention import mosaic as kernel
from tests.compile_for import compile_for, h200_mesh

pytestmark = pytest.mark.deep
in_a_hurry = pytest.mark.usefixtures("interpreted_in_a_hurry")

BF16 = jnp.bfloat16


def shape(heads, kv_heads, head_dim):
    return Shape(f"{heads}:{kv_heads} of {head_dim}", 1, 1, 1, 1, heads, kv_heads, head_dim)


def check(lengths, shape, page_size, *, num_blocks=3, unused=np.nan, run=mosaic.run, **tile):
    rng = np.random.default_rng(len(lengths))
    keys, values = paged.make(rng, lengths, shape, BF16)
    max_pages = 1 + -(-max(lengths) // page_size)
    pages = paged.scatter(rng, keys, values, page_size, max_pages, unused=unused, dtype=BF16)
    k_pages, v_pages, table = pages
    q = jnp.asarray(rng.normal(size=(len(lengths), shape.heads, shape.head_dim)).astype(BF16))
    scale = shape.head_dim**-0.5
    chosen = tiles.choose(shape.head_dim, page_size)
    assert chosen is not None

    def attend(q, k_pages, v_pages, layer, table, kv_len):
        return kernel.paged_attention(
            q,
            k_pages,
            v_pages,
            layer=layer,
            block_table=table,
            kv_len=kv_len,
            scale=scale,
            tile=replace(chosen, **{"min_tiles": 1, "merge_width": 2, **tile}),
            num_blocks=num_blocks,
        )

    args = q, k_pages, v_pages, jnp.int32(paged.LAYER), table, jnp.asarray(lengths, jnp.int32)
    got = run(attend, *args)
    want = [paged.attend(*row, scale) for row in zip(q, keys, values, strict=True)]
    np.testing.assert_allclose(got.astype(jnp.float32), np.stack(want), rtol=0, atol=0.015)


@functools.partial(jax.jit, static_argnames=("kv_heads", "tokens", "num_blocks", "min_tiles"))
def plan(kv_len, **sizes):
    return schedule.plan(kv_len, **sizes)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "num_blocks", "min_tiles"),
    [(1, 1, 1, 1), (5, 2, 7, 1), (5, 2, 7, 3), (3, 1, 50, 4), (9, 3, 28, 1), (130, 2, 12, 2)],
)
def test_every_tile_is_in_one_run_and_every_cut_is_known(batch, kv_heads, num_blocks, min_tiles):
    rng = np.random.default_rng(0)
    for trial in range(20):
        kv_len = rng.integers(0, 900, batch) * rng.integers(0, 2, batch) * (trial > 0)
        args = {"kv_heads": kv_heads, "num_blocks": num_blocks, "min_tiles": min_tiles}
        got = plan(jnp.asarray(kv_len, jnp.int32), tokens=64, **args)
        tiles = -(-kv_len // 64)
        np.testing.assert_array_equal(got.before, np.cumsum([0, *(tiles * kv_heads)]))
        total = int(got.before[-1])
        start, stop, row, row_start, row_end = np.asarray(got.runs).T
        np.testing.assert_array_equal(start, [0, *stop[:-1]])
        assert stop[-1] == total
        active = (stop - start)[stop > start]
        assert (stop > start)[: len(active)].all()
        assert np.ptp(active) <= 1 if len(active) else total == 0
        assert len(active) == num_blocks or (stop - start).max() <= 2 * min_tiles
        assert len(active) <= 1 or active.min() >= min_tiles

        row_of = np.repeat(np.arange(batch), tiles * kv_heads)
        np.testing.assert_array_equal(row[: len(active)], row_of[start[: len(active)]])
        assert (row < batch).all()
        np.testing.assert_array_equal(row_start, np.asarray(got.before)[row])
        np.testing.assert_array_equal(row_end, np.asarray(got.before)[row + 1])
        segment = np.repeat(np.arange(batch * kv_heads), np.repeat(tiles, kv_heads))
        owner = np.searchsorted(stop, np.arange(total), side="right")
        of_segments = [owner[segment == s] for s in np.unique(segment)]
        cut = {(s, o[0], o[-1]) for s, o in zip(np.unique(segment), of_segments, strict=True)}
        cut = {(int(s), int(a), int(b)) for s, a, b in cut if a < b}
        assert len(got.cuts) == schedule.num_cuts(batch * kv_heads, num_blocks) >= len(cut)
        found = [tuple(entry) for entry in np.asarray(got.cuts).tolist() if entry[2] > entry[1]]
        assert len(found) == len(cut)
        assert set(found) == cut
        # As the kernels have it: what begins a segment and what does not.
        slots = [2 * w + (w > a) for _, a, b in cut for w in range(a, b + 1)]
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < 2 * num_blocks


@in_a_hurry
def test_one_sequence_holds_nearly_all():
    check([3, 0, 0, 700, 0, 1, 0], shape(4, 2, 64), 16, num_blocks=4, tokens=64)


@in_a_hurry
def test_a_sequence_in_more_pieces_than_the_merge_takes_at_once():
    check([1170], shape(1, 1, 64), 64, num_blocks=19, tokens=64, merge_width=16)


@in_a_hurry
def test_more_blocks_than_tiles():
    check([70, 5], shape(2, 1, 128), 16, num_blocks=9, min_tiles=2)


@in_a_hurry
@pytest.mark.parametrize(
    ("of", "page_size"),
    [
        (shape(3, 3, 128), 128),  # a tile is half a page
        (shape(2, 2, 64), 128),  # one row of 64 a kv head: half a line
        (shape(9, 1, 128), 32),  # a group of more than eight
        (shape(2, 1, 256), 64),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_shapes(of, page_size):
    check([150, 64], of, page_size)


def test_layer_is_traced_and_the_plan_is_made_before():
    rng = np.random.default_rng(1)
    layers = 2
    kv = jnp.asarray(rng.normal(size=(2, layers, 3, 1, 16, 64)), BF16)
    q = jnp.asarray(rng.normal(size=(1, 4, 64)), BF16)

    def run(q, kv):
        sizes = common.sizes_of(q, kv[0], None, 2)
        assert sizes is not None
        todo = sizes.plan(jnp.asarray([20]))

        def one(_, layer):
            out = kernel.paged_attention(
                q,
                *kv,
                layer=layer,
                block_table=jnp.asarray([[2, 1]]),
                kv_len=jnp.asarray([20]),
                scale=0.125,
                todo=todo,
                num_blocks=2,
            )
            return None, out

        return lax.scan(one, None, jnp.arange(layers))[1]

    got = mosaic.run(run, q, kv)
    for layer in range(layers):
        k, v = (np.concatenate([a[layer, 2, 0], a[layer, 1, 0]])[:20, None] for a in kv)
        want = paged.attend(q[0], k, v, 0.125)
        np.testing.assert_allclose(got[layer, 0].astype(jnp.float32), want, rtol=0, atol=0.015)


@in_a_hurry
def test_what_is_read_and_written():
    """By tiles of 64. Each key and value is read once; a sequence of none is no work. Ten tiles of
    four blocks: the last two segments are cut, and of no other are pieces written or read.
    """
    of, lengths = shape(6, 2, 128), (64, 0, 1, 130)
    with mosaic.emulated() as ran:
        check(lengths, of, 64, num_blocks=4, run=lambda fn, *args: jax.jit(fn)(*args))
    attend, merge = ran
    num_tiles = sum(-(-length // 64) for length in lengths) * of.kv_heads
    tile_bytes = 64 * of.head_dim * 2
    assert attend.read[6:8] == [num_tiles * tile_bytes] * 2
    segment = of.heads // of.kv_heads * of.head_dim
    results, pieces, _ = attend.written[8:]
    assert results == 4 * segment * 2
    assert pieces == 4 * segment * 4
    assert merge.read[2] == pieces
    assert sum(merge.written) == 4 * segment * 2  # two joined, two of the empty sequence
    assert merge.read[4:] == [0, 0]


def abstract(of, batch, context, page_size, *, layers=48, num_pages=4000):
    # More than 2**31 elements.
    kv = jax.ShapeDtypeStruct((layers, num_pages, of.kv_heads, page_size, of.head_dim), BF16)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in [(batch, context // page_size), (batch,)]]
    q = jax.ShapeDtypeStruct((batch, of.heads, of.head_dim), BF16)
    return q, kv, kv, *ints


def in_eight_bits(q, k_pages, v_pages, *ints):
    """Returns the same with pages in eight bits."""
    scales = jax.ShapeDtypeStruct(k_pages.shape[:-1], jnp.float32)
    pages = Fp8Pages(jax.ShapeDtypeStruct(k_pages.shape, jnp.uint8), scales)
    return q, pages, pages, *ints


def over_layers(q, k_pages, v_pages, table, kv_len, sinks=None, window=0):
    def one(q, layer):
        common = {"layer": layer, "block_table": table, "kv_len": kv_len, "scale": 0.1}
        common |= {"sinks": sinks, "window": window}
        return q + paged_attention(q, k_pages, v_pages, **common), None

    return lax.scan(one, q, jnp.arange(k_pages.shape[0]))[0]


@pytest.mark.parametrize(
    ("columns", "head_dim", "fit"),
    [(8, 64, (3, 2)), (16, 64, (2, 3)), (24, 64, (2, 2)), (48, 128, (2, 2)), (56, 128, (1, 5)),
     (64, 128, (1, 5)), (8, 256, (1, 3)), (24, 256, (1, 2)), (64, 256, None)],
)  # fmt: skip
def test_blocks_and_stages(columns, head_dim, fit):
    tile = tiles.choose(head_dim, 64)
    assert tile is not None
    assert tiles.occupancy(columns, head_dim, tile) == fit


@pytest.mark.parametrize(
    ("heads", "page_size", "batch", "sinks", "window"),
    [(128, 64, 64, 0, 0), (128, 64, 1, 0, 0), (16, 16, 64, 0, 0), (64, 128, 64, 1, 0),
     (128, 64, 64, 1, 100), (20, 64, 64, 0, 0)],
    ids=["V3", "V3, one row", "V2-Lite", "64 heads", "window", "GLM-4.7-Flash"],
)  # fmt: skip
@pytest.mark.sized(exhaustive=("V3, one row", "V2-Lite", "64 heads", "window"))
def test_latents_compile_without_spills_or_copies(
    capfd, monkeypatch, heads, page_size, batch, sinks, window
):
    """Of DeepSeek, GLM-4.7-Flash and heads in between: 512 elements of 576 are values."""
    q, pages, _, *ints = abstract(shape(heads, 1, 576), batch, 8192, page_size, layers=2)

    def run(q, pages, table, kv_len, *sinks):
        attend = {"layer": jnp.int32(1), "block_table": table, "kv_len": kv_len, "scale": 0.1}
        attend |= {"latent": 512, "window": window, "sinks": sinks[0] if sinks else None}
        return paged_attention(q, pages, None, **attend)

    assert kernel.supports(q, pages, None, 512)
    own = [jax.ShapeDtypeStruct((heads,), BF16)] * sinks
    compiled, kernels = mosaic.compile_kernels(capfd, monkeypatch, run, q, pages, *ints, *own)
    assert [(k.spill_bytes, k.registers <= 255) for k in kernels] == [(0, True)] * 2
    sizes = common.latent_sizes(q, pages, 512, None, None)
    assert sizes is not None
    assert sizes.num_blocks * sizes.parts == NUM_SMS
    assert sizes.stages == 2
    assert tiles.latent_shared_bytes(576, 64, 2) <= 227 * 1024
    padded = sizes.columns * 512
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20 + 4.1 * sizes.slots * padded + (
        2 * batch * padded * (heads < sizes.columns)
    )


@pytest.mark.parametrize(
    ("heads", "width", "latent", "page_size", "taken"),
    [(128, 576, 512, 64, True), (16, 576, 512, 16, True), (72, 576, 512, 64, True),
     (20, 576, 512, 64, True), (16, 640, 512, 64, False), (16, 576, 448, 64, False),
     (16, 576, 512, 48, False), (16, 576, 512, 8, False)],
)  # fmt: skip
def test_latents_that_the_kernel_takes(heads, width, latent, page_size, taken):
    q, pages, *_ = abstract(shape(heads, 1, width), 8, 64 * 48, page_size)
    assert kernel.supports(q, pages, None, latent) == taken
    assert not kernel.supports(jax.ShapeDtypeStruct(q.shape, jnp.float32), pages, None, latent)


@pytest.mark.sized(exhaustive=("emulated, of DeepSeek-V3",))
@pytest.mark.parametrize(
    ("heads", "width", "latent", "run"),
    [(5, 192, 128, mosaic.run), (128, 576, 512, mosaic.emulate)],
    ids=["interpreted", "emulated, of DeepSeek-V3"],
)
def test_latents_are_cut_as_keys_are(heads, width, latent, run):
    """Of sequences that are cut, and one that is empty; the second case has two parts of heads."""
    of, lengths, scale = shape(heads, 1, width), [70, 5, 0, 130], width**-0.5
    rng = np.random.default_rng(0)
    keys, _ = paged.make(rng, lengths, of, BF16)
    pages, _, table = paged.scatter(rng, keys, keys, 64, 4, unused=np.nan, dtype=BF16)
    q = jnp.asarray(rng.normal(size=(4, heads, width)).astype(BF16))
    kv_len = jnp.asarray(lengths, jnp.int32)

    def attend(q, pages, layer, table, kv_len):
        rows = {"layer": layer, "block_table": table, "kv_len": kv_len, "scale": scale}
        cut = {"tile": tiles.Tile(64, min_tiles=1, merge_width=2), "num_blocks": 2}
        cut |= {"interpreted": run == mosaic.run and not mosaic.ON_SM90}
        return kernel.paged_attention(q, pages, None, latent=latent, **rows, **cut)

    got = run(attend, q, pages, jnp.int32(paged.LAYER), table, kv_len)
    want = [paged.attend(row, k, k[..., :latent], scale) for row, k in zip(q, keys, strict=True)]
    np.testing.assert_allclose(got.astype(jnp.float32), np.stack(want), rtol=0, atol=0.015)


def compile_and_fit(monkeypatch, folder, args, blocks, stages, sinks=(), window=0):
    """Compiles, and checks that nothing is spilled and that all blocks fit the multiprocessors."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")
    for what in ("PTXAS", "MLIR_PASSES"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    attend = functools.partial(over_layers, window=window)
    compiled = compile_for(h200_mesh(), attend, *args, *sinks)
    passes, report = (
        "".join(path.read_text(errors="replace") for path in folder.glob(f"*.{suffix}"))
        for suffix in ("mlir-passes.log", "ptxas")
    )
    kernels = ptxas.parse(report)
    assert [(k.spill_bytes, k.serialized) for k in kernels] == [(0, False)] * 2
    launch = r"gpu\.launch async.*? in \(%\w+ = %c(\d+).*dynamic_shared_memory_size %c(\d+)_i32"
    ((grid, shared),) = {(int(g), int(b)) for g, b in re.findall(launch, passes) if int(b)}
    q, k_pages, *_ = args
    sizes = common.sizes_of(q, k_pages, None, None)
    assert sizes is not None
    assert (sizes.num_blocks, sizes.stages) == (NUM_SMS * blocks, stages)
    assert grid == NUM_SMS * blocks
    tile = sizes.tile
    of = functools.partial(
        tiles.shared_bytes, sizes.columns, sizes.head_dim, tile.tokens, fp8=sizes.fp8
    )
    assert shared == of(stages)
    # Of 228 KB the system takes 1 KB a block, of which none may have more than 227.
    assert shared <= 227 * 1024
    assert blocks * (shared + 128 + 1024) <= 228 * 1024
    assert blocks * (of(stages + 1) + 1024) > 228 * 1024
    by_registers = 2 if sizes.fp8 and sizes.columns > 8 else 3
    wanted = min(blocks + 1, tile.blocks_per_sm, by_registers)
    assert wanted == blocks or wanted * (of(2) + 1024) > 228 * 1024
    # Of 65,536 registers, in eights for each of a block's 128 threads.
    assert max(k.registers for k in kernels) <= 65536 // (128 * blocks) // 8 * 8
    return compiled


@pytest.mark.parametrize(("batch", "context"), [(1, 32768), (512, 1024)])
@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.name)
def test_compiles_without_spills_or_copies(monkeypatch, tmp_path, of, batch, context):
    args = abstract(of, batch, context, 64)
    compiled = compile_and_fit(monkeypatch, tmp_path, args, 3, 2)
    temp = compiled.memory_analysis().temp_size_in_bytes
    queries = 2 * batch * of.heads * of.head_dim
    pieces = 4 * 2 * 3 * NUM_SMS * of.heads // of.kv_heads * of.head_dim
    assert temp < 2**20 + 1.1 * pieces + 2 * queries
    hlo = compiled.as_text()
    assert hlo.count("mosaic_gpu_v2") == 2
    # The merge writes into what the kernel before has written: the same array, copied nowhere.
    made = dict(re.findall(r"(%[\w.\-]+) = \S+ ([\w\-]+\(.*)", hlo))
    (updating,) = re.findall(r"custom-call\((.*?)\), .*output_to_operand_aliasing=\{", hlo)
    source = updating.split()[-1]
    while (step := made[source]).startswith("bitcast("):
        (source,) = re.findall(r"\((%[\w.\-]+)\)", step)
    assert re.match(r"get-tuple-element\(%\S+\), index=0", step)


@pytest.mark.parametrize(
    ("of", "page_size", "blocks", "stages"),
    [
        (shape(14, 2, 64), 16, 3, 2),
        (shape(28, 4, 128), 128, 3, 2),
        (shape(28, 4, 128), 32, 3, 2),
        (shape(96, 8, 128), 64, 2, 3),
        (shape(96, 4, 128), 64, 2, 2),
        (shape(16, 2, 256), 16, 1, 3),
        (shape(48, 2, 256), 64, 1, 2),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_other_shapes_compile_without_spills(monkeypatch, tmp_path, of, page_size, blocks, stages):
    args = abstract(of, 8, 4096, page_size)
    compile_and_fit(monkeypatch, tmp_path, args, blocks, stages)


@pytest.mark.parametrize(
    ("of", "page_size", "blocks", "stages"),
    [
        (QWEN3_30B_A3B, 64, 3, 2),
        (shape(64, 8, 64), 64, 3, 6),
        (shape(80, 2, 64), 64, 2, 8),
        (shape(64, 2, 128), 128, 2, 2),
        (shape(16, 2, 256), 64, 1, 4),
        (shape(32, 2, 256), 64, 1, 4),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_pages_in_eight_bits_compile_without_spills_or_copies(
    monkeypatch, tmp_path, of, page_size, blocks, stages
):
    args = in_eight_bits(*abstract(of, 64, 4096, page_size))
    compiled = compile_and_fit(monkeypatch, tmp_path, args, blocks, stages)
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20


@pytest.mark.parametrize(
    ("of", "window", "has_sinks"),
    [(shape(32, 8, 128), 4096, False), (shape(64, 8, 64), 128, True)],  # Mixtral-8x7B, gpt-oss
    ids=str,
)
def test_windows_and_sinks_over_eight_bits_spill_nothing(
    monkeypatch, tmp_path, of, window, has_sinks
):
    sinks = [jax.ShapeDtypeStruct((of.heads,), BF16)] * has_sinks
    args = in_eight_bits(*abstract(of, 64, 8192, 64))
    stages = 2 if of.head_dim == 128 else 6
    compile_and_fit(monkeypatch, tmp_path, args, 3, stages, sinks, window)


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "taken"),
    [(32, 128, 64, True), (33, 128, 64, False), (16, 256, 64, True), (17, 256, 64, False),
     (40, 64, 128, True), (4, 128, 32, False), (4, 128, 96, False)],
)  # fmt: skip
def test_pages_in_eight_bits_that_the_kernel_takes(heads, head_dim, page_size, taken):
    args = in_eight_bits(*abstract(shape(heads, 1, head_dim), 8, 64 * 96, page_size))
    assert kernel.supports(*args[:3]) == taken


@pytest.mark.parametrize(
    ("of", "blocks", "stages"), [(shape(64, 8, 64), 3, 2), (shape(96, 8, 128), 2, 3)], ids=str
)
def test_sinks_cost_no_block_and_no_spill(monkeypatch, tmp_path, of, blocks, stages):
    """Of gpt-oss, and of a group of more than eight."""
    sinks = (jax.ShapeDtypeStruct((of.heads,), BF16),)
    compile_and_fit(monkeypatch, tmp_path, abstract(of, 64, 4096, 64), blocks, stages, sinks)


@pytest.mark.parametrize(
    ("of", "window", "has_sinks"),
    [(shape(32, 8, 128), 4096, False), (shape(64, 8, 64), 128, True)],  # Mixtral-8x7B, gpt-oss
    ids=str,
)
def test_a_window_costs_no_block_and_no_spill(monkeypatch, tmp_path, of, window, has_sinks):
    sinks = [jax.ShapeDtypeStruct((of.heads,), BF16)] * has_sinks
    args = abstract(of, 64, 8192, 64)
    compile_and_fit(monkeypatch, tmp_path, args, 3, 2, sinks, window)


def test_the_first_keys_are_asked_for_at_once(monkeypatch, tmp_path):
    """A block reads where its run starts: it waits for no copy, and for no other thread but to
    have its barriers made. Fewer than 250 instructions; counting tiles took 358 and 23 barriers.
    """
    kernels = sass.disassemble(
        monkeypatch, tmp_path, over_layers, *abstract(MODELS[0], 64, 4096, 64)
    )
    opcodes = [i.opcode for i in kernels["paged_attention"]]
    before = opcodes[: opcodes.index("UTMALDG.5D")]
    assert len(before) < 250
    assert not any(opcode.startswith("SYNCS.PHASECHK") for opcode in before)
    assert sum(opcode.startswith("BAR.") for opcode in before) <= 2


@in_a_hurry
def test_a_wide_group_takes_room_from_keys_and_values():
    """As the public op cuts it: three stages would not fit beside 24 queries of 256 elements."""
    check([300, 1, 65], shape(24, 1, 256), 64, num_blocks=2, run=mosaic.emulate)


def test_what_the_kernels_cannot_take_runs_the_reference():
    q, kv, *_ = abstract(QWEN3_30B_A3B, 2, 1024, 64)
    assert kernel.supports(q, kv, kv)
    assert not kernel.supports(jax.ShapeDtypeStruct(q.shape, jnp.float32), kv, kv)
    q, kv, *_ = abstract(shape(4, 2, 96), 2, 1024, 64)
    assert not kernel.supports(q, kv, kv)
    q, kv, *_ = abstract(QWEN3_30B_A3B, 2, 960, 48)
    assert not kernel.supports(q, kv, kv)
    q, kv, *_ = abstract(shape(64, 1, 256), 2, 1024, 64)  # queries leave no room for two stages
    assert not kernel.supports(q, kv, kv)
    pytest.importorskip("jax_plugins.xla_cuda13")
    compiled = compile_for(h200_mesh(), over_layers, *abstract(shape(4, 2, 96), 2, 64, 16))
    assert "mosaic_gpu" not in compiled.as_text()
