"""Checkpoints: what is refused and how it is named, and jmoe's own format there and back."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import CheckpointError, ConfigError
from jmoe.brownout import Brownout
from jmoe.checkpoint import native_config
from jmoe.layers import Layers

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASE, SHARDED = "qwen2_moe", "qwen3_moe"
TOKENS = np.random.default_rng(0).integers(0, 70, (3, 8))


def change_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(directory, error=CheckpointError):
    with pytest.raises(error) as caught:
        jmoe.load(directory, dtype="float32")
    return str(caught.value)


def test_every_missing_and_misshapen_tensor_is_named_in_one_error(copy):
    directory = copy(CASE)
    at = "model.layers.1."

    def damage(tensors):
        del tensors[at + "self_attn.q_proj.bias"], tensors[at + "mlp.experts.3.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]

    change_tensors(directory, damage)
    words = refused(directory)
    assert str(directory) in words
    assert f"{at}self_attn.q_proj.bias is missing" in words
    assert f"{at}mlp.experts.3.up_proj.weight is missing" in words
    assert "model.norm.weight is [31], expected [32]" in words


def test_a_wrong_config_names_some_tensors_and_counts_the_rest(copy, edit_config):
    directory = copy(CASE)
    edit_config(directory, num_experts=60)
    words = refused(directory)
    assert "experts.7.gate_proj.weight is missing" in words
    assert "mlp.gate.weight is [7, 32], expected [60, 32]" in words
    assert "more" in words.splitlines()[-1]


def test_a_missing_shard_is_named(copy):
    directory = copy(SHARDED)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors" in refused(directory)


def test_no_weights_at_all(copy):
    directory = copy(CASE)
    (directory / "model.safetensors").unlink()
    assert "lacks model.safetensors" in refused(directory)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all, but long enough", None])
def test_an_unreadable_file_is_named(copy, content):
    directory = copy(CASE)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert f"{path} is not readable" in refused(directory)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}']
)
def test_an_unreadable_index_is_named(copy, content):
    directory = copy(SHARDED)
    path = directory / "model.safetensors.index.json"
    path.write_text(content)
    assert f"{path} is not readable" in refused(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', which has no experts; jmoe serves "),
        (
            {"model_type": "jamba"},
            "'jamba', whose recurrent layers are none of jmoe's; jmoe",
        ),
        ({"model_type": "dbrx"}, "solar_open; docs/new-architecture.md says how to add one"),
        (
            {"a": 1, "b": [2], "rope_scaling": {"rope_type": "linear", "factor": 2.0, "c": 3}},
            "a is 1; jmoe does not know this key; b is [2]; jmoe does not know this key; "
            "rope_scaling.c is 3; rope type 'linear' as jmoe knows it does not have this key",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be between 1 and"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "config.json lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"decoder_sparse_step": 5}, "at least one MoE layer"),
    ],
)
def test_a_config_that_is_not_served_names_key_and_value(copy, edit_config, change, words):
    directory = copy(CASE)
    edit_config(directory, **change)
    assert words in refused(directory, ConfigError)


def test_a_checkpoint_of_pytorch_says_how_to_convert_it(copy):
    directory = copy(CASE)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    words = refused(directory)
    assert f"AutoModelForCausalLM.from_pretrained({str(directory)!r}, " in words
    assert f".save_pretrained('{directory.name}-safetensors')" in words
    assert compile(words.split('"')[1], "command", "exec")


def shards_of(directory, count):
    """Cuts a checkpoint's one file into shards, without an index."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    for at in range(count):
        names = sorted(tensors)[at::count]
        own = directory / f"model-{at + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names}, own)


