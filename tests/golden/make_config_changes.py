"""Make `config_changes.npz` of the golden cases: what transformers makes of a changed config.json.

Run in the environment of make_golden.py, after it:

    OMP_NUM_THREADS=1 python tests/golden/make_config_changes.py [case ...]

For every case each key of its config.json is changed to other values and taken out, and keys that
it lacks are put in, one at a time. The file holds

    changes   one JSON text: a list of [path, value, outcome]. `path` is a list of one key, or of
              more for a nested one; what describes images is left as it is. A key that is taken
              out has the value "<absent>".
              outcome: `same` (the golden logits), `error` (it does not load, tensors are
              missing, or logits are not finite), or the row of `logits`.
    logits    float32 [rows, 2, V]: of the last position of the golden tokens.
"""

import copy
import functools
import json
import logging
import operator
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from make_golden import CASES, ROOT, auto, forward, options
from transformers import AutoConfig
from transformers import logging as hf_logging

OF_IMAGES = "vision_config", "multimodal_projector_bias", "spatial_merge_size"
ABSENT, SAME, ERROR = "<absent>", "same", "error"
TOLERANCE = 1e-6

ROPES = [
    None,
    {"rope_theta": 300.0},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0},
    {"rope_type": "linear", "rope_theta": 300.0},
    {"type": "linear", "rope_theta": 300.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0},
    {
        "rope_type": "yarn",
        "rope_theta": 50.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]
