"""The prefill attention kernel's own edge cases, interpreted, and its programs for an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest
from prefill_contract import IMPLEMENTATIONS, check, wide
from sm90 import sass

from benchmarks.kernels.shapes import MODELS, QWEN3_30B_A3B
from pallas_kernels.backend import traced_for
from pallas_kernels.prefill_attention import mosaic, prefill_attention, tiles, work
from pallas_kernels.prefill_attention import plan as plan_step
from pallas_kernels.prefill_attention.tiles import Tile
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_loop_launches

pytestmark = pytest.mark.deep
in_a_hurry = pytest.mark.usefixtures("interpreted_in_a_hurry")

I32 = jnp.int32
INTERPRETED = {"interpreted": not interpreter.ON_SM90}


def kernel(**options):
    """Returns the contract's implementation of the kernel, with other options."""
    op = partial(mosaic.prefill_attention, **{"num_blocks": 2, **INTERPRETED, **options})
    return IMPLEMENTATIONS["mosaic"]._replace(op=op)


@in_a_hurry
def test_chunks_that_end_anywhere_in_a_tile():
    """Tiles of 8 rows a warpgroup: stored whole, from an inner row on, or up to one."""
    chunks = [(0, 3), (5, 1), (2, 7), (0, 0), (1, 8), (0, 9), (3, 15), (0, 16), (2, 17), (4, 31)]
    check(kernel(num_blocks=4), chunks, wide(8, 1), 16, padding=1)


@in_a_hurry
@pytest.mark.parametrize(("heads", "pack"), [(4, 4), (6, 2)])
def test_heads_packed_beside_their_rows(heads, pack):
    assert tiles.choose(heads, 64).pack == pack
    check(kernel(), [(3, 21), (0, 0), (0, 13)], wide(heads, 1), 16)


@in_a_hurry
def test_steps_before_on_and_past_the_diagonal():
    """A warpgroup has none to four steps without a mask; NaN lies behind the last position."""
    chunks = [(0, 90), (300, 70), (58, 70), (127, 1), (128, 2), (0, 1)]
    check(kernel(num_blocks=4), chunks, wide(1, 1), 32, unused=np.nan)


@in_a_hurry
@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 64), (256, 16), (256, 128)])
def test_head_sizes(head_dim, page_size):
    """A page of 128 is more than a step of head size 256 takes."""
    check(kernel(), [(90, 50), (0, 3)], wide(2, 1, head_dim), page_size, unused=np.inf)


@in_a_hurry
@pytest.mark.parametrize(
    ("tile", "num_blocks"), [(Tile(64, 3, 2, 1), 1), (Tile(128, 2, 4, 4), 8)], ids=str
)
def test_tiles_and_more_and_fewer_blocks_than_items(tile, num_blocks):
    check(
        kernel(tile=tile, num_blocks=num_blocks),
        [(100, 40), (7, 30)],
        wide(4, 1),
        16,
        unused=np.nan,
    )


@in_a_hurry
@pytest.mark.parametrize(
    ("window", "head_dim"), [(64, 128), (1, 128), (7, 128), (1000, 128), (100, 256)]
)
def test_windows_of_wider_heads(window, head_dim):
    """Pages before a window have been freed and are NaN."""
    chunks = [(0, 5), (6, 0), (300, 70), (63, 2), (window, 1)]
    check(kernel(), chunks, wide(2, 1, head_dim), 16, window=window, unused=np.nan)


@in_a_hurry
@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [128, 256])
def test_an_emulated_window_of_wider_heads(head_dim):
    chunks = [(0, 5), (200, 20), (63, 2)]
    check(IMPLEMENTATIONS["sm90"], chunks, wide(2, 1, head_dim), 16, window=64, unused=np.nan)


