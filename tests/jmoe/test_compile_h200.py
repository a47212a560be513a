"""Step programs of a real model, compiled for an H200 that is not there: nothing large is copied.

Donation is no evidence (it shows in full where XLA copies, too), so two things are looked at: the
temporary memory, and every instruction of the program that is not inside a fusion. A control that
slices a layer's experts out of the pool shows that both would tell.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import (
    BATCH,
    LARGE,
    MAX_BLOCKS,
    MIB,
    MIXTRAL,
    PAGE_SIZE,
    PAGES,
    QWEN3,
    QWEN15,
    TEMPORARY,
    Case,
    _kernels_are_assembled_well,
    abstract_model,
    bf16,
    check_copies,
    compile_step,
    int32,
    mesh,
)
from jax import lax

from jmoe import load, model
from jmoe.brownout import Control
from jmoe.forward import _forward
from jmoe.packed_rows import NUM_COLUMNS, NUM_SHAPE_COLUMNS, num_words, seat_size
from jmoe.shaping import make_shaping, seat
from jmoe.steps import decode_step, draw_step, prefill_step, sample_step, score_step
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.backend import traced_for
from tests.compile_for import compile_for, h100_mesh, h200_mesh
from tests.compiled import count_launches, count_loop_launches, large_results
from tests.equal_kernels import equal_kernels_are_compiled_once

pytestmark = pytest.mark.deep

__all__ = ["_kernels_are_assembled_well", "equal_kernels_are_compiled_once", "mesh"]  # fixtures


# Every layer is compiled anew: one model at full depth, and others with six layers.
SHORT_QWEN3 = QWEN3._replace(depth=6, launches=(100, 95, 20))
SHORT_MIXTRAL = MIXTRAL._replace(depth=6, launches=(102, 96, 21))
# A window in all layers, as once published; and in each other layer, with sinks and biases.
WINDOWED_MIXTRAL = MIXTRAL._replace(
    depth=2, launches=(50, 49, 0), changes={"sliding_window": 4096}, max_blocks=128
)
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS = Case("gpt-oss-20b", 4, (60, 56, 0), depth=2, changes=LAYERS)
GLM_AIR = Case("GLM-4.5-Air", 16, (51, 50, 0), depth=2)
GPT_OSS_120B = Case("gpt-oss-120b", 4, (60, 56, 0), depth=2, changes=LAYERS)
# Latents have no kernel that writes pages.
DEEPSEEK_V3 = Case(
    "DeepSeek-V3-bf16", 16, (65, 60, 0), depth=2, changes={"first_k_dense_replace": 1}
)
unrolled = pytest.mark.parametrize(
    "case",
    [QWEN15, SHORT_QWEN3, SHORT_MIXTRAL, WINDOWED_MIXTRAL, GPT_OSS],
    ids=lambda case: case.name + "-window" * bool(case.changes),
)
# A scan's body is one layer: by six of them, too, or by as many as nearly fill the memory.
scanned = pytest.mark.parametrize(
    "case", [QWEN15, SHORT_QWEN3, MIXTRAL], ids=lambda case: case.name
)


def compile_decode(mesh, case, **options):
    rows = int32(BATCH, NUM_COLUMNS), int32(8, 3), int32(2)
    return compile_step(mesh, case, decode_step, *rows, **options)


PREFILL_STEPS = {}


def compile_prefill(mesh, case):
    """Compiles a prefill step of 512 rows, once for all tests that look at it."""
    if (name := repr(case)) not in PREFILL_STEPS:
        PREFILL_STEPS[name] = compile_step(mesh, case, *ROWS["prefill"])
    return PREFILL_STEPS[name]


def check_one_graph(program):
    """Checks that the whole step is one CUDA graph, which the host launches once."""
    alone = [line[:19] for line in program.plan if not line.startswith(" ")]
    assert alone == ["000: kCommandBuffer"]


@pytest.mark.sized(
    exhaustive=(
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "mixtral-8x7b-window",
        "qwen1.5-moe-a2.7b",
    )
)
@unrolled
def test_a_decode_step_is_one_graph_and_copies_neither_experts_nor_pages(mesh, case):
    program = compile_decode(mesh, case)
    cfg = case.config
    experts = cfg.num_layers * case.num_slots * case.expert_bytes
    assert program.memory.argument_size_in_bytes > experts  # the whole model, cache and all
    check_copies(program)
    check_one_graph(program)
    # KV write, attention and its merge, routing, two products.
    assert program.mosaic_kernels == 6 * cfg.num_layers
    assert " while(" not in program.hlo
    assert sum(count_launches(program.hlo).values()) == case.launches[0]


@pytest.mark.sized(
    exhaustive=("qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x7b-window")
)
@unrolled
def test_a_prefill_step_is_one_graph_and_copies_neither_experts_nor_pages(mesh, case):
    program = compile_prefill(mesh, case)
    check_copies(program)
    check_one_graph(program)
    # KV write, attention, routing, two products.
    assert program.mosaic_kernels == 5 * case.config.num_layers
    assert sum(count_launches(program.hlo).values()) == case.launches[1]


ROWS = {
    "decode": (decode_step, int32(BATCH, NUM_COLUMNS), int32(8, 3), int32(2)),
    "prefill": (prefill_step, int32(512), int32(8, NUM_COLUMNS), int32(8, 3), int32(2)),
}


SORTED_ROWS = ["custom-call f32[6016,7168]{1,0}"]
"""What the sorted rows of one layer of DeepSeek-V3's experts become in a prefill step."""
GEOMETRIES = (GLM_AIR, GPT_OSS_120B, DEEPSEEK_V3)