def test_experts_that_may_lie_either_way_are_refused_where_their_shape_does_not_say(copy):
    directory = copy("qwen3_vl_moe")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    d, m = config["text_config"]["hidden_size"], config["text_config"]["num_experts"]
    config["text_config"]["moe_intermediate_size"] = d // 2
    path.write_text(json.dumps(config))

    def square(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            shape = (m, d, d) if "gate_up" in name else (m, d // 2, d)
            tensors[name] = np.zeros(shape, np.float32)

    change_tensors(directory, square)
    assert f"experts.gate_up_proj is square: [{m}, {d}, {d}]" in refused(directory)


def test_shards_without_an_index_are_read(copy):
    directory = copy(CASE)
    whole = jmoe.load(directory, dtype="float32")
    shards_of(directory, 3)
    model = jmoe.load(directory, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, whole.params)
    jax.tree.map(np.testing.assert_array_equal, model.pool, whole.pool)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors; a Hugging Face" in refused(directory)
    last = directory / "model-00003-of-00003.safetensors"
    last.rename(directory / "model-00001-of-99999.safetensors")
    assert "model-00004-of-99999.safetensors and 99995 more; a Hugging Face" in refused(directory)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "This is an adapter: merge it"),
        (["model-Q4_K_M.gguf"], "jmoe reads no GGUF: name the safetensors"),
        (["snapshots/abc/config.json", "refs/main"], "/snapshots/REVISION, or OWNER/NAME"),
        (["README.md"], "name a Hugging Face model directory"),
    ],
)
def test_what_is_no_model_is_said_to_be_what_it_is(tmp_path, files, said):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert said in refused(tmp_path, ConfigError)
    if files[0].endswith("gguf"):
        assert said in refused(tmp_path / files[0], ConfigError)


def test_a_directory_without_weights_is_not_told_to_convert_any(copy):
    directory = copy(CASE)
    (directory / "model.safetensors").unlink()
    assert refused(directory).endswith("or shards and model.safetensors.index.json")


def test_a_pointer_of_git_lfs_is_said_to_be_one(copy):
    directory = copy(CASE)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (directory / "model.safetensors").write_text(pointer)
    assert "it is a pointer of git-lfs: `git lfs pull` gets the file" in refused(directory)


def test_a_directory_that_is_none(tmp_path):
    assert "config.json does not exist" in refused(tmp_path / "nowhere", ConfigError)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused(tmp_path, ConfigError)
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list, not an object" in refused(tmp_path, ConfigError)
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of bfloat16, float16"):
        jmoe.load(tmp_path, dtype="int8")


def spoil(*names, value=np.nan, at=-1):
    """Puts a value into the last place of some tensors."""

    def change(tensors):
        for name in names:
            tensors[name] = tensors[name].copy()
            tensors[name].flat[at] = value

    return change


LAYER = "model.layers.1."
ALL_KINDS = (
    "lm_head.weight",
    "model.norm.weight",
    LAYER + "self_attn.k_proj.bias",
    LAYER + "mlp.shared_expert_gate.weight",
    LAYER + "mlp.experts.5.up_proj.weight",
    LAYER + "mlp.experts.6.down_proj.weight",
)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ALL_KINDS)
def test_weights_that_are_not_finite_are_refused_by_name(copy, name, value):
    directory = copy(CASE)
    change_tensors(directory, spoil(name, value=value))
    words = refused(directory)
    assert words.startswith(f"{directory} has weights that are not finite:")
    assert words.endswith(f"  {name} holds NaN or infinity")
    assert len(words.splitlines()) == 2
    jmoe.load(directory, dtype="float32", check_weights=False)


def test_all_bad_weights_of_a_layer_are_named(copy):
    directory = copy(CASE)
    names = [name for name in ALL_KINDS if name.startswith(LAYER)]
    change_tensors(directory, spoil(*names))
    assert all(name in refused(directory) for name in names)


def test_large_weights_are_refused_only_in_a_precision_that_does_not_hold_them(copy):
    directory = copy(CASE)
    change_tensors(directory, spoil(*ALL_KINDS[-1:], value=1e5))
    jmoe.load(directory, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"6\.down_proj\.weight is not finite as float16"):
        jmoe.load(directory, dtype="float16")


