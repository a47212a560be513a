"""A changed config.json changes what jmoe computes as it does in transformers, or is refused.

The oracle is `config_changes.npz` beside the golden files (tests/golden/make_config_changes.py).
"""

import dataclasses
import json
import operator
from functools import reduce
from pathlib import Path

import numpy as np
import numpy_forward
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import CheckpointError, ConfigError
from jmoe.checkpoint import HFLayers
from jmoe.config import read_config

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
QUICK = {"qwen2_moe", "mixtral", "qwen3_moe_mixed_yarn"}
SIZED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.deep) for name in CASES]
ABSENT = "<absent>"
TOLERANCE = 2e-4
OF_IMAGES = {"vision_config", "multimodal_projector_bias", "spatial_merge_size"}
"""Keys that shape tensors which jmoe does not read."""

# Without it transformers takes a number of its own for each family, and the tensors do not fit.
# jmoe takes as many as there are query heads, as they do fit in models without grouped queries.
LOADS_HERE_ONLY = [(["num_key_value_heads"], ABSENT)]


def changed(config, path, value):
    config = json.loads(json.dumps(config))
    *outer, key = path
    inner = reduce(operator.getitem, outer, config)
    if value == ABSENT:
        del inner[key]
    else:
        inner[key] = value
    return config


def linked(case, directory):
    """Makes a directory with the case's weights, to put a config.json into."""
    directory.mkdir()
    for path in (GOLDEN / case).glob("model*"):
        (directory / path.name).symlink_to(path)
    return directory


def same_arithmetic(one, other):
    """Returns whether two configurations differ in nothing but when to stop."""
    plain = {"eos_token_ids": (), "max_position": 1}
    return dataclasses.replace(one, **plain) == dataclasses.replace(other, **plain)


def outcome(directory, model, golden):
    """Returns no logits and jmoe's error; or the logits at the last position and no error."""
    try:
        cfg = read_config(directory)
        if same_arithmetic(cfg, model.config):
            return golden["logits"][:, -1], ""  # as test_golden.py shows
        HFLayers(directory, cfg, model.dtype)  # every tensor is as this configuration needs it
    except (ConfigError, CheckpointError) as error:
        return None, str(error)
    changed_model = dataclasses.replace(model, config=cfg)
    if golden["tokens"].shape[1] > cfg.max_position:
        with pytest.raises(ValueError, match="rows have") as caught:
            jmoe.forward(changed_model, golden["tokens"])
        return None, str(caught.value)
    return numpy_forward.forward(changed_model, golden["tokens"]), ""


def names_it(words, path):
    """Returns whether an error names the key that was changed, its section, or tensors."""
    own = path[path.count("text_config") :]  # each key of which would be named by that
    roots = "  model.", "  language_model.", "  backbone.", "  lm_head."
    return any(name in words for name in (own[-1], own[0], *roots))


@pytest.mark.sized(deep=("qwen3_moe_mixed_yarn",))
@pytest.mark.parametrize("case", SIZED)
def test_a_changed_key_does_what_it_does_in_transformers_or_is_refused(case, tmp_path):
    directory = linked(case, tmp_path / case)
    config = json.loads((GOLDEN / case / "config.json").read_text())
    golden = np.load(GOLDEN / case / "golden.npz")
    oracle = np.load(GOLDEN / case / "config_changes.npz")
    model, wrong = jmoe.load(GOLDEN / case, dtype="float32"), []
    changes = json.loads(str(oracle["changes"]))
    assert {path[0] for path, _, _ in changes} >= config.keys() - OF_IMAGES
    assert {path[1] for path, *_ in changes if path[1:]} >= config.get("text_config", {}).keys()
    for path, value, theirs in changes:
        (directory / "config.json").write_text(json.dumps(changed(config, path, value)))
        ours, words = outcome(directory, model, golden)
        if ours is None and not names_it(words, path):
            wrong.append(f"{path} = {value}: {words}")
        if ours is None or (path[-1:], value) in LOADS_HERE_ONLY:
            continue
        if theirs == "error":
            wrong.append(f"{path} = {value}: transformers refuses it")
            continue
        want = golden["logits"][:, -1] if theirs == "same" else oracle["logits"][theirs]
        if np.abs(ours - want).max() > TOLERANCE:
            wrong.append(f"{path} = {value}: off by {np.abs(ours - want).max():.3g}")
    assert not wrong, "\n".join(wrong)


