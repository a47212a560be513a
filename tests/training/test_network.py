"""The trained layers, which are jmoe's own, against a naive model in float64: a token and an expert
at a time, differentiated by differences.
"""

from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmoe.attention import FULL, Paged
from jmoe.config import ModelConfig, RopeConfig, from_hf
from jmoe.router import ScoredTopK
from tests.jmoe.router_oracle import scored
from training.geometry import HF_CONFIG
from training.network import forward, init_params
from training.packing import training_batch
from training.train import TrainConfig, loss_fn, make_optimizer, train_step

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 40,
}
QWEN2 = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
}
COMMON = {"max_position_embeddings": 64, "num_experts_per_tok": 2}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "moe_intermediate_size": 10,
    "intermediate_size": 12,
    "norm_topk_prob": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
GLM4 = {
    **QWEN3,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.67,
}
del GLM4["num_experts"]
MIXTRAL = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 5,
    "intermediate_size": 10,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Leaning:
    """A router from outside the package whose parameter moves every gate weight."""

    bias = True

    def __call__(self, cfg, layer, logits):
        leaned = logits * (1 + layer["router_bias"][None])
        top, ids = jax.lax.top_k(leaned, cfg.experts_per_token)
        return jnp.tanh(top), ids.astype(jnp.int32)


def configs() -> dict[str, ModelConfig]:
    qwen2 = from_hf({**HF_CONFIG, **SIZES, **QWEN2})
    own = Paged(rotary=RopeConfig(theta=7.0))
    return {
        "qwen2": qwen2,
        "qwen3": from_hf({**SIZES, **QWEN3}),
        "turned first": replace(from_hf({**SIZES, **QWEN3}), turned_first=True),
        "turned by kind": replace(from_hf({**SIZES, **MIXTRAL}), layer_attention=(FULL, own)),
        "mixtral": from_hf({**SIZES, **MIXTRAL}),
        "glm4": from_hf({**SIZES, **GLM4}),
        "own router": replace(qwen2, router=Leaning()),
        "scored": replace(qwen2, router=ScoredTopK(scale=2.5)),
    }


def norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x**2) + eps)


def network(x, gate_up, down):
    gate, up = np.split(x @ gate_up, 2)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def turned(x, position, rope):
    half = int(len(x) * rope.partial) // 2
    angle = position * rope.theta ** (-np.arange(half) / half)
    a, b, rest = x[:half], x[half : 2 * half], x[2 * half :]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest]
    )


def attention(cfg, layer, rows, rope):
    """Returns what each token of one item reads."""
    q, k, v = [], [], []
    heads, kv, size = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    for position, x in enumerate(rows):
        found = norm(x, layer["attn_norm"], cfg.rms_norm_eps) @ layer["wqkv"]
        found = (found + layer["bqkv"] if cfg.qkv_bias else found).reshape(-1, size)
        for out, first, count, name in ((q, 0, heads, "q"), (k, heads, kv, "k")):
            own = list(found[first : first + count])
            if cfg.turned_first:
                own = [turned(head, position, rope) for head in own]
            if cfg.qk_norm:
                own = [norm(head, layer[f"{name}_norm"], cfg.rms_norm_eps) for head in own]
            if not cfg.turned_first:
                own = [turned(head, position, rope) for head in own]
            out.append(own)
        v.append(found[heads + kv :])
    outs = []
    for i in range(len(rows)):
        read = []
        for head in range(heads):
            group = head // (heads // kv)
            scores = np.stack([q[i][head] @ k[j][group] for j in range(i + 1)]) / size**0.5
            probs = np.exp(scores) / np.sum(np.exp(scores))
            read.append(sum(probs[j] * v[j][group] for j in range(i + 1)))
        out = np.concatenate(read) @ layer["wo"]
        outs.append(out + layer["bo"] if cfg.o_bias else out)
    return outs


def picked(cfg, layer, logits):
    """Returns (weight, expert) of one token, and its logits' softmax."""
    softmax = np.exp(logits) / np.sum(np.exp(logits))
    if isinstance(cfg.router, Leaning):
        keys = logits * (1 + layer["router_bias"])
        weights = np.tanh(keys)
    elif cfg.router is not None:
        keys = 1 / (1 + np.exp(-logits))
        weights = cfg.router.scale * keys
        bias = layer["router_bias"] if cfg.router.bias else 0.0
        fields = {**asdict(cfg.router), "bias": bias, "normalize": False}
        ids = scored(logits, top_k=cfg.experts_per_token, **fields)[0]
    else:
        keys = weights = softmax
    if not isinstance(cfg.router, ScoredTopK):
        ids = np.argsort(-keys)[: cfg.experts_per_token]
    weights = [weights[e] for e in ids]
    if cfg.norm_topk_prob:
        scale = cfg.router.scale if isinstance(cfg.router, ScoredTopK) else 1.0
        weights = [scale * weight / sum(weights) for weight in weights]
    return list(zip(weights, map(int, ids), strict=True)), softmax


