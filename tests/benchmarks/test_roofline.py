"""Predictions of the kernel benchmark against figures worked out by hand, and their page."""

import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.sizes import hf_config
from benchmarks.kernels import inputs, problems, roofline
from benchmarks.kernels.cases import (
    ATTENTION_OPS,
    DRY,
    Case,
    Count,
    Sizes,
    all_cases,
)
from benchmarks.kernels.roofline import assumptions, attention, gemm, page, parts
from benchmarks.kernels.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GLM_45_AIR,
    MIXTRAL_8X7B,
    MODELS,
    OLMOE_1B_7B,
    QWEN3_30B_A3B,
    QWEN15_MOE_A27B,
    Shape,
)
from jmoe.config import from_hf
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile
from pallas_kernels.paged_attention import common, schedule
from pallas_kernels.prefill_attention import mosaic as prefill_kernel
from pallas_kernels.prefill_attention import work
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_launches

ROOT = Path(__file__).parents[2]
SMALL = Shape("small", 128, 128, 8, 2, 4, 2, 128, 128, window=600)


def predict(op, shape, phase, tokens, context=0, skew="", window=0):
    return roofline.predict(Case(op, shape, phase, tokens, context, skew, window), Sizes())


@pytest.fixture(scope="module")
def rows():
    return page.predictions()


# ---- By hand ----


@pytest.mark.parametrize(
    ("shape", "tokens", "context", "window"),
    [
        (QWEN15_MOE_A27B, 64, 1000, 0),
        (QWEN3_30B_A3B, 512, 1024, 0),
        (MIXTRAL_8X7B, 1, 32768, 0),
        (MIXTRAL_8X7B, 77, 8192, 4000),
    ],
)
def test_what_is_merged_is_what_the_plan_of_the_step_cuts(shape, tokens, context, window):
    case = Case("paged_attention", shape, "decode", tokens, context, "", window)
    sizes = common.sizes_of(*attention.arrays(case, Sizes().page_size), None, None, window)
    assert sizes is not None
    cuts = np.asarray(sizes.plan(jnp.full(tokens, context, jnp.int32)).cuts)
    pieces = cuts[:, schedule.LAST] - cuts[:, schedule.FIRST] + 1
    merged = attention.pieces_of_cut_segments(case, sizes)
    assert sorted(merged) == sorted(pieces[pieces > 1])


@pytest.mark.parametrize(
    ("shape", "us"), [(QWEN15_MOE_A27B, 241), (QWEN3_30B_A3B, 281), (MIXTRAL_8X7B, 655)]
)
def test_floors_of_routed_weights_are_those_of_the_design(shape, us):
    """256 rows hit every expert: 60 x 17.3 MB, 128 x 9.4 MB, 8 x 352 MB over 4.3 TB/s."""
    got = predict("grouped_gemm", shape, "decode", 256, skew="uniform")
    assert round(got.floor_us) == us
    assert got.count.flops == 2 * 256 * shape.top_k * 3 * shape.d_model * shape.d_ff


def test_floors_of_other_models():
    """64 x 3 x 2048 x 1024, 128 and 64 x 3 x 4096 or 2048 x 1408 elements of two bytes."""
    floors = {OLMOE_1B_7B: 187, GLM_45_AIR: 1030, DEEPSEEK_V2_LITE: 258}
    for shape, us in floors.items():
        assert round(predict("grouped_gemm", shape, "decode", 256).floor_us) == us


def test_attention_and_page_writes():
    # 2 x 128 x 8192 positions x 4 heads x 128 x 2 bytes = 2,147 MB, and 2.1 MB of rows.
    decode = predict("paged_attention", QWEN3_30B_A3B, "decode", 128, 8192)
    assert decode.floor_us == pytest.approx((2_147_483_648 + 2_097_152) / 4.3e6)
    # 16384 x 16385 / 2 pairs x 4 x 32 heads x 128.
    prefill = predict("prefill_attention", QWEN3_30B_A3B, "prefill", 16384, 16384)
    assert prefill.floor_us == pytest.approx(134_225_920 * 16384 / 790e6)
    # 16384 rows of 48 heads x 128 x 2 bytes, in and out, and 128 x 4 bytes of angles.
    write = predict("kv_write", MIXTRAL_8X7B, "prefill", 16384)
    assert write.floor_us == pytest.approx(16384 * (2 * 12288 + 512) / 4.3e6)