def test_finite_weights_whose_sums_overflow_are_taken(copy):
    directory = copy(CASE)
    name = LAYER + "self_attn.o_proj.weight"
    change_tensors(directory, put(name, np.full((32, 32), 3e38, np.float32)))
    jmoe.load(directory, dtype="float32")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("down_proj_scales", "holds scales that are NaN"),
        ("gate_up_proj_bias", "holds NaN or infinity"),
    ],
)
def test_experts_of_one_tensor_are_refused_by_its_name(copy, name, words):
    directory, name = copy("gpt_oss_mxfp4"), LAYER + "mlp.experts." + name
    change_tensors(directory, spoil(name, value=255 if "scales" in name else np.nan))
    assert refused(directory).splitlines()[1:] == [f"  {name} {words}"]


def test_layers_are_checked_when_they_are_read(copy):
    directory = copy(CASE)
    change_tensors(directory, spoil(ALL_KINDS[-1]))
    layers = Layers(directory)
    layers.top()
    layers.layer(0)
    with pytest.raises(CheckpointError, match=ALL_KINDS[-1].replace(".", r"\.")):
        layers.layer(1)
    Layers(directory, check_weights=False).layer(1)


def test_weights_that_are_not_floats_are_refused(copy):
    directory = copy(CASE)
    change_tensors(directory, put("model.norm.weight", np.ones(32, np.int8)))
    assert "model.norm.weight is I8; jmoe reads BF16, F16, F32, F64" in refused(directory)


def test_a_tensor_in_two_files_is_refused(copy):
    directory = copy(SHARDED)
    last = directory / "model-00003-of-00003.safetensors"
    save_file({**load_file(last), "model.norm.weight": np.ones(36, np.float32)}, last)
    first = directory / "model-00001-of-00003.safetensors"
    save_file({**load_file(first), "model.norm.weight": np.ones(36, np.float32)}, first)
    assert "holds model.norm.weight, and another file too" in refused(directory)


def change_united(directory, change):
    tensors = load_file(directory / "united.safetensors")
    change(tensors)
    save_file(tensors, directory / "united.safetensors")


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("way2.layers.1.down"), "way2.layers.1.down missing"),
        (put("way3.layers.0.down", np.zeros((3, 19, 31), np.float32)), "way3.layers.0.down"),
        (put("way2.layers.0.groups", np.arange(7, dtype=np.int32)), "groups of way 2"),
        (put("way2.layers.0.groups", np.zeros(7, np.float32)), "way2.layers.0.groups"),
        (put("something", np.zeros(1, np.float32)), "something"),
        (put("way2.layers.2.down", np.zeros(1, np.float32)), "way2.layers.2.down"),
        (put("way2.layers.0.down", np.zeros((4, 19, 32), np.int8)), "must be floats"),
        (spoil("way3.layers.1.down"), "way3.layers.1.down holds NaN or infinity"),
        (put("way0.layers.0.groups", np.zeros(7, np.int32)), "way0.layers.0.groups"),
    ],
)
def test_united_experts_that_do_not_fit_are_named(united_dirs, tmp_path, change, words):
    directory = tmp_path / CASE
    shutil.copytree(united_dirs(CASE), directory)
    change_united(directory, change)
    message = refused(directory)
    assert words in message
    assert "united.safetensors" in message


def test_unreadable_united_experts(united_dirs, tmp_path):
    directory = tmp_path / CASE
    shutil.copytree(united_dirs(CASE), directory)
    (directory / "united.safetensors").write_bytes(b"")
    assert "united.safetensors is not readable" in refused(directory)


@pytest.fixture(scope="module")
def saved(united_dirs, tmp_path_factory):
    """Returns a model with united experts in its pool, saved in jmoe's own format."""
    model = jmoe.load(united_dirs(CASE), dtype="float32")
    model.use_way(2)
    directory = tmp_path_factory.mktemp("native") / CASE
    jmoe.save(model, directory)
    return model, directory


@pytest.mark.deep
def test_save_and_load_give_equal_logits(saved):
    model, directory = saved
    back = jmoe.load(directory, dtype="float32")
    assert back.config == model.config
    assert back.num_parameters == model.num_parameters
    assert jax.tree.structure(back.params) == jax.tree.structure(model.params)
    # United experts came along; which way is in the pool is not remembered.
    assert back.way is None
    for brownout in (None, Brownout("partial", 20, 2), Brownout("partial", 20, 3)):
        want = np.asarray(jmoe.forward(model, TOKENS, brownout))
        np.testing.assert_array_equal(np.asarray(jmoe.forward(back, TOKENS, brownout)), want)