def plan(lengths, cached, num_rows, block_rows=16, block_kv=64):
    q_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kv_len = np.add(lengths, cached).astype(np.int32)
    planned = jax.jit(partial(work.plan, num_rows=num_rows, block_rows=block_rows, block_kv=64))(
        jnp.asarray(q_start), jnp.asarray(kv_len)
    )
    count = int(planned.count[0])
    assert count <= planned.tiles.shape[0]
    return q_start, kv_len, np.asarray(planned.tiles)[:count]


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_one_tiles_own(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([3, 20, 200]), size=rng.integers(1, 9))
    cached = rng.integers(0, 500, size=len(lengths))
    num_rows = -(-(int(lengths.sum()) + int(rng.integers(0, 40))) // 8) * 8
    q_start, kv_len, planned = plan(lengths, cached, num_rows)
    owner = np.full(num_rows, -1)
    for t in planned:
        row, lo, hi, chunk = t[work.ROW], t[work.LO], t[work.HI], t[work.CHUNK]
        assert row % work.ALIGN == 0
        assert row <= lo < hi <= row + 16
        assert (owner[lo:hi] == -1).all()
        owner[lo:hi] = chunk
        if chunk < len(lengths):
            assert t[work.KV_LEN] == kv_len[chunk]
            assert hi - 1 + t[work.OFFSET] == kv_len[chunk] - (q_start[chunk + 1] - hi) - 1
            assert t[work.BLOCKS] == (hi - 1 + t[work.OFFSET]) // 64 + 1
        else:
            assert t[work.BLOCKS] == 0
    want = np.repeat(np.arange(len(lengths) + 1), [*lengths, num_rows - lengths.sum()])
    np.testing.assert_array_equal(owner, want)
    assert (np.diff(planned[:, work.BLOCKS]) <= 0).all()


def test_the_bound_on_tiles_is_attained():
    """A chunk of two rows from row 7 on, in tiles of 8 rows, takes two."""
    lengths = [7] + [2, 6] * 3 + [2]
    *_, planned = plan(lengths, [0] * len(lengths), 40, block_rows=8)
    assert len(planned) > 8


def arguments(shape, num_tokens, page_size=64, num_chunks=32, layers=24, pages=8192):
    sds = jax.ShapeDtypeStruct
    cache = sds((layers, pages, shape.kv_heads, page_size, shape.head_dim), jnp.bfloat16)
    return (
        sds((num_tokens, shape.heads, shape.head_dim), jnp.bfloat16),
        cache,
        cache,
        sds((), I32),
        sds((num_chunks, 512), I32),
        sds((num_chunks + 1,), I32),
        sds((num_chunks,), I32),
    )


def attention(
    q, k_pages, v_pages, layer, block_table, q_start, kv_len, sinks=None, todo=None, window=0
):
    assert mosaic.supports(q, k_pages, v_pages, 0.1)
    return prefill_attention(
        q,
        k_pages,
        v_pages,
        layer=layer,
        block_table=block_table,
        q_start=q_start,
        kv_len=kv_len,
        scale=q.shape[2] ** -0.5,
        window=window,
        sinks=sinks,
        todo=todo,
    )


@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [
        *((shape, 16384) for shape in MODELS),
        (wide(16, 4, 256), 1024),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled_for_an_h200(capfd, monkeypatch, shape, num_tokens):
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, attention, *arguments(shape, num_tokens)
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    # Nothing but the plan: neither rows nor pages are copied.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("shape", [wide(64, 8), wide(32, 4, 128), wide(16, 4, 256)])
def test_sinks_cost_no_spill(capfd, monkeypatch, shape):
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.bfloat16)
    compiled, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, attention, *arguments(shape, 4096), sinks
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize(
    ("shape", "window", "page_size", "has_sinks"),
    [
        (wide(64, 8), 128, 64, True),  # gpt-oss
        (wide(32, 8, 128), 4096, 64, False),  # Mixtral-8x7B
        (wide(28, 4, 128), 32768, 16, False),  # Qwen2-MoE
        (wide(64, 8, 128), 128, 128, True),
        (wide(16, 16, 128), 1000, 32, True),
        (wide(16, 8, 256), 1024, 64, False),
        (wide(64, 8, 256), 1024, 16, True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_window_costs_no_spill(capfd, monkeypatch, shape, window, page_size, has_sinks):
    sinks = [jax.ShapeDtypeStruct((shape.heads,), jnp.bfloat16)] * has_sinks
    compiled, kernels = interpreter.compile_kernels(
        capfd,
        monkeypatch,
        partial(attention, window=window),
        *arguments(shape, 4096, page_size),
        *sinks,
    )
    assert [kernel.spill_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize(
    ("head_dim", "window"), [(64, 0), (128, 0), (256, 0), (128, 4096)], ids=str
)
def test_weights_are_found_while_the_values_before_are_weighed(
    monkeypatch, tmp_path, head_dim, window
):
    """Of steps with a mask and without, in the order of the machine code."""
    shape = wide(8, 2, head_dim)
    attend = partial(attention, window=window)
    kernels = sass.disassemble(monkeypatch, tmp_path, attend, *arguments(shape, 2048))
    under, is_weighing = [], False  # exponentials between the waits for scores and for values
    for instruction in kernels["prefill_attention"]:
        if instruction.opcode == "WARPGROUP.DEPBAR.LE":
            is_weighing = instruction.operands.startswith("gsb0, 0x1")
            under += [0] * is_weighing
        elif instruction.opcode == "MUFU.EX2" and is_weighing:
            under[-1] += 1
    # A thread has 64 x block_kv / 128 weights, and two rows whose sums it scales.
    loops = 3 if window else 2
    assert under == loops * [tiles.choose(4, head_dim).block_kv // 2 + 2]


@pytest.mark.parametrize("planned", [True, False])
def test_a_layer_is_one_launch_where_the_step_was_planned_before(planned):
    pytest.importorskip("jax_plugins.xla_cuda13")
    q, k_pages, v_pages, _, *rest = arguments(QWEN3_30B_A3B, 1024)

    def layers(q, k_pages, v_pages, block_table, q_start, kv_len):
        chunks = {"q_start": q_start, "kv_len": kv_len}
        todo = plan_step(q.shape[0], q.shape[1], k_pages, **chunks) if planned else None

        def layer(x, i):
            return attention(x, k_pages, v_pages, i, block_table, todo=todo, **chunks), None

        return jax.lax.scan(layer, q, jnp.arange(24, dtype=I32))[0]

    compiled = compile_for(h200_mesh(), layers, q, k_pages, v_pages, *rest)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * q.size * 2 + 2**20
    launches = count_loop_launches(compiled.as_text())
    others = sum(launches.values()) - launches["custom-call"]
    assert launches["custom-call"] == 1
    # The layer's number is counted and, as an array, sliced; rows that are the carry are copied.
    assert others <= 3 if planned else others >= 7  # a plan's own kernels


@in_a_hurry
def test_a_plan_made_before_is_the_one_made_inside():
    chunks = [(3, 21), (0, 0), (0, 13)]
    made = []

    def planned(q, k_pages, v_pages, **kwargs):
        with traced_for("cuda"):
            rows = {name: kwargs[name] for name in ("q_start", "kv_len")}
            todo = plan_step(q.shape[0], q.shape[1], k_pages, **rows)
        made.append(todo)
        return mosaic.prefill_attention(
            q, k_pages, v_pages, todo=todo, num_blocks=2, **INTERPRETED, **kwargs
        )

    check(IMPLEMENTATIONS["mosaic"]._replace(op=planned), chunks, wide(4, 1), 16)
    assert isinstance(made[0], work.Work)
    cache = jnp.zeros((1, 1, 1, 16, 64), jnp.bfloat16)
    starts = jnp.zeros(2, I32)
    assert plan_step(8, 4, cache, q_start=starts, kv_len=starts[1:]) is None  # on a CPU
