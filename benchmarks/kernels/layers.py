"""Cases of whole layers: a layer's experts with all around them, and a decode step's whole layer.

They run the stages of `jmoe.model` on one layer's weights, as step programs do in every layer, and
are held against the sum of what their parts have to move. The references are float32 and share no
code with the stages but the judges of the ops.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from benchmarks.kernels import judge
from benchmarks.kernels.cases import Case, Sizes, count_decode_layer, count_moe_layer
from benchmarks.kernels.inputs import DTYPE, LAYER, NUM_LAYERS, Pool, Pools, choices, normal
from benchmarks.kernels.problems import TOLERANCE, Problem, itself
from jmoe.attention import DecodeAttention, Written
from jmoe.brownout import Control
from jmoe.config import ModelConfig, from_hf
from jmoe.experts import ExpertPool, ExpertTable
from jmoe.kv_cache import KVPages
from jmoe.model import attend
from jmoe.moe import RoutedRows, moe
from jmoe.random_model import random_params
from jmoe.rope import rotation
from pallas_kernels.shapes import MODELS, Shape

PRESETS = Path(__file__).parents[2] / "configs" / "models"


def config_of(shape: Shape) -> ModelConfig:
    """Returns one layer of a published model; of another shape, one with a bias and a shared
    expert.
    """
    if shape in MODELS:
        text = (PRESETS / f"{shape.name.lower()}.yaml").read_text(encoding="utf-8")
        cfg = from_hf(yaml.safe_load(text))
    else:
        cfg = from_hf(
            {
                "model_type": "qwen2_moe",
                "hidden_size": shape.d_model,
                "num_hidden_layers": 1,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "num_experts": shape.num_experts,
                "num_experts_per_tok": shape.top_k,
                "moe_intermediate_size": shape.d_ff,
                "shared_expert_intermediate_size": shape.d_ff_shared,
                "max_position_embeddings": 4096,
                "vocab_size": 8,
            }
        )
    kind = cfg.layer_attention[:1]
    return replace(cfg, num_layers=1, moe_layers=(True,), layer_attention=kind, vocab_size=8)


def _weights(cfg: ModelConfig, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Returns one layer's weights. The router's columns are orthonormal, so that rows can be made
    for its picks.
    """
    key = jax.random.key(int(rng.integers(2**31)), impl="rbg")
    [segment] = random_params(cfg, key, jnp.dtype(DTYPE))["segments"]
    layer = {name: leaf[0] for name, leaf in segment.items()}
    for name in layer:
        if "norm" in name or name == "bqkv":
            layer[name] = layer[name] + normal(rng, layer[name].shape, 0.1)
    layer["wo"] = layer["wo"] * jnp.asarray(0.1, DTYPE)  # attention must not change the picks
    columns = np.linalg.qr(rng.normal(size=(cfg.d_model, cfg.num_experts)))[0]
    # To whole eights, as `jmoe.model.run_layers` has it.
    columns = np.pad(columns, ((0, 0), (0, -cfg.num_experts % 8)))
    return layer | {"router": jnp.asarray(columns, DTYPE)}


@dataclass
class _Set:
    """One input set; `ids` are what the router picks."""

    layer: dict[str, jax.Array]
    index: int  # of the layer's experts in the pool
    x: jax.Array
    ids: np.ndarray


def _draw(
    case: Case, cfg: ModelConfig, rng: np.random.Generator, pool: Pool
) -> tuple[list[_Set], dict[str, Any]]:
    """Returns an input set for each layer of the pool, and facts of their routing."""
    sets = []
    for index in range(pool.num_layers):
        layer = _weights(cfg, rng)
        ids = choices(rng, case.shape, case.tokens, "uniform")
        along = np.zeros((case.tokens, layer["router"].shape[1]), np.float32)
        np.put_along_axis(along, ids, rng.uniform(2.0, 2.2, ids.shape).astype(np.float32), axis=1)
        x = jnp.asarray(along, DTYPE) @ layer["router"].T
        x = x + normal(rng, x.shape, 0.01)
        sets.append(_Set(layer, index, x, ids))
    active = [len(np.unique(one.ids)) for one in sets]
    return sets, {"rows": case.tokens * case.shape.top_k, "active_experts": active}


def _mean(active: list[int]) -> int:
    return round(float(np.mean(active)))


def _moe(cfg: ModelConfig, layer, gate_up, down, slots, x):
    tokens, m = x.shape[0], cfg.num_experts
    rows = RoutedRows(jnp.zeros(tokens, jnp.int32), jnp.ones(tokens, bool), jnp.zeros(tokens, bool))
    table, pool = ExpertTable(slots, jnp.full(m, -1, jnp.int32)), ExpertPool(gate_up, down)
    return moe(cfg, layer, pool, table, x, rows, Control.of(None), max_active=m)[0]


def _args(one: _Set, pool: Pool) -> tuple[Any, ...]:
    m = pool.shape.num_experts
    slots = jnp.arange(one.index * m, (one.index + 1) * m, dtype=jnp.int32)
    return one.layer, pool.gate_up, pool.down, slots, one.x