# Other values of keys whose type does not suggest one.
OTHERS = {
    "architectures": [["LlamaForCausalLM"]],
    "attention_dropout": [0.5],
    "time_step_limit": [[0.0, 0.5], [0.4, 2.0], 3.0],
    "position_embedding_type": ["rope", "nope", None, "alibi"],
    "bos_token_id": [3],
    "clip_qkv": [0.5, 3.0],
    "decoder_sparse_step": [2, 1],
    "dtype": ["float16"],
    "eos_token_id": [5, [5, 6]],
    "head_dim": [8, 16],
    "hidden_act": ["gelu", "relu"],
    "long_factor": [[1.0, 3.0, 5.0, 9.0], [1.0]],
    "short_factor": [[1.0, 1.1, 1.5, 2.0], [1.0]],
    "full_attention": ROPES,
    "sliding_attention": ROPES,
    "layer_types": [["sliding_attention", "full_attention"]],
    "mlp_layer_types": [["dense", "dense", "sparse"], ["sparse"] * 3, ["dense", "sparse"]],
    "mlp_only_layers": [[1], [], [7]],
    "mrope_section": [[2, 2, 2], [6, 0, 0]],
    "modules_to_not_convert": [["lm_head"]],
    "hybrid_override_pattern": ["MEEEM", "MEM*-", "MMM*E", "EEM*E", "MEM*X"],
    "layers_block_type": [["full_attention", "moe"] * 3, ["full_attention", "mlp", "mamba", "moe"]],
    "mamba_hidden_act": ["gelu"],
    "mamba_ssm_cache_dtype": ["bfloat16"],
    "mlp_hidden_act": ["silu"],
    "mtp_layers_block_type": [["moe"]],
    "mtp_layer_types": [["full_attention"]],
    "mtp_mlp_layer_types": [["dense"]],
    "moe_layer_end_index": [-1, 1, 3, 9],
    "moe_topk": [[2, 2], [3, 3], [2, 1, 2], [3, 2], 2],
    "moe_layer_start_index": [0, 1, 2, 9],
    "model_type": ["qwen2_moe", "qwen3_moe", "mixtral", "llama"],
    "n_group": [1, 2],
    "num_key_value_heads": [1, 2, 4],
    "original_max_position_embeddings": [24],
    "pad_token_id": [7],
    "partial_rotary_factor": [0.25, 0.75, 1.0],
    "projector_hidden_act": ["relu"],
    "q_lora_rank": [7, None],
    "quant_method": ["fp8"],
    "quantization_config": [{"quant_method": "fp8"}],
    "rms_norm_eps": [1e-2],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}],
    "rope_theta": [300.0],
    "rope_type": ["default", "dynamic"],
    "rotary_dim": [4, 10],
    "sliding_window": [4, 4096],
    "sliding_window_pattern": [1, 2, 3, "LLLG", None],
    "topk_group": [1, 2],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "torch_dtype": ["float16"],
    "transformers_version": ["4.40.0"],
    "type": ["default", "dynamic"],
}
# Keys to put in where a case lacks them, as other checkpoints have them.
ADDED = {
    "attention_bias": [True, False],
    "chunk_size_feed_forward": [2],
    "head_dim": [8],
    "is_decoder": [True],
    "long_factor": [[1.0, 3.0, 5.0, 9.0], [1.0]],
    "short_factor": [[1.0, 1.1, 1.5, 2.0], [1.0]],
    "layer_types": [["sliding_attention", "full_attention"]],
    "logits_scaling": [2.0],
    "mlp_bias": [True],
    "mlp_only_layers": [[0]],
    "norm_topk_prob": [True, False],
    "num_experts": [3],
    "num_local_experts": [3],
    "original_max_position_embeddings": [24],
    "partial_rotary_factor": [0.5, 1.0],
    "qkv_bias": [True, False],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "rope_theta": [300.0],
    "router_jitter_noise": [0.5],
    "shared_expert_intermediate_size": [8, 0],
    "temperature": [0.5],
    "use_qk_norm": [True, False],
    "use_sliding_window": [True],
}
ADDED_FOR = {
    "deepseek_v2": {
        "aux_loss_alpha": [0.1],
        "ep_size": [2],
        "moe_layer_freq": [2],
        "n_group": [1],
        "scoring_func": ["softmax", "sigmoid"],
        "seq_aux": [True],
        "topk_group": [1, 2],
        "topk_method": ["greedy", "noaux_tc"],
    },
    "deepseek_v3": {
        "ep_size": [2],
        "moe_layer_freq": [2],
        "num_nextn_predict_layers": [1],
        "scoring_func": ["softmax", "sigmoid"],
        "topk_method": ["noaux_tc", "greedy"],
    },
    "glm4_moe": {
        "e_score_correction_bias": [False],
        "num_mtp_layers": [0],
        "scoring_func": ["softmax"],
        "topk_method": ["greedy"],
    },
    "gpt_oss": {
        "experts_per_token": [4],
        "initial_context_length": [4096],
        "num_experts": [4],
        "swiglu_alpha": [1.1],
        "swiglu_limit": [0.7],
    },
    "dots1": {
        "moe_layer_freq": [1, 2],
        "scoring_func": ["softmax", "sigmoid"],
        "sliding_window": [4],
        "topk_method": ["noaux_tc", "greedy"],
    },
    "ernie4_5_moe": {
        "moe_capacity": [[64, 64, 64]],
        "moe_gate": ["topk", "sinkhorn"],
        "moe_gate_act": ["softmax", "sigmoid"],
        "moe_use_aux_free": [True, False],
        "num_experts_per_tok": [1, 3],
        "num_nextn_predict_layers": [1],
        "use_rmsnorm": [True, False],
    },
    "hy_v3": {
        "enable_lm_head_fp32": [True],
        "eod_token_id": [3],
        "expert_hidden_dim": [11, 13],
        "first_k_dense_replace": [0, 1],
        "moe_router_enable_expert_bias": [True, False],
        "moe_router_use_sigmoid": [True, False],
        "num_nextn_predict_layers": [0, 1],
        "qk_norm": [True, False],
        "route_norm": [True, False],
        "sliding_window": [4],
        "use_grouped_mm": [True, False],
    },
    "afmoe": {
        "layer_types": [["sliding_attention"] * 4, ["full_attention"] * 4, ["full_attention"]],
        "load_balance_coeff": [0.1],
        "n_group": [1, 2],
        "num_expert_groups": [1, 2],
        "num_limited_groups": [1, 2],
        "route_norm": [True, False],
        "score_func": ["sigmoid", "softmax"],
        "topk_group": [1, 2],
        "use_grouped_mm": [True, False],
    },
    "hunyuan_v1_moe": {
        "attention_head_dim": [8, 10],
        "cla_share_factor": [2],
        "moe_drop_tokens": [False, True],
        "moe_intermediate_size": [11, 7, [11, 11], [13, 13, 13]],
        "moe_layer_num_skipped": [0, 1],
        "n_group": [False, 3],
        "norm_type": ["rms"],
        "num_experts_per_tok": [1, 2],
        "num_shared_expert": [1, 2, [1, 1], [2, 2]],
        "org_vocab_size": [50],
        "pool_type": ["last"],
        "routed_scaling_factor": [False, 1.0, 2.0],
        "use_cla": [False, True],
        "use_mixed_mlp_moe": [True, False],
    },
    "mistral4": {
        "n_group": [1],
        "num_nextn_predict_layers": [1],
        "scoring_func": ["softmax", "sigmoid"],
        "topk_method": ["greedy"],
    },
    "mellum": {
        "max_window_layers": [0, 1],
        "sliding_window": [4],
        "use_sliding_window": [True, False],
    },
    "exaone_moe": {
        "is_moe_layer": [[False, True, True, True], [True] * 4],
        "mtp_share_layers": [True],
        "num_nextn_predict_layers": [1],
        "scoring_func": ["softmax", "sigmoid"],
        "topk_method": ["noaux_tc", "greedy"],
    },
    "minimax_m2": {
        "attn_type_list": [[1, 1], [1, 0]],
        "mlp_intermediate_size": [64],
        "num_mtp_modules": [3],
        "qk_norm_type": ["per_layer", "per_head"],
        "rotary_dim": [4],
        "scoring_func": ["softmax", "sigmoid"],
        "shared_intermediate_size": [0, 8],
        "sliding_window": [4],
        "use_mtp": [True],
        "use_routing_bias": [True, False],
    },
    "phimoe": {"sliding_window": [4], "lm_head_bias": [True], "input_jitter_noise": [0.3]},
    "olmoe": {"clip_qkv": [0.5], "sliding_window": [4], "qk_norm": [False]},
}
ADDED_ROPE = {
    "attention_factor": [1.7],
    "beta_fast": [3.0],
    "beta_slow": [0.3],
    "factor": [3.0],
    "long_factor": [[1.0, 2.0]],
    "mscale": [0.5],
    "partial_rotary_factor": [0.5],
    "rope_theta": [300.0],
    "truncate": [False],
}


