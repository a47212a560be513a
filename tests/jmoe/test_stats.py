"""`forward(..., return_stats=True)`: a plan of what it returns is the plan that was carried out."""

import jax
import numpy as np
import plan_oracle
import pytest

import jmoe
from jmoe.attention import CausalAttention
from jmoe.brownout import Brownout, plan
from jmoe.model import attend
from jmoe.moe import route
from jmoe.rope import rotation

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = ["qwen2_moe", pytest.param("qwen2_moe_mlp_only_tied", marks=pytest.mark.deep), "qwen3_moe"]
TOKENS = np.random.default_rng(0).integers(0, 70, (3, 8))
SETTINGS = [
    Brownout("zero", 0),
    *(Brownout("full", t) for t in (0, 35, 80, 100)),
    *(Brownout("partial", t, way) for t in (0, 35, 80, 100) for way in (2, 3)),
]


@pytest.fixture(scope="module", params=CASES)
def model(request, united_models):
    return united_models(request.param)


def test_shapes_and_dtypes_are_those_that_are_written(model):
    cfg = model.config
    logits, stats = jmoe.forward(model, TOKENS, return_stats=True, return_hidden=True)
    layers, rows, experts = cfg.num_moe_layers, TOKENS.shape, model.table.slots.shape[1]
    want = {
        "router_choices": ((layers, *rows, cfg.experts_per_token), np.int32),
        "gate_weights": ((layers, *rows, cfg.experts_per_token), np.float32),
        "degraded_visits": ((layers, *rows), np.int32),
        "expert_rows": ((layers, experts), np.int32),
        "hidden_states": ((cfg.num_layers + 1, *rows, cfg.d_model), model.dtype),
    }
    assert {name: (one.shape, one.dtype) for name, one in stats._asdict().items()} == want
    assert logits.shape == (*rows, cfg.vocab_size)
    assert stats.degraded_share == 0


@pytest.mark.parametrize("exempt", [None, [False, True, False]], ids=["all", "one exempt"])
@pytest.mark.parametrize("brownout", SETTINGS, ids=str)
def test_the_plan_of_the_choices_is_what_was_degraded(brownout, exempt, model):
    _, stats = jmoe.forward(model, TOKENS, brownout, exempt=exempt, return_stats=True)
    m, shape = model.config.num_experts, TOKENS.shape
    refuses = np.repeat(exempt or [False] * len(TOKENS), TOKENS.shape[1])
    total = 0
    for layer, choices in enumerate(stats.router_choices):
        partial = brownout.strategy == "partial"
        groups = model.united[brownout.way].groups[layer] if partial else np.full(m, -1)
        planned = plan(
            choices,
            num_experts=m,
            threshold_percent=brownout.threshold_percent,
            groups=groups,
            strategy=brownout.strategy,
            exempt=refuses.reshape(shape),
        )
        rows = np.asarray(choices).reshape(-1, choices.shape[-1])
        ids, degraded, _ = plan_oracle.plan(
            rows.tolist(),
            groups.tolist(),
            brownout.threshold_percent,
            brownout.strategy,
            [True] * len(rows),
            refuses.tolist(),
        )
        by_token = np.sum(degraded, axis=-1).reshape(shape)
        np.testing.assert_array_equal(stats.degraded_visits[layer], by_token)
        np.testing.assert_array_equal(np.sum(planned.degraded, axis=-1), by_token)
        np.testing.assert_array_equal(planned.expert_ids, np.reshape(ids, choices.shape))
        computed = [sum(e in row for row in ids) for e in range(stats.expert_rows.shape[1])]
        np.testing.assert_array_equal(stats.expert_rows[layer], computed)
        total += by_token.sum()
    assert stats.degraded_share == total / stats.router_choices.size
    if brownout.strategy == "zero" or brownout.threshold_percent == 100:
        assert total == 0
    elif exempt is None and brownout.threshold_percent <= 35:
        assert total > 0


