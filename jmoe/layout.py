"""The layout of a model's parameters: one description that all who read or make weights follow.

For each parameter: the Hugging Face tensors it is made of, its shape, and what kind it is, by which
drawn weights begin. Loading (`jmoe.checkpoint`), random weights (`jmoe.random_model`), training and
export (`training.network`, `training.export`) follow it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jmoe.architectures import naming
from jmoe.attention import Latent
from jmoe.config import ModelConfig
from jmoe.recurrent import GatedDelta, Mamba, ShortConv
from pallas_kernels.grouped_gemm.four_bits import PackedWeights, packed_codes

Kind = Literal["matrix", "laid out", "mxfp4", "embedding", "router", "norm", "bias", "gate"]
"""What a parameter is; who draws weights chooses by it how each one begins. A matrix that is laid
out lies in the file as in memory; one of MXFP4 in four bits, in groups with a scale.
"""

MXFP4_GROUP = 32
"""Elements of a row that share a scale (OCP Microscaling Formats 1.0)."""
MXFP4_NAN = 255
"""The scale that is no number."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.stack(np.meshgrid(*2 * [np.concatenate([_E2M1, -_E2M1])]), axis=-1).reshape(256, 2)
"""The two elements of a byte, the lower four bits first."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, of a layer, or of an expert."""

    names: tuple[str, ...]  # Hugging Face tensors, joined along the output axis
    stored: tuple[tuple[int, ...], ...]  # their shapes in the file, `[out, in]`, without `part`
    kind: Kind = "matrix"
    float32: bool = False  # whatever the model's dtype is
    part: tuple[int, int] | None = None  # its place along a first axis of the file, of how many
    swapped: bool = False  # the file may have rows and columns the other way round, too
    in_turn: bool = False  # the file's columns are those of the two halves in turn
    paired: int = 0
    """Of a file whose heads turn two neighbours together, the elements of one: all tensors but the
    last have their heads' halves in turn.
    """
    woven: tuple[tuple[int, ...], ...] = ()
    """Of a file whose first tensors have several things head by head, how many rows of each in
    turn; in memory each of them is together.
    """
    offset: float = 0.0  # what is added to the file's numbers

    @property
    def transposed(self) -> bool:
        """Whether the file has it `[out, in]` and jmoe `[in, out]`."""
        return self.kind in ("matrix", "router")

    @property
    def is_row(self) -> bool:
        """Whether the file has a vector as a matrix of one row."""
        return self.kind == "gate" or (self.kind == "bias" and len(self.stored[0]) == 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, without a layer axis."""
        if self.transposed:
            return self.stored[0][1], sum(shape[0] for shape in self.stored)
        if self.kind == "mxfp4":
            columns, groups, _ = self.stored[0]
            return groups * MXFP4_GROUP, columns
        if self.is_row:
            return self.stored[0][1:]
        return sum(shape[0] for shape in self.stored), *self.stored[0][1:]

    @property
    def in_file(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the file."""
        lead = () if self.part is None else self.part[1:]
        return tuple((*lead, *shape) for shape in self.stored)

    def assemble(self, tensors: Sequence[Any]) -> Any:
        """Returns the parameter of its tensors; where those are NumPy's, it is too. Of MXFP4 they
        are as in the file, and it is float32.
        """
        if self.kind == "mxfp4":
            tensors = [_dequantized(*tensors).T]
        if self.in_turn:
            return _halves(*tensors)
        if self.offset:
            return tensors[0] + tensors[0].dtype.type(self.offset)
        tensors = [*map(_apart, tensors, self.woven), *tensors[len(self.woven) :]]
        if self.paired:
            tensors = [*(self._swapped(one, -1, 2) for one in tensors[:-1]), tensors[-1]]
        if self.transposed:
            tensors = [tensor.T for tensor in tensors]
        if self.is_row:
            tensors = [tensor[0] for tensor in tensors]
        if len(tensors) == 1:
            return tensors[0]
        return _of(tensors[0]).concatenate(tensors, axis=-1)

    def kept(self, blocks: Any, scales: Any) -> PackedWeights:
        """Returns a parameter of MXFP4 as an expert pool keeps it; its tensors are NumPy's."""
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
        if self.in_turn:
            codes, scales = (np.concatenate([x[::2], x[1::2]]) for x in (codes, scales))
        values = packed_codes(codes)
        return PackedWeights(values, scales.T, k=codes.shape[1], group=MXFP4_GROUP)

    def split(self, parameter: Any) -> dict[str, Any]:
        """Returns tensors by name, as the file has them: the inverse of `assemble`."""
        if self.is_row:
            return {self.names[0]: parameter[None]}
        if self.kind == "mxfp4":
            raise ValueError(f"{self.names[0]} is not written: jmoe does not quantize to MXFP4")
        xp = _of(parameter)
        if self.in_turn:
            turns = xp.stack(xp.split(parameter, 2, axis=-1), axis=-1)
            return {self.names[0]: turns.reshape(parameter.shape)}
        if self.offset:
            return {self.names[0]: parameter - parameter.dtype.type(self.offset)}
        ends = np.cumsum([shape[0] for shape in self.stored])[:-1].tolist()
        parts = xp.split(parameter, ends, axis=-1 if self.transposed else 0)
        if self.transposed:
            parts = [part.T for part in parts]
        if self.paired:
            parts = [*(self._swapped(one, 2, -1) for one in parts[:-1]), parts[-1]]
        parts = [*map(_woven, parts, self.woven), *parts[len(self.woven) :]]
        return dict(zip(self.names, parts, strict=True))

    def _swapped(self, tensor: Any, *sizes: int) -> Any:
        """Returns rows of heads, each cut into `sizes`, of which the second comes first."""
        heads = (len(tensor) // self.paired, *sizes, *tensor.shape[1:])
        return tensor.reshape(heads).swapaxes(1, 2).reshape(tensor.shape)


def _of(array: Any) -> Any:
    """Returns the module whose array it is: NumPy, or jax's."""
    return np if isinstance(array, np.ndarray) else jnp


def _halves(x: Any) -> Any:
    """Returns the even columns, then the odd ones."""
    return _of(x).concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _apart(tensor: Any, sizes: tuple[int, ...]) -> Any:
    """Returns the rows of each of the things that a tensor has in turn, one thing after another."""
    by_head = tensor.reshape(-1, sum(sizes), *tensor.shape[1:])
    parts = _of(tensor).split(by_head, np.cumsum(sizes)[:-1].tolist(), axis=1)
    return _of(tensor).concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _woven(tensor: Any, sizes: tuple[int, ...]) -> Any:
    """Returns the rows as a file has them: the inverse of `_apart`."""
    heads = len(tensor) // sum(sizes)
    ends = (heads * np.cumsum(sizes))[:-1].tolist()
    parts = _of(tensor).split(tensor, ends)
    each = zip(parts, sizes, strict=True)
    by_head = [part.reshape(heads, size, *tensor.shape[1:]) for part, size in each]
    return _of(tensor).concatenate(by_head, axis=1).reshape(tensor.shape)


def _dequantized(blocks: Any, scales: Any) -> Any:
    """Returns float32 [rows, k] of MXFP4: uint8 blocks [rows, groups, 16] of two elements a byte,
    and the groups' exponents [rows, groups], uint8, 127 too high.
    """
    xp = _of(blocks)
    pairs = xp.asarray(_PAIRS)[blocks]
    with np.errstate(over="ignore", invalid="ignore"):  # of NaN, which is looked for later
        scale = xp.ldexp(xp.ones(scales.shape, xp.float32), scales.astype(xp.int32) - 127)
        return (pairs * scale[..., None, None]).reshape(blocks.shape[0], -1)


Layout = dict[str, Parameter]
"""Parameters by key; the order is that in which random weights are drawn."""


def top(cfg: ModelConfig) -> Layout:
    """Describes the parameters outside the layers."""
    d, vocab, names = cfg.d_model, cfg.vocab_size, naming(cfg.architecture)
    out: Layout = {
        "embed": Parameter((f"{names.root}embed_tokens.weight",), ((vocab, d),), "embedding"),
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
    at = f"{names.root}layers.{index}."
    attn, kind = at + "self_attn.", cfg.layer_attention[index]
    out: Layout = {
        **_norm(cfg, "attn_norm", at + names.norms[0]),
        **_norm(cfg, "mlp_norm", at + names.norms[1]),
    }
    if isinstance(kind, GatedDelta):
        out |= _delta(cfg, kind, at + "linear_attn.")
    elif isinstance(kind, Mamba):
        out |= _mamba(cfg, kind, at + "mamba.")
    elif isinstance(kind, ShortConv):
        out |= _short_conv(cfg, kind, at + "conv.")
    else:
        out |= _latent(cfg, kind, attn) if isinstance(kind, Latent) else _heads(cfg, kind, attn)
    if cfg.has_sinks(index):
        out["sinks"] = Parameter((attn + "sinks",), ((cfg.num_heads,),), "bias")
    mlp = f"{at}{names.mlp}."
    if not is_moe:
        return out | _swiglu("", mlp, d, cfg.d_ff_dense, names.dense_names)
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
        out["shared_gate_up"] = Parameter((gate_up,), ((2 * cfg.d_ff_shared, d),))
        out["shared_down"] = Parameter((down,), ((d, cfg.d_ff_shared),))
    elif cfg.d_ff_shared:
        out |= _swiglu("shared_", f"{mlp}{names.shared}.", d, cfg.d_ff_shared)
        if cfg.shared_gate:
            gate = (f"{mlp}{names.shared}_gate.weight",)
            out["shared_gate"] = Parameter(gate, ((1, d),), "gate")
    return out


def _heads(cfg: ModelConfig, kind: Any, attn: str) -> Layout:
    d, size, gated = cfg.d_model, cfg.head_dim, getattr(kind, "gated", False)
    q, kv = cfg.num_heads * size, cfg.num_kv_heads * size
    qkv = tuple(f"{attn}{p}_proj." for p in "qkv")
    weights, biases = (tuple(p + kind for p in qkv) for kind in ("weight", "bias"))
    paired = size if naming(cfg.architecture).neighbours_turn else 0
    woven = ((size, size),) if gated else ()
    queries = q * (1 + gated)
    out = {
        "wqkv": Parameter(weights, ((queries, d), (kv, d), (kv, d)), paired=paired, woven=woven),
        "wo": Parameter((f"{attn}{naming(cfg.architecture).output}.weight",), ((d, q),)),
    }
    if cfg.qkv_bias:
        out["bqkv"] = Parameter(biases, ((queries,), (kv,), (kv,)), "bias", woven=woven)
    if cfg.o_bias:
        out["bo"] = Parameter((attn + "o_proj.bias",), ((d,),), "bias")
    if cfg.qk_norm:
        names = naming(cfg.architecture).head_norms
        for key, name, whole in zip(("q_norm", "k_norm"), names, (q, kv), strict=True):
            shape = (whole if cfg.normed_whole else size,)
            out[key] = Parameter((f"{attn}{name}.weight",), (shape,), "norm", **_centred(cfg))
    return out


def _delta(cfg: ModelConfig, kind: GatedDelta, at: str) -> Layout:
    d, heads, group = cfg.d_model, kind.value_heads, kind.value_heads // kind.key_heads
    keys, values = kind.key_heads * kind.key, heads * kind.value
    names, woven = ("qkv", "z", "b", "a"), ()
    stored = (kind.channels, d), (values, d), (heads, d), (heads, d)
    if naming(cfg.architecture).joined_delta:
        names, stored = ("qkvz", "ba"), ((2 * keys + 2 * values, d), (2 * heads, d))
        woven = (*2 * (kind.key,), *2 * (group * kind.value,)), 2 * (group,)
    names = tuple(f"{at}in_proj_{name}.weight" for name in names)
    return {
        "w_in": Parameter(names, stored, woven=woven),
        "conv": Parameter((at + "conv1d.weight",), ((kind.channels, 1, kind.taps),), "laid out"),
        "a_log": Parameter((at + "A_log",), ((heads,),), "bias", float32=True),
        "dt_bias": Parameter((at + "dt_bias",), ((heads,),), "bias", float32=True),
        "gated_norm": Parameter((at + "norm.weight",), ((kind.value,),), "norm"),
        "wo": Parameter((at + "out_proj.weight",), ((d, values),)),
    }


def _mamba(cfg: ModelConfig, kind: Mamba, at: str) -> Layout:
    d, heads = cfg.d_model, (kind.heads,)
    columns = kind.wide + kind.channels + kind.heads
    out = {
        "w_in": Parameter((at + "in_proj.weight",), ((columns, d),)),
        "conv": Parameter((at + "conv1d.weight",), ((kind.channels, 1, kind.taps),), "laid out"),
        "a_log": Parameter((at + "A_log",), (heads,), "bias", float32=True),
        "dt_bias": Parameter((at + "dt_bias",), (heads,), "bias", float32=True),
        "skip": Parameter((at + "D",), (heads,), "norm", float32=True),
        "gated_norm": Parameter((at + "norm.weight",), ((kind.wide,),), "norm"),
        "wo": Parameter((at + "out_proj.weight",), ((d, kind.wide),)),
    }
    sizes = {"b_conv": ("conv1d", kind.channels)} if kind.conv_bias else {}
    if kind.bias:
        sizes |= {"b_in": ("in_proj", columns), "bo": ("out_proj", d)}
    for key, (name, size) in sizes.items():
        out[key] = Parameter((f"{at}{name}.bias",), ((size,),), "bias")
    return out


def _short_conv(cfg: ModelConfig, kind: ShortConv, at: str) -> Layout:
    d, wide = cfg.d_model, kind.channels
    out = {
        "w_in": Parameter((at + "in_proj.weight",), ((3 * wide, d),)),
        "conv": Parameter((at + "conv.weight",), ((wide, 1, kind.taps),), "laid out"),
        "wo": Parameter((at + "out_proj.weight",), ((d, wide),)),
    }
    if kind.bias:
        sizes = {"b_in": ("in_proj", 3 * wide), "b_conv": ("conv", wide), "bo": ("out_proj", d)}
        for key, (name, size) in sizes.items():
            out[key] = Parameter((f"{at}{name}.bias",), ((size,),), "bias")
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
    at, part = f"{names.root}layers.{index}.{names.mlp}.", (number, cfg.num_experts)
    if names.interleaved:
        return _interleaved(cfg, at, part)
    if names.joined_experts is None or cfg.experts_apart:
        at = f"{at}experts.{number}."
        out = _swiglu("", at, d, f, names.expert_names)
        if cfg.expert_bias:
            gate, up, down = (f"{at}{name}.bias" for name in names.expert_names)
            out["gate_up_bias"] = Parameter((gate, up), ((f,), (f,)), "bias")
            out["down_bias"] = Parameter((down,), ((d,),), "bias")
        return out
    gate_up, down = (at + name for name in names.joined_experts)
    if names.laid_out:
        return {
            "gate_up": Parameter((gate_up,), ((d, 2 * f),), "laid out", part=part, swapped=True),
            "down": Parameter((down,), ((f, d),), "laid out", part=part, swapped=True),
        }
    return {
        "gate_up": Parameter((gate_up,), ((2 * f, d),), part=part),
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
    return {key: parameter.shape for key, parameter in expert(cfg, 0, 0).items()}


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


def _swiglu(
    key: str,
    at: str,
    d: int,
    f: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Layout:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {
        f"{key}gate_up": Parameter((gate, up), ((f, d), (f, d))),
        f"{key}down": Parameter((down,), ((d, f),)),
    }