def naive_loss(params, arrays, config):
    """Returns what `loss_fn` does, of rows whose items are one each."""
    cfg = config.model
    tokens, targets, _, items, loss_weights = arrays
    rows = {(b, s): params["embed"][tokens[b, s]] for b, s in zip(*np.nonzero(items), strict=True)}
    balance = z = 0.0
    for number in range(cfg.num_layers):
        layer = {key: leaf[number] for key, leaf in params["segments"][0].items()}
        experts = {key: leaf[number] for key, leaf in params["experts"].items()}
        for b in range(len(tokens)):
            own = [rows[at] for at in sorted(rows) if at[0] == b]
            rope = cfg.rope_of(cfg.layer_attention[number])
            for s, out in enumerate(attention(cfg, layer, own, rope)):
                rows[b, s] = rows[b, s] + out
        visits, mean = np.zeros(cfg.num_experts), 0.0
        for at, x in rows.items():
            h = norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
            logits = h @ layer["router"]
            picks, softmax = picked(cfg, layer, logits)
            for weight, expert in picks:
                x = x + weight * network(h, experts["gate_up"][expert], experts["down"][expert])
                visits[expert] += 1
            if cfg.d_ff_shared:
                opening = 1.0
                if cfg.shared_gate:
                    opening = 1 / (1 + np.exp(-(h @ layer["shared_gate"])))
                x = x + opening * network(h, layer["shared_gate_up"], layer["shared_down"])
            rows[at] = x
            mean = mean + softmax / len(rows)
            z = z + np.log(np.sum(np.exp(logits))) ** 2 / len(rows) / cfg.num_layers
        share = visits / visits.sum()
        balance = balance + cfg.num_experts * np.sum(share * mean) / cfg.num_layers
    loss = 0.0
    for (b, s), x in rows.items():
        logits = norm(x, params["final_norm"], cfg.rms_norm_eps) @ params["embed"].T
        wrong = np.log(np.sum(np.exp(logits))) - logits[targets[b, s]]
        loss = loss + loss_weights[b, s] * wrong / loss_weights.sum()
    return loss + config.balance_coef * balance + config.z_coef * z


def case(cfg):
    """Returns parameters none of which is as it begins, and a batch of two rows with padding."""
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape).astype(np.float32),
        init_params(cfg, seed=2),
    )
    tokens, targets = rng.integers(0, cfg.vocab_size, (2, 2, 4)).astype(np.int32)
    items = np.array([[1] * 4, [1] * 3 + [0]], np.int32)
    positions = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    weights = (rng.random((2, 4)) * (items > 0)).astype(np.float32)
    return params, (tokens, targets, positions, items, weights)


@pytest.mark.deep
@pytest.mark.parametrize("name", configs())
def test_loss_and_gradients_are_those_of_a_naive_model(name, monkeypatch):
    cfg = configs()[name]
    config, (params, arrays) = TrainConfig(model=cfg, balance_coef=0.3, z_coef=0.1), case(cfg)
    monkeypatch.setattr(
        "training.train.forward", lambda *a, **k: forward(*a, **k, dtype=jnp.float32)
    )
    got = jax.jit(
        jax.value_and_grad(lambda p: loss_fn(p, tuple(map(jnp.asarray, arrays)), config, 16)[0])
    )(params)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    np.testing.assert_allclose(got[0], naive_loss(wide, arrays, config), rtol=2e-5)
    leaves, tree = jax.tree.flatten(wide)
    rng, step = np.random.default_rng(3), 1e-5
    for at, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(got[1]), strict=True)):
        for _ in range(3):
            ahead = rng.standard_normal(leaf.shape)
            there, back = (
                naive_loss(
                    tree.unflatten([*leaves[:at], leaf + by * ahead, *leaves[at + 1 :]]),
                    arrays,
                    config,
                )
                for by in (step, -step)
            )
            got_ahead = np.sum(gradient * ahead)
            np.testing.assert_allclose(got_ahead, (there - back) / 2 / step, rtol=2e-3, atol=1e-4)
    if cfg.router is not None and name != "own router":  # a bias that only chooses has none
        got[1]["segments"][0].pop("router_bias", None)
    smallest = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), got[1])
    assert min(jax.tree.leaves(smallest)) > 1e-4 or name == "scored"


@pytest.mark.deep
def test_a_router_from_outside_trains(tiny, tokenizer):
    """Its loss falls, its parameter moves, and no norm or bias is decayed."""
    config = TrainConfig(
        model=replace(tiny.cfg, router=Leaning()), steps=12, rows=4, warmup=2, peak_lr=1e-2
    )
    params = init_params(config.model, seed=1)
    state, losses = make_optimizer(config).init(params), []
    for step in range(config.steps):
        batch = training_batch(tokenizer, 1, step, config.rows, config.length)
        params, state, metrics = train_step(params, state, batch.arrays(), config)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
    assert float(jnp.abs(params["segments"][0]["router_bias"]).max()) > 1e-3


def test_norms_and_biases_of_any_architecture_are_not_decayed():
    config = TrainConfig(model=configs()["qwen3"], steps=2, warmup=1)
    params = jax.tree.map(jnp.ones_like, init_params(config.model, 0))
    optimizer, state = make_optimizer(config), make_optimizer(config).init(params)
    nothing = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(nothing, state, params)
        params = optax.apply_updates(params, updates)
    segment = params["segments"][0]
    for name in ("q_norm", "k_norm", "bqkv", "bo", "attn_norm"):
        np.testing.assert_array_equal(segment[name], 1.0)
    for name in ("wqkv", "router", "wo"):
        assert float(segment[name].max()) < 1
