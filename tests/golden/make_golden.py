"""Make the golden checkpoints and reference logits beside this file.

The oracle is Hugging Face transformers, which the project itself never depends on, so this is run
by hand in an environment of its own (Python 3.11):

    pip install torch==2.13.0 transformers==5.23.0 numpy safetensors
    OMP_NUM_THREADS=1 python tests/golden/make_golden.py [case ...]

Every case becomes ``tests/golden/<case>/``: ``config.json``, the safetensors weights, and
``golden.npz`` with ``tokens`` int32 [2, L], ``logits`` float32 [2, L, V] and ``greedy`` int32
[2, 12]. Each saved directory is loaded back and must give the same logits.
"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4Config,
    Mistral4ForCausalLM,
    Mxfp4Config,
    logging,
)

ROOT = Path(__file__).resolve().parent
LENGTH, NEW_TOKENS = 19, 12
MIN_ROUTER_GAP, MIN_LOGIT_GAP, MIN_DISTINCT, MIN_ROPE_EFFECT = 0.005, 0.02, 5, 0.05
# Sigmoids saturate, and groups can tie: so wide a gap between their scores is never seen.
# Scores with a bias in the choice.
BIASED = (
    *("glm4_moe", "glm4_moe_lite", "solar_open", "deepseek_v3", "minimax_m2", "ernie4_5_moe"),
    *("dots1", "hy_v3", "lfm2_moe", "nemotron_h", "exaone_moe", "afmoe"),
)
MIN_SCORE_GAP = dict.fromkeys((*BIASED, "phimoe", "deepseek_v2", "mistral4"), 0.0005)
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


# Keys of the number of experts and of their width, where they are not Qwen's.
NAMES = {
    "phimoe": ("num_local_experts", "intermediate_size"),
    "nemotron_h": ("n_routed_experts", "moe_intermediate_size"),
    "granitemoe": ("num_local_experts", "intermediate_size"),
    "granitemoehybrid": ("num_local_experts", "intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size"),
    "glm4_moe_lite": ("n_routed_experts", "moe_intermediate_size"),
    "solar_open": ("n_routed_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "hunyuan_v1_moe": ("num_experts", "intermediate_size"),
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    "mistral3": ("n_routed_experts", "moe_intermediate_size"),
    "mistral4": ("n_routed_experts", "moe_intermediate_size"),
    "minimax_m2": ("num_local_experts", "intermediate_size"),
    "ernie4_5_moe": ("moe_num_experts", "moe_intermediate_size"),
    "dots1": ("n_routed_experts", "moe_intermediate_size"),
}


def case(
    model_type,
    sizes,
    experts,
    *,
    rope=None,
    hub=True,
    bf16=False,
    shard=None,
    mxfp4=False,
    vision=None,
    text_type=None,
    **config,
):
    """Describe one case.

    ``sizes`` is layers, hidden size, heads, key-value heads and vocabulary; ``experts`` is count,
    top-k, expert width and, where there are any, dense width and (Qwen2) shared width. ``hub``
    picks the spelling of the checkpoints on the hub over the newest one; ``shard`` is a shard size;
    ``mxfp4`` has experts in four bits; ``vision`` is the configuration of what sees images beside,
    and ``text_type`` the ``model_type`` of what reads text, where that has to be said.
    """
    layers, hidden, heads, kv_heads, vocab = sizes
    count, top_k, width, *others = experts
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    of_count, of_width = NAMES.get(model_type, ("num_experts", "moe_intermediate_size"))
    config |= {of_count: count, of_width: width}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        config.setdefault("max_window_layers", layers)
    names = ("intermediate_size", "shared_expert_intermediate_size")
    config |= dict(zip(names, others, strict=False))
    if rope is None or "full_attention" not in rope:
        rope = {"rope_type": "default", "rope_theta": 1e6} | (rope or {})
    of = rope.get("full_attention", rope)
    trained, factor = of.get("original_max_position_embeddings", 128), of.get("factor", 1)
    config |= {
        "num_experts_per_tok": top_k,
        "max_position_embeddings": int(trained * factor),
        "rope_parameters": rope,
    }
    spec = {"model_type": model_type, "config": config, "hub": hub, "bf16": bf16, "shard": shard}
    return spec | {"mxfp4": mxfp4, "vision": vision, "text_type": text_type}


def auto(config):
    """Return the class that makes and loads models of a configuration."""
    if isinstance(config, Mistral4Config):  # which transformers 5.24 has no class for by itself
        return Mistral4ForCausalLM
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


DELTA_TYPES = "qwen3_next", "qwen3_5_moe"
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 0.1,  # a head that reads next to nothing would be made as large as any
}
TEN_THOUSAND, FIVE_HUNDRED = {"rope_theta": 1e4}, {"rope_theta": 500.0}
LINEAR = {"type": "linear", "rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}
ALPHA = {
    "type": "dynamic",
    "rope_type": "dynamic",
    "alpha": 50.0,
    "beta_fast": 32,
    "factor": 1.0,
    "mscale": 1.0,
    "rope_theta": 100.0,
}
# So small a theta makes the ramp cross several dimensions.
YARN_BETAS = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 3.0,
    "rope_theta": 50.0,
    "beta_fast": 4.0,
}
YARN_BETAS |= {"beta_slow": 0.5, "attention_factor": 1.4, "original_max_position_embeddings": 64}
YARN_MSCALE = {
    "rope_type": "yarn",
    "factor": 6.0,
    "rope_theta": 100.0,
    "beta_fast": 5.0,
    "mscale": 1.3,
}
YARN_MSCALE |= {"mscale_all_dim": 0.6, "truncate": False, "original_max_position_embeddings": 48}
YARN_EXACT = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 150.0,
    "beta_fast": 8.0,
    "truncate": False,
}
YARN_EXACT |= {"original_max_position_embeddings": 32}
YARN_SCORES = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 50.0,
    "beta_fast": 8.0,
    "mscale": 1.0,
}
YARN_SCORES |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": 32}
# So few positions that queries grow within the golden tokens.
YARN_QUERIES = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 16.0,
    "rope_theta": 50.0,
    "beta_fast": 0.5,
    "beta_slow": 0.05,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 5,
}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
TIED, NORM = {"tie_word_embeddings": True}, {"norm_topk_prob": True}
PLAIN_VISION = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
PLAIN_VISION |= {"patch_size": 2, "num_position_embeddings": 4}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4}
PIXTRAL |= {"num_hidden_layers": 1, "intermediate_size": 8, "patch_size": 2, "image_size": 4}
QWEN_VISION = {**PLAIN_VISION, "deepstack_visual_indexes": [0]}
SPARSE_STEP, MLP_ONLY = {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}

GLM_NORM = {"use_qk_norm": True, "attention_bias": True}
YARN_PARTIAL = {**YARN_BETAS, "partial_rotary_factor": 0.25}

qwen2, qwen3, mixtral = (partial(case, name) for name in ("qwen2_moe", "qwen3_moe", "mixtral"))
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 48,
    "short_factor": [1.0, 1.2, 1.7, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
}
PHI_BIASES = {"attention_bias": True, "lm_head_bias": True}
phi = partial(case, "phimoe", eos_token_id=2, router_jitter_noise=0.3)
MULTIPLIERS = {"embedding_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 1.7}
granite = partial(case, "granitemoe", **MULTIPLIERS)
hybrid = partial(
    case, "granitemoehybrid", **MULTIPLIERS, residual_multiplier=0.8, rms_norm_eps=0.01
)
nemotron = partial(case, "nemotron_h", layer_norm_epsilon=0.01)
BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
olmoe = partial(case, "olmoe", eos_token_id=2)
deepseek2, deepseek3 = (
    partial(case, name, eos_token_id=2, **LATENT) for name in ("deepseek_v2", "deepseek_v3")
)
glm4_lite = partial(case, "glm4_moe_lite", eos_token_id=2, **LATENT)
mistral4, mistral3 = (
    partial(case, name, hub=False, eos_token_id=2, **LATENT) for name in ("mistral4", "mistral3")
)
solar = partial(case, "solar_open", eos_token_id=2)
mellum = partial(case, "mellum", eos_token_id=2)
hunyuan = partial(case, "hunyuan_v1_moe", eos_token_id=2)
exaone = partial(case, "exaone_moe", eos_token_id=2)
hy3 = partial(case, "hy_v3", eos_token_id=2)
afmoe = partial(case, "afmoe", eos_token_id=2)
minimax = partial(case, "minimax_m2", eos_token_id=2)
ernie = partial(case, "ernie4_5_moe", eos_token_id=2)
dots = partial(case, "dots1", eos_token_id=2, n_shared_experts=2)
gpt_oss = partial(case, "gpt_oss", rope=YARN_EXACT, sliding_window=5, eos_token_id=2)
glm4 = partial(case, "glm4_moe", rope={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
CASES = {
    "qwen2_moe": qwen2([2, 32, 4, 4, 97], [7, 3, 19, 41, 29]),
    "qwen2_moe_norm_topk": qwen2(
        [2, 40, 4, 2, 83], [11, 3, 13, 41, 23], rope=TEN_THOUSAND, bf16=True, **NORM
    ),
    "qwen2_moe_sparse_step_linear": qwen2(
        [3, 36, 6, 3, 71], [7, 2, 17, 37, 15], rope=LINEAR, **SPARSE_STEP
    ),
    "qwen2_moe_mlp_only_tied": qwen2(
        [2, 42, 7, 1, 89], [7, 3, 15, 33, 21], rope=FIVE_HUNDRED, hub=False, **MLP_ONLY, **TIED
    ),
    "qwen2_moe_yarn": qwen2([2, 32, 2, 1, 67], [5, 2, 21, 31, 27], rope=YARN_BETAS),
    "qwen2_moe_window": qwen2(
        [3, 32, 4, 2, 91],
        [7, 3, 19, 41, 29],
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3_moe": qwen3([2, 36, 6, 3, 79], [9, 3, 11, 35], shard="60KB", head_dim=10, **NORM),
    "qwen3_moe_mixed_yarn": qwen3(
        [4, 24, 4, 2, 61], [7, 3, 13, 29], rope=YARN_MSCALE, hub=False, head_dim=16, **SPARSE_STEP
    ),
    "qwen3_moe_yarn": qwen3([2, 28, 4, 1, 73], [6, 2, 17, 31], rope=YARN, head_dim=12, **NORM),
    "qwen3_moe_tied_no_head_dim": qwen3(
        [2, 42, 7, 1, 95], [7, 3, 13, 31], rope=FIVE_HUNDRED, **NORM, **TIED
    ),
    "qwen3_moe_attention_bias": qwen3(
        [2, 32, 4, 2, 87], [6, 2, 15, 27], head_dim=8, attention_bias=True, **NORM
    ),
    "qwen3_vl_moe": case(
        "qwen3_vl_moe",
        [2, 36, 6, 3, 79],
        [9, 3, 11, 35],
        rope={"mrope_interleaved": True, "mrope_section": [2, 2, 1]},
        head_dim=10,
        vision={**QWEN_VISION, "out_hidden_size": 36},
    ),
    "qwen3_vl_moe_tied": case(
        "qwen3_vl_moe",
        [3, 28, 4, 1, 73],
        [7, 2, 13, 31],
        rope={**TEN_THOUSAND, "mrope_interleaved": True, "mrope_section": [3, 2, 1]},
        hub=False,
        bf16=True,
        head_dim=12,
        vision={**QWEN_VISION, "out_hidden_size": 28},
        mlp_only_layers=[1],
        **TIED,
    ),
    "qwen3_next": case(
        "qwen3_next",
        [3, 36, 6, 3, 79],
        [9, 3, 11, 35, 13],
        rope={"partial_rotary_factor": 0.25, "rope_theta": 1e4},
        head_dim=16,
        full_attention_interval=3,
        **DELTA,
    ),
    "qwen3_next_types_yarn_tied": case(
        "qwen3_next",
        [4, 28, 4, 1, 71],
        [7, 2, 13, 31, 17],
        rope={**YARN, "partial_rotary_factor": 0.5},
        hub=False,
        bf16=True,
        head_dim=16,
        layer_types=["full_attention", *2 * ["linear_attention"], "full_attention"],
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        rms_norm_eps=0.1,
        **TIED,
    ),
    "qwen3_5_moe": case(
        "qwen3_5_moe",
        [4, 36, 6, 2, 75],
        [9, 3, 11],
        rope={"partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [1, 1, 0]},
        hub=False,
        head_dim=16,
        shared_expert_intermediate_size=13,
        vision={**PLAIN_VISION, "out_hidden_size": 36},
        **DELTA,
    ),
    "qwen3_5_moe_types_tied": case(
        "qwen3_5_moe",
        [3, 28, 4, 4, 73],
        [7, 2, 13],
        rope={**TEN_THOUSAND, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
        hub=False,
        bf16=True,
        head_dim=16,
        shared_expert_intermediate_size=17,
        layer_types=[*2 * ["linear_attention"], "full_attention"],
        vision={**PLAIN_VISION, "out_hidden_size": 28},
        **{**DELTA, "linear_num_value_heads": 2},
        **TIED,
    ),
    "lfm2_moe": case(
        "lfm2_moe",
        [4, 36, 6, 3, 79],
        [9, 3, 11, 35],
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_dense_layers=1,
        routed_scaling_factor=1.3,
    ),
    "lfm2_moe_biases_untied": case(
        "lfm2_moe",
        [3, 28, 7, 1, 73],
        [7, 2, 13, 31],
        rope=YARN,
        hub=False,
        bf16=True,
        layer_types=["full_attention", "conv", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        num_dense_layers=0,
        norm_topk_prob=False,
        use_expert_bias=False,
        tie_word_embeddings=False,
    ),
    "mixtral": mixtral([2, 32, 4, 2, 91], [5, 2, 25]),
    "mixtral_tied_llama3": mixtral([2, 48, 4, 4, 77], [5, 2, 15], rope=LLAMA3, **TIED),
    "mixtral_window": mixtral([2, 36, 6, 3, 85], [5, 2, 19], sliding_window=6),
    "mixtral_top1_head_dim": mixtral(
        [3, 30, 5, 5, 69], [3, 1, 23], rope=TEN_THOUSAND, hub=False, bf16=True, head_dim=8
    ),
    "glm4_moe": glm4(
        [3, 30, 6, 3, 71],
        [9, 3, 11, 25],
        head_dim=12,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        **GLM_NORM,
    ),
    "glm4_moe_air": glm4(
        [3, 28, 5, 1, 67],
        [7, 2, 13, 23],
        hub=False,
        head_dim=8,
        attention_bias=True,
        first_k_dense_replace=2,
        n_shared_experts=2,
    ),
    "glm4_moe_yarn_tied": glm4(
        [2, 36, 3, 3, 59],
        [5, 3, 9],
        rope=YARN_PARTIAL,
        head_dim=24,
        first_k_dense_replace=0,
        intermediate_size=21,
        norm_topk_prob=False,
        use_qk_norm=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        **TIED,
    ),
    "olmoe": olmoe([2, 40, 5, 5, 73], [9, 3, 11], rope=TEN_THOUSAND),
    "olmoe_clip_gqa": olmoe(
        [3, 36, 6, 2, 61], [7, 2, 13], hub=False, rope=FIVE_HUNDRED, clip_qkv=0.8, **NORM, **TIED
    ),
    "olmoe_attention_bias_linear": olmoe(
        [2, 48, 4, 4, 67], [5, 2, 11], rope=LINEAR, bf16=True, attention_bias=True
    ),
    "gpt_oss": gpt_oss([2, 36, 6, 3, 79], [7, 3, 11], head_dim=10),
    "gpt_oss_types_tied": gpt_oss(
        [3, 28, 5, 1, 73],
        [5, 2, 13],
        rope=TEN_THOUSAND,
        hub=False,
        bf16=True,
        head_dim=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=3,
        swiglu_alpha=1.3,
        swiglu_limit=0.9,
        attention_bias=False,
        **TIED,
    ),
    "deepseek_v2": deepseek2(
        [3, 30, 5, 5, 71],
        [7, 3, 11, 25],
        rope=YARN_SCORES,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
    ),
    "deepseek_v2_groups_tied": deepseek2(
        [2, 36, 3, 3, 73],
        [9, 3, 9, 21],
        hub=False,
        rope=TEN_THOUSAND,
        q_lora_rank=10,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        **TIED,
    ),
    "deepseek_v2_scaled": deepseek2(
        [2, 40, 4, 4, 61],
        [5, 2, 13],
        bf16=True,
        q_lora_rank=8,
        n_shared_experts=1,
        routed_scaling_factor=2.0,
    ),
    "deepseek_v3": deepseek3(
        [3, 30, 6, 6, 73],
        [8, 3, 11, 25],
        rope=YARN_SCORES,
        q_lora_rank=10,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "deepseek_v3_halves": deepseek3(
        [3, 35, 5, 5, 67],
        [6, 2, 9, 23],
        hub=False,
        rope=TEN_THOUSAND,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        rope_interleave=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.3,
    ),
    "deepseek_v3_tied": deepseek3(
        [2, 36, 3, 3, 61],
        [9, 3, 9],
        bf16=True,
        q_lora_rank=14,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=0,
        n_shared_experts=2,
        num_nextn_predict_layers=0,
        **TIED,
    ),
    "glm4_moe_lite": glm4_lite([3, 30, 5, 5, 71], [8, 3, 11, 25], q_lora_rank=10),
    "glm4_moe_lite_types_tied": glm4_lite(
        [3, 35, 3, 3, 67],
        [9, 2, 9, 23],
        hub=False,
        bf16=True,
        rope=YARN_SCORES,
        q_lora_rank=None,
        mlp_layer_types=["sparse", "dense", "sparse"],
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        rope_interleave=False,
        **TIED,
    ),
    "mistral4": mistral4(
        [3, 30, 6, 6, 73],
        [9, 3, 11, 25],
        rope=YARN_QUERIES,
        q_lora_rank=10,
        first_k_dense_replace=1,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "mistral3_halves_tied": mistral3(
        [2, 36, 3, 3, 67],
        [7, 2, 9],
        bf16=True,
        rope={**YARN_QUERIES, "mscale_all_dim": 0.6, "original_max_position_embeddings": 4},
        text_type="mistral4",
        vision=PIXTRAL,
        q_lora_rank=None,
        n_shared_experts=2,
        norm_topk_prob=False,
        rope_interleave=False,
        **TIED,
    ),
    "solar_open": solar(
        [2, 30, 6, 3, 73], [9, 3, 11], head_dim=8, n_group=3, topk_group=2, n_shared_experts=2
    ),
    "solar_open_bias_yarn_tied": solar(
        [3, 28, 5, 1, 61],
        [7, 2, 13],
        hub=False,
        rope=YARN_BETAS,
        head_dim=8,
        attention_bias=True,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        **TIED,
    ),
    "mellum": mellum(
        [3, 30, 6, 3, 73],
        [9, 3, 11, 25],
        hub=False,
        rope={
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
    ),
    "mellum_yarn_tied": mellum(
        [4, 28, 5, 1, 61],
        [7, 2, 13, 21],
        hub=False,
        bf16=True,
        rope={
            "full_attention": YARN_BETAS,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        head_dim=10,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=False,
        num_mtp_layers=1,
        sliding_window=4,
        **TIED,
    ),
    "hunyuan_v1_moe": hunyuan([2, 30, 6, 3, 73], [9, 3, 11], rope=ALPHA, head_dim=8, **TIED),
    "hunyuan_v1_moe_attention_bias": hunyuan(
        [3, 28, 5, 1, 61],
        [7, 2, 13],
        hub=False,
        bf16=True,
        rope=YARN_BETAS,
        head_dim=10,
        attention_bias=True,
    ),
    "hy_v3": hy3([3, 30, 6, 3, 73], [9, 3, 11, 25], head_dim=8, num_shared_experts=2),
    "hy_v3_types_tied": hy3(
        [3, 28, 5, 1, 61],
        [7, 2, 13, 21],
        hub=False,
        bf16=True,
        rope=YARN_BETAS,
        head_dim=10,
        attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
        router_scaling_factor=1.3,
        **TIED,
    ),
    "exaone_moe": exaone(
        [3, 30, 6, 3, 73],
        [9, 3, 11, 25],
        rope=TEN_THOUSAND,
        head_dim=8,
        n_group=3,
        topk_group=2,
        num_shared_experts=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
        sliding_window_pattern="LGL",
    ),
    "exaone_moe_pattern_yarn_tied": exaone(
        [4, 28, 5, 1, 61],
        [7, 2, 13, 21],
        hub=False,
        bf16=True,
        rope=YARN_BETAS,
        head_dim=10,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=False,
        routed_scaling_factor=1.3,
        sliding_window=4,
        sliding_window_pattern=2,
        **TIED,
    ),
    "afmoe": afmoe(
        [3, 30, 6, 3, 73],
        [9, 3, 11, 25],
        rope=TEN_THOUSAND,
        head_dim=8,
        global_attn_every_n_layers=2,
        sliding_window=5,
        mup_enabled=True,
        route_scale=1.7,
    ),
    "afmoe_types_yarn_tied": afmoe(
        [3, 28, 5, 1, 61],
        [7, 2, 13, 21],
        hub=False,
        bf16=True,
        rope=YARN_BETAS,
        head_dim=10,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_dense_layers=0,
        num_shared_experts=1,
        sliding_window=4,
        **TIED,
    ),
    "minimax_m2": minimax(
        [2, 36, 6, 3, 73],
        [9, 3, 13],
        rope={"rope_theta": 1e4, "partial_rotary_factor": 0.6},
        head_dim=10,
    ),
    "minimax_m2_yarn_tied": minimax(
        [3, 28, 5, 1, 61],
        [6, 2, 9],
        rope=YARN_PARTIAL,
        hub=False,
        bf16=True,
        head_dim=24,
        **TIED,
    ),
    "ernie4_5_moe": ernie([3, 40, 5, 1, 73], [9, 3, 11, 25], moe_k=3, num_nextn_predict_layers=1),
    "ernie4_5_moe_yarn_untied": ernie(
        [4, 36, 6, 3, 61],
        [7, 2, 9, 21],
        rope=YARN_BETAS,
        hub=False,
        bf16=True,
        head_dim=10,
        moe_k=2,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        moe_num_shared_experts=0,
        tie_word_embeddings=False,
    ),
    "dots1": dots(
        [3, 40, 4, 2, 73],
        [9, 3, 11, 25],
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        sliding_window=5,
        max_window_layers=2,
        **NORM,
    ),
    "dots1_attention_bias_tied": dots(
        [2, 36, 3, 3, 61],
        [7, 2, 9, 21],
        rope=YARN_BETAS,
        hub=False,
        bf16=True,
        head_dim=10,
        attention_bias=True,
        **TIED,
    ),
    "gpt_oss_mxfp4": gpt_oss([2, 96, 3, 3, 61], [3, 2, 32], head_dim=12, bf16=True, mxfp4=True),
    "phimoe": phi([2, 32, 4, 2, 73], [5, 2, 23], rope=LONGROPE, hub=False, **PHI_BIASES),
    "phimoe_window_tied": phi(
        [2, 36, 3, 3, 71],
        [7, 2, 11],
        rope=TEN_THOUSAND,
        sliding_window=9,
        lm_head_bias=True,
        **TIED,
    ),
    "phimoe_attention_bias": phi(
        [3, 40, 5, 1, 61], [9, 2, 15], hub=False, bf16=True, attention_bias=True
    ),
    "granitemoe": granite(
        [2, 42, 7, 1, 83], [7, 3, 11], rope=TEN_THOUSAND, residual_multiplier=1.3, **TIED
    ),
    "granitemoe_attention_bias": granite(
        [3, 36, 6, 3, 61],
        [5, 2, 13],
        hub=False,
        bf16=True,
        attention_bias=True,
        residual_multiplier=0.8,
    ),
    "granitemoehybrid": hybrid(
        [4, 36, 6, 3, 75],
        [9, 3, 11],
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        shared_intermediate_size=13,
        position_embedding_type=None,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=8,
        **TIED,
    ),
    "granitemoehybrid_rope_biases": hybrid(
        [3, 28, 7, 1, 73],
        [7, 2, 13],
        rope=YARN,
        hub=False,
        bf16=True,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        shared_intermediate_size=17,
        position_embedding_type="rope",
        mamba_expand=3,
        mamba_n_heads=4,
        mamba_d_state=6,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        time_step_limit=[0.2, 1.1],
    ),
    "nemotron_h": nemotron(
        [5, 36, 6, 3, 74],
        [9, 3, 11],
        layers_block_type=[BLOCKS[letter] for letter in "MEM*E"],
        head_dim=10,
        mamba_num_heads=4,
        mamba_head_dim=14,
        n_groups=2,
        ssm_state_size=8,
        conv_kernel=4,
        moe_shared_expert_intermediate_size=13,
        routed_scaling_factor=2.5,
    ),
    "nemotron_h_mlp_biases": nemotron(
        [9, 28, 7, 1, 73],
        [10, 2, 15, 19],
        hub=False,
        bf16=True,
        layers_block_type=[BLOCKS[letter] for letter in "*-ME*M-ME"],
        head_dim=8,
        mamba_num_heads=6,
        mamba_head_dim=10,
        n_groups=3,
        ssm_state_size=7,
        conv_kernel=3,
        use_conv_bias=False,
        use_bias=True,
        moe_shared_expert_intermediate_size=17,
        routed_scaling_factor=1.5,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
    ),
    "granitemoe_yarn": granite(
        [2, 40, 4, 2, 71], [9, 4, 7], rope=YARN_BETAS, residual_multiplier=0.6
    ),
}


@torch.no_grad()
def build(spec, seed):
    """Return the case's model in float32, every parameter drawn afresh.

    transformers would leave norms at one and biases at zero, where a mistake in them cannot show,
    and its 0.02 makes routers and logits near ties.
    """
    own = json.loads(json.dumps(spec["config"]))
    if spec["vision"]:
        own = {"text_config": own, "vision_config": dict(spec["vision"])}
        if spec["text_type"]:
            own["text_config"]["model_type"] = spec["text_type"]
        own["tie_word_embeddings"] = spec["config"].get("tie_word_embeddings", False)
    config = AutoConfig.for_model(spec["model_type"], **own)
    of = auto(config)
    make_it = of._from_config if of is Mistral4ForCausalLM else of.from_config
    model = make_it(config, **EAGER).float().eval()
    generator = torch.Generator().manual_seed(seed)
    ends = "e_score_correction_bias", "feed_forward.expert_bias"
    biases = ((n, b) for n, b in model.named_buffers() if n.endswith(ends))
    for name, parameter in (*model.named_parameters(), *biases):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and not name.endswith("bias"):
            centred = spec["model_type"] in DELTA_TYPES and "linear_attn" not in name
            value = (not centred) + 0.2 * noise
        elif name.endswith("sinks"):
            value = 2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif spec["mxfp4"] and "experts" in name:
            value = dequantized(*packed(name, parameter.shape, seed))
        elif "embed" in name:
            value = 0.4 * noise
        else:
            routes = name.endswith((".gate.weight", ".router.weight"))
            gain = 2.5 if routes or "lm_head" in name else 1.5
            fan_in = parameter.shape[
                -2 if "experts" in name and spec["model_type"] == "gpt_oss" else -1
            ]
            value = gain / fan_in**0.5 * noise
        parameter.copy_(value.bfloat16().float() if spec["bf16"] else value)
    return model


def packed(name, shape, seed):
    """Draw an expert matrix [m, in, out] in MXFP4: blocks [m, out, in / 32, 16] and scales [m, out,
    in / 32], both uint8.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    experts, k, columns = shape
    blocks = rng.integers(0, 256, (experts, columns, k // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(121, 124, (experts, columns, k // 32), dtype=np.uint8)


def dequantized(blocks, scales):
    """Return the float32 matrix of blocks and scales, by the format's definition (OCP MX 1.0)."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, codes & 1
    size = np.where(exponent, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0), 0.5 * mantissa)
    values = np.where(sign, -size, size) * 2.0 ** (scales[..., None] - 127.0)
    values = values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return torch.from_numpy(values.astype(np.float32))


@torch.no_grad()
def forward(model, tokens, **options):
    """Return the output of one full forward pass, without a cache."""
    return model(input_ids=torch.as_tensor(tokens).long(), use_cache=False, **options)


def gap(values, k):
    """Return the smallest distance between the k-th and the next largest value of any row."""
    top = torch.topk(values.flatten(0, -2), k + 1).values
    return float((top[:, k - 1] - top[:, k]).min())


def choice_gap(model, logits):
    """Return how far the routers' choices are from a tie."""
    config = model.config.get_text_config()
    if config.model_type == "phimoe":
        gaps, left = [], logits
        for _ in range(2):
            most, chosen = left.max(-1, keepdim=True)
            far = (most - logits) / logits.abs().clamp(min=most)
            far = far.masked_fill(left.isinf(), torch.inf)
            gaps += [gap(left, 1), float((far - 2 * config.router_jitter_noise).abs().min())]
            left = left.scatter(-1, chosen, -torch.inf)
        return min(gaps)
    best = {"deepseek_v2": 1, "mistral4": 2}.get(config.model_type)
    if best and config.n_group and config.n_group > 1:
        scores = logits.softmax(-1).flatten(0, -2)
        groups = scores.unflatten(-1, (config.n_group, -1))
        worth = groups.topk(best).values.sum(-1)
        least = worth.topk(config.topk_group).values[..., -1:]
        allowed = groups.masked_fill((worth < least)[..., None], 0.0).flatten(-2)
        return min(gap(worth, config.topk_group), gap(allowed, config.num_experts_per_tok))
    if config.model_type not in BIASED:
        return gap(logits, config.num_experts_per_tok)
    names = "mlp", "feed_forward", "mixer"
    blocks = (
        next(getattr(layer, name) for name in names if hasattr(layer, name))
        for layer in model.model.layers
    )
    at = [block for block in blocks if hasattr(block, "gate") or hasattr(block, "router")]
    n_group, topk_group = (getattr(config, key, 1) for key in ("n_group", "topk_group"))
    gaps = []
    for block, own in zip(at, logits, strict=True):
        biases = [b for n, b in block.state_dict().items() if n.endswith(("n_bias", "t_bias"))]
        [bias] = biases or [0.0]
        scores = own.softmax(-1) if config.model_type == "ernie4_5_moe" else own.sigmoid()
        scores = scores + bias
        groups = scores.unflatten(-1, (n_group, -1))
        worth = groups.topk(2).values.sum(-1)
        if topk_group < n_group:
            gaps.append(gap(worth, topk_group))
        least = worth.topk(topk_group).values[..., -1:]
        allowed = groups.masked_fill((worth < least)[..., None], -torch.inf).flatten(-2)
        gaps.append(gap(allowed, config.num_experts_per_tok))
    return min(gaps)


def make_golden(model, seed):
    """Return the arrays to store, and how far routing and greedy choices are from a tie."""
    vocab = model.config.get_text_config().vocab_size
    tokens = np.random.default_rng(seed).integers(0, vocab, (2, LENGTH), dtype=np.int32)
    sequence = tokens
    for _ in range(NEW_TOKENS):
        last = forward(model, sequence).logits[:, -1]
        sequence = np.concatenate([sequence, last.argmax(-1, keepdim=True).int().numpy()], axis=1)
    final = routed = forward(model, sequence, output_router_logits=True)
    if "router_logits" not in final:  # what sees images does not pass them on
        routed = forward(model.model.language_model, sequence, output_router_logits=True)
    gaps = (
        choice_gap(model, torch.stack(routed.router_logits)),
        gap(final.logits[:, LENGTH - 1 : -1], 1),
    )
    logits = forward(model, tokens).logits.numpy()
    return {"tokens": tokens, "logits": logits, "greedy": sequence[:, LENGTH:]}, gaps


def rope_effect(spec, model, golden):
    """Return how much the logits change when the case's RoPE scaling is taken out."""

    def unscaled(of):
        kept = {key: of[key] for key in ("rope_theta", "partial_rotary_factor") if key in of}
        if "llama_4_scaling_beta" in of:  # is of queries, whose model has no `default`
            own = "llama_4_scaling_beta", "original_max_position_embeddings"
            kept |= {"factor": 1.0, **{key: of[key] for key in own}}
            return {"rope_type": "linear", **kept}
        return {"rope_type": "default", **kept}

    rope = spec["config"]["rope_parameters"]
    if "full_attention" in rope:
        rope = {kind: unscaled(of) for kind, of in rope.items()}
    else:
        rope = unscaled(rope)
    plain = build(spec | {"config": spec["config"] | {"rope_parameters": rope}}, 0)
    plain.load_state_dict(model.state_dict())
    return float(np.abs(forward(plain, golden["tokens"]).logits.numpy() - golden["logits"]).max())


def spell_like_hub(path):
    """Rewrite a config.json from the newest spelling to that of the checkpoints on the hub."""
    whole = json.loads(path.read_text())
    config = whole.get("text_config", whole)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        factor = rope.pop("partial_rotary_factor")
        if config["model_type"] == "minimax_m2":
            config["rotary_dim"] = round(factor * config["head_dim"])
        else:
            config["partial_rotary_factor"] = factor
    if "type" in rope:  # the oldest spelling names the kind of scaling `type`
        rope.pop("rope_type")
    config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    whole["torch_dtype"] = whole.pop("dtype")
    if config["model_type"] == "qwen3_next":
        config["full_attention_interval"] = 1 + config["layer_types"].index("full_attention")
    if config["model_type"] == "granitemoehybrid":
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [older[kind] for kind in config["layer_types"]]
        config["position_embedding_type"] = "nope"
    if config["model_type"] == "nemotron_h":
        kinds, letters = (
            config.pop("layers_block_type"),
            {kind: one for one, kind in BLOCKS.items()},
        )
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
    if config["model_type"] == "lfm2_moe":
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    for name in ("layer_types", "qkv_bias"):
        if config["model_type"] not in ("gpt_oss", "lfm2_moe", "granitemoehybrid", "exaone_moe"):
            config.pop(name, None)
    if config.get("head_dim", 0) is None:
        del config["head_dim"]
    if config["model_type"].startswith("qwen") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config.get("sliding_window") == 0:  # the hub keeps a size there, switched off
        config["sliding_window"] = config["max_position_embeddings"]
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def pack(directory, model, seed):
    """Replace the experts' matrices of a saved case by what they were dequantized from."""
    path, found = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if "experts" in name and not name.endswith("bias"):
            drawn = packed(name, tensor.shape, seed)
            torch.testing.assert_close(dequantized(*drawn), tensor.float(), rtol=0, atol=0)
            for kind, part in zip(("blocks", "scales"), drawn, strict=True):
                found[f"{name}_{kind}"] = torch.from_numpy(part)
        else:
            found[name] = tensor
    save_file(found, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "modules_to_not_convert": [*skipped, "lm_head"],
        "quant_method": "mxfp4",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def lay_out(directory):
    """Turn the experts' matrices of a saved case as the checkpoints on the hub have them: [m, in,
    out].
    """
    path = directory / "model.safetensors"
    found = load_file(path)
    for name in found:
        if "mlp.experts." in name:
            found[name] = found[name].transpose(1, 2).contiguous()
    save_file(found, path, metadata={"format": "pt"})


def join_experts(directory):
    """Join the experts of a saved case as checkpoints on the hub have them: [m, out, in]."""
    path = directory / "model.safetensors"
    found, experts = load_file(path), {}
    for name in sorted(
        found, key=lambda name: [int(p) if p.isdecimal() else 0 for p in name.split(".")]
    ):
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            projection = rest.split(".")[1]
            experts.setdefault(layer, {}).setdefault(projection, []).append(found.pop(name))
    for layer, of in experts.items():
        gate, up, down = (torch.stack(of[f"{key}_proj"]) for key in ("gate", "up", "down"))
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{layer}.experts.down_proj"] = down
    save_file(found, path, metadata={"format": "pt"})


def options(directory):
    """Return how a saved case is loaded: in float32, with eager attention and experts."""
    config = json.loads((directory / "config.json").read_text())
    own = {"dtype": torch.float32, "output_loading_info": True, **EAGER}
    if "quantization_config" in config:
        own["quantization_config"] = Mxfp4Config(dequantize=True)
    return own


def save(spec, model, golden, directory, seed):
    """Write the checkpoint and its golden arrays."""
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16 if spec["bf16"] else torch.float32)
    model.save_pretrained(directory, max_shard_size=spec["shard"] or "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    if spec["hub"]:
        spell_like_hub(directory / "config.json")
        if spec["model_type"] == "qwen3_vl_moe":
            lay_out(directory)
    if directory.name == "qwen3_5_moe":
        join_experts(directory)
    if spec["mxfp4"]:
        pack(directory, model, seed)
    np.savez(directory / "golden.npz", **golden)


def check(directory):
    """Load a saved case and assert that it gives the logits and the tokens stored beside it."""
    of = auto(AutoConfig.from_pretrained(directory))
    model, info = of.from_pretrained(directory, **options(directory))
    model = model.float()  # MXFP4 is dequantized to bfloat16, which holds it
    assert not any(info.values()), info
    golden = np.load(directory / "golden.npz")
    logits = forward(model.eval(), golden["tokens"]).logits.numpy()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-6)
    full = np.concatenate([golden["tokens"], golden["greedy"]], axis=1)
    best = forward(model, full).logits.argmax(-1).numpy()
    np.testing.assert_array_equal(best[:, LENGTH - 1 : -1], golden["greedy"])


def make(name):
    """Make one case with the first seed far from ties; return its row of the table."""
    spec, directory = CASES[name], ROOT / name
    least = MIN_SCORE_GAP.get(spec["model_type"], MIN_ROUTER_GAP)
    for seed in range(1000):
        model = build(spec, seed)
        golden, (router_gap, logit_gap) = make_golden(model, seed)
        varied = min(len(set(row)) for row in golden["greedy"].tolist()) >= MIN_DISTINCT
        if varied and router_gap >= least and logit_gap >= MIN_LOGIT_GAP:
            break
    else:
        raise RuntimeError(f"no seed gives {name} varied tokens away from ties")
    rope = spec["config"]["rope_parameters"]
    scaled = rope.get("full_attention", rope)["rope_type"] != "default"
    effect = rope_effect(spec, model, golden) if scaled else None
    assert effect is None or effect > MIN_ROPE_EFFECT, (name, effect)
    parameters = sum(x.numel() for x in model.parameters())
    save(spec, model, golden, directory, seed)
    check(directory)
    size = sum(x.stat().st_size for x in directory.iterdir()) / 1000
    spelling, dtype = "hub" if spec["hub"] else "newest", "bf16" if spec["bf16"] else "f32"
    changed = f"{effect:.2f}" if scaled else "-"
    row = (name, spelling, dtype, seed, parameters, f"{size:.0f}", f"{router_gap:.4f}")
    return (*row, f"{logit_gap:.3f}", changed)


def main():
    """Make the cases named on the command line, or all of them, and print the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        print("|", " | ".join(map(str, make(name))), "|", flush=True)


if __name__ == "__main__":
    main()
