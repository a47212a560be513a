"""The layout of parameters against the files that transformers wrote, and the documented table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jmoe import layout
from jmoe.config import read_config
from jmoe.random_model import random_params

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = [
    "qwen2_moe",
    "qwen2_moe_mlp_only_tied",
    "qwen3_moe_attention_bias",
    "mixtral",
    "glm4_moe",
    "granitemoe",
    "phimoe",
    "gpt_oss",
    "deepseek_v3",
    "minimax_m2",
    "ernie4_5_moe",
    "hy_v3",
    "hunyuan_v1_moe",
    "afmoe",
    "afmoe_types_yarn_tied",
]


@pytest.fixture(params=CASES)
def case(request):
    directory = request.config.rootpath / "tests" / "golden" / request.param
    return directory, read_config(directory)


def every_layout(cfg):
    yield layout.top(cfg)
    for index, is_moe in enumerate(cfg.moe_layers):
        yield layout.layer(cfg, index, is_moe)
        if is_moe:
            yield layout.expert(cfg, index, cfg.num_experts - 1)


def test_names_and_shapes_are_those_of_the_file(case):
    directory, cfg = case
    with safe_open(directory / "model.safetensors", "numpy") as file:
        names = list(file.keys())
        found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    want = {
        name: shape
        for parameter in layout.whole(cfg)
        for name, shape in zip(parameter.names, parameter.in_file, strict=True)
    }
    if cfg.tie_embeddings:
        found.pop("lm_head.weight", None)
    assert want == found


@pytest.mark.sized(
    deep=("qwen2_moe-jax.numpy", "qwen3_moe_attention_bias-jax.numpy", "glm4_moe-jax.numpy")
)
@pytest.mark.sized(deep=[f"{name}-jax.numpy" for name in CASES[-8:]])
@pytest.mark.parametrize("where", [np, jnp])
def test_splitting_is_the_inverse_of_assembling(case, where):
    _, cfg = case
    rng = np.random.default_rng(0)
    for own in every_layout(cfg):
        for parameter in own.values():
            tensors = [where.asarray(rng.random(s, np.float32)) for s in parameter.stored]
            made = parameter.assemble(tensors)
            assert made.shape == parameter.shape
            for name, tensor in zip(parameter.names, tensors, strict=True):
                np.testing.assert_array_equal(parameter.split(made)[name], tensor)


def test_random_weights_have_its_shapes(case):
    _, cfg = case
    params = jax.eval_shape(lambda: random_params(cfg, jax.random.key(0), jnp.dtype("float32")))
    segments = params.pop("segments")
    assert {k: a.shape for k, a in params.items()} == {
        key: p.shape for key, p in layout.top(cfg).items()
    }
    for (is_moe, first, count), segment in zip(cfg.segments(), segments, strict=True):
        assert {k: a.shape for k, a in segment.items()} == {
            key: (count, *p.shape) for key, p in layout.layer(cfg, first, is_moe).items()
        }
