"""A model whose steps run on the kernels: what ptxas is given, emulated, beside the references."""

import jax
import numpy as np
import pytest

import jmoe
from jmoe.config import from_hf
from jmoe.random_model import random_model
from pallas_kernels.backend import references_only, traced_for

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")

import sm90

pytestmark = pytest.mark.exhaustive

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
BROWNOUT = jmoe.Brownout("partial", threshold_percent=50, way=4)


@pytest.fixture
def fresh_programs():
    """Drops traced programs: one traced for one backend would be reused for the other."""
    jax.clear_caches()
    yield
    jax.clear_caches()


KERNELS = {
    "routing",
    "grouped_gemm_gate_up",
    "grouped_gemm_down",
    "kv_write",
    "prefill_attention",
    "paged_attention",
    "paged_attention_merge",
}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_prefill_and_decode_write_what_they_write_on_the_references(fresh_programs, kv_cache_dtype):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = random_model(from_hf(CONFIG), 0, "bfloat16", ways=(4,), skew=0.3)
        model = model.with_kv_cache_dtype(kv_cache_dtype)
        size = 64 if kv_cache_dtype == "fp8" else 16
        rng = np.random.default_rng(0)
        prompts = [rng.integers(256, size=size).tolist() for size in (20, 33)]

        def write():
            return jmoe.generate(model, prompts, 2, BROWNOUT, stop_token_ids=(), page_size=size)

        with references_only():
            want = write()
        jax.clear_caches()
        with sm90.emulated() as ran, traced_for("cuda"):
            got = write()
    assert {kernel.name for kernel in ran} == KERNELS
    assert got.tokens == want.tokens
    assert got.degraded_visits == want.degraded_visits
    assert sum(want.degraded_visits) > 0
