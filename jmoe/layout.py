"""The layout of a model's parameters: one description that all who read or make weights follow.

For each parameter: the Hugging Face tensors it is made of, its shape, what its axes mean, and what
kind it is, by which drawn weights begin. Loading (`jmoe.checkpoint`), random weights
(`jmoe.random_model`), training and export (`training.network`, `training.export`) and the table in
docs/architecture.md follow it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jmoe.architectures import naming
from jmoe.config import ModelConfig

Kind = Literal["matrix", "embedding", "router", "norm", "bias", "gate"]
"""What a parameter is; who draws weights chooses by it how each one begins."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, of a layer, or of an expert."""

    names: tuple[str, ...]  # Hugging Face tensors, joined along the output axis
    stored: tuple[tuple[int, ...], ...]  # their shapes in the file, `[out, in]`, without `part`
    axes: tuple[str, ...]  # of the parameter itself
    kind: Kind = "matrix"
    float32: bool = False  # whatever the model's dtype is
    part: tuple[int, int] | None = None  # its place along a first axis of the file, of how many

    @property
    def transposed(self) -> bool:
        """Whether the file has it `[out, in]` and jmoe `[in, out]`."""
        return self.kind in ("matrix", "router")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, without a layer axis."""
        if self.transposed:
            return self.stored[0][1], sum(shape[0] for shape in self.stored)
        if self.kind == "gate":  # the file has a matrix of one row
            return self.stored[0][1:]
        return sum(shape[0] for shape in self.stored), *self.stored[0][1:]

    @property
    def in_file(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the file."""
        lead = () if self.part is None else self.part[1:]
        return tuple((*lead, *shape) for shape in self.stored)

    def assemble(self, tensors: Sequence[Any]) -> Any:
        """Returns the parameter of its tensors; where those are NumPy's, it is too."""
        if self.transposed:
            tensors = [tensor.T for tensor in tensors]
        if self.kind == "gate":
            tensors = [tensor[0] for tensor in tensors]
        if len(tensors) == 1:
            return tensors[0]
        on_host = isinstance(tensors[0], np.ndarray)
        return (np if on_host else jnp).concatenate(tensors, axis=-1)

    def split(self, parameter: Any) -> dict[str, Any]:
        """Returns tensors by name, as the file has them: the inverse of `assemble`."""
        if self.kind == "gate":
            return {self.names[0]: parameter[None]}
        axis = -1 if self.transposed else 0
        ends = np.cumsum([shape[0] for shape in self.stored])[:-1].tolist()
        on_host = isinstance(parameter, np.ndarray)
        parts = (np if on_host else jnp).split(parameter, ends, axis=axis)
        return {
            name: part.T if self.transposed else part
            for name, part in zip(self.names, parts, strict=True)
        }


Layout = dict[str, Parameter]
"""Parameters by key; the order is that in which random weights are drawn."""


def top(cfg: ModelConfig) -> Layout:
    """Describes the parameters outside the layers."""
    d, vocab = cfg.d_model, cfg.vocab_size
    out: Layout = {
        "embed": Parameter(
            ("model.embed_tokens.weight",), ((vocab, d),), ("vocab", "d"), "embedding"
        ),
        **_norm(cfg, "final_norm", "model.norm"),
    }
    if not cfg.tie_embeddings:
        out["lm_head"] = Parameter(("lm_head.weight",), ((vocab, d),), ("d", "vocab"))
    if cfg.head_bias:
        out["head_bias"] = Parameter(("lm_head.bias",), ((vocab,),), ("vocab",), "bias")
    return out


def layer(cfg: ModelConfig, index: int, is_moe: bool) -> Layout:
    """Describes the parameters of one layer, experts left out."""
    at, d, size = f"model.layers.{index}.", cfg.d_model, cfg.head_dim
    q, kv = cfg.num_heads * size, cfg.num_kv_heads * size
    attn, heads = at + "self_attn.", "q k v heads"
    qkv = tuple(f"{attn}{p}_proj." for p in "qkv")
    out: Layout = {
        **_norm(cfg, "attn_norm", at + "input_layernorm"),
        **_norm(cfg, "mlp_norm", at + "post_attention_layernorm"),
        "wqkv": Parameter(
            tuple(p + "weight" for p in qkv), ((q, d), (kv, d), (kv, d)), ("d", heads)
        ),
        "wo": Parameter((attn + "o_proj.weight",), ((d, q),), ("heads", "d")),
    }
    if cfg.qkv_bias:
        names = tuple(p + "bias" for p in qkv)
        out["bqkv"] = Parameter(names, ((q,), (kv,), (kv,)), (heads,), "bias")
    if cfg.o_bias:
        out["bo"] = Parameter((attn + "o_proj.bias",), ((d,),), ("d",), "bias")
    if cfg.qk_norm:
        axis = heads if cfg.normed_whole else "head_dim"
        for key, whole in (("q_norm", q), ("k_norm", kv)):
            shape = (whole if cfg.normed_whole else size,)
            out[key] = Parameter((f"{attn}{key}.weight",), (shape,), (axis,), "norm")
    names = naming(cfg.architecture)
    mlp = f"{at}{names.mlp}."
    if not is_moe:
        return out | _swiglu("", mlp, d, cfg.d_ff_dense, "f")
    gate = (f"{mlp}{names.router}.weight",)
    out["router"] = Parameter(gate, ((cfg.num_experts, d),), ("d", "m"), "router")
    if cfg.router is not None and cfg.router.bias:
        name = (mlp + "gate.e_score_correction_bias",)
        out["router_bias"] = Parameter(name, ((cfg.num_experts,),), ("m",), "bias", float32=True)
    if cfg.d_ff_shared:
        out |= _swiglu("shared_", f"{mlp}{names.shared}.", d, cfg.d_ff_shared, "f_s")
        if cfg.shared_gate:
            gate = (f"{mlp}{names.shared}_gate.weight",)
            out["shared_gate"] = Parameter(gate, ((1, d),), ("d",), "gate")
    return out


def expert(cfg: ModelConfig, index: int, number: int) -> Layout:
    """Describes the parameters of one routed expert of layer `index`; the keys are those of an
    ExpertPool.
    """
    names, d, f = naming(cfg.architecture), cfg.d_model, cfg.d_ff_expert
    at, part = f"model.layers.{index}.{names.mlp}.", (number, cfg.num_experts)
    if names.joined_experts is None:
        return _swiglu("", f"{at}experts.{number}.", d, f, "f", names.expert_names)
    gate_up, down = (f"{at}{name}.weight" for name in names.joined_experts)
    return {
        "gate_up": Parameter((gate_up,), ((2 * f, d),), ("d", "2 f"), part=part),
        "down": Parameter((down,), ((d, f),), ("f", "d"), part=part),
    }


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
    own = {key: Parameter((f"{at}.weight",), ((cfg.d_model,),), ("d",), "norm")}
    if cfg.layer_norm:
        own[f"{key}_bias"] = Parameter((f"{at}.bias",), ((cfg.d_model,),), ("d",), "bias")
    return own


def _swiglu(
    key: str,
    at: str,
    d: int,
    f: int,
    width: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Layout:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {
        f"{key}gate_up": Parameter((gate, up), ((f, d), (f, d)), ("d", f"2 {width}")),
        f"{key}down": Parameter((down,), ((d, f),), (width, "d")),
    }
