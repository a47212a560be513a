"""Random models: what their weights are, and how often their routers pick each expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.checkpoint import empty_pool
from jmoe.config import from_hf
from jmoe.random_model import popularity, random_model, random_params, weight_bytes

GEOMETRY = {
    "model_type": "qwen2_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def config(**change):
    return from_hf(GEOMETRY | change)


@pytest.mark.deep
def test_weights_have_unit_gain_and_every_layer_its_own():
    model = random_model(config(hidden_size=256, moe_intermediate_size=128), seed=3)
    gate_up = np.asarray(model.pool.gate_up)
    assert gate_up.std() == pytest.approx(256**-0.5, rel=0.01)
    assert np.asarray(model.pool.down).std() == pytest.approx(128**-0.5, rel=0.01)
    assert len({weights.tobytes() for weights in gate_up}) == 14


@pytest.mark.deep
def test_united_experts_are_means_of_their_members_and_can_be_loaded():
    model = random_model(config(), seed=1, ways=(2, 3))
    gate_up = np.asarray(model.pool.gate_up).reshape(2, 11, 32, 32)[:, :7]
    for way, count in ((2, 4), (3, 3)):
        united = model.united[way]
        want = [gate_up[:, g * way : (g + 1) * way].mean(1) for g in range(count)]
        np.testing.assert_allclose(united.gate_up, np.stack(want, 1), atol=1e-6)
        assert united.groups[1].tolist() == [e // way for e in range(7)]
    out = jmoe.forward(model, [[1, 2, 3]], jmoe.Brownout("partial", threshold_percent=0, way=3))
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.deep
def test_a_seed_gives_the_same_model_and_another_another():
    first, same, other = (random_model(config(), seed=seed) for seed in (1, 1, 2))
    assert jnp.array_equal(first.pool.down, same.pool.down)
    assert jnp.array_equal(first.params["lm_head"], same.params["lm_head"])
    assert not jnp.array_equal(first.pool.down, other.pool.down)


@pytest.mark.sized(deep=("60-4-4.0",))
@pytest.mark.parametrize(("experts", "picks", "skew"), [(60, 4, 4.0), (128, 8, 4.0), (8, 2, 1.0)])
def test_the_router_picks_experts_as_often_as_it_is_told(experts, picks, skew):
    cfg = config(hidden_size=128, num_experts=experts, num_experts_per_tok=picks)
    params = random_params(cfg, jax.random.key(0), jnp.dtype("float32"), skew)
    router = np.asarray(params["segments"][0]["router"])
    rng = np.random.default_rng(0)
    for layer in router:
        logits = rng.standard_normal((20_000, 128)) @ layer
        chosen = np.argsort(-logits, axis=1)[:, :picks]
        share = np.sort(np.bincount(chosen.ravel(), minlength=experts) / 20_000)[::-1]
        want = popularity(experts, picks, skew)
        assert want[0] / want[-1] == pytest.approx(np.exp(skew * (1 - 1 / experts)))
        # The k-th largest logit of few experts varies from row to row, which evens loads out.
        np.testing.assert_allclose(share, want, rtol=0.35, atol=0.012)
    hot = np.argmax(np.linalg.norm(router, axis=1), axis=-1)
    assert hot[0] != hot[1]  # another expert is the popular one in another layer


def test_a_skew_that_no_router_without_bias_has_is_refused():
    with pytest.raises(ValueError, match=r"skew is 4; .*2 of 8 experts"):
        random_model(config(num_experts=8), skew=4.0)
    with pytest.raises(ValueError, match="skew is -1"):
        random_model(config(), skew=-1.0)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_count_what_a_step_reads(tied):
    cfg = config(tie_word_embeddings=tied)
    expert, others = weight_bytes(cfg, "bfloat16")
    pool = jax.eval_shape(lambda: empty_pool(cfg, 14, jnp.dtype("bfloat16")))
    assert expert * 14 == sum(2 * leaf.size for leaf in pool.arrays.values())
    # By hand: norms, QKV with biases, output, router, shared expert and its gate; then the head.
    layer = 2 * 32 + 3 * 32 * 32 + 3 * 32 + 32 * 32 + 32 * 7 + 3 * 32 * 24 + 32
    assert others == 2 * (64 * 32 + 32 + 2 * layer)