# A decode, a prefill and a hybrid step of gpt-oss are compiled every time.
@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ROWS)
@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda case: case.name)
@pytest.mark.parametrize("make_mesh", [h200_mesh, h100_mesh], ids=["H200", "H100"])
def test_two_layers_as_published_copy_neither_experts_nor_pages(make_mesh, case, phase):
    """On both Hopper GPUs. GLM's and DeepSeek's are a dense layer and one of experts, chosen by
    scores and biases; a layer of gpt-oss has a window, the other has none.
    """
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")
    program = compile_step(make_mesh(), case, *ROWS[phase])
    check_copies(program, SORTED_ROWS if (case, phase) == (DEEPSEEK_V3, "prefill") else ())
    check_one_graph(program)
    of_attention, of_experts = (3 if phase == "decode" else 2), 3
    if case is DEEPSEEK_V3:
        of_attention -= 1
        # Nor what makes keys or values of latents, which products and kernels read as it lies.
        weights = {"bf16[512,128,128]", "bf16[512,128,256]", "bf16[512,16384]", "bf16[512,32768]"}
        results = large_results(program.hlo, 16 * MIB)
        by_xla = [result for result in results if not result.startswith("custom-call")]
        assert not [result for result in by_xla if any(each in result for each in weights)]
    cfg = case.config
    assert (cfg.num_layers, cfg.num_moe_layers) == (2, 2 if case is GPT_OSS_120B else 1)
    assert program.mosaic_kernels == 2 * of_attention + cfg.num_moe_layers * of_experts
    assert sum(count_launches(program.hlo).values()) == case.launches[phase == "prefill"]


TWO_QWEN15 = QWEN15._replace(depth=2)
HYBRIDS = [(TWO_QWEN15, 14, 17), (GPT_OSS, 14, 22), (DEEPSEEK_V3, 11, 25)]
"""Kernels of a hybrid step of two layers, and its launches beside those of a prefill step."""


def launches_of_prefill(mesh, case):
    return sum(count_launches(compile_prefill(mesh, case).hlo).values())


# What is not exhaustive is of the model whose decode and prefill steps are compiled above.
@pytest.mark.sized(exhaustive=("qwen1.5-moe-a2.7b", "DeepSeek-V3-bf16"))
@pytest.mark.parametrize(
    ("case", "kernels", "launches"), HYBRIDS, ids=[case.name for case, _, _ in HYBRIDS]
)
def test_a_hybrid_step_is_one_graph_and_copies_neither_experts_nor_pages(
    mesh, case, kernels, launches
):
    step = partial(prefill_step, num_decodes=BATCH)
    rows = int32(512), int32(BATCH + 8, NUM_COLUMNS), int32(8, 3), int32(2)
    program = compile_step(mesh, case, step, *rows)
    check_copies(program, SORTED_ROWS if case is DEEPSEEK_V3 else ())
    check_one_graph(program)
    more = sum(count_launches(program.hlo).values()) - launches_of_prefill(mesh, case)
    assert (program.mosaic_kernels, more) == (kernels, launches)


