"""The real engine with its steps on the kernels: what ptxas is given, emulated, beside a CPU's.

Three forms of model, two layers each: prompts that reuse pages of others, best effort whose steps
run in parts, decode steps with rows of both classes. Every launch is emulated, a second or more
each, so that there is one case a form. Under brownout what a row gets depends on its company, so
there each prompt is alone.
"""

import asyncio

import jax
import pytest

from jmoe.config import from_hf
from jmoe.random_model import random_model
from pallas_kernels.backend import traced_for
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import Priority, SamplingParams

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")

import sm90

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
}
QWEN = {
    "num_experts": 12,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FORMS = {
    "qwen2": {
        **COMMON,
        **QWEN,
        "model_type": "qwen2_moe",
        "hidden_size": 256,  # heads of 64
        "shared_expert_intermediate_size": 128,
    },
    "qwen3": {**COMMON, **QWEN, "model_type": "qwen3_moe", "head_dim": 64, "attention_bias": False},
    "mixtral": {**COMMON, "model_type": "mixtral", "hidden_size": 256, "num_local_experts": 8},
}
KERNELS = {
    "routing",
    "grouped_gemm_gate_up",
    "grouped_gemm_down",
    "kv_write",
    "prefill_attention",
    "paged_attention",
}
SHARED = list(range(1, 17))  # a page
PROMPTS = [
    ([*SHARED, 20, 21, 22], LS),
    ([*SHARED, 30, 31], LS),
    ([40, 41, 42, 43, 44], BE),
    ([50] * 9, BE),
    ([60, 61, 62], LS),
]
NEW = 3


@pytest.fixture(autouse=True)
def _fresh_programs():
    """Traced for one backend, a program would be taken for the other."""
    jax.clear_caches()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.clear_caches()


def settings(threshold):
    return EngineConfig(
        max_num_seqs=8,
        max_model_len=48,
        num_pages=32,
        page_size=16,
        max_prefill_tokens=32,
        max_prefill_seqs=4,
        decode_buckets=(8,),
        prefill_buckets=(32,),
        threshold_buckets_percent=(100,),
        part_layers=1,
        reserved_ls_seqs=0,
        compilation_cache="",
        watchdog_s=0,
        best_effort_max_wait_s=0,
        brownout=BrownoutConfig(
            strategy="zero" if threshold == 100 else "partial",
            salc=False,
            prefill_threshold_percent=threshold,
            decode_threshold_percent=threshold,
        ),
    )


async def served(model, threshold):
    """Tokens, log-probabilities and degraded visits of each prompt; whether pages were reused."""
    engine = await Engine.start(settings(threshold), model=model)

    async def ask(prompt, priority):
        tokens, logprobs, usage = [], [], None
        sampling = SamplingParams(max_new_tokens=NEW, logprobs=True, ignore_eos=True)
        async for out in engine.generate(prompt, sampling, priority=priority):
            tokens += out.token_ids
            logprobs += out.logprobs
            usage = out.usage
        return tokens, logprobs, usage.degraded_visits

    try:
        found = [await ask(*PROMPTS[0])]
        if threshold == 100:
            found += await asyncio.gather(*(ask(*one) for one in PROMPTS[1:]))
        else:
            found += [await ask(*one) for one in PROMPTS[1:3]]
        return found, engine.scheduler.reuse.num_reused
    finally:
        await engine.stop()


@pytest.mark.parametrize("threshold", [100, 50])
@pytest.mark.parametrize("form", FORMS)
async def test_the_engine_serves_on_kernels_what_it_serves_on_a_cpu(form, threshold):
    def model():
        return random_model(from_hf(FORMS[form]), 0, "bfloat16", ways=(4,), skew=0.3)

    want, reused = await served(model(), threshold)
    jax.clear_caches()
    with sm90.emulated() as ran, traced_for("cuda"):
        got, reused_too = await served(model(), threshold)
    assert {kernel.name for kernel in ran} >= KERNELS
    assert reused == reused_too == len(SHARED)
    for (tokens, logprobs, degraded), (own, theirs, as_many) in zip(got, want, strict=True):
        assert tokens == own
        assert logprobs == pytest.approx(theirs, abs=0.01)
        assert (degraded > 0) == (threshold < 100)
        assert degraded == pytest.approx(as_many, abs=2)  # ties of experts' visits
