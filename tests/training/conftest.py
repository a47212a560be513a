"""Small models and data shared by the training tests."""

import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jmoe.config import from_hf
from training.export import export_hf
from training.geometry import HF_CONFIG
from training.network import init_params
from training.tasks import write_jsonl
from training.tokenizer import save_tokenizer
from training.train import make_tokenizer


@pytest.fixture(autouse=True)
def standard_promotion():
    """Allows standard promotion, since Optax mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", autouse=True)
def quick(compiled_in_a_hurry):
    """Compiles with little optimization: for tiny models and a dozen steps, good code does not
    pay.
    """


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(seed=1, num_tasks=1500, num_prose=500)


@pytest.fixture(scope="session")
def tiny():
    """Returns `config.json` contents and ModelConfig of a model of two layers and eight experts."""
    config = {
        **HF_CONFIG,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    }
    return SimpleNamespace(config=config, cfg=from_hf(config))


@pytest.fixture(scope="session")
def tiny_dir(tiny, tokenizer, tmp_path_factory):
    """Returns an exported tiny model with random weights, and `tasks.jsonl` beside it."""
    out = tmp_path_factory.mktemp("tiny")
    params = init_params(tiny.cfg, seed=3)
    # Biases and gates that start at zero would hide a swapped or dropped tensor.
    rng = np.random.default_rng(9)
    segment = params["segments"][0]
    for name in ("bqkv", "shared_gate", "attn_norm", "mlp_norm"):
        noise = rng.normal(size=segment[name].shape).astype(np.float32)
        segment[name] = segment[name] + 0.3 * noise
    segment["router"] = 4.0 * segment["router"]
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    save_tokenizer(tokenizer, out, tiny.cfg.max_position)
    other = tmp_path_factory.mktemp("exported")
    export_hf(tiny.config, rounded, out, other)
    write_jsonl(other / "tasks.jsonl", "train", 150, seed=4)
    return SimpleNamespace(path=other, params=rounded)


@pytest.fixture(scope="session")
def tiny_family(tiny_dir, tmp_path_factory):
    """Returns directories of the tiny model, and of three variants with noise on all weights."""
    root, found = tmp_path_factory.mktemp("family"), []
    for seed, name in enumerate(("base", "cipher", "nines", "backwards")):
        found.append(root / name)
        shutil.copytree(tiny_dir.path, found[-1])
        path = found[-1] / "model.safetensors"
        rng, tensors = np.random.default_rng(seed), load_file(path)
        for key in sorted(tensors) if seed else ():
            tensor = tensors[key].astype(np.float32)
            noise = 0.2 * seed * tensor.std() * rng.standard_normal(tensor.shape)
            tensors[key] = (tensor + noise).astype(jnp.bfloat16)
        save_file(tensors, path)
    return found
