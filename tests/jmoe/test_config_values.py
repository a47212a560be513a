"""Bad values in the JSON files of a model directory: one error that names file, key and value."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmoe
from jmoe import CheckpointError, ConfigError
from jmoe.architectures import ARCHITECTURES
from jmoe.checkpoint import HFLayers
from jmoe.config import ModelConfig, from_hf, read_config
from jmoe.layers import Layers
from jmoe.tokenizer import Tokenizer, TokenizerError

GOLDEN = Path(__file__).parents[1] / "golden"
CASE = "qwen2_moe"


def config_of(case):
    return json.loads((GOLDEN / case / "config.json").read_text())


def refused(directory):
    with pytest.raises(ConfigError) as caught:
        jmoe.load(directory, dtype="float32")
    words = str(caught.value)
    assert len(words.splitlines()) == 1
    return words


BAD = [
    ("max_position_embeddings", 0, "an integer from 1"),
    ("num_hidden_layers", "5", "an integer from 1"),
    ("num_hidden_layers", 10**9, "an integer from 1 to 10000"),
    ("num_hidden_layers", True, "an integer from 1"),
    ("vocab_size", -1, "an integer from 1"),
    ("vocab_size", 97.0, "an integer from 1"),
    ("hidden_size", 0, "an integer from 1"),
    ("hidden_size", 33, "an even multiple of num_attention_heads (4)"),
    ("num_key_value_heads", 0, "an integer from 1"),
    ("num_experts", 10**12, "an integer from 1"),
    ("num_local_experts", 8, "the same as num_experts (7)"),
    ("num_experts_per_tok", [2], "an integer from 1"),
    ("shared_expert_intermediate_size", -2, "an integer from 0"),
    ("moe_intermediate_size", {}, "an integer from 1"),
    ("head_dim", 0, "an integer from 1"),
    ("decoder_sparse_step", 0, "an integer from 1"),
    ("mlp_only_layers", "all", "a list of integers"),
    ("mlp_only_layers", [0.5], "a list of integers"),
    ("norm_topk_prob", 1, "true or false"),
    ("qkv_bias", "yes", "true or false"),
    ("tie_word_embeddings", 0, "true or false"),
    ("rms_norm_eps", "abc", "a number above 0"),
    ("rms_norm_eps", 0.0, "a finite number above 0"),
    ("rms_norm_eps", math.nan, "a finite number above 0"),
    ("rope_theta", math.inf, "a finite number above 0"),
    ("rope_theta", 10**400, "a finite number above 0"),
    ("rope_scaling", "yarn", "an object or null"),
    ("rope_scaling", [1, 2], "an object or null"),
    ("eos_token_id", "x", "a token id from 0 to 96"),
    ("eos_token_id", -1, "a token id from 0 to 96"),
    ("eos_token_id", 97, "a token id from 0 to 96"),
    ("eos_token_id", [1, True], "a token id from 0 to 96"),
    ("layer_types", ["full_attention"], "'full_attention' for each of num_hidden_layers (2)"),
    ("layer_types", [["full_attention"]] * 2, "'full_attention' for each of num_hidden_layers (2)"),
    ("architectures", ["Qwen2MoeForSequenceClassification"], "['Qwen2MoeForCausalLM']"),
    ("hidden_act", ["silu"], "'silu'"),
]


@pytest.mark.parametrize(("key", "value", "wanted"), BAD)
def test_a_bad_value_is_named_with_its_file_and_what_it_must_be(
    copy, edit_config, key, value, wanted
):
    directory = copy(CASE)
    edit_config(directory, **{key: value})
    words = refused(directory)
    assert words.startswith(f"{directory / 'config.json'}: {key} is ")
    assert f"; it must be {wanted}" in words


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor is '2'"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor is 0"),
        ({"rope_type": "linear"}, "lacks factor in rope_scaling"),
        ({"rope_type": ["linear"]}, "rope type is ['linear'] in rope_scaling"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 0}, "rope_scaling.truncate is 0"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "rope_theta is 1"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4.0},
            "rope_scaling.high_freq_factor is 4.0; it must be above low_freq_factor (4)",
        ),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor in rope_scaling"),
        ({"type": "linear", "factor": 2.0, "long_factor": [1]}, "rope_scaling.long_factor is [1]"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling.full_attention is {"),
        ({"rope_type": "default", "factor": 4.0}, "--allow-unknown-config rope_scaling.factor"),
    ],
)
def test_bad_rope_settings_are_named(copy, edit_config, scaling, words):
    directory = copy(CASE)
    edit_config(directory, rope_scaling=scaling)
    assert words in refused(directory)


def test_two_rope_sections_that_differ(copy, edit_config):
    directory = copy(CASE)
    linear = {"rope_type": "linear", "factor": 2.0}
    edit_config(directory, rope_scaling=linear, rope_parameters=linear)
    assert read_config(directory).rope.factor == 2.0
    edit_config(directory, rope_parameters={**linear, "factor": 3.0})
    assert "rope_scaling is" in refused(directory)


def test_windows_that_transformers_would_not_use_are_refused(copy, edit_config):
    directory = copy("mixtral")
    edit_config(directory, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    assert "'sliding_attention' for each of num_hidden_layers (2)" in refused(directory)
    edit_config(directory, sliding_window=None, layer_types=["sliding_attention"] * 2)
    assert "layer_types is ['sliding_attention'" in refused(directory)
    directory = copy("qwen3_moe")
    edit_config(directory, use_sliding_window=True)
    assert "use_sliding_window is True" in refused(directory)


def test_an_unknown_key_is_refused_and_can_be_allowed(copy, edit_config):
    directory = copy(CASE)
    edit_config(directory, logits_scaling=2.0, rope_scaling={"type": "default", "short_factor": 1})
    words = refused(directory)
    assert "config.json: logits_scaling is 2.0; jmoe does not know this key" in words
    flags = "--allow-unknown-config logits_scaling --allow-unknown-config rope_scaling.short_factor"
    assert words.endswith(f"if they change nothing, pass {flags}")
    keys = ("logits_scaling", "rope_scaling.short_factor")
    assert "rope_scaling.short_factor is 1; rope type 'default' as jmoe knows" in words
    with pytest.raises(ConfigError, match=r"rope_scaling\.short_factor is 1"):
        read_config(directory, allow_unknown_config=keys[:1])
    with pytest.raises(ConfigError, match="logits_scaling"):
        read_config(directory, allow_unknown_config=keys[1])
    model = jmoe.load(directory, dtype="float32", allow_unknown_config=keys)
    assert Layers(directory, allow_unknown_config=keys).cfg == model.config
    assert model.config == read_config(GOLDEN / CASE)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({"use_qk_norm": True}, "jmoe serves False only"),
        ({"attention_bias": True}, "jmoe serves False only"),
        ({"partial_rotary_factor": 0.5}, "jmoe serves 1.0 only"),
        ({"chunk_size_feed_forward": False}, "jmoe serves 0 only"),
    ],
)
def test_keys_that_are_served_with_some_values_only(copy, edit_config, change, served):
    directory = copy(CASE)
    edit_config(directory, **change)
    [key] = change
    assert f"{key} is " in refused(directory)
    assert served in refused(directory)


@pytest.mark.parametrize("case", sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz")))
def test_each_architecture_refuses_all_but_the_values_that_it_serves(case):
    config = config_of(case)
    for key in ARCHITECTURES[config["model_type"]].only:
        changed = json.loads(json.dumps(config))
        changed.get("text_config", changed)[key] = "other"
        with pytest.raises(ConfigError, match=rf"{key} is 'other'; jmoe serves"):
            from_hf(changed)


def test_qwen3_vl_has_no_windows_as_in_transformers():
    config = config_of("qwen3_vl_moe")
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ConfigError, match="use_sliding_window is True; jmoe serves False only"):
        from_hf(config)


@pytest.mark.parametrize("key", ["compression_config", "quantization", "quantization_config"])
def test_quantized_weights_are_refused_without_advice_to_ignore_it(copy, edit_config, key):
    directory = copy(CASE)
    edit_config(directory, **{key: {"quant_method": "hqq"}})
    words = refused(directory)
    assert f"{key} is {{'quant_method': 'hqq'}}; jmoe loads weights of a" in words
    assert "--allow-unknown-config" not in words
    assert read_config(directory, allow_unknown_config=[key]) == read_config(GOLDEN / CASE)


def test_what_tools_for_fine_tuning_write_passes(copy, edit_config):
    directory = copy(CASE)
    edit_config(
        directory,
        **{
            "_commit_hash": "0123abc",
            "_flash_attn_2_enabled": True,
            "_name_or_path": "someone/base",
            "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
            "custom_pipelines": {},
            "gradient_checkpointing": False,
            "loss_type": "ForCausalLM",
            "neftune_noise_alpha": 5.0,
            "pretraining_tp": 2,
            "tokenizer_model_max_length": 4096,
            "tokenizer_padding_side": "right",
            "transformers.js_config": {"kv_cache_dtype": "float16"},
            "unsloth_version": "2026.4.2",
            "use_cache": False,
            "use_mrope": False,
        },
    )
    assert read_config(directory) == read_config(GOLDEN / CASE)


@pytest.mark.parametrize("eos", ["x", -1, 97, [0, 97], {"id": 3}])
def test_a_bad_stop_token_of_the_generation_config_names_that_file(copy, eos):
    directory = copy(CASE)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": eos}))
    assert refused(directory).startswith(f"{path}: eos_token_id is ")
    path.write_text("[]")
    assert refused(directory) == f"{path} holds a list, not an object"


def test_stop_tokens_that_are_right(copy):
    directory = copy(CASE)
    for eos, want in ((None, ()), (5, (5,)), ([5, 96], (5, 96)), ([], ())):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert read_config(directory).eos_token_ids == want


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"vocab_size": 1' + "0" * 5000 + "}"])
def test_json_that_cannot_be_read(copy, content):
    directory = copy(CASE)
    (directory / "config.json").write_text(content)
    assert f"{directory / 'config.json'} is not valid JSON" in refused(directory)


def test_a_config_that_is_a_directory(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "config.json cannot be read" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", "[]", "holds a list, not an object"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", b"\xff\xfe", "is not readable"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is a int"),
        ("chat_template.jinja", b"\xff", "is not readable"),
        ("tokenizer.json", "{}", "is not readable"),
    ],
)
def test_bad_tokenizer_files_are_named(tmp_path, name, content, words):
    bundled = jmoe.api.resolve("bundled")
    (tmp_path / "tokenizer.json").write_bytes((bundled / "tokenizer.json").read_bytes())
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(path if "template is" not in words else tmp_path) in str(caught.value)


def test_the_default_of_several_chat_templates_is_taken(tmp_path):
    bundled = jmoe.api.resolve("bundled")
    (tmp_path / "tokenizer.json").write_bytes((bundled / "tokenizer.json").read_bytes())
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat([{"role": "user", "content": "?"}]) == "yes"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
CASES = ("qwen2_moe_yarn", "qwen3_moe_mixed_yarn", "mixtral_tied_llama3")
KEYS = [
    (case, outer, key)
    for case in CASES
    for outer in ("", "rope_scaling", "rope_parameters")
    if not outer or config_of(case).get(outer)
    for key in ((config_of(case)[outer] if outer else config_of(case)).keys() | {"new"})
]


@pytest.mark.deep
@settings(max_examples=300)
@given(st.sampled_from(sorted(KEYS)), ANY_JSON)
def test_any_value_of_any_key_gives_a_model_or_an_error_of_ours(where, value):
    case, outer, key = where
    config = config_of(case)
    (config[outer] if outer else config)[key] = value
    try:
        cfg = from_hf(config, file="the/config.json")
        assert isinstance(cfg, ModelConfig)
        HFLayers(GOLDEN / case, cfg, np.dtype("float32"))
    except ConfigError as error:
        words = str(error)
    except CheckpointError as error:
        words = str(error).replace(str(GOLDEN), "the/config.json")
    else:
        return
    assert words.startswith("the/config.json")
