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

from pallas_kernels.compile_for import compile_for, h200_mesh
from pallas_kernels.paged_attention import common, paged_attention, schedule, tiles
from pallas_kernels.paged_attention import mosaic as kernel
from pallas_kernels.shapes import MODELS, QWEN3_30B_A3B, Shape

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


@functools.partial(jax.jit, static_argnums=(1, 2))
def starts_and_owners(total, num_blocks, min_tiles):
    share = schedule.share(total, num_blocks, min_tiles)
    return jax.vmap(share.start)(jnp.arange(num_blocks + 1)), jax.vmap(share.owner)(jnp.arange(99))


@pytest.mark.parametrize(("num_blocks", "min_tiles"), [(1, 1), (7, 1), (7, 3), (50, 4)])
def test_every_tile_has_one_owner_and_every_piece_its_own_slot(num_blocks, min_tiles):
    rng = np.random.default_rng(0)
    for _ in range(20):
        of_segments = rng.integers(0, 12, rng.integers(1, 9))
        total = int(of_segments.sum())
        starts, owners = map(np.asarray, starts_and_owners(total, num_blocks, min_tiles))
        assert starts[0] == 0
        assert starts[-1] == total
        sizes = np.diff(starts)
        active = sizes[sizes > 0]
        assert (sizes[: len(active)] > 0).all()
        assert np.ptp(active) <= 1 if len(active) else total == 0
        assert len(active) == num_blocks or sizes.max() <= 2 * min_tiles
        assert len(active) <= 1 or active.min() >= min_tiles
        owner = np.searchsorted(starts, np.arange(total), side="right") - 1
        np.testing.assert_array_equal(owners[:total], owner)
        segment = np.repeat(np.arange(len(of_segments)), of_segments)
        pieces = set(zip(segment.tolist(), owner.tolist(), strict=True))
        slots = [s + w for s, w in pieces]
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < schedule.num_slots(len(of_segments), num_blocks)


