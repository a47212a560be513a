"""The layout of a model's parameters: one description that all who read or make weights follow.

For each parameter: the Hugging Face tensors it is made of, its shape, and what kind it is, by which
drawn weights begin. Loading (`jmoe.checkpoint`), random weights (`jmoe.random_model`), training and
export (`training.network`, `training.export`) follow it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jmoe.architectures import naming
from jmoe.attention import Latent
from jmoe.config import ModelConfig
from jmoe.parameter import MXFP4_GROUP, Kind, Layout, Parameter
from jmoe.recurrent import Recurrent


def top(cfg: ModelConfig) -> Layout:
    """Describes the parameters outside the layers."""
    d, vocab, names = cfg.d_model, cfg.vocab_size, naming(cfg.architecture)
    out: Layout = {
        "embed": Parameter((names.embedding,), ((vocab, d),), "embedding"),
        **_norm(cfg, "final_norm", names.root + names.norms[2]),
    }
    if not cfg.tie_embeddings:
        out["lm_head"] = Parameter((f"{names.head}weight",), ((vocab, d),))
    if cfg.head_bias:
        out["head_bias"] = Parameter((f"{names.head}bias",), ((vocab,),), "bias")
    return out


def layer(cfg: ModelConfig, index: int, is_moe: bool) -> Layout:
    """Describes the parameters of one layer, experts left out."""
    names, d = naming(cfg.architecture), cfg.d_model
    at = names.layer(cfg.blocks[index][0] if cfg.blocks else index)
    kind = cfg.layer_attention[index]
    attn = f"{at}{names.mixer or 'self_attn'}."
    out = _norm(cfg, "attn_norm", at + names.norms[0])
    if cfg.has_mlp(index):
        out |= _norm(cfg, "mlp_norm", _mlp_prefix(cfg, index) + names.norms[1])
    if cfg.post_norms:
        for half, name in zip(("attn", "mlp"), names.post_norms, strict=True):
            key, tensor = f"{half}_post_norm", f"{at}{name}.weight"
            out[key] = Parameter((tensor,), ((d,),), "norm", **_centred(cfg))
    if isinstance(kind, Recurrent):
        out |= kind.tensors(cfg, names, at)
    else:
        out |= _latent(cfg, kind, attn) if isinstance(kind, Latent) else _heads(cfg, kind, attn)
    if cfg.has_sinks(index):
        out["sinks"] = Parameter((attn + "sinks",), ((cfg.num_heads,),), "bias")
    if not cfg.has_mlp(index):
        return out
    at = _mlp_prefix(cfg, index)
    mlp = f"{at}{names.mlp}."
    if not is_moe:
        return out | _mlp(cfg, "", mlp, cfg.d_ff_dense, names.dense_names)
    gate = (f"{mlp}{names.router}.weight",)
    out["router"] = Parameter(gate, ((cfg.num_experts, d),), "router")
    if cfg.logits_bias:
        name = (f"{mlp}{names.router}.bias",)
        out["logits_bias"] = Parameter(name, ((cfg.num_experts,),), "bias")
    if cfg.router is not None and cfg.router.bias:
        name, shape = (mlp + names.router_bias,), (cfg.num_experts,)
        shape = (1, *shape) if names.row_of_bias else shape
        out["router_bias"] = Parameter(name, (shape,), "bias", float32=True)
    if cfg.d_ff_shared and names.joined_shared:
        gate_up, down = (f"{at}{name}.weight" for name in names.joined_shared)
        out["shared_gate_up"] = Parameter((gate_up,), ((cfg.up_matrices * cfg.d_ff_shared, d),))
        out["shared_down"] = Parameter((down,), ((d, cfg.d_ff_shared),))
    elif cfg.d_ff_shared:
        out |= _mlp(cfg, "shared_", f"{mlp}{names.shared}.", cfg.d_ff_shared)
        if cfg.shared_gate:
            gate = (f"{mlp}{names.shared}_gate.weight",)
            out["shared_gate"] = Parameter(gate, ((1, d),), "gate")
    return out


def _mlp_prefix(cfg: ModelConfig, index: int) -> str:
    """Returns how the names of a layer's second half begin."""
    number = cfg.blocks[index][1] if cfg.blocks else index
    assert number is not None
    return naming(cfg.architecture).layer(number)


