"""Logits and greedy tokens against Hugging Face transformers (tests/golden)."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe.stepper import programs
from pallas_kernels.backend import batched_only
from pallas_kernels.grouped_gemm import batched

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
QUICK = {"mixtral", "mixtral_top1_head_dim", "qwen2_moe", "qwen3_moe", "qwen3_moe_mixed_yarn"}
QUICK |= {"glm4_moe", "phimoe", "gpt_oss", "deepseek_v3", "minimax_m2", "ernie4_5_moe", "dots1"}
# Fed eight tokens at a time instead of whole: dense layers between, all kinds of grouping.
CHUNKED = {"qwen2_moe_mlp_only_tied", "qwen3_moe_mixed_yarn", "mixtral_top1_head_dim"}
CHUNKED |= {
    "gpt_oss_types_tied",
    "deepseek_v3_tied",
    "mistral4",
    "qwen3_next",
    "exaone_moe",
    "afmoe",
}


pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    directory = GOLDEN / request.param
    model = jmoe.load(directory, dtype="float32")
    return request.param, model, np.load(directory / "golden.npz")


def test_every_case_is_there():
    assert len(CASES) >= 12
    assert set(CASES) >= CHUNKED


@pytest.mark.sized(deep=[name for name in CASES if name not in QUICK])
def test_forward_equals_transformers(case):
    _, model, golden = case
    logits = np.asarray(jmoe.forward(model, golden["tokens"]))
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["logits"]).max() < 1e-4


def test_kimi_k2_is_deepseek_v3_by_another_model_type(copy):
    directory = copy("deepseek_v3")
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps(config))
    own, model = (jmoe.load(one, dtype="float32") for one in (directory, GOLDEN / "deepseek_v3"))
    assert own.config == replace(model.config, architecture="kimi_k2")
    jax.tree.map(np.testing.assert_array_equal, own.params, model.params)
    jax.tree.map(np.testing.assert_array_equal, own.pool, model.pool)


@pytest.mark.deep
def test_qwen3_5_without_what_sees_images_is_that_of_its_text(copy):
    directory = copy("qwen3_5_moe")
    whole = json.loads((directory / "config.json").read_text())
    config = {**whole["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.visual.")
    }
    tensors["mtp.fc.weight"] = tensors["lm_head.weight"]  # of the prediction layer
    save_file(tensors, directory / "model.safetensors")
    own, model = (jmoe.load(one, dtype="float32") for one in (directory, GOLDEN / "qwen3_5_moe"))
    assert own.config == replace(model.config, architecture="qwen3_5_moe_text")
    jax.tree.map(np.testing.assert_array_equal, own.params, model.params)
    jax.tree.map(np.testing.assert_array_equal, own.pool, model.pool)


def test_kimi_k25_is_kimi_k2_beside_what_sees_images(copy, caplog):
    directory = copy("deepseek_v3")
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"patch_size": 14}}
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    images = {
        f"{part}.weight": np.ones(3, np.float32) for part in ("vision_tower.a", "mm_projector.b")
    }
    save_file(tensors | images, path)
    caplog.set_level("INFO")
    own, model = (jmoe.load(one, dtype="float32") for one in (directory, GOLDEN / "deepseek_v3"))
    assert "2 tensors are not read: jmoe serves text alone" in caplog.text
    assert own.config == replace(model.config, architecture="kimi_k25")
    jax.tree.map(np.testing.assert_array_equal, own.params, model.params)
    jax.tree.map(np.testing.assert_array_equal, own.pool, model.pool)


@pytest.mark.deep
def test_mistral4_may_have_each_expert_by_itself(copy):
    directory = copy("mistral4")
    path, tensors = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        at, is_expert, what = name.partition(".experts.")
        if not is_expert:
            tensors[name] = tensor
        for number, one in enumerate(tensor if is_expert else ()):
            keys = ("gate", "up") if what == "gate_up_proj" else ("down",)
            for key, part in zip(keys, np.split(one, len(keys)), strict=True):
                tensors[f"{at}.experts.{number}.{key}_proj.weight"] = part
    save_file(tensors, path)
    own, model = (jmoe.load(one, dtype="float32") for one in (directory, GOLDEN / "mistral4"))
    jax.tree.map(np.testing.assert_array_equal, own.pool, model.pool)
    jax.tree.map(np.testing.assert_array_equal, own.params, model.params)


@pytest.mark.deep
def test_likelihoods_of_texts_equal_transformers():
    """Of the bundled model, whose tests/e2e/test_lm_eval.py compares with the same file."""
    model, told = jmoe.load("bundled", "float32"), []
    known = [json.loads(line) for line in (GOLDEN / "bundled_likelihoods.jsonl").open()]
    for one in known:
        context, whole = (
            model.tokenizer.encode(text, special_tokens=False)
            for text in (one["context"], one["context"] + one["text"])
        )
        if not context:
            context, whole = [0], [0, *whole]
        padded = np.zeros((1, -(-len(whole) // 128) * 128), np.int32)  # few shapes to compile
        padded[0, : len(whole)] = whole
        logits = np.asarray(jmoe.forward(model, padded), np.float64)[0, len(context) - 1 :]
        wanted = whole[len(context) :]
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        at = np.arange(len(wanted))
        greedy = bool((logits[at].argmax(-1) == wanted).all())
        told.append((logprobs[at, wanted].sum(), greedy))
    assert [greedy for _, greedy in told] == [one["greedy"] for one in known]
    off = np.array([value for value, _ in told]) - [one["logprob"] for one in known]
    assert np.abs(off).max() < 1e-3
    assert len(known) == 36


@pytest.mark.deep
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_batched_forms_equal_transformers_greedy(name):
    """What a GPU without the Mosaic kernels runs, forced here: prompts by products and by sums."""
    golden, out = np.load(GOLDEN / name / "golden.npz"), None
    model = jmoe.load(GOLDEN / name, dtype="float32")
    prompts, n = [row.tolist() for row in golden["tokens"]], golden["greedy"].shape[1]
    programs.cache_clear()  # traced for one form, a program would be taken for the other
    jax.clear_caches()
    try:
        with batched_only(), mock.patch.object(batched, "SUMMED", 1):
            out = jmoe.generate(model, prompts, n, stop_token_ids=(), page_size=4)
    finally:
        programs.cache_clear()
        jax.clear_caches()
    assert out.tokens == golden["greedy"].tolist()


@pytest.mark.sized(
    deep=[name for name in CASES if name != "qwen2_moe"],
    exhaustive=(
        "afmoe_types_yarn_tied",
        "deepseek_v2_scaled",
        "deepseek_v3_halves",
        "deepseek_v3_tied",
        "dots1_attention_bias_tied",
        "ernie4_5_moe_yarn_untied",
        "exaone_moe_pattern_yarn_tied",
        "glm4_moe_air",
        "glm4_moe_yarn_tied",
        "gpt_oss_types_tied",
        "granitemoe_attention_bias",
        "granitemoe_yarn",
        "granitemoehybrid_rope_biases",
        "hunyuan_v1_moe_attention_bias",
        "hy_v3_types_tied",
        "lfm2_moe_biases_untied",
        "mellum_yarn_tied",
        "mistral3_halves_tied",
        "minimax_m2_yarn_tied",
        "nemotron_h_mlp_biases",
        "olmoe",
        "olmoe_attention_bias_linear",
        "phimoe_attention_bias",
        "qwen2_moe_norm_topk",
        "qwen3_5_moe_types_tied",
        "qwen3_next_types_yarn_tied",
        "qwen2_moe_sparse_step_linear",
        "qwen3_moe_attention_bias",
        "mixtral_tied_llama3",
        "mixtral_top1_head_dim",
        "qwen2_moe_mlp_only_tied",
        "qwen2_moe_yarn",
        "qwen3_moe",
        "qwen3_moe_tied_no_head_dim",
    ),
)
def test_paged_generation_equals_transformers_greedy(case):
    name, model, golden = case
    prompts = [row.tolist() for row in golden["tokens"]]
    n = golden["greedy"].shape[1]
    chunk_size = 8 if name in CHUNKED else 256  # one of them: each is more programs to compile
    out = jmoe.generate(model, prompts, n, stop_token_ids=(), chunk_size=chunk_size, page_size=4)
    assert out.tokens == golden["greedy"].tolist()
    assert out.degraded_visits == [0, 0]