def others(key, value):
    """Return other values for a key."""
    if key in OTHERS:
        return [other for other in OTHERS[key] if other != value]
    if value is None:
        return [1]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1] if value > 1 else [value + 1]
    if isinstance(value, float):
        return [value * 1.5 if value else 0.5]
    raise ValueError(f"{key} is {value!r}; give OTHERS a value for it")


def changes(config):
    """Yield (path, other value) for every key, one at a time."""
    for key, value in config.items():
        if key in OF_IMAGES:
            continue
        if key == "text_config":
            yield from (([key, *path], other) for path, other in changes(value))
            continue
        yield [key], ABSENT
        if key == "model_type" and "text_config" in config:
            continue  # a model of the sizes that a class has by itself
        if isinstance(value, dict):
            for inner, old in value.items():
                yield [key, inner], ABSENT
                yield from (([key, inner], other) for other in others(inner, old))
            absent = (k for k in ADDED_ROPE if k not in value)
            yield from (([key, k], other) for k in absent for other in ADDED_ROPE[k])
        yield from (([key], other) for other in (OTHERS.get(key) or others(key, value)))
    added = ADDED | ADDED_FOR.get(config["model_type"], {})
    absent = (key for key in added if key not in config)
    yield from (([key], other) for key in absent for other in added[key])


def changed(config, path, value):
    """Return the config with one key changed or taken out."""
    config = copy.deepcopy(config)
    *outer, key = path
    inner = functools.reduce(operator.getitem, outer, config)
    if value == ABSENT:
        del inner[key]
    else:
        inner[key] = value
    return config


@torch.no_grad()
def last_logits(directory, tokens):
    """Return float32 [2, V], or None where transformers does not load all the model needs."""
    try:
        of = auto(AutoConfig.from_pretrained(directory))
        model, info = of.from_pretrained(directory, **options(directory))
        model = model.float()
        if info["missing_keys"] or info["mismatched_keys"] or info["error_msgs"]:
            return None
        logits = forward(model.eval(), tokens).logits[:, -1].numpy()
        return logits if np.isfinite(logits).all() else None
    except Exception:  # transformers refuses in many ways
        return None


def make(name):
    """Write one case's file; return how many changes there are and how they came out."""
    case = ROOT / name
    config = json.loads((case / "config.json").read_text())
    golden = np.load(case / "golden.npz")
    found, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for path in case.glob("model*"):
            shutil.copyfile(path, directory / path.name)
        for path, value in changes(config):
            (directory / "config.json").write_text(json.dumps(changed(config, path, value)))
            logits = last_logits(directory, golden["tokens"])
            if logits is None:
                outcome = ERROR
            elif np.abs(logits - golden["logits"][:, -1]).max() < TOLERANCE:
                outcome = SAME
            else:
                outcome = len(rows)
                rows.append(logits)
            found.append([path, value, outcome])
    np.savez_compressed(
        case / "config_changes.npz", changes=np.array(json.dumps(found)), logits=np.stack(rows)
    )
    counts = [sum(one[2] == outcome for one in found) for outcome in (SAME, ERROR)]
    return len(found), *counts, len(rows)


def main():
    """Make the cases named on the command line, or all of them, and print the counts."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        print("|", " | ".join(map(str, (name, *make(name)))), "|", flush=True)


if __name__ == "__main__":
    main()
