import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import jmoe
from training import remake
from training.distill import sampled
from training.export import newest_params, to_tensors
from training.network import forward, init_params
from training.packing import eval_tasks, task_batch, training_batch
from training.train import TrainConfig, family_accuracy, make_optimizer, train, train_step


@pytest.fixture(scope="module")
def config(tiny):
    return TrainConfig(
        model=tiny.cfg,
        steps=20,
        rows=8,
        warmup=3,
        peak_lr=1e-2,
        eval_every=1000,
        save_every=15,
        eval_items=8,
    )


@pytest.mark.deep
def test_loss_falls(config, tokenizer):
    params = init_params(config.model, seed=1)
    state = make_optimizer(config).init(params)
    losses = []
    for step in range(config.steps):
        batch = training_batch(tokenizer, 1, step, config.rows, config.length)
        params, state, metrics = train_step(params, state, batch.arrays(), config)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    scores = family_accuracy(params, task_batch(tokenizer, eval_tasks(8, 1), 128), config)
    assert all(0 <= score <= 1 for score in scores.values())


@pytest.mark.deep
def test_resumed_run_equals_uninterrupted(config, tmp_path):
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", stop_after_s=0.0)
    resumed = train(config, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    step, saved = newest_params(tmp_path / "parts", config.model)
    assert step == config.steps
    jax.tree.map(np.testing.assert_array_equal, whole, saved)


def test_newest_params_of_an_empty_run_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        newest_params(tmp_path, config.model)


@pytest.mark.exhaustive
def test_one_command_makes_a_model_of_the_geometry_that_it_names(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(remake.GEOMETRIES, "second", tiny.config)
    monkeypatch.setattr(remake, "EVAL_ITEMS", 4)
    monkeypatch.setattr(remake, "DISTILL_ITEMS", 300)
    monkeypatch.setattr(sampled, "SAMPLED", 20)
    for key, value in remake.ALLOCATOR.items():
        monkeypatch.setenv(key, value)
    flags = "--geometry second --seed 3 --steps 2 --rows 2 --distill-steps 2 --refine-steps 1"
    monkeypatch.setattr("sys.argv", ["remake", *flags.split(), "--out", str(tmp_path / "model")])
    remake.main()
    model = jmoe.load(tmp_path / "model", "float32")
    assert model.config.num_experts == tiny.cfg.num_experts
    assert sorted(model.united) == list(remake.WAYS)


@pytest.mark.deep
def test_logits_equal_jmoes(tiny, tiny_dir):
    """Training forward, export and jmoe's loader and forward agree."""
    tokens = np.random.default_rng(0).integers(0, 512, (3, 20)).astype(np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    got, stats = forward(
        tiny.cfg,
        tiny_dir.params,
        jnp.asarray(tokens),
        jnp.asarray(positions),
        jnp.ones(tokens.shape, jnp.int32),
        capacity=60,
        dtype=jnp.float32,
    )
    want = jmoe.forward(jmoe.load(tiny_dir.path, "float32"), tokens)
    assert int(jnp.sum(stats["dropped"])) == 0
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_packed_items_do_not_see_each_other(tiny, tiny_dir, tokenizer):
    batch = task_batch(tokenizer, eval_tasks(6, 3), 128)
    args = [jnp.asarray(a) for a in (batch.tokens, batch.positions, batch.items)]
    run = jax.jit(
        lambda *a: forward(tiny.cfg, tiny_dir.params, *a, capacity=400, dtype=jnp.float32)[0]
    )
    packed = run(*args)
    at = np.flatnonzero(batch.items[0] == 2)
    alone = [jnp.zeros_like(a).at[0, : len(at)].set(a[0, at]) for a in args]
    np.testing.assert_allclose(packed[0, at], run(*alone)[0, : len(at)], atol=2e-4)


def test_exported_names_are_qwen2_moes(tiny, tiny_dir):
    with safe_open(tiny_dir.path / "model.safetensors", framework="flax") as file:
        names = set(file.keys())
        assert file.get_slice(next(iter(names))).get_dtype() == "BF16"
    assert names == set(to_tensors(tiny.cfg, tiny_dir.params))
    kinds = {
        re.sub(r"layers\.\d+", "layers.N", re.sub(r"experts\.\d+", "experts.E", n)) for n in names
    }
    layer = "model.layers.N."
    attention = {f"{layer}self_attn.{p}_proj.{k}" for p in "qkv" for k in ("weight", "bias")}
    ffn = ("gate_proj", "up_proj", "down_proj")
    assert kinds == attention | {
        "model.embed_tokens.weight",
        "model.norm.weight",
        f"{layer}self_attn.o_proj.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        f"{layer}mlp.gate.weight",
        f"{layer}mlp.shared_expert_gate.weight",
        *(f"{layer}mlp.experts.E.{p}.weight" for p in ffn),
        *(f"{layer}mlp.shared_expert.{p}.weight" for p in ffn),
    }