def test_a_window_is_all_that_is_read_and_multiplied():
    """Of 8,192 positions 4,096 for each of 64 rows; 4,096 + 1,023 for 1,024 rows."""
    of = {"shape": MIXTRAL_8X7B, "context": 8192, "window": 4096}
    decode = predict("paged_attention", phase="decode", tokens=64, **of).count
    assert decode.bytes == 64 * (2 * 4096 * 8 + 2 * 32) * 128 * 2
    assert decode.flops == 64 * 4096 * 4 * 32 * 128
    prefill = predict("prefill_attention", phase="prefill", tokens=1024, **of).count
    assert prefill.bytes == (2 * 5119 * 8 + 2 * 1024 * 32) * 128 * 2
    assert prefill.flops == 1024 * 4096 * 4 * 32 * 128
    # A window that some of the rows outgrow: 4,000 rows see 1 to 4,000 positions, 96 more 4,000.
    some = predict("prefill_attention", MIXTRAL_8X7B, "prefill", 4096, 4096, window=4000).count
    assert some.flops == (4000 * 4001 // 2 + 96 * 4000) * 4 * 32 * 128


def test_latents_are_read_once_and_multiplied_by_all_heads():
    """By hand: 128 heads are bound by products on an H200, 16 by what they read."""
    few, many = (
        predict("paged_attention", shape, "decode", 64, 8192)
        for shape in (DEEPSEEK_V2_LITE, DEEPSEEK_V3)
    )
    assert many.count.bytes == 64 * (8192 * 576 + 128 * (576 + 512)) * 2
    assert many.count.flops == 64 * 8192 * 128 * (576 + 512) * 2
    assert few.count.bytes == 64 * (8192 * 576 + 16 * (576 + 512)) * 2
    assert many.floor_us == pytest.approx(many.count.flops / 790e6)
    assert few.floor_us == pytest.approx(few.count.bytes / 4.3e6)
    assert few.share > 0.8
    # Of 2,176 cycles of products a tile, 456 of softmax are not hidden: 0.83; and ends of runs.
    assert 0.7 < many.share < 2176 / (2176 + 456)


def test_latents_that_are_expanded_by_hand():
    """A chunk of 1,024 rows is one item a head, which expands 8,192 positions in 64 tiles."""
    of = predict("prefill_attention", DEEPSEEK_V3, "prefill", 1024, 8192)
    pairs = 1024 * (8192 - 1024) + 1024 * 1025 // 2
    assert of.count.flops == 2 * 128 * (pairs * (192 + 128) + 8192 * 512 * 256)
    moved = 8192 * 576 + 512 * 128 * 256 + 1024 * 128 * (192 + 128)
    assert of.count.bytes == 2 * moved
    assert of.floor_us == pytest.approx(of.count.flops / 790e6)
    # Its 128 items are of 132 blocks: none has two, and four have none.
    assert of.main.name == "expanded_attention"
    assert of.main.losses[parts.TAIL] < 0.05 * of.us
    # Nearly all positions that are expanded and multiplied are seen.
    assert of.main.losses[parts.PADDING] < 0.1 * of.floor_us
    # In the absorbed form it would take 2,176 operations a pair instead of 640 and 512.
    assert of.us < 2 * 128 * pairs * (576 + 512) / 790e6


def test_the_tensor_cores():
    assert pytest.approx(1.461, abs=1e-3) == assumptions.PRODUCT_GHZ
    # Two operands of 2 KB at 128 bytes a clock; below 64 columns they take longer than products.
    assert [assumptions.wgmma_cycles(n) for n in (8, 64, 128)] == [18, 32, 64]
    assert assumptions.wgmma_cycles(64, registers=True) == 32


TILE = Tile((8, 16), 1, 16, GemmTile(64, 2, 1, stages=4), GemmTile(64, 1, 1), np.dtype("float32"))
PRODUCT = gemm.Product("p", TILE, TILE.gate_up, (5, 0, 16, 17), 128, 256, 128, 2, 2)


def test_a_product_by_hand():
    """Two columns of 2 x 64 an expert. Tiles of 5; 16; 16 and 1 rows, in the order of items."""
    assert PRODUCT.items().tolist() == [5, 5, 16, 16, 16, 1, 16, 1]
    # 8 steps of 16 x 2 parts, 18 cycles each at 8 rows and 20 at 16.
    assert [PRODUCT.multiply(rows) for rows in (5, 16)] == [288, 320]
    kernel = PRODUCT.kernel()
    assert kernel.floor_us == pytest.approx(3 * 128 * 256 * 2 / 4.3e6)
    # Three experts stream through 6 or 8 of 132 blocks, whose ports take 64 bytes at 1.7 GHz.
    assert kernel.losses[parts.TAIL] > 0
    assert kernel.losses[parts.LAUNCHES] == assumptions.KERNEL_US


def test_large_and_small_tiles_in_turn_leave_every_other_cluster_behind():
    """Experts of 272 rows are a tile of 256 and one of 16; clusters are 66, an even number."""
    tile = replace(TILE, widths=(8, 128), cluster=2, group=8)
    even = gemm.Product("p", tile, tile.gate_up, (272,) * 66, 2048, 1024, 512, 2, 2)
    odd = even._replace(rows=(272, 256) * 33)
    for product, least, most in ((even, 1.5, 2.0), (odd, 1.0, 1.4)):
        cost = np.array([product.multiply(r) + product.finish(r) for r in product.items()])
        sums = np.bincount(np.arange(len(cost)) % product.workers, cost)
        ratio = sums.max() / sums.mean()
        assert least <= ratio <= most
    assert even.kernel().losses[parts.TAIL] > 2 * odd.kernel().losses[parts.TAIL]


def test_fewer_rows_take_the_narrowest_width_and_clusters_halve_them():
    tile = replace(TILE, widths=(32, 64, 96, 128), cluster=2)
    product = PRODUCT._replace(tile=tile)
    # Halves in eights: of 65 rows 40, of 200 rows 104.
    assert [product.width(rows) for rows in (1, 64, 65, 128, 200, 256)] == [
        32,
        32,
        64,
        64,
        128,
        128,
    ]


def test_steps_of_prefill_tiles():
    """Chunks of 300 rows at the end of 1000 positions: tiles of 128, steps of 128 keys."""
    shape = replace(SMALL, heads=1, kv_heads=1)

    class Two(Case):
        def chunks(self):
            return [(300, 1000), (100, 100)]

    two = Two("prefill_attention", shape, "prefill", 400, 1000)
    got = attention.steps_of_tiles(two, 64)
    # Last positions 827, 955 and 999 of the first; 99 of the second.
    assert got.tolist() == [7, 8, 8, 1]
    # Over 200 positions from 501, 629, 757 on, rounded down to pages; all of the second.
    assert attention.steps_of_tiles(replace(two, window=200), 64).tolist() == [3, 3, 3, 1]
    dealt = attention._dealt(264)
    assert (dealt[0], dealt[131], dealt[132], dealt[263]) == (0, 131, 131, 0)


@pytest.mark.parametrize(("tokens", "context"), [(4096, 8192), (4096, 1024)])
def test_steps_over_a_window_are_those_of_the_plan(tokens, context):
    case = Case("prefill_attention", MIXTRAL_8X7B, "prefill", tokens, context, "", 300)
    rows, lengths = zip(*case.chunks(), strict=True)
    _, pages = attention.arrays(case, 64)
    starts = jnp.asarray(np.cumsum([0, *rows]), jnp.int32)
    kv_len = jnp.asarray(lengths, jnp.int32)
    of = {"q_start": starts, "kv_len": kv_len, "window": 300}
    planned = prefill_kernel.plan(tokens, MIXTRAL_8X7B.heads, pages, **of)
    steps = planned.tiles[: int(planned.count[0]), work.BLOCKS]
    assert sorted(attention.steps_of_tiles(case, 64)) == sorted(np.asarray(steps))


def test_long_prompts_are_expected_between_what_others_measured():
    """With the overlap that this kernel has, and without it (arXiv 2407.08608, table 2, H100)."""
    of = predict("prefill_attention", QWEN15_MOE_A27B, "prefill", 4096, 32768)
    assert 582 < of.count.flops / of.us / 1e6 < 661


def test_another_hopper_gpu_has_its_own_rates():
    """By hand: an H100 copies 3.0 TB/s, a product of an H20 takes 5.6 times an H200's time."""
    decode, gigabyte = ("paged_attention", QWEN3_30B_A3B, "decode", 64, 32768), 1e9
    usual = predict(*decode)
    with assumptions.on("NVIDIA H100 80GB HBM3") as name:
        assert name == "H100"
        assert assumptions.copy_us(gigabyte) == pytest.approx(333.3, abs=0.1)
        assert assumptions.product_us(790e6) == pytest.approx(1.0)
        assert predict(*decode).us > 1.3 * usual.us
    with assumptions.on("NVIDIA H20") as name:
        assert name == "H20"
        assert assumptions.product_us(790e6) == pytest.approx(790 / 140)
        assert assumptions.wgmma_cycles(256) == 512  # 64 x 256 x 16 at 1,024 a clock
    with assumptions.on("NVIDIA H200") as name:
        assert name == "H200"
        assert predict(*decode) == usual
    assert predict(*decode) == usual


def test_losses_of_a_ladder():
    got = parts.losses(10.0, [("a", 12.0), ("b", 11.0), ("c", 15.0), ("a", 16.0)], trips=3)
    assert got == {"a": 3.0, "b": 0.0, "c": 3.0, **parts.fixed(3)}
    kernels = (parts.Kernel("x", 4.0, {"a": 1.0}), parts.Kernel("y", 3.0, {"a": 1.0, "b": 5.0}))
    of = parts.Prediction(Count(int(4.3e6 * 6), 0), kernels)
    assert (of.floor_us, of.us, of.share) == (6.0, 14.0, 6 / 14)
    assert of.losses == {"b": 5.0, "a": 2.0, parts.OTHER: 1.0}
    assert (of.largest_loss, of.main.name) == ("b", "y")


# ---- Every case ----


@pytest.mark.deep
def test_every_case_has_a_prediction_that_adds_up(rows):
    assert len({case.name for case, _ in rows}) == len(rows)
    for case, of in [*rows, *((case, roofline.predict(case, DRY)) for case in all_cases(DRY))]:
        record = of.record()
        json.dumps(record, allow_nan=False)
        assert 0 < record["expected_share"] <= 1, case.name
        assert min(of.losses.values()) > -1e-9 * of.us, case.name
        assert of.us == pytest.approx(of.floor_us + sum(of.losses.values()))
        assert of.largest_loss in record["losses_us"]
        by_bytes, by_products = of.count.bytes / 4.3e6, of.count.flops / 790e6
        assert of.floor_us == pytest.approx(max(by_bytes, by_products))
        assert all(math.isfinite(k.us) for k in of.kernels)


@pytest.mark.deep
def test_what_jmoe_does_not_serve_is_left_out(rows):
    of_deepseek = {case.op for case, _ in rows if case.shape is DEEPSEEK_V2_LITE}
    assert of_deepseek.intersection(ATTENTION_OPS) == set(ATTENTION_OPS[:2])
    assert {"grouped_gemm", "routing"} <= of_deepseek
    of_glm = {case.op for case, _ in rows if case.shape is GLM_45_AIR}
    assert of_glm == of_deepseek | set(ATTENTION_OPS)


def test_measured_models_are_those_of_the_presets():
    for shape in MODELS:
        cfg = from_hf(hf_config(shape.name.lower()))
        sizes = (cfg.d_model, cfg.d_ff_expert, cfg.num_experts, cfg.experts_per_token)
        heads = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        values = [getattr(shape, field.name) for field in fields(shape)]
        assert values[1:-2] == [*sizes, *heads, cfg.d_ff_shared]


# ---- The command and its page ----


def test_the_page_is_what_the_command_writes(rows, monkeypatch):
    """If not: `python -m benchmarks.kernels.roofline --page docs/roofline.md`."""
    monkeypatch.setattr(page, "predictions", lambda: rows)  # reckoned once
    assert (ROOT / "docs" / "roofline.md").read_text(encoding="utf-8") == page.page()


@pytest.mark.deep
def test_the_command_starts_no_device():
    command = [sys.executable, "-m", "benchmarks.kernels.roofline", "--model", "glm"]
    env = {**os.environ, "JAX_PLATFORMS": "none"}  # to ask for a device would fail
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(page.predictions("glm"))
    assert all("GLM-4.5-Air" in line for line in lines[1:])


@pytest.mark.exhaustive
def test_launches_are_those_of_compiled_programs(monkeypatch):
    """Of every op in bfloat16, at small sizes, and of attention to latents."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra jmoe[aot]")
    steps = {"decode_tokens": (8,), "prefill_tokens": (1024,), "contexts": (1024,)}
    models = {"models": (SMALL,), "quantized_models": (), "latent_models": (DEEPSEEK_V3,)}
    monkeypatch.setattr(problems, "expands", lambda case, sizes: True)  # as on the GPU
    sizes = Sizes(**models, **steps, rotated_bytes=0, kv_bytes=1 << 20)
    found, expected = {}, {}
    for case in all_cases(sizes):
        if case.skew == "exponential":
            continue
        problem = problems.build(case, sizes, 0, inputs.Pools())
        args = problem.sets[0] if problem.carry is None else (problem.carry, *problem.sets[0])
        donated = () if problem.carry is None else 0
        exe = compile_for(h200_mesh(), problem.call, *args, donate_argnums=donated)
        found[case.name] = sum(count_launches(exe.as_text()).values())
        expected[case.name] = roofline.predict(case, sizes).record()["launches"]
    assert {case.op for case in all_cases(sizes)} == {name.split("/")[0] for name in found}
    assert found == expected