@pytest.mark.deep
def test_a_saved_model_loads_in_another_precision(saved):
    _, directory = saved
    back = jmoe.load(directory, dtype="bfloat16")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((back.params, back.pool))}
    assert kinds == {"bfloat16"}
    assert back.table.slots.dtype == np.int32


NAMED = [
    "glm4_moe",
    "phimoe_window_tied",
    "gpt_oss",
    "deepseek_v2",
    "mellum",
    "mistral4",
    "exaone_moe",
    "afmoe",
    "qwen3_next",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h_mlp_biases",
]


@pytest.mark.sized(deep=NAMED[1:])
@pytest.mark.parametrize("case", NAMED)
def test_routers_activations_and_attentions_come_back_by_name(case, copy, tmp_path):
    model = jmoe.load(copy(case), "bfloat16")
    jmoe.save(model, tmp_path / "saved")
    back = jmoe.load(tmp_path / "saved", "bfloat16")
    assert back.config == model.config
    jax.tree.map(np.testing.assert_array_equal, back.weights, model.weights)
    kinds = [jax.tree.map(lambda leaf: str(leaf.dtype), dict(one.params)) for one in (back, model)]
    assert kinds[0] == kinds[1]  # a router's bias stays float32


def test_what_programs_alone_are_made_with_is_not_saved(copy, tmp_path):
    model = jmoe.load(copy(CASE), "float32")
    served = dataclasses.replace(model.config, exchange="direct")
    jmoe.save(dataclasses.replace(model, config=served), tmp_path / "saved")
    assert jmoe.load(tmp_path / "saved", "float32").config == model.config
    assert (
        not {"exchange", "strategy"} & json.loads((tmp_path / "saved/jmoe.json").read_text()).keys()
    )


def test_save_does_not_overwrite(saved):
    model, directory = saved
    with pytest.raises(FileExistsError, match="already holds a model"):
        jmoe.save(model, directory)


def test_a_saved_model_that_was_damaged(saved, tmp_path):
    directory = tmp_path / CASE
    shutil.copytree(saved[1], directory)
    path = directory / "jmoe.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "d_model"}))
    assert "is not readable" in refused(directory)
    for change in ({"d_model": "32"}, {"num_layers": 3, "moe_layers": [True] * 3}, {"rope": []}):
        path.write_text(json.dumps({**config, **change}))
        assert "is not readable" in refused(directory)
    for text in ("{}", "{"):  # of which a mesh reads the configuration alone, first
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"jmoe.json is not readable"):
            native_config(directory)
    path.write_text(json.dumps(config))
    shutil.rmtree(directory / "state")
    assert "is not readable" in refused(directory)


def test_a_saved_model_with_weights_that_are_not_finite(united_dirs, tmp_path):
    model = jmoe.load(united_dirs(CASE), dtype="float32")
    final_norm = model.params["final_norm"].at[3].set(np.nan)
    jmoe.save(
        model.with_weights(params={**model.params, "final_norm": final_norm}), tmp_path / "bad"
    )
    assert "final_norm" in refused(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="final_norm"):
        Layers(tmp_path / "bad")
    jmoe.load(tmp_path / "bad", dtype="float32", check_weights=False)


def test_a_model_saved_without_slots_says_so(united_dirs, tmp_path):
    model = jmoe.load(united_dirs(CASE), dtype="float32", ways=[3])
    jmoe.save(model, tmp_path / "few")
    with pytest.raises(ValueError, match=r"saved without slots for ways \[2, 3\]"):
        jmoe.load(tmp_path / "few", dtype="float32")
    assert jmoe.load(tmp_path / "few", dtype="float32", ways=[3]).num_united_slots == 3


def test_progress_counts_layers(copy):
    seen = []
    jmoe.load(copy(CASE), dtype="float32", progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]
