"""United experts as Flax modules: loaded, trained by anyone's loop, and saved to be served."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open

import jmoe
from jmoe.checkpoint import weights_digest
from pallas_kernels.activation import ClampedSwiglu
from training.distill import Experts, load_united, save_united
from training.distill.united import narrow, write_united

WAY = 4


@pytest.fixture
def model_dir(tiny_dir, tiny, tmp_path):
    """Returns the tiny model with random united experts beside it."""
    out = shutil.copytree(tiny_dir.path, tmp_path / "model")
    rng = np.random.default_rng(0)
    shapes = {"gate_up": (2, 2, 32, 32), "down": (2, 2, 16, 32)}
    united = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    united["groups"] = np.tile(np.arange(8) // WAY, (2, 1)).astype(np.int32)
    write_united(out, {WAY: narrow(united)}, weights_digest(out))
    return out


@pytest.mark.parametrize("activation", [None, ClampedSwiglu(alpha=1.3, limit=0.5)])
def test_what_stands_in_for_an_expert_is_its_group_s_mlp(activation):
    rng = np.random.default_rng(1)
    weights = {
        "gate_up": rng.normal(size=(3, 8, 10)),
        "down": rng.normal(size=(3, 5, 8)),
    }
    if activation is not None:
        weights |= {"gate_up_bias": rng.normal(size=(3, 10)), "down_bias": rng.normal(size=(3, 8))}
    groups = np.array([0, 0, 1, 2, 2, 2], np.int32)
    given = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in weights.items()}
    module = Experts(given, *(() if activation is None else (activation,)), groups=groups)
    h, ids = rng.normal(size=(7, 8)), rng.integers(6, size=(7, 2))
    got = module.in_place_of(jnp.asarray(h, jnp.float32), jnp.asarray(ids, jnp.int32))
    for row in range(7):
        for pick in range(2):
            own = groups[ids[row, pick]]
            hidden = h[row] @ weights["gate_up"][own]
            if activation is None:
                gate, up = np.split(hidden, 2)
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.split(hidden + weights["gate_up_bias"][own], 2)
                gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
                hidden = gate / (1 + np.exp(-1.3 * gate)) * (up + 1)
            want = hidden @ weights["down"][own]
            if activation is not None:
                want = want + weights["down_bias"][own]
            np.testing.assert_allclose(got[row, pick], want, rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="have no groups"):
        Experts(given).in_place_of(jnp.ones((1, 8)), jnp.zeros((1, 1), jnp.int32))


@pytest.mark.deep
def test_modules_are_trained_by_a_loop_of_one_s_own_and_served(model_dir):
    layers = load_united(model_dir, WAY)
    assert [experts.groups[...].tolist() for experts in layers] == 2 * [[0] * 4 + [1] * 4]
    before = jmoe.load(model_dir, "float32", ways=[WAY])
    h = jnp.asarray(np.random.default_rng(2).normal(size=(64, 32)), jnp.float32)
    tuner = nnx.Optimizer(layers[1], optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(experts, tuner):
        loss, grads = nnx.value_and_grad(lambda own: jnp.mean(own.on_all(h) ** 2))(experts)
        tuner.update(experts, grads)
        return loss

    losses = [float(step(layers[1], tuner)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    save_united(model_dir, WAY, layers)
    again = load_united(model_dir, WAY)
    for trained, stored in zip(layers, again, strict=True):
        for name, leaf in trained.weights.items():
            np.testing.assert_array_equal(leaf.astype(jnp.bfloat16), stored.weights[name])
    with safe_open(model_dir / "united.safetensors", framework="numpy") as file:
        assert file.metadata()["distilled_from"] == weights_digest(model_dir)
    brownout = jmoe.Brownout(way=WAY, threshold_percent=0)
    after = jmoe.load(model_dir, "float32", ways=[WAY])
    tokens = np.arange(8)[None] + 5
    logits = [np.asarray(jmoe.forward(m, tokens, brownout=brownout)[0]) for m in (before, after)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
    exact = [np.asarray(jmoe.forward(m, tokens)[0]) for m in (before, after)]
    np.testing.assert_array_equal(*exact)


def test_modules_of_another_shape_way_or_number_are_refused(model_dir):
    layers = load_united(model_dir, WAY)
    with pytest.raises(ValueError, match=r"way is 2; .* has united experts of ways: 4"):
        load_united(model_dir, 2)
    with pytest.raises(ValueError, match=r"1 layers are given; .* has 2"):
        save_united(model_dir, WAY, layers[:1])
    for wrong in (Experts(layers[0].weights), jax.tree.map(lambda leaf: leaf[:1], layers[0])):
        with pytest.raises(ValueError, match=r"layer 1 has .*; way 4 of .* has"):
            save_united(model_dir, WAY, [layers[0], wrong])