def _heads(cfg: ModelConfig, kind: Any, attn: str) -> Layout:
    d, size, gated = cfg.d_model, cfg.head_dim, getattr(kind, "gated", False)
    names = naming(cfg.architecture)
    apart = (names.head_gate,) if gated and names.head_gate else ()
    q, kv = cfg.num_heads * size, cfg.num_kv_heads * size
    paired = size if names.neighbours_turn else 0
    woven = ((size, size),) if gated and not apart else ()
    queries = 2 * q if woven else q
    rows = (queries, *(q for _ in apart), kv, kv)
    weights = tuple(f"{attn}{name}.weight" for name in ("q_proj", *apart, "k_proj", "v_proj"))
    stored = tuple((one, d) for one in rows)
    out = {
        "wqkv": Parameter(weights, stored, paired=paired, woven=woven),
        "wo": Parameter((f"{attn}{names.output}.weight",), ((d, q),)),
    }
    if cfg.qkv_bias:
        biases = tuple(f"{attn}{p}_proj.bias" for p in "qkv")
        out["bqkv"] = Parameter(biases, ((queries,), (kv,), (kv,)), "bias", woven=woven)
    if cfg.o_bias:
        out["bo"] = Parameter((attn + "o_proj.bias",), ((d,),), "bias")
    if cfg.qk_norm:
        for key, name, whole in zip(("q_norm", "k_norm"), names.head_norms, (q, kv), strict=True):
            shape = (whole if cfg.normed_whole else size,)
            out[key] = Parameter((f"{attn}{name}.weight",), (shape,), "norm", **_centred(cfg))
    return out


def _latent(cfg: ModelConfig, kind: Latent, attn: str) -> Layout:
    d, rank, q_rank = cfg.d_model, kind.kv_rank, kind.q_rank
    q, kv, out = (
        cfg.num_heads * size for size in (kind.nope + kind.rope, kind.nope + kind.value, kind.value)
    )

    def one(name: str, *stored: int, kind: Kind = "matrix") -> Parameter:
        return Parameter((f"{attn}{name}.weight",), (stored,), kind)

    queries = {"wq": one("q_proj", q, d)}
    if q_rank:
        queries = {
            "wq_a": one("q_a_proj", q_rank, d),
            "q_a_norm": one("q_a_layernorm", q_rank, kind="norm"),
            "wq": one("q_b_proj", q, q_rank),
        }
    return {
        **queries,
        "wkv_a": one("kv_a_proj_with_mqa", rank + kind.rope, d),
        "kv_a_norm": one("kv_a_layernorm", rank, kind="norm"),
        "wkv_b": one("kv_b_proj", kv, rank),
        "wo": one("o_proj", d, out),
    }


def expert(cfg: ModelConfig, index: int, number: int) -> Layout:
    """Describes the parameters of one routed expert of layer `index`; the keys are those of an
    ExpertPool.
    """
    names, d, f = naming(cfg.architecture), cfg.d_model, cfg.d_ff_expert
    at, part = f"{_mlp_prefix(cfg, index)}{names.mlp}.", (number, cfg.num_experts)
    if names.interleaved:
        return _interleaved(cfg, at, part)
    if names.joined_experts is None or cfg.experts_apart:
        at = f"{at}experts.{number}."
        out = _mlp(cfg, "", at, f, names.expert_names)
        if cfg.expert_bias:
            gate, up, down = (f"{at}{name}.bias" for name in names.expert_names)
            out["gate_up_bias"] = Parameter((gate, up), ((f,), (f,)), "bias")
            out["down_bias"] = Parameter((down,), ((d,),), "bias")
        return out
    gate_up, down = (at + name for name in names.joined_experts)
    if names.laid_out:
        return {
            "gate_up": Parameter(
                (gate_up,), ((d, cfg.up_matrices * f),), "laid out", part=part, swapped=True
            ),
            "down": Parameter((down,), ((f, d),), "laid out", part=part, swapped=True),
        }
    return {
        "gate_up": Parameter((gate_up,), ((cfg.up_matrices * f, d),), part=part),
        "down": Parameter((down,), ((d, f),), part=part),
    }


