"""Step programs of a real model, compiled for an H200 that is not there: nothing large is copied.

Donation is no evidence (it shows in full where XLA copies, too), so two things are looked at: the
temporary memory, and every instruction of the program that is not inside a fusion. A control that
slices a layer's experts out of the pool shows that both would tell.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmoe.config import ModelConfig, RopeConfig
from jmoe.experts import ExpertPool, make_table
from jmoe.steps import decode_step, make_state, prefill_step
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.compile_for import compile_for, h200_mesh
from pallas_kernels.shapes import QWEN15_MOE_A27B as SHAPE

LAYERS, UNITED, BATCH, PAGES, PAGE_SIZE, VOCAB = 24, 30, 64, 1024, 64, 151936
MIB = 2**20
EXPERT_BYTES = 2 * SHAPE.expert_elements
LARGE = 6 * EXPERT_BYTES  # a tenth of a layer's experts; above all a decode step computes
# Sampling sorts 64 rows of logits, 37 MiB each time they are written; cuBLAS takes 32. One layer's
# keys are 256, its experts 1,031.
TEMPORARY = 256 * MIB
NUM_EXPERTS = SHAPE.num_experts + UNITED


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    return h200_mesh()


CFG = ModelConfig(
    architecture="qwen2_moe",
    vocab_size=VOCAB,
    d_model=SHAPE.d_model,
    num_layers=LAYERS,
    num_heads=SHAPE.heads,
    num_kv_heads=SHAPE.kv_heads,
    head_dim=SHAPE.head_dim,
    num_experts=SHAPE.num_experts,
    experts_per_token=SHAPE.top_k,
    d_ff_expert=SHAPE.d_ff,
    d_ff_shared=5632,
    d_ff_dense=0,
    moe_layers=(True,) * LAYERS,
    norm_topk_prob=False,
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=False,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position=8192,
)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_pool():
    slots, d, f = LAYERS * NUM_EXPERTS, SHAPE.d_model, SHAPE.d_ff
    return ExpertPool(bf16(slots, d, 2 * f), bf16(slots, f, d))


def abstract_model():
    n, d, m, fs = LAYERS, SHAPE.d_model, SHAPE.num_experts, CFG.d_ff_shared
    width = SHAPE.heads * SHAPE.head_dim
    segment = {
        "attn_norm": bf16(n, d),
        "mlp_norm": bf16(n, d),
        "wqkv": bf16(n, d, 3 * width),
        "bqkv": bf16(n, 3 * width),
        "wo": bf16(n, width, d),
        "router": bf16(n, d, m),
        "shared_gate_up": bf16(n, d, 2 * fs),
        "shared_down": bf16(n, fs, d),
        "shared_gate": bf16(n, d),
    }
    top = {"embed": bf16(VOCAB, d), "final_norm": bf16(d), "lm_head": bf16(d, VOCAB)}
    table = jax.eval_shape(lambda: make_table(LAYERS, SHAPE.num_experts, UNITED))
    return {**top, "segments": (segment,)}, abstract_pool(), table


def abstract_state():
    sizes = {"num_slots": BATCH, "num_pages": PAGES, "page_size": PAGE_SIZE, "max_blocks": 64}
    return jax.eval_shape(lambda: make_state(CFG, dtype=jnp.dtype(jnp.bfloat16), **sizes))


BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}
# What hands an array on without writing it.
HANDED_ON = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "conditional"}
# What writes a few rows into a large array that is its operand.
IN_PLACE = {"scatter", "dynamic-update-slice"}


def large_results(hlo):
    """Instructions that write an array of LARGE bytes or more, computations of fusions left out.

    A fusion that ends in a scatter or an update of its operand writes in place: how much memory
    that takes is for the other half of the test to say.
    """
    head = r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$"
    instruction = r"^\s+(ROOT )?%?[\w.\-]+ = (.+?) ([\w\-]+)\("
    fused = set(re.findall(r"(?:fusion\(.*?calls=|to_apply=)%?([\w.\-]+)", hlo))
    roots, found, computation = {}, [], ""
    for line in hlo.splitlines():
        if start := re.match(head, line):
            computation = start[1]
        elif parts := re.match(instruction, line):
            is_root, result, opcode = parts.groups()
            if is_root:
                roots[computation] = opcode
            if computation not in fused and opcode not in HANDED_ON:
                called = re.search(r"calls=%?([\w.\-]+)", line)
                found.append((opcode, called and called[1], result))
    return [
        f"{opcode} {result}"
        for opcode, called, result in found
        if max(map(size, re.findall(r"(\w+)\[([\d,]*)\]", result)), default=0) >= LARGE
        and opcode not in IN_PLACE
        and roots.get(called) not in IN_PLACE
    ]


def size(array):
    kind, dims = array
    return BYTES.get(kind, 8) * math.prod(int(n) for n in dims.split(",") if n)


@pytest.fixture(scope="module")
def decode(mesh):
    step = partial(decode_step, CFG, max_active=SHAPE.num_experts)
    rows = int32(BATCH, 8), int32(8, 3), int32(2)
    return compile_for(mesh, step, *abstract_model(), abstract_state(), *rows, donate_argnums=3)


def test_a_decode_step_copies_neither_experts_nor_pages(decode):
    memory = decode.memory_analysis()
    assert memory.argument_size_in_bytes > 40 * 1024 * MIB  # the whole model, cache and all
    assert memory.temp_size_in_bytes < TEMPORARY
    assert large_results(decode.as_text()) == []


def test_a_decode_step_has_no_loop_that_waits_for_the_host(decode):
    loops = [line for line in decode.as_text().splitlines() if " while(" in line]
    assert loops
    assert all("known_trip_count" in line for line in loops)


def test_a_prefill_step_copies_neither_experts_nor_pages(mesh):
    step = partial(prefill_step, CFG, max_active=SHAPE.num_experts)
    rows = int32(512), int32(8, 8), int32(8, 3), int32(2)
    exe = compile_for(mesh, step, *abstract_model(), abstract_state(), *rows, donate_argnums=3)
    assert exe.memory_analysis().temp_size_in_bytes < TEMPORARY
    assert large_results(exe.as_text()) == []


@pytest.mark.parametrize("sliced", [False, True])
def test_the_control_that_slices_its_layer_from_the_pool_is_caught(mesh, sliced):
    def layers(pool, x, ids):
        def one_layer(x, layer):
            slots = jnp.arange(NUM_EXPERTS, dtype=jnp.int32)
            first = layer * NUM_EXPERTS
            if sliced:
                own = [lax.dynamic_slice_in_dim(w, first, NUM_EXPERTS) for w in pool]
            else:
                own, slots = pool, first + slots
            weights = jnp.ones(ids.shape, jnp.float32)
            work = routing.dispatch(ids, weights, slots, block_m=8, max_active=SHAPE.num_experts)
            return x + grouped_gemm.moe_mlp(x, *own, work).astype(x.dtype), None

        return lax.scan(one_layer, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]

    ids = int32(BATCH, SHAPE.top_k)
    exe = compile_for(mesh, layers, abstract_pool(), bf16(BATCH, SHAPE.d_model), ids)
    temporary = exe.memory_analysis().temp_size_in_bytes
    if sliced:
        assert temporary > NUM_EXPERTS * EXPERT_BYTES
        assert any(f"[{NUM_EXPERTS}," in result for result in large_results(exe.as_text()))
    else:
        assert temporary < 100 * MIB
        assert large_results(exe.as_text()) == []
