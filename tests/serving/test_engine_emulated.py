"""The real engine with its steps on the kernels: what ptxas is given, emulated, beside a CPU's.

Three forms of model, two layers each: prompts that reuse pages of others, best effort whose steps
run in parts, decode steps with rows of both classes; and two models of a family in one decode step.
Every launch is emulated, a second or more each, so that there is one case a form. Under brownout
what a row gets depends on its company, so there each prompt is alone.
"""

import asyncio
import math

import jax
import pytest

from jmoe.config import from_hf
from jmoe.random_model import random_family, random_model
from jmoe.sharing import Sharing
from pallas_kernels.backend import traced_for
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.mixed import MixedSteps
from serving.request import Priority, SamplingParams

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")

import sm90

pytestmark = pytest.mark.exhaustive

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
TIE = 0.02
"""Between the log-probabilities of two tokens, either of which may be the likelier one, and between
a CPU's and the kernels' of one token. A CPU's own are as far from those of the same weights in
float32: by 0.009 in the mean and 0.041 at most, over 64 random tokens of the Qwen2 form."""


@pytest.fixture(autouse=True)
def _fresh_programs():
    """Drops traced programs: one traced for one backend would be reused for the other."""
    jax.clear_caches()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.clear_caches()


def settings(threshold, **changes):
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
        **changes,
    )


async def ask(engine, prompt, priority=LS, model=""):
    """Returns tokens, log-probabilities of them and of the likeliest two, and degraded visits."""
    tokens, logprobs, likeliest, usage = [], [], [], None
    sampling = SamplingParams(max_new_tokens=NEW, logprobs=True, top_logprobs=2, ignore_eos=True)
    async for out in engine.generate(prompt, sampling, priority=priority, model=model):
        tokens += out.token_ids
        logprobs += out.logprobs
        likeliest += [[logprob for _, logprob in top] for top in out.top_logprobs]
        usage = out.usage
    return tokens, logprobs, likeliest, usage.degraded_visits


async def served(model, threshold):
    """Returns answers to the prompts, reused tokens, and the layers that steps ran at once."""
    engine = await Engine.start(settings(threshold), model=model)
    launch, layers = engine.executor.launch, set()

    def watched(plan, control):
        layers.add((plan.first_layer, plan.stop_layer))
        return launch(plan, control)

    engine.executor.launch = watched
    try:
        found = [await ask(engine, *PROMPTS[0])]
        if threshold == 100:
            found += await asyncio.gather(*(ask(engine, *one) for one in PROMPTS[1:]))
        else:
            found += [await ask(engine, *one) for one in PROMPTS[1:3]]
        return found, engine.scheduler.reuse.num_reused, layers
    finally:
        await engine.stop()


def num_alike(got, want):
    """Returns how many tokens of an answer are the same, up to a tie in which either may follow."""
    for at, (token, own) in enumerate(zip(got[0], want[0], strict=True)):
        if token != own:
            assert math.isclose(*want[2][at], abs_tol=TIE)
            return at
        assert got[1][at] == pytest.approx(want[1][at], abs=TIE)
    return len(got[0])


@pytest.mark.parametrize("threshold", [100, 50])
@pytest.mark.parametrize("form", FORMS)
async def test_the_engine_serves_on_kernels_what_it_serves_on_a_cpu(form, threshold):
    def model():
        return random_model(from_hf(FORMS[form]), 0, "bfloat16", ways=(4,), skew=0.3)

    want, reused, layers = await served(model(), threshold)
    jax.clear_caches()
    with sm90.emulated() as ran, traced_for("cuda"):
        got, reused_too, layers_too = await served(model(), threshold)
    assert {kernel.name for kernel in ran} >= KERNELS
    assert reused == reused_too == len(SHARED)
    assert layers == layers_too == {(0, 1), (1, 2), (0, 2)}
    for answer, own in zip(got, want, strict=True):
        assert num_alike(answer, own) > 0
        if answer[0] == own[0]:
            assert answer[3] == pytest.approx(own[3], abs=2)  # ties of experts' visits
    assert (sum(answer[3] for answer in got) > 0) == (threshold < 100)
    alike = sum(num_alike(answer, own) for answer, own in zip(got, want, strict=True))
    assert alike >= 0.8 * NEW * len(want)


async def test_two_models_in_one_decode_step_answer_on_kernels_as_on_a_cpu(monkeypatch):
    """What pays is not timed: each would be a step more to emulate."""
    monkeypatch.setattr(MixedSteps, "measure", lambda self: None)
    monkeypatch.setattr(MixedSteps, "pays", lambda self, counts: True)

    async def both():
        cfg = from_hf(FORMS["qwen3"])
        sharing = Sharing.none(("one", "other"), cfg.num_moe_layers, cfg.num_experts)
        sharing.owners[1, :, ::2] = 0  # half of the experts are the first model's
        family = random_family(cfg, sharing, 0, "bfloat16", skew=0.3)
        engine = await Engine.start(settings(100, policy="fcfs", mixed_models=2), model=family)
        try:
            asked = [
                ask(engine, prompt, model=engine.names[at % 2])
                for at, (prompt, _) in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*asked), engine.scheduler.num_mixed
        finally:
            await engine.stop()

    want, mixed = await both()
    jax.clear_caches()
    with sm90.emulated() as ran, traced_for("cuda"):
        got, mixed_too = await both()
    assert {kernel.name for kernel in ran} >= KERNELS
    assert mixed > 0
    assert mixed_too > 0
    assert [answer[0] for answer in got] == [own[0] for own in want]
    assert all(num_alike(answer, own) == NEW for answer, own in zip(got, want, strict=True))