MTP = "mellum", "qwen3_next", "qwen3_5_moe_text", "exaone_moe"
"""Whose prediction layer has that name."""


def extra_tensor_names(config):
    root = "model.language_model." if "text_config" in config else "model."
    if config["model_type"] == "mistral3":
        root = "language_model.model."
    config = config.get("text_config", config)
    layer = f"{root}layers.0."
    if config["model_type"] == "nemotron_h":
        yield from (f"backbone.layers.{name}" for name in ("1.mixer.up_proj.bias", "9.norm.weight"))
        yield "backbone.layers.0.mixer.shared_experts.gate_proj.weight"
        return
    sparse = config["model_type"] in ("mixtral", "minimax_m2")
    block = "block_sparse_moe." if sparse else "mlp."
    biased = ("glm4_moe", "glm4_moe_lite", "solar_open", "deepseek_v3", "dots1")
    if config["model_type"] not in biased:
        yield layer + block + "gate.e_score_correction_bias"
    yield layer + block + "experts.0.gate_proj.bias"
    predicting = config.get("num_nextn_predict_layers")
    if predicting is None:
        predicting = int(config["model_type"] in ("glm4_moe_lite", "hy_v3", "mellum"))
    behind = config["num_hidden_layers"] + predicting
    yield f"{root}layers.{behind}.input_layernorm.weight"
    if not config.get("attention_bias") or config["model_type"] in ("glm4_moe", "solar_open"):
        yield layer + "self_attn.o_proj.bias"
    if config["model_type"] not in MTP:
        yield "mtp.fc.weight"


@pytest.mark.parametrize("case", SIZED)
def test_a_tensor_that_nothing_reads_is_refused_by_name(case, tmp_path, add_tensors):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    names = list(extra_tensor_names(config))
    directory = add_tensors(case, {name: np.ones(3, np.float32) for name in names})
    with pytest.raises(CheckpointError, match="would be left out") as caught:
        jmoe.load(directory, dtype="float32")
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("case", "at"),
    [
        ("ernie4_5_moe", "model.mtp_"),
        ("mellum", "mtp."),
        ("qwen3_next", "mtp."),
        ("nemotron_h", "mtp."),
        ("exaone_moe", "mtp."),
    ],
)
def test_a_prediction_layer_of_a_name_of_its_own_is_left_out(add_tensors, caplog, case, at):
    names = [f"{at}block.0.mlp.up_proj.weight", f"{at}linear_proj.0.weight"]
    caplog.set_level("INFO")
    directory = add_tensors(case, dict.fromkeys(names, np.ones(3, np.float32)))
    jmoe.load(directory, dtype="float32")
    behind = "" if case in ("qwen3_next", "nemotron_h", "exaone_moe") else "model.layers.3.*, "
    assert f"2 tensors are not read, {behind}{at}*: they predict" in caplog.text


@pytest.fixture
def add_tensors(copy):
    def add(case, tensors):
        directory = copy(case)
        path = sorted(directory.glob("model*.safetensors"))[-1]
        save_file({**load_file(path), **tensors}, path)
        return directory

    return add


def test_the_layer_that_predicts_further_is_named_and_left_out(add_tensors, caplog):
    names = ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"]
    caplog.set_level("INFO")
    directory = add_tensors("glm4_moe", dict.fromkeys(names, np.ones(3, np.float32)))
    jmoe.load(directory, dtype="float32")
    assert "2 tensors are not read, model.layers.3.*: they predict" in caplog.text


def test_inverse_frequencies_of_old_checkpoints_are_no_harm(add_tensors):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    jmoe.load(add_tensors("mixtral", {name: np.ones(4, np.float32)}), dtype="float32")


def test_a_tied_model_may_hold_its_embedding_twice_but_no_other(add_tensors):
    case = "mixtral_tied_llama3"
    embed = load_file(GOLDEN / case / "model.safetensors")["model.embed_tokens.weight"]
    jmoe.load(add_tensors(case, {"lm_head.weight": embed}), dtype="float32")


def test_a_tied_model_with_another_output_matrix_is_refused(add_tensors):
    case = "mixtral_tied_llama3"
    embed = load_file(GOLDEN / case / "model.safetensors")["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens"):
        jmoe.load(add_tensors(case, {"lm_head.weight": embed + 1}), dtype="float32")
