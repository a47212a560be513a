"""An architecture that the package does not know, added without touching it."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe.architectures import ARCHITECTURES, Architecture, register
from jmoe.config_keys import READ_FOR_ALL

GOLDEN = "qwen3_moe"
TOKENS = np.array([[5, 60, 17, 33, 8]], np.int32)
RENAMED = {"experts": "num_experts", "expert_width": "moe_intermediate_size"}


def toy(fields):
    return {
        "num_experts": fields.size("experts"),
        "d_ff_expert": fields.size("expert_width"),
        "moe_layers": (True,) * fields.size("num_hidden_layers"),
        "norm_topk_prob": True,
        "qk_norm": True,
    }


TOY = Architecture(
    "ToyForCausalLM",
    toy,
    READ_FOR_ALL | set(RENAMED),
    mlp="moe",
    expert_names=("wide_a", "wide_b", "narrow"),
)


@pytest.fixture
def toy_directory(request, tmp_path):
    """Returns the golden Qwen3-MoE under other names of keys and tensors."""
    golden = request.config.rootpath / "tests" / "golden" / GOLDEN
    given = json.loads((golden / "config.json").read_text())
    config = {key: given[key] for key in READ_FOR_ALL if key in given}
    config |= {ours: given[theirs] for ours, theirs in RENAMED.items()}
    config |= {"model_type": "toy_moe", "architectures": ["ToyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {}
    for file in golden.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            name = name.replace(".mlp.", ".moe.")
            for old, new in zip(
                ("gate_proj", "up_proj", "down_proj"), TOY.expert_names, strict=True
            ):
                name = name.replace(old, new)
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def registered():
    register("toy_moe", TOY)
    yield
    del ARCHITECTURES["toy_moe"]


def test_without_it_the_checkpoint_is_refused(toy_directory):
    with pytest.raises(jmoe.ConfigError, match=r"'toy_moe'; jmoe serves .*mixtral.*, qwen2_moe"):
        jmoe.load(toy_directory, dtype="float32")


@pytest.mark.deep
@pytest.mark.usefixtures("registered")
def test_with_it_the_model_is_the_one_it_renames(request, toy_directory):
    golden = jmoe.load(request.config.rootpath / "tests" / "golden" / GOLDEN, dtype="float32")
    model = jmoe.load(toy_directory, dtype="float32")
    assert model.config.architecture == "toy_moe"
    for ours, theirs in zip(*map(jax.tree.leaves, (model.weights, golden.weights)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(jmoe.forward(model, TOKENS)[0], jmoe.forward(golden, TOKENS)[0])


@pytest.mark.usefixtures("registered")
def test_its_keys_are_judged_as_all_are(toy_directory):
    file = toy_directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts": 8}))
    with pytest.raises(jmoe.ConfigError, match="num_experts is 8; jmoe does not know this key"):
        jmoe.load(toy_directory, dtype="float32")


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ValueError, match="'mixtral' is registered already"):
        register("mixtral", TOY)