@pytest.mark.sized(deep=("qwen3_moe", "qwen2_moe"))
def test_hidden_states_are_what_the_stages_pass_on(model):
    """From the rows before a layer its attention and router make the choices and weights."""
    cfg = model.config
    tokens = TOKENS.reshape(-1)
    logits, stats = jmoe.forward(model, TOKENS, return_stats=True, return_hidden=True)
    hidden = stats.hidden_states.reshape(cfg.num_layers + 1, len(tokens), -1)
    np.testing.assert_array_equal(hidden[0], model.params["embed"][tokens])
    normed = hidden[-1] / np.sqrt(np.mean(hidden[-1] ** 2, -1, keepdims=True) + cfg.rms_norm_eps)
    embed = model.params["embed"]
    out = (normed * model.params["final_norm"][None]) @ (
        embed.T if cfg.tie_embeddings else model.params["lm_head"]
    )
    np.testing.assert_allclose(logits.reshape(out.shape), out, atol=1e-4)
    positions = np.tile(np.arange(TOKENS.shape[1], dtype=np.int32), len(TOKENS))
    cos_sin = rotation(jax.numpy.asarray(positions), cfg.rope, cfg.head_dim)
    attention = CausalAttention(*TOKENS.shape)
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], segment)
        for segment in model.params["segments"]
        for i in range(len(segment["attn_norm"]))
    ]
    moe_layer = 0
    for index, layer in enumerate(layers):
        if not cfg.moe_layers[index]:
            continue
        x, _ = attend(cfg, layer, hidden[index], cos_sin, attention, jax.numpy.int32(0), None)
        _, weights, ids = route(cfg, layer, x)
        seen = stats.router_choices[moe_layer], stats.gate_weights[moe_layer]
        np.testing.assert_array_equal(seen[0].reshape(ids.shape), ids)
        np.testing.assert_allclose(seen[1].reshape(ids.shape), weights, rtol=0, atol=1e-5)
        moe_layer += 1
    assert moe_layer == cfg.num_moe_layers


def test_stats_do_not_move_the_logits(model):
    plain = jmoe.forward(model, TOKENS, Brownout("full", 35))
    for hidden in (False, True):
        logits, stats = jmoe.forward(
            model, TOKENS, Brownout("full", 35), return_stats=True, return_hidden=hidden
        )
        np.testing.assert_allclose(logits, plain, rtol=0, atol=1e-5)
        assert (stats.hidden_states is not None) == hidden


def test_hidden_states_come_with_stats_only(model):
    with pytest.raises(ValueError, match="return_hidden is True; it needs return_stats=True"):
        jmoe.forward(model, TOKENS, return_hidden=True)


def test_choices_of_all_layers_at_once_are_not_one_step(model):
    _, stats = jmoe.forward(model, TOKENS, return_stats=True)
    with pytest.raises(ValueError, match=r"ids must be integers \[T, K\]; got int32"):
        plan(
            stats.router_choices, num_experts=model.config.num_experts, threshold_percent=50, way=2
        )


def test_masks_have_the_rows_of_the_choices():
    ids = np.zeros((2, 3, 1), np.int32)
    with pytest.raises(ValueError, match=r"exempt must be bool \[2, 3\]; got bool \(6,\)"):
        plan(ids, num_experts=2, threshold_percent=0, way=2, exempt=[False] * 6)


def test_rows_are_one_step_and_not_one_a_sequence():
    """Two sequences that agree leave less to degrade than each alone would."""
    ids = np.array([[[0], [1]], [[0], [0]]])
    together = plan(ids, num_experts=2, threshold_percent=60, strategy="full")
    assert np.asarray(together.degraded).tolist() == [[[False], [True]], [[False], [False]]]
    flat = plan(ids.reshape(4, 1), num_experts=2, threshold_percent=60, strategy="full")
    np.testing.assert_array_equal(together.expert_ids, np.reshape(flat.expert_ids, ids.shape))