FP8_QWEN3 = QWEN3._replace(depth=2, quantize="fp8")
FP8_KV = QWEN3._replace(depth=2, kv_cache_dtype="fp8")


@pytest.mark.exhaustive
def test_a_step_over_experts_and_pages_in_fp8_copies_neither(mesh):
    """Each by itself, and prefill steps, are looked at below."""
    case = FP8_KV._replace(quantize="fp8")
    program = compile_step(mesh, case, *ROWS["decode"])
    check_copies(program)
    check_one_graph(program)
    check_arguments_in_fp8(program, case)
    check_pages_in_fp8(program, case)
    assert program.mosaic_kernels == 6 * case.depth


def check_arguments_in_fp8(program, case):
    experts = case.depth * case.num_slots * case.expert_bytes
    other = 2 * case.config.vocab_size * case.config.d_model * 2
    assert program.memory.argument_size_in_bytes < 0.55 * experts + 2 * other


def check_pages_in_fp8(program, case):
    pages = f"[{case.depth},{PAGES + 1},"
    assert not [result for result in large_results(program.hlo, LARGE) if pages in result]
    of_rows = 2 * 8 * MAX_BLOCKS * PAGE_SIZE * 4 * 128 * 2  # keys and values of a prefill step
    assert program.memory.temp_size_in_bytes < 1.2 * of_rows + 64 * MIB


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_over_experts_in_fp8_copies_none_of_them(mesh, phase):
    step = decode_step if phase == "decode" else prefill_step
    tokens = () if phase == "decode" else (int32(512),)
    rows = int32(BATCH if phase == "decode" else 8, NUM_COLUMNS), int32(8, 3), int32(2)
    program = compile_step(mesh, FP8_QWEN3, step, *tokens, *rows)
    check_copies(program)
    check_one_graph(program)
    assert program.mosaic_kernels == (6 if phase == "decode" else 5) * FP8_QWEN3.depth
    check_arguments_in_fp8(program, FP8_QWEN3)


