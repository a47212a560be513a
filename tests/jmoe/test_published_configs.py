"""Configurations of released checkpoints are read, and mean the models that were released."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_forward
import pytest

import jmoe
from jmoe.attention import CacheSizes, Latent, make_pages
from jmoe.config import ConfigError, RopeConfig, from_hf
from jmoe.int4 import Int4
from jmoe.model import project
from jmoe.random_model import random_model, random_params
from jmoe.rope import rotation
from pallas_kernels.kv_write import mosaic
from serving.cli.model_info import kv_bytes_per_token, num_parameters

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

PUBLISHED = Path(__file__).parents[1] / "published_configs"
# Parameters in all and active for a token, in 1e9, and positions; as the model cards say them.
CARDS = {
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7, 8192),
    "Qwen1.5-MoE-A2.7B-Chat": (14.3, 2.7, 32768),
    "Qwen2-57B-A14B": (57.4, 14, 131072),
    "Qwen2-57B-A14B-Instruct": (57.4, 14, 32768),
    "Qwen3-Next-80B-A3B-Instruct": (80, 3.9, 262144),
    "Qwen3-Coder-Next": (80, 3.9, 262144),
    "Qwen3.6-35B-A3B": (34.7, 3, 262144),
    "LFM2-8B-A1B": (8.3, 1.55, 128000),
    "Qwen3-30B-A3B": (30.5, 3.3, 40960),
    "Qwen3-30B-A3B-Base": (30.5, 3.3, 32768),
    "Qwen3-30B-A3B-Instruct-2507": (30.5, 3.3, 262144),
    "Qwen3-30B-A3B-Thinking-2507": (30.5, 3.3, 262144),
    "Qwen3-235B-A22B": (235, 22, 40960),
    "Qwen3-235B-A22B-Instruct-2507": (235, 22, 262144),
    "Qwen3-235B-A22B-Thinking-2507": (235, 22, 262144),
    "Qwen3-Coder-30B-A3B-Instruct": (30.5, 3.3, 262144),
    "Qwen3-Coder-480B-A35B-Instruct": (480, 35, 262144),
    "Qwen3-VL-30B-A3B-Instruct": (30.5, 3.3, 262144),  # but for what sees images
    "Qwen3-VL-235B-A22B-Thinking": (235, 22, 262144),
    "Mixtral-8x7B-v0.1": (46.7, 12.9, 32768),
    "Mixtral-8x7B-Instruct-v0.1": (46.7, 12.9, 32768),
    "Mixtral-8x22B-v0.1": (141, 39, 65536),
    "Mixtral-8x22B-Instruct-v0.1": (141, 39, 65536),
    "GLM-4.5": (355, 32, 131072),
    "GLM-4.5-Air": (106, 12, 131072),
    "GLM-4.7-Flash": (30, 3.6, 202752),
    "Solar-Open-100B": (102.6, 12, 131072),
    "Hunyuan-A13B-Instruct": (80, 13, 32768),
    "Hy3-preview": (295, 21, 262144),
    "Mellum2-12B-A2.5B-Instruct": (12.1, 2.5, 131072),
    "Trinity-Nano-Preview": (6.1, 1, 131072),
    "Trinity-Mini": (26, 3, 131072),
    "granite-3.0-3b-a800m-base": (3.3, 0.88, 4096),
    "granite-4.0-h-tiny": (6.9, 1.5, 131072),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2, 262144),
    "Phi-3.5-MoE-instruct": (41.9, 6.6, 4096),  # of 131,072: LongRoPE's short factors
    "OLMoE-1B-7B-0924": (6.9, 1.3, 4096),
    "DeepSeek-V2": (236, 21, 163840),
    "DeepSeek-V2-Lite": (15.7, 2.4, 163840),
    "DeepSeek-V3-bf16": (671, 37, 163840),
    "Kimi-K2-Instruct": (1026, 32, 131072),
    "Kimi-K2.5": (1026, 32, 262144),
    "K-EXAONE-236B-A23B": (236, 23, 262144),
    "Mistral-Small-4-119B-2603": (119, 6.5, 1048576),  # but for what sees images
    "ERNIE-4.5-21B-A3B-PT": (21.8, 3, 131072),
    "ERNIE-4.5-300B-A47B-PT": (300, 47, 131072),
    "dots.llm1.inst": (142, 14, 32768),
    "MiniMax-M2.5": (228.69, 10, 196608),
    "gpt-oss-20b": (20.9, 3.6, 131072),
    "gpt-oss-120b": (116.8, 5.1, 131072),
}
KV_BYTES = {  # of a position, in bfloat16
    "DeepSeek-V2-Lite": 31_104,
    "DeepSeek-V3-bf16": 70_272,
    "GLM-4.5-Air": 188_416,
    "GLM-4.7-Flash": 54_144,
    "Mistral-Small-4-119B-2603": 23_040,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 6_144,
    "Qwen3-30B-A3B": 98_304,
    "Qwen3-Next-80B-A3B-Instruct": 24_576,
    "gpt-oss-120b": 73_728,
}


def test_every_file_has_a_card():
    assert {path.stem for path in PUBLISHED.glob("*.json")} == CARDS.keys()


def test_deepseek_v3_is_read_in_eight_bits_as_it_is_published():
    config = json.loads((PUBLISHED / "DeepSeek-V3-bf16.json").read_text())
    fp8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    cfg = from_hf(config | {"quantization_config": fp8})
    assert cfg == replace(from_hf(config), fp8_block=(128, 128))


def test_kimi_k2_is_read_in_four_bits_as_its_thinking_models_are_published():
    config = json.loads((PUBLISHED / "Kimi-K2-Instruct.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None}
    weights |= {"strategy": "group", "group_size": 32, "observer": "minmax"}
    names = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    int4 = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [*names, r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    }
    cfg, packed = from_hf(config), Int4("compressed-tensors", 32, has_zeros=False)
    assert cfg.fp8_block == (128, 128)
    thinking = from_hf(config | {"quantization_config": int4})
    assert thinking == replace(cfg, fp8_block=(), int4=packed)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("Qwen3-VL-30B-A3B-Instruct", "Qwen3-30B-A3B"), ("Kimi-K2.5", "Kimi-K2-Instruct")],
)
def test_what_reads_text_beside_images_is_the_model_without_them(name, plain):
    whole, other = (json.loads((PUBLISHED / f"{one}.json").read_text()) for one in (name, plain))
    cfg, without = (
        from_hf(whole),
        from_hf(other | whole["text_config"] | {"model_type": other["model_type"]}),
    )
    assert replace(cfg, architecture=without.architecture) == without
    with pytest.raises(ConfigError, match="lacks text_config"):
        from_hf({key: value for key, value in whole.items() if key != "text_config"})
    with pytest.raises(ConfigError, match=r"text_config.model_type is 'llama'; it must be"):
        from_hf(whole | {"text_config": whole["text_config"] | {"model_type": "llama"}})
    with pytest.raises(ConfigError, match=r"audio_config is .*; jmoe does not know this key"):
        from_hf(whole | {"audio_config": {"depth": 3}})
    with pytest.raises(ConfigError, match=r"text_config.new_key is 3; .* text_config.new_key$"):
        from_hf(whole | {"text_config": whole["text_config"] | {"new_key": 3}})
    with pytest.raises(ConfigError, match=r"text_config.eos_token_id is .* as eos_token_id beside"):
        from_hf(whole | {"eos_token_id": 7})


def test_mistral_small_4_has_yarn_of_half_a_head_and_queries_that_grow():
    whole = json.loads((PUBLISHED / "Mistral-Small-4-119B-2603.json").read_text())
    cfg, text = from_hf(whole), whole["text_config"]
    plain = from_hf(text | {"quantization_config": whole["quantization_config"]})
    assert replace(cfg, architecture="mistral4") == plain
    assert cfg.fp8_block == (0, 0)
    assert (cfg.rope.query_scaling, cfg.rope.original_max_position) == (0.1, 8192)
    assert not cfg.tie_embeddings
    assert from_hf({key: whole[key] for key in whole if key[:3] != "tie"}).tie_embeddings
    rope = text["rope_parameters"]
    for change, words in (
        ({"rope_parameters": None}, r"rope_parameters is None; it must be an object whose rope_ty"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope type is 'default' .*; jmoe serves yarn$"),
        ({"rope_parameters": rope | {"rope_type": "linear"}}, "rope type is 'linear'"),
        ({"rope_parameters": rope | {"llama_4_scaling_beta": None}}, "lacks llama_4_scaling_beta"),
        ({"rope_parameters": rope | {"llama_4_scaling_beta": -1}}, "a finite number above 0"),
        (
            {"rope_parameters": rope | {"partial_rotary_factor": 1.0}},
            r"is 1.0; .* absent, or .* 0.5",
        ),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor is 0.25; .* absent, or .* 0.5"),
        ({"rope_scaling": rope}, "rope_scaling is .*; it must be absent"),
        ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta is 0.1; it must be absent"),
        ({"head_dim": 64}, r"head_dim is 64; .* qk_nope_head_dim \+ qk_rope_head_dim \(128\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            from_hf(text | change)
    other = json.loads((PUBLISHED / "DeepSeek-V3-bf16.json").read_text())
    with pytest.raises(
        ConfigError, match=r"llama_4_scaling_beta is 0\.1; jmoe serves models without"
    ):
        from_hf(other | {"rope_scaling": other["rope_scaling"] | {"llama_4_scaling_beta": 0.1}})
    with pytest.raises(
        ConfigError, match=r"query_scaling is 0\.1; it must be 0 in layers of Paged"
    ):
        replace(cfg, layer_attention=())


def test_k_exaone_turns_heads_in_windows_only():
    config = json.loads((PUBLISHED / "K-EXAONE-236B-A23B.json").read_text())
    cfg = from_hf(config)
    own, full = cfg.attention_kinds
    assert cfg.layer_attention == (own, own, own, full) * 12
    assert (own.window, full.window) == (128, 0)
    assert (cfg.rope_of(own), cfg.rope_of(full).kind) == (RopeConfig(theta=1e6), "none")
    wide = from_hf(config | {"sliding_window": 262144}).attention_kinds
    assert [(kind.window, kind.rotary) for kind in wide] == [(0, None), (0, full.rotary)]
    known = from_hf(config | {"architectures": ["ExaoneMoeForCausalLM"]})
    assert known == cfg
    plain = {key: config[key] for key in config if key not in ("layer_types", "mlp_layer_types")}
    assert from_hf(plain | {"sliding_window_pattern": 4}) == cfg
    dense = {"first_k_dense_replace": 2, "is_moe_layer": None}
    assert from_hf(config | dense) == cfg  # mlp_layer_types say it
    assert from_hf(plain | dense | {"sliding_window_pattern": 4}).moe_layers[:3] == (
        *2 * (False,),
        True,
    )
    for given, words in (
        (plain, r"sliding_window_pattern is 'LLLG'; .* a number of layers where layer_types is"),
        (config | {"sliding_window": None}, "sliding_window is None; it must be 1 or more"),
        (config | {"is_moe_layer": [True] * 48}, r"is_moe_layer is .* absent, or as mlp_layer"),
        (config | {"layer_types": ["chunked_attention"] * 48}, "layer_types is .*sliding_attent"),
        (config | {"n_group": 3}, r"n_group is 3; it must be a divisor of num_experts \(128\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            from_hf(given)


def test_hunyuan_has_lists_of_one_number_for_all_layers():
    config = json.loads((PUBLISHED / "Hunyuan-A13B-Instruct.json").read_text())
    cfg = from_hf(config)
    plain = {"moe_intermediate_size": 3072, "moe_topk": 8, "num_shared_expert": 1}
    assert from_hf(config | plain | {"num_experts": [64] * 32}) == cfg
    assert (cfg.num_experts, cfg.experts_per_token, cfg.d_ff_shared) == (64, 8, 3072)
    for key in (*plain, "num_experts"):
        for each in ([64] * 31 + [1], [64] * 31, []):
            with pytest.raises(ConfigError, match=rf"{key} .* has the same for each of num_hidden"):
                from_hf(config | {key: each})
    with pytest.raises(ConfigError, match="moe_intermediate_size is 2048; it must be 3072"):
        from_hf(config | {"moe_intermediate_size": [2048] * 32})
    rope = config["rope_scaling"] | {"alpha": None}
    with pytest.raises(ConfigError, match="lacks alpha in rope_scaling"):
        from_hf(config | {"rope_scaling": rope})


def test_mellum_turns_layers_with_windows_in_their_own_way_whatever_the_window():
    config = json.loads((PUBLISHED / "Mellum2-12B-A2.5B-Instruct.json").read_text())
    for window, kept in ((1024, 1024), (131072, 0)):
        cfg = from_hf(config | {"sliding_window": window})
        own, full = cfg.attention_kinds
        assert (own.window, full.window) == (kept, 0)
        assert cfg.layer_attention == (own, own, own, full) * 7
        assert cfg.rope_of(own) == RopeConfig(theta=500000.0)
        assert cfg.rope_of(full).kind == "yarn"
    alike = {kind: {"rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")}
    kinds = from_hf(config | {"rope_parameters": alike}).attention_kinds
    assert [kind.rotary for kind in kinds] == [None, None]
    with pytest.raises(ConfigError, match="lacks full_attention in rope_parameters"):
        from_hf(config | {"rope_parameters": {"sliding_attention": {"rope_theta": 500.0}}})
    with pytest.raises(ConfigError, match=r"rope_scaling is .* it must be absent: rope_parameters"):
        from_hf(config | {"rope_scaling": config["rope_parameters"]})


def test_trinity_turns_in_windows_only_whatever_the_window():
    config = json.loads((PUBLISHED / "Trinity-Mini.json").read_text())
    by_number = {key: value for key, value in config.items() if key != "layer_types"}
    assert from_hf(by_number) == from_hf(config)
    for window, kept in ((2048, 2048), (131072, 0)):
        cfg = from_hf(config | {"sliding_window": window})
        own, full = cfg.attention_kinds
        assert (own.window, full.window, own.gated, full.gated) == (kept, 0, True, True)
        assert cfg.layer_attention == (own, own, own, full) * 8
        assert cfg.rope_of(own) == RopeConfig(theta=10000.0)
        assert cfg.rope_of(full).kind == "none"
    assert from_hf(config | {"mup_enabled": False}).embedding_multiplier == 1
    for key, value in {"n_group": 2, "route_norm": False, "score_func": "softmax"}.items():
        with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
            from_hf(config | {key: value})
    with pytest.raises(ConfigError, match="sliding_window is None; it must be 1 or more"):
        from_hf(config | {"sliding_window": None})
    with pytest.raises(ConfigError, match=r"num_dense_layers is 32; it must be below num_hidden"):
        from_hf(config | {"num_dense_layers": 32})
    with pytest.raises(ConfigError, match=r"'sliding_attention' or 'full_attention' for each of"):
        from_hf(config | {"layer_types": ["full_attention"] * 31})


def test_minimax_m2_is_as_its_later_releases_but_for_keys_of_nothing():
    config = json.loads((PUBLISHED / "MiniMax-M2.5.json").read_text())
    first = config | {"attention_dropout": 0.0, "mlp_intermediate_size": 8192}
    assert from_hf(first) == from_hf(config)
    with pytest.raises(ConfigError, match=r"attn_type_list .* all 1: full attention"):
        from_hf(config | {"attn_type_list": [1, 0] * 31})
    with pytest.raises(ConfigError, match=r"absent, or rotary_dim / head_dim \(0.5\)"):
        from_hf(config | {"partial_rotary_factor": 0.75})


def test_qwen3_has_the_positions_that_its_card_says_to_get_by_yarn():
    config = json.loads((PUBLISHED / "Qwen3-30B-A3B.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cfg = from_hf(config | {"rope_scaling": yarn})
    assert (cfg.max_position, cfg.rope.original_max_position) == (131072, 32768)
    window = {"use_sliding_window": True, "sliding_window": 65536}
    short, long = (from_hf(config | window | more) for more in ({}, {"rope_scaling": yarn}))
    assert [cfg.layer_attention[0].window for cfg in (short, long)] == [0, 65536]
    whole = from_hf(config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert whole.max_position == config["max_position_embeddings"]
    huge = from_hf(config | {"rope_scaling": yarn | {"factor": 1e30}})
    assert huge.max_position == 2**31 - 1


@pytest.mark.parametrize("name", CARDS)
def test_a_released_model_is_read(name):
    total, active, positions = CARDS[name]
    cfg = from_hf(json.loads((PUBLISHED / f"{name}.json").read_text()))
    assert num_parameters(cfg) / 1e9 == pytest.approx(total, rel=0.01)
    # Cards round active parameters, and some leave embeddings out.
    found, embed = num_parameters(cfg, cfg.experts_per_token), cfg.vocab_size * cfg.d_model
    counts = [(found - part) / 1e9 for part in (0, embed, (2 - cfg.tie_embeddings) * embed)]
    assert any(one == pytest.approx(active, rel=0.03) for one in counts)
    assert cfg.max_position == positions
    yarn = "deepseek_v2", "deepseek_v3", "gpt_oss", "kimi_k2", "kimi_k25", "solar_open", "mellum"
    kinds = dict.fromkeys((*yarn, "mistral3"), "yarn")
    kinds |= dict.fromkeys(("granitemoehybrid", "nemotron_h"), "none")
    kinds |= {"phimoe": "longrope", "hunyuan_v1_moe": "dynamic"}
    assert cfg.rope.kind == kinds.get(cfg.architecture, "default")
    if name in KV_BYTES:
        assert kv_bytes_per_token(cfg, "bfloat16") == KV_BYTES[name]


@pytest.mark.parametrize("name", CARDS)
def test_a_kernel_writes_keys_and_values_of_all_but_latent_attention(name):
    cfg, dtype = (
        from_hf(json.loads((PUBLISHED / f"{name}.json").read_text())),
        jnp.dtype("bfloat16"),
    )
    if any(isinstance(kind, Latent) for kind in cfg.attention_kinds):
        return
    taken = []

    def ask():
        params = random_params(cfg, jax.random.key(0), dtype)
        segment = next(one for one in params["segments"] if "wqkv" in one)
        layer = {name: weight[0] for name, weight in segment.items()}
        angles = rotation(jnp.zeros(8, jnp.int32), cfg.rope, cfg.head_dim)
        projection, _ = project(cfg, layer, jnp.zeros((8, cfg.d_model), dtype), angles)
        pages = make_pages(cfg, 1, CacheSizes(1, 16, 1, 1, dtype))
        taken.append(mosaic.supports(projection, *pages))

    jax.eval_shape(ask)
    assert taken == [True]


SMALL = {
    "vocab_size": 50,
    "num_hidden_layers": 3,
    "intermediate_size": 11,
    "moe_intermediate_size": 7,
    "expert_hidden_dim": 7,
    "shared_expert_intermediate_size": 13,
    "head_dim": 12,
    "attention_head_dim": 12,
    "rotary_dim": 8,
    "kv_lora_rank": 6,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "full_attention_interval": 3,
    "shared_intermediate_size": 13,
    "mamba_d_head": "auto",
    "mamba_d_state": 6,
    "mamba_n_heads": 4,
    "mamba_head_dim": 6,
    "mamba_num_heads": 8,
    "moe_shared_expert_intermediate_size": 13,
    "ssm_state_size": 6,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}


def shrunk(config):
    """Returns a published configuration with small sizes, and all else as it is."""
    if "text_config" in config:
        return config | {"text_config": shrunk(config["text_config"]), "eos_token_id": 3}
    own = {key: size for key, size in SMALL.items() if config.get(key)}
    if config.get("partial_rotary_factor") == 0.25:  # of which that is even
        own["head_dim"] = 16
    rope = config.get("rope_parameters") or {}
    if "llama_4_scaling_beta" in rope:  # half of a head turns, and queries grow
        own |= {"qk_nope_head_dim": 4, "head_dim": 8}
        own["rope_parameters"] = rope | {"original_max_position_embeddings": 5}
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    own["num_key_value_heads"] = 3 if group == 1 else 2
    own["num_attention_heads"] = heads = own["num_key_value_heads"] * group
    own["hidden_size"] = 30 if "head_dim" in config else 8 * heads
    counts = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
    keys = "moe_k", "moe_topk", "num_experts_per_tok"
    per_token = next(config[key] for key in keys if key in config)
    for key in ("moe_topk", "moe_intermediate_size", "num_shared_expert"):
        if isinstance(config.get(key), list):
            own[key] = [own["intermediate_size"] if "size" in key else config[key][0]] * 3
    per_token = per_token[0] if isinstance(per_token, list) else per_token
    for key in counts & config.keys():
        own[key] = max(per_token + 3, 3 * (config.get("n_group") or 1))
    if "moe_layer_start_index" in config:
        own["moe_layer_start_index"] = 1
    for key in {"first_k_dense_replace", "num_dense_layers"} & config.keys():
        own[key] = min(config[key], 2)
    if (config.get("sliding_window") or 0) in range(1, config["max_position_embeddings"]):
        own["sliding_window"] = 5
    if "hybrid_override_pattern" in config:
        own |= {"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5}
    for key in {"is_moe_layer", "layer_types", "mlp_layer_types"} & config.keys():
        own[key] = config[key][-3:]
    rope = dict(config.get("rope_scaling") or {})
    for key in {"long_factor", "short_factor"} & rope.keys():
        own["rope_scaling"] = rope = rope | {key: rope[key][:4]}
    own |= {"eos_token_id": 3, "quantization_config": None}
    return config | own


DISTINCT = {}
for path in sorted(PUBLISHED.glob("*.json")):
    DISTINCT.setdefault(from_hf(shrunk(json.loads(path.read_text()))), path.stem)


FIRST = {cfg.architecture: name for cfg, name in reversed(DISTINCT.items())}.values()


@pytest.mark.deep
@pytest.mark.sized(exhaustive=[name for name in DISTINCT.values() if name not in FIRST])
@pytest.mark.parametrize("cfg", DISTINCT, ids=DISTINCT.get)
def test_a_released_model_shrunk_is_that_of_loops(cfg):
    """Every option as published, over weights of which no norm is one and no bias nothing."""
    model, rng = random_model(cfg, dtype="float32"), np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype), model.params
    )
    model = model.with_weights(params=drawn)
    tokens = rng.integers(0, cfg.vocab_size, (2, 19)).astype(np.int32)
    got = np.asarray(jmoe.forward(model, tokens))[:, -1]
    np.testing.assert_allclose(got, numpy_forward.forward(model, tokens), atol=1e-4, rtol=0)