def moe_layer(case: Case, sizes: Sizes, rng: np.random.Generator, pools: Pools) -> Problem:
    """Makes the MoE half of a layer: norm, routing, routed and shared experts, and residual."""
    pool, cfg = pools.of(case.shape, rng), config_of(case.shape)
    sets, facts = _draw(case, cfg, rng, pool)
    first = sets[0]

    def error(out: jax.Array) -> float:
        wanted = _wanted_moe(cfg, first.layer, *pool.layer(0), first.x, jnp.asarray(first.ids))
        return judge.relative_error(out, wanted)

    return Problem(
        itself,
        partial(_moe, cfg),
        [_args(one, pool) for one in sets],
        error,
        TOLERANCE,
        count_moe_layer(case.shape, _mean(facts["active_experts"]), case.tokens),
        facts=facts,
    )


def decode_layer(case: Case, sizes: Sizes, rng: np.random.Generator, pools: Pools) -> Problem:
    """Makes a whole layer of a decode step: each row is the last of its context."""
    pool, cfg = pools.of(case.shape, rng), config_of(case.shape)
    sets, facts = _draw(case, cfg, rng, pool)
    tokens, size = case.tokens, sizes.page_size
    each = -(-case.context // size)
    # The sets share pages, each in an order of its own; the last one is the padding page.
    cache = (NUM_LAYERS, tokens * each + 1, cfg.num_kv_heads, size, cfg.head_dim)
    kv = normal(rng, cache), normal(rng, cache)
    orders = [rng.permutation(tokens * each).reshape(tokens, each) for _ in sets]
    tables = [jnp.asarray(order, jnp.int32) for order in orders]
    position = jnp.full(tokens, case.context - 1, jnp.int32)
    cos_sin = rotation(position, cfg.rope, cfg.head_dim)
    before = jax.tree.map(jnp.copy, kv)

    def call(carry, table, layer, gate_up, down, slots, x):
        cache = KVPages(*carry[:2])
        attention = DecodeAttention.of(
            Written(table[:, -1], position % size),
            cache,
            table,
            num_heads=cfg.num_heads,
            kv_len=position + 1,
        )
        x, new = attend(cfg, layer, x, cos_sin, attention, jnp.int32(LAYER), cache)
        return *new, _moe(cfg, layer, gate_up, down, slots, x)

    first, table = sets[0], tables[0]

    def error(after: Any) -> float:
        return _decode_error(cfg, first, pool.layer(0), before, table, cos_sin, after)

    active = _mean(facts["active_experts"])
    out = jnp.zeros((tokens, cfg.d_model), DTYPE)
    return Problem(
        itself,
        call,
        [(table, *_args(one, pool)) for one, table in zip(sets, tables, strict=True)],
        error,
        TOLERANCE,
        count_decode_layer(case.shape, active, case.chunks()),
        carry=(*kv, out),
        facts=facts,
        data=(*before, out),
    )


# ---- References ----


def _norm(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight[None]


def _wide(layer):
    return {name: leaf.astype(jnp.float32) for name, leaf in layer.items()}


def _wanted_moe(cfg, layer, gate_up, down, x, ids):
    layer, x = _wide(layer), x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        h = _norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
        logits = (h @ layer["router"])[:, : cfg.num_experts]
        scores = jnp.take_along_axis(jax.nn.softmax(logits), ids, axis=1)
        if cfg.norm_topk_prob:
            scores = scores / jnp.sum(scores, axis=1, keepdims=True)
        row = jnp.arange(x.shape[0])[:, None]
        gates = jnp.zeros((x.shape[0], cfg.num_experts)).at[row, ids].set(scores)
        out = x + judge.all_experts(h, gate_up, down, gates)
        if cfg.d_ff_shared:
            gate, up = jnp.split(h @ layer["shared_gate_up"], 2, axis=1)
            shared = (jax.nn.silu(gate) * up) @ layer["shared_down"]
            out = out + jax.nn.sigmoid(h @ layer["shared_gate"])[:, None] * shared
    return out


def _wanted_heads(cfg, layer, x, cos, sin):
    """Returns queries, keys and values [T, heads, D] in float32."""
    layer, x = _wide(layer), x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        rows = _norm(x, layer["attn_norm"], cfg.rms_norm_eps) @ layer["wqkv"]
    if cfg.qkv_bias:
        rows = rows + layer["bqkv"][None]
    rows = rows.reshape(x.shape[0], -1, cfg.head_dim)
    norms = (layer["q_norm"], layer["k_norm"]) if cfg.qk_norm else None
    return judge.finished_heads(rows, cfg.num_kv_heads, cos, sin, norms, cfg.rms_norm_eps)


def _decode_error(cfg, one: _Set, experts, before, table, cos_sin, after) -> float:
    """Returns the largest of the errors of keys, values and rows."""
    q, *new = _wanted_heads(cfg, one.layer, one.x, *cos_sin)
    page, offset = table[:, -1], before[0].shape[3] - 1  # contexts fill their pages
    caches, errors = [], []
    for old, now, rows in zip(before, after, new, strict=False):
        errors.append(judge.relative_error(now[LAYER, page, :, offset], rows))
        caches.append(old[LAYER].at[page, :, offset].set(rows.astype(old.dtype)))
    mixed = judge.attended(q, *caches, table).reshape(q.shape[0], -1)
    with jax.default_matmul_precision("highest"):
        x = one.x.astype(jnp.float32) + mixed @ one.layer["wo"].astype(jnp.float32)
    want = _wanted_moe(cfg, one.layer, *experts, x, jnp.asarray(one.ids))
    return max(judge.relative_error(after[2], want), *errors)


MAKERS: dict[str, Callable[..., Problem]] = {"moe_layer": moe_layer, "decode_layer": decode_layer}