FOUR_BITS = [QWEN3._replace(depth=2, quantize="int4"), GPT_OSS._replace(quantize="mxfp4")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("case", FOUR_BITS, ids=lambda case: case.quantize)
def test_a_step_over_experts_in_four_bits_copies_none_of_them(mesh, case, phase):
    program = compile_step(mesh, case, *ROWS[phase])
    check_copies(program)
    check_one_graph(program)
    assert program.mosaic_kernels == (6 if phase == "decode" else 5) * case.depth
    experts = case.depth * case.num_slots * case.expert_bytes
    other = 2 * case.config.vocab_size * case.config.d_model * 2
    assert program.memory.argument_size_in_bytes < 0.32 * experts + 3 * other


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_over_pages_in_fp8_copies_none_of_them(mesh, phase):
    """XLA copies what a prefill step reads, for the kernel."""
    program = compile_step(mesh, FP8_KV, *ROWS[phase])
    if phase == "decode":
        check_copies(program)
    check_one_graph(program)
    assert program.mosaic_kernels == (6 if phase == "decode" else 5) * FP8_KV.depth
    check_pages_in_fp8(program, FP8_KV)


@pytest.mark.exhaustive
def test_thresholds_by_layer_are_one_launch_of_a_whole_step(mesh):
    case = TWO_QWEN15
    without, levels = (compile_decode(mesh, case, levels=each) for each in (False, True))
    check_one_graph(levels)
    assert levels.mosaic_kernels == without.mosaic_kernels
    counts = [sum(count_launches(program.hlo).values()) for program in (without, levels)]
    assert counts[1] <= counts[0] + 1


@pytest.mark.exhaustive
def test_a_prefill_of_1024_rows_launches_as_little_as_one_of_512(mesh):
    rows = int32(1024), int32(8, NUM_COLUMNS), int32(8, 3), int32(2)
    program = compile_step(mesh, TWO_QWEN15, prefill_step, *rows)
    launches = sum(count_launches(program.hlo).values())
    assert launches <= launches_of_prefill(mesh, TWO_QWEN15) + 1  # one more beside the layers


STEPS = {"decode": (decode_step, [(BATCH, 9), (8, 3), (4,)]),
         "prefill": (prefill_step, [(512,), (8, 9), (8, 3), (4,), (512,)])}  # fmt: skip
NUM_HIDDEN = BATCH + 2 * 512


def compile_part(mesh, phase, layers):
    step, shapes = STEPS[phase]
    rows = [int32(*shape) for shape in shapes]
    return compile_step(mesh, QWEN15, partial(_part, step, layers), *rows, num_hidden=NUM_HIDDEN)


def _part(step, layers, *args, **options):
    return step(*args, layers=layers, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("phase", "fixed"), [("decode", 15), ("prefill", 15)])
def test_a_part_of_a_step_is_one_graph_with_few_launches_of_its_own(mesh, phase, fixed):
    """Layers cost what they cost; beside them there is what each further part adds."""
    parts = {n: compile_part(mesh, phase, range(6, 6 + n)) for n in (3, 6)}
    launches = {n: sum(count_launches(part.hlo).values()) for n, part in parts.items()}
    assert 2 * launches[3] - launches[6] == fixed
    for part in parts.values():
        check_copies(part)
        check_one_graph(part)


@pytest.mark.exhaustive  # the whole step and a part from its middle copy nothing
@pytest.mark.parametrize("layers", [range(3), range(21, 24)])
def test_the_first_and_the_last_part_copy_nothing_either(mesh, layers):
    part = compile_part(mesh, "decode", layers)
    check_copies(part)
    check_one_graph(part)


@pytest.mark.exhaustive
@scanned
def test_an_eager_step_scans_its_layers_and_copies_nothing(mesh, case):
    program = compile_decode(mesh, case, eager=True)
    check_copies(program)
    assert program.plan is None
    assert program.mosaic_kernels == 6
    assert sum(count_loop_launches(program.hlo).values()) == case.launches[2]
    loops = [line for line in program.hlo.splitlines() if " while(" in line]
    assert loops
    # A loop with a traced trip count makes the host wait for the device in every iteration.
    assert all("known_trip_count" in line for line in loops)


@pytest.mark.parametrize("truncate", [False, True])
def test_sampling_waits_for_nothing(mesh, truncate):
    logits = jax.ShapeDtypeStruct((BATCH, QWEN15.config.vocab_size), jnp.float32)
    draw = partial(sample_step, truncate=truncate)
    exe = compile_for(mesh, draw, int32(BATCH), logits, int32(BATCH, NUM_COLUMNS), donate_argnums=0)
    assert " while(" not in exe.as_text()
    assert " conditional(" not in exe.as_text()
    assert exe.memory_analysis().temp_size_in_bytes < TEMPORARY


def test_drawing_of_changed_logits_waits_for_nothing_and_copies_no_slots(mesh):
    """What slots hold, 37 MiB each for counts and biases of 64, is changed in place."""
    vocab = QWEN15.config.vocab_size
    logits = jax.ShapeDtypeStruct((BATCH, vocab), jnp.float32)
    held = jax.eval_shape(partial(make_shaping, BATCH, vocab))
    shapes, allowed = int32(BATCH, NUM_SHAPE_COLUMNS), int32(BATCH, num_words(vocab))
    rows, draw = int32(BATCH, NUM_COLUMNS), partial(draw_step, truncate=True)
    arguments = int32(BATCH), held, logits, rows, shapes, allowed
    exe = compile_for(mesh, draw, *arguments, donate_argnums=(0, 1))
    assert " while(" not in exe.as_text()
    assert " conditional(" not in exe.as_text()
    assert exe.memory_analysis().temp_size_in_bytes < TEMPORARY
    assert exe.memory_analysis().alias_size_in_bytes >= 2 * 4 * BATCH * vocab
    told = int32(1, seat_size(MAX_BLOCKS * PAGE_SIZE))
    exe = compile_for(mesh, seat, held, told, donate_argnums=0)
    assert " while(" not in exe.as_text()
    assert exe.memory_analysis().alias_size_in_bytes >= 2 * 4 * BATCH * vocab


def test_prompts_are_scored_in_parts_and_nothing_is_sorted(mesh):
    """The logits of 8,192 rows take 4.6 GiB."""
    cfg, count = QWEN15.config, 8192
    width, vocab = cfg.d_model, cfg.vocab_size
    sizes = {"final_norm": (width,), "embed": (vocab, width), "lm_head": (width, vocab)}
    params = {name: jax.ShapeDtypeStruct(one, jnp.bfloat16) for name, one in sizes.items()}
    hidden = jax.ShapeDtypeStruct((count, width), jnp.bfloat16)
    score = partial(score_step, cfg)
    exe = compile_for(mesh, score, params, hidden, int32(count), int32(16, 9))
    assert exe.memory_analysis().temp_size_in_bytes < 1 << 30
    loops = [line for line in exe.as_text().splitlines() if " while(" in line]
    assert all("known_trip_count" in line for line in loops)
    assert " sort(" not in exe.as_text()


@pytest.mark.exhaustive
def test_the_control_without_our_options_computes_things_twice(mesh):
    """This model takes more than 80 % of the memory, as weights and pages together are meant to."""
    program = compile_decode(mesh, MIXTRAL, eager=True, xla_disable_hlo_passes="")
    assert ".remat" in program.hlo


def test_a_router_whose_columns_cublas_does_not_take_is_padded_once(mesh, monkeypatch):
    monkeypatch.setattr(model, "with_wide_router", lambda segment: segment)
    program = compile_decode(mesh, QWEN15, eager=True)
    assert sum(count_loop_launches(program.hlo).values()) == QWEN15.launches[2] + 2


@pytest.mark.exhaustive
def test_a_padded_router_changes_no_bit(request, monkeypatch):
    """On a CPU that is taken for some other GPU: neither padded there, nor with our kernels."""
    tiny = load(request.config.rootpath / "tests/golden/qwen2_moe")
    router = tiny.params["segments"][0]["router"]
    assert router.shape[-1] % 8
    tokens = jnp.asarray([[5, 9, 2, 40, 7]], jnp.int32)
    shapes, logits = [], []

    def watched(segment, pad=model.with_wide_router):
        shapes.append(pad(segment)["router"].shape[-1])
        return pad(segment)

    for way in (watched, lambda segment: segment):
        monkeypatch.setattr(model, "with_wide_router", way)
        with traced_for("rocm"):
            fresh = jax.jit(partial(_forward.__wrapped__, tiny.config, model.COUNTS, None))
            arrays = tiny.weights, tokens, jnp.zeros(1, bool), jnp.ones(1, bool)
            logits.append(fresh(*arrays, Control.of(None))[0])
    assert set(shapes) == {-(-router.shape[-1] // 8) * 8}
    np.testing.assert_array_equal(*logits)


@pytest.mark.sized(exhaustive=("True",))
@pytest.mark.parametrize("sliced", [False, True])
def test_the_control_that_slices_its_layer_from_the_pool_is_caught(mesh, sliced):
    case = QWEN15
    cfg, num_slots = case.config, case.num_slots

    def layers(pool, x, ids):
        def one_layer(x, layer):
            slots = jnp.arange(num_slots, dtype=jnp.int32)
            first = layer * num_slots
            if sliced:
                own = [lax.dynamic_slice_in_dim(w, first, num_slots) for w in pool.arrays.values()]
            else:
                own, slots = pool.arrays.values(), first + slots
            weights = jnp.ones(ids.shape, jnp.float32)
            work = routing.dispatch(ids, weights, slots, block_m=8, max_active=cfg.num_experts)
            return x + grouped_gemm.moe_mlp(x, *own, work).astype(x.dtype), None

        return lax.scan(one_layer, x, jnp.arange(cfg.num_layers, dtype=jnp.int32))[0]

    ids = int32(BATCH, cfg.experts_per_token)
    _, pool, _ = abstract_model(case)
    exe = compile_for(mesh, layers, pool, bf16(BATCH, cfg.d_model), ids)
    temporary = exe.memory_analysis().temp_size_in_bytes
    if sliced:
        assert temporary > num_slots * case.expert_bytes // 2  # gate_up, then down in its place
        assert any(f"[{num_slots}," in result for result in large_results(exe.as_text(), LARGE))
    else:
        assert temporary < 100 * MIB
        assert large_results(exe.as_text(), LARGE) == []
