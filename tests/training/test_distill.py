import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import jmoe
from jmoe.model import rms_norm
from training.capture import capture, read_texts
from training.distill import (
    DistillConfig,
    apply_all,
    distill,
    distill_layer,
    fit_groups,
    membership,
)
from training.network import layer_forward, packed_attention

QUICK = DistillConfig(rows=1024, steps=40, batch=128)


def random_experts(count, d, f, seed):
    a, b = jax.random.split(jax.random.key(seed))
    return {
        "gate_up": jax.random.normal(a, (count, d, 2 * f)) * d**-0.5,
        "down": jax.random.normal(b, (count, f, d)) * f**-0.5,
    }


def brute_force_loss(united, members, groups, h):
    """Equation 4 as printed: mean over the group's members of the squared distance, per group."""
    ours, theirs = apply_all(united, h), apply_all(members, h)
    return [
        np.mean(
            [
                np.mean(np.sum(np.square(ours[j] - theirs[i]), axis=-1))
                for i in np.flatnonzero(groups == j)
            ]
        )
        for j in range(groups.max() + 1)
    ]


def test_every_group_beats_its_start_also_a_short_one():
    members, groups = random_experts(7, 16, 8, 0), np.arange(7) // 3
    h = jax.random.normal(jax.random.key(5), (1024, 16))
    average = jnp.asarray(membership(groups))
    start = {key: jnp.einsum("um,mab->uab", average, leaf) for key, leaf in members.items()}
    united, before, after = distill_layer(
        members, h, groups, DistillConfig(steps=200, batch=256, learning_rate=1e-2)
    )
    assert after < 0.7 * before
    trained, mean = (brute_force_loss(u, members, groups, h) for u in (united, start))
    assert trained[0] < mean[0]
    assert trained[1] < mean[1]
    # A group of one is its own minimiser; bf16 is not in play here, so it must stay.
    np.testing.assert_allclose(trained[2], 0.0, atol=1e-3)


def test_reaches_the_minimiser_where_it_is_known():
    """Members with equal gates are linear in `down`: the best united expert has their mean."""
    d, f = 8, 6
    one = random_experts(1, d, f, 1)
    members = {
        "gate_up": jnp.repeat(one["gate_up"], 2, axis=0),
        "down": jax.random.normal(jax.random.key(7), (2, f, d)),
    }
    h = jax.random.normal(jax.random.key(8), (2048, d))
    best = {"gate_up": one["gate_up"], "down": jnp.mean(members["down"], axis=0, keepdims=True)}
    start = {**best, "down": jnp.zeros_like(best["down"])}
    target = apply_all(best, h)
    config = DistillConfig(steps=500, batch=256, learning_rate=2e-2)
    _, before, after = fit_groups(start, h, target, config)
    np.testing.assert_allclose(before, 1.0, rtol=1e-5)
    assert float(after) < 1e-2


def test_membership_averages_each_group():
    np.testing.assert_allclose(
        membership(np.array([0, 0, 1, 1, 2])),
        [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]],
    )


def test_capture_is_what_enters_the_experts(tiny, tiny_dir):
    """Against the trainer's own layers, sequence by sequence, padding and order included."""
    cfg, params = tiny.cfg, tiny_dir.params
    model = jmoe.load(tiny_dir.path, "float32")
    rows = capture(model, tiny_dir.path / "tasks.jsonl", 200, batch=4, length=64)
    assert [r.shape for r in rows] == [(200, cfg.d_model)] * 2
    text = read_texts(tiny_dir.path / "tasks.jsonl")[0]
    tokens = jnp.asarray([[*model.tokenizer.encode(text), 0]])
    positions = jnp.arange(tokens.size)[None]
    mask = jnp.where(jnp.tril(jnp.ones((tokens.size, tokens.size), bool)), 0.0, -1e9)[None, None]

    @jax.jit
    def inputs(params):
        x, out = params["embed"][tokens], []
        for i in range(cfg.num_layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["segments"][0])
            experts = jax.tree.map(lambda leaf, i=i: leaf[i], params["experts"])
            h = rms_norm(x, layer["attn_norm"], cfg.rms_norm_eps)
            mixed = x + packed_attention(cfg, layer, h, positions, mask) @ layer["wo"]
            out.append(rms_norm(mixed, layer["mlp_norm"], cfg.rms_norm_eps)[0])
            x, _ = layer_forward(
                cfg,
                layer,
                experts,
                x,
                positions,
                mask,
                jnp.ones(tokens.size),
                capacity=64,
                dtype=jnp.float32,
            )
        return out

    assert tokens.size <= 64
    for got, want in zip(rows, inputs(params), strict=True):
        np.testing.assert_allclose(got[: tokens.size], want, atol=1e-4)


def test_distill_writes_what_jmoe_loads(tiny_dir, tmp_path):
    seen = []
    results = distill(
        tiny_dir.path,
        [3],
        tiny_dir.path / "tasks.jsonl",
        tmp_path,
        QUICK,
        lambda *args: seen.append(args),
    )
    assert {(r.way, r.layer) for r in results} == {(3, 0), (3, 1)}
    assert all(r.error_after < r.error_before for r in results)
    assert seen[-1] == ("distill", 2, 2)
    with safe_open(tmp_path / "united.safetensors", framework="flax") as file:
        assert file.get_slice("way3.layers.1.gate_up").get_shape() == [3, 32, 32]
        assert file.get_slice("way3.layers.1.gate_up").get_dtype() == "BF16"
        np.testing.assert_array_equal(
            file.get_tensor("way3.layers.1.groups"), [0, 0, 0, 1, 1, 1, 2, 2]
        )


@pytest.mark.parametrize("ways", [[1], [9], [2, 2], []])
def test_bad_ways_are_refused(tiny_dir, tmp_path, ways):
    with pytest.raises(ValueError, match="way"):
        distill(tiny_dir.path, ways, tiny_dir.path / "tasks.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "cannot read"),
        ("empty.txt", "\n\n", "holds no text"),
        ("bad.jsonl", '{"prompt": "a"}\nnot json\n', "line 2"),
        ("key.jsonl", '{"text": "a"}\n', "line 1"),
        ("type.jsonl", '{"prompt": 3}\n', "line 1"),
    ],
)
def test_bad_data_is_refused_by_name_and_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / name)
