"""Routers: scored ones against loops, and one from outside the package wherever experts are."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import layout
from jmoe.api import Model
from jmoe.checkpoint import HFLayers
from jmoe.config import read_config
from jmoe.random_model import random_params
from jmoe.router import ScoredTopK, SparseMixer
from serving.config import AsynchronousConfig, BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams
from tests.jmoe.router_oracle import scored, sparsemixer

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"


def by_loops(router, row, bias, top_k, normalize):
    fields = asdict(router) | {"normalize": normalize}
    del fields["bias"]
    return scored(row, bias, top_k, **fields)[:2]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "router",
    [
        ScoredTopK(),
        ScoredTopK("softmax", scale=2.5),
        ScoredTopK("sigmoid", 4, 2, 1.5, bias=True),
        ScoredTopK("sigmoid", 6, 1, bias=True),
        ScoredTopK("softmax", 12, 5),
        ScoredTopK("softmax", 4, 1, best=1),
        ScoredTopK("sigmoid", 3, 2, bias=True, best=1),
    ],
)
def test_scores_are_chosen_from_as_published(router, normalize):
    rng = np.random.default_rng(3)
    cfg = replace(read_config(GOLDEN), num_experts=12, experts_per_token=2)
    cfg = replace(cfg, norm_topk_prob=normalize, router=router)
    logits = rng.normal(size=(50, 12)).astype(np.float32)
    bias = rng.normal(size=12).astype(np.float32) if router.bias else np.zeros(12, np.float32)
    layer = {"router_bias": jnp.asarray(bias)} if router.bias else {}
    weights, ids = router(cfg, layer, jnp.asarray(logits))
    for got_ids, got, row in zip(ids, weights, logits, strict=True):
        want_ids, want_weights = by_loops(router, row, bias, 2, normalize)
        assert got_ids.tolist() == want_ids
        np.testing.assert_allclose(got, want_weights, rtol=1e-5)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_the_second_expert_is_the_likeliest_but_for_the_first(jitter):
    cfg = replace(read_config(GOLDEN), num_experts=12, experts_per_token=2)
    logits = np.random.default_rng(4).normal(size=(200, 12)).astype(np.float32) - 0.5
    weights, ids = SparseMixer(jitter)(cfg, {}, jnp.asarray(logits))
    for got_ids, got, row in zip(ids, weights, logits, strict=True):
        want_ids, want, _ = sparsemixer(row, jitter)
        assert got_ids.tolist() == want_ids
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_layers_bias_is_a_parameter_of_its_layout():
    cfg = replace(read_config(GOLDEN), router=ScoredTopK(bias=True))
    of_bias = layout.layer(cfg, 1, is_moe=True)["router_bias"]
    assert of_bias.names == ("model.layers.1.mlp.gate.e_score_correction_bias",)
    assert of_bias.shape == (cfg.num_experts,)
    assert "router_bias" not in layout.layer(replace(cfg, router=ScoredTopK()), 1, is_moe=True)


def test_a_bias_of_float32_stays_so_in_a_model_of_less(tmp_path):
    """In bfloat16 two experts whose bias differs by less than their scores would change places."""
    cfg = replace(read_config(GOLDEN), router=ScoredTopK(bias=True))
    tensors, bias = load_file(GOLDEN / "model.safetensors"), np.float32(9) + np.arange(7) / 1000
    for layer in range(cfg.num_layers):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias.astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    layer, _ = HFLayers(tmp_path, cfg, jnp.dtype("bfloat16")).layer(0)
    assert np.asarray(layer["router_bias"]).tolist() == bias.astype(np.float32).tolist()
    assert layer["router"].dtype == jnp.bfloat16
    drawn = jax.eval_shape(lambda: random_params(cfg, jax.random.key(0), jnp.dtype("bfloat16")))
    assert drawn["segments"][0]["router_bias"].dtype == np.float32


@dataclass(frozen=True)
class Contrary:
    """A router from outside the package: the least likely experts, each with the same weight."""

    bias = False

    def __call__(self, cfg, layer, logits):
        _, ids = jax.lax.top_k(-logits, cfg.experts_per_token)
        share = jnp.full(ids.shape, 1 / cfg.experts_per_token, jnp.float32)
        return share, ids.astype(jnp.int32)


def served_by(router) -> Model:
    model = jmoe.load(GOLDEN, "float32")
    model.config = replace(model.config, router=router)
    return model


PROMPT = [5, 9, 2, 40, 7]


@pytest.fixture(scope="module")
def plain():
    """Returns what the likeliest experts answer."""
    return jmoe.generate(jmoe.load(GOLDEN, "float32"), [PROMPT], 6, stop_token_ids=())


ROUTERS = pytest.mark.parametrize("router", [Contrary(), ScoredTopK()], ids=["own", "scored"])


@pytest.mark.deep
@ROUTERS
def test_steps_and_the_whole_forward_pass_agree(router, plain):
    """And differ from the likeliest experts' answers."""
    model, prompt = served_by(router), PROMPT
    got = jmoe.generate(model, [prompt], 6, stop_token_ids=())
    logits = np.asarray(jmoe.forward(model, [[*prompt, *got.tokens[0]]]))[0]
    assert got.tokens[0] == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()
    assert np.abs(np.array(plain.logprobs[0]) - np.array(got.logprobs[0])).max() > 1e-3


@pytest.mark.sized(
    exhaustive=(
        "aep-own",
        "steps-scored",
    )
)
@pytest.mark.deep
@ROUTERS
@pytest.mark.parametrize("mode", ["steps", "aep"])
async def test_engines_serve_it_on_one_device_and_on_workers(router, mode):
    model, prompt = served_by(router), PROMPT
    crew = AsynchronousConfig(attention=1, experts=2) if mode == "aep" else AsynchronousConfig()
    config = EngineConfig(
        mode=mode,
        asynchronous=crew,
        dtype="float32",
        max_num_seqs=2,
        max_model_len=32,
        page_size=8,
        brownout=BrownoutConfig(strategy="zero", salc=False),
        compilation_cache="",
    )
    engine = await Engine.start(config, model=model, progress=lambda *_: None)
    try:
        sampling, tokens = SamplingParams(max_new_tokens=6, ignore_eos=True), []
        async for output in engine.generate(prompt, sampling):
            tokens += output.token_ids
    finally:
        await engine.stop()
    assert tokens == jmoe.generate(model, [prompt], 6, stop_token_ids=()).tokens[0]
