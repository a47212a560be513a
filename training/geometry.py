"""Architectures of the models made here, as the `config.json` each is exported with."""

from typing import Any

from jmoe.config import ModelConfig, from_hf

EOS_ID = 0

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 192,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "qkv_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "bfloat16",
}

BUNDLED: ModelConfig = from_hf(HF_CONFIG)

GEOMETRIES: dict[str, dict[str, Any]] = {
    "bundled": HF_CONFIG,
    "second": {  # to see whether what is found on the bundled model is found on another
        **HF_CONFIG,
        "hidden_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 128,
    },
}
