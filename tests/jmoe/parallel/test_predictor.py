"""Predictors of the next layer: by hand, against NumPy, and on rows they must get right."""

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe import model as stages
from jmoe.parallel import predictor

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def test_lookahead_is_the_next_layers_router_on_these_rows(request):
    model = jmoe.load(request.config.rootpath / "tests/golden/qwen2_moe", "float32")
    cfg, layers = model.config, stages.layers_of(model.config, model.params)
    layer = {name: np.asarray(a) for name, a in layers[1][0].items()}
    x = np.random.default_rng(0).normal(size=(9, cfg.d_model)).astype(np.float32)
    got = predictor.lookahead(cfg, layers[1][0], jnp.asarray(x))
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + cfg.rms_norm_eps)
    logits = (normed * layer["mlp_norm"]) @ layer["router"]
    np.testing.assert_array_equal(got, np.argsort(-logits, axis=1)[:, : cfg.experts_per_token])


def test_a_correction_learns_what_is_missed_by_expert():
    predicted = jnp.asarray([[80, 20, 0], [40, 10, 0]], jnp.int32)
    made = jnp.asarray([[50, 20, 30], [25, 10, 15]], jnp.int32)
    fix = predictor.Correction.none(3)
    np.testing.assert_array_equal(fix.of(predicted), predicted)
    once = fix.seen(predicted, made, decay=0.5)
    np.testing.assert_allclose(once.error, [-0.15, 0, 0.15], atol=1e-6)
    for _ in range(60):
        fix = fix.seen(predicted, made)
    np.testing.assert_array_equal(fix.of(predicted), made)
    assert float(predictor.count_accuracy(fix.of(predicted), made)) == 1


def test_a_correction_keeps_every_devices_visits_and_never_goes_below_none():
    fix = predictor.Correction(jnp.asarray([-0.9, 0.4, 0.5], jnp.float32))
    got = np.asarray(fix.of(jnp.asarray([[100, 50, 0], [0, 0, 0]], jnp.int32)))
    assert got.min() >= 0
    assert got.sum(axis=1).tolist() == [150, 0]


def test_accuracies_by_hand():
    predicted, made = jnp.asarray([[3, 1, 0], [0, 4, 0]]), jnp.asarray([[1, 1, 2], [0, 2, 2]])
    assert float(predictor.count_accuracy(predicted, made)) == 4 / 8
    picks, chosen = jnp.asarray([[0, 1], [2, 3]]), jnp.asarray([[1, 0], [3, 5]])
    assert float(predictor.pick_accuracy(picks, chosen)) == 3 / 4
    assert float(predictor.count_accuracy(made * 0, made * 0)) == 0