def _interleaved(cfg: ModelConfig, at: str, part: tuple[int, int]) -> Layout:
    """Describes an expert of tensors whose columns are gate and up in turn, with biases
    (gpt-oss).
    """
    d, f = cfg.d_model, cfg.d_ff_expert
    at += "experts."

    def matrix(name: str, k: int, columns: int) -> Parameter:
        own, turns = at + name, name == "gate_up_proj"
        if not cfg.mxfp4:
            return Parameter((own,), ((k, columns),), "laid out", part=part, in_turn=turns)
        stored = (columns, k // MXFP4_GROUP, MXFP4_GROUP // 2), (columns, k // MXFP4_GROUP)
        names = f"{own}_blocks", f"{own}_scales"
        return Parameter(names, stored, "mxfp4", part=part, in_turn=turns)

    biases = (at + "gate_up_proj_bias",), (at + "down_proj_bias",)
    return {
        "gate_up": matrix("gate_up_proj", d, 2 * f),
        "down": matrix("down_proj", f, d),
        "gate_up_bias": Parameter(biases[0], ((2 * f,),), "bias", part=part, in_turn=True),
        "down_bias": Parameter(biases[1], ((d,),), "bias", part=part),
    }


def expert_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an expert's arrays, routed or united, by the names an ExpertPool has
    for them.
    """
    first = cfg.moe_layers.index(True)
    return {key: parameter.shape for key, parameter in expert(cfg, first, 0).items()}


def expert_parameters(cfg: ModelConfig) -> int:
    """Returns the weights of one expert, routed or united."""
    return sum(map(math.prod, expert_shapes(cfg).values()))


def whole(cfg: ModelConfig) -> Iterator[Parameter]:
    """Yields every parameter of a model, layer by layer, expert by expert."""
    yield from top(cfg).values()
    for index, is_moe in enumerate(cfg.moe_layers):
        yield from layer(cfg, index, is_moe).values()
        if is_moe:
            for number in range(cfg.num_experts):
                yield from expert(cfg, index, number).values()


def split(layout: Layout, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors by Hugging Face name from parameters by key; what is not in the layout is
    left out.
    """
    tensors: dict[str, Any] = {}
    for key, parameter in layout.items():
        tensors |= parameter.split(params[key])
    return tensors


def _norm(cfg: ModelConfig, key: str, at: str) -> Layout:
    own = {key: Parameter((f"{at}.weight",), ((cfg.d_model,),), "norm", **_centred(cfg))}
    if cfg.layer_norm:
        own[f"{key}_bias"] = Parameter((f"{at}.bias",), ((cfg.d_model,),), "bias")
    return own


def _centred(cfg: ModelConfig) -> dict[str, Any]:
    """Returns what sets apart the weights of norms that are in the file less 1."""
    return {"float32": True, "offset": 1.0} if naming(cfg.architecture).centred else {}


def _mlp(
    cfg: ModelConfig,
    key: str,
    at: str,
    f: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Layout:
    d = cfg.d_model
    *first, down = (f"{at}{name}.weight" for name in names[-1 - cfg.up_matrices :])
    return {
        f"{key}gate_up": Parameter(tuple(first), ((f, d),) * cfg.up_matrices),
        f"{key}down": Parameter((down,), ((d, f),)),
    }