@pytest.mark.parametrize("batch", [1, 5, 130])
def test_running_sum_of_tiles(batch):
    """Of the first kernel alone: the merge of as many rows takes the interpreter minutes."""
    lengths = np.zeros(batch, np.int32)
    lengths[[0, batch // 2, -1]] = [65, 3, 130]
    pages = jnp.zeros((1, 1, 1, 64, 64), BF16)
    tile = tiles.Tile(tokens=64, stages=1, blocks_per_sm=1, min_tiles=1)
    sizes = common.sizes_of(jnp.zeros((batch, 1, 64), BF16), pages, tile, 2)
    table, q = jnp.zeros((batch, 3), jnp.int32), jnp.zeros((batch, 1, 8, 64), BF16)
    args = jnp.asarray(lengths), table, jnp.zeros(1, jnp.int32), q, pages, pages
    before = mosaic.run(lambda *args: kernel.attend(sizes, 1.0)(*args), *args)[2]
    want = np.concatenate([[0], np.cumsum(-(-lengths // 64))])
    np.testing.assert_array_equal(before[sizes.zeros - 1 :][: batch + 1], want)


def test_one_sequence_holds_nearly_all():
    check([3, 0, 0, 700, 0, 1, 0], shape(4, 2, 64), 16, num_blocks=4, tokens=64)


def test_a_sequence_in_more_pieces_than_the_merge_takes_at_once():
    check([1170], shape(1, 1, 64), 64, num_blocks=19, tokens=64, merge_width=16)


def test_more_blocks_than_tiles():
    check([70, 5], shape(2, 1, 128), 16, num_blocks=9, min_tiles=2)


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


def test_layer_is_traced():
    rng = np.random.default_rng(1)
    layers = 2
    kv = jnp.asarray(rng.normal(size=(2, layers, 3, 1, 16, 64)), BF16)
    q = jnp.asarray(rng.normal(size=(1, 4, 64)), BF16)

    def run(q, kv):
        def one(_, layer):
            out = kernel.paged_attention(
                q,
                *kv,
                layer=layer,
                block_table=jnp.asarray([[2, 1]]),
                kv_len=jnp.asarray([20]),
                scale=0.125,
                num_blocks=2,
            )
            return None, out

        return lax.scan(one, None, jnp.arange(layers))[1]

    got = mosaic.run(run, q, kv)
    for layer in range(layers):
        k, v = (np.concatenate([a[layer, 2, 0], a[layer, 1, 0]])[:20, None] for a in kv)
        want = paged.attend(q[0], k, v, 0.125)
        np.testing.assert_allclose(got[layer, 0].astype(jnp.float32), want, rtol=0, atol=0.015)


def test_each_key_and_value_is_read_once():
    """By tiles of 64; a sequence of none is no work, and pieces of two blocks no more of it."""
    of, lengths = shape(6, 2, 128), (64, 0, 1, 130)
    with mosaic.emulated() as ran:
        check(lengths, of, 64, num_blocks=4, run=lambda fn, *args: jax.jit(fn)(*args))
    attend, merge = ran
    num_tiles = sum(-(-length // 64) for length in lengths) * of.kv_heads
    tile_bytes = 64 * of.head_dim * 2
    assert attend.read[4:6] == [num_tiles * tile_bytes] * 2
    assert merge.written[-1] == len(lengths) * of.heads * of.head_dim * 2


def abstract(of, batch, context, page_size, *, layers=48, num_pages=4000):
    # More than 2**31 elements.
    kv = jax.ShapeDtypeStruct((layers, num_pages, of.kv_heads, page_size, of.head_dim), BF16)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in [(batch, context // page_size), (batch,)]]
    q = jax.ShapeDtypeStruct((batch, of.heads, of.head_dim), BF16)
    return q, kv, kv, *ints


def over_layers(q, k_pages, v_pages, table, kv_len):
    def one(q, layer):
        common = {"layer": layer, "block_table": table, "kv_len": kv_len, "scale": 0.1}
        return q + paged_attention(q, k_pages, v_pages, **common), None

    return lax.scan(one, q, jnp.arange(k_pages.shape[0]))[0]


@pytest.mark.parametrize(("batch", "context"), [(1, 32768), (256, 1024)])
@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.name)
def test_compiles_without_spills_or_copies(capfd, monkeypatch, of, batch, context):
    args = abstract(of, batch, context, 64)
    compiled, kernels = mosaic.compile_kernels(capfd, monkeypatch, over_layers, *args)
    assert [k.spill_bytes for k in kernels] == [0, 0]
    # Three blocks of 128 threads fit a multiprocessor.
    assert max(k.registers for k in kernels) <= 168
    temp = compiled.memory_analysis().temp_size_in_bytes
    queries = 2 * batch * of.heads * of.head_dim
    slots = batch * of.kv_heads + 3 * common.NUM_SMS
    pieces = 4 * slots * of.heads // of.kv_heads * of.head_dim
    assert temp < 2**20 + 1.1 * pieces + 2 * queries
    assert compiled.as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    ("of", "page_size"),
    [
        (shape(14, 2, 64), 16),
        (shape(28, 4, 128), 128),
        (shape(28, 4, 128), 32),
        (shape(16, 2, 256), 16),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_other_shapes_compile_without_spills(capfd, monkeypatch, of, page_size):
    args = abstract(of, 8, 4096, page_size)
    _, kernels = mosaic.compile_kernels(capfd, monkeypatch, over_layers, *args)
    assert [k.spill_bytes for k in kernels] == [0, 0]


def test_the_blocks_of_a_multiprocessor_fit_its_shared_memory(tmp_path, monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda13")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_MLIR_PASSES", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compile_for(h200_mesh(), over_layers, *abstract(QWEN3_30B_A3B, 256, 1024, 64))
    passes = "".join(path.read_text(errors="replace") for path in tmp_path.glob("*.txt"))
    sizes = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    tile = tiles.choose(128, 64)
    assert tile is not None
    # Of 228 KB; the system takes 1 KB a block.
    assert tile.blocks_per_sm * (max(map(int, sizes)) + 1024) <= 228 * 1024


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
