"""Model configurations: one dataclass, and the translation of Hugging Face `config.json` to it."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jmoe.architectures import ARCHITECTURES, LACKING, MOST_LAYERS, full_or_window
from jmoe.attention import FULL, AttentionKind, Latent, Paged
from jmoe.brownout import Own
from jmoe.config_fields import ConfigError as ConfigError
from jmoe.config_fields import Fields, shown
from jmoe.config_keys import (
    ORIGINAL,
    ROPE_READ,
    ROPE_SECTIONS,
    check_keys,
    fp8_block,
    positions,
    rope_kind,
    text_part,
)
from jmoe.int4 import Int4, int4
from jmoe.model_files import instead, read_text
from jmoe.recurrent import Recurrent
from jmoe.rope import RopeConfig as RopeConfig
from jmoe.router import Router
from pallas_kernels.activation import SILU, Activation, up_matrices

EXCHANGES = "auto", "all-gather", "halves", "direct", "forwarded"
"""How rows may meet experts over a mesh."""


@dataclass(frozen=True, repr=False)
class ModelConfig:
    """One MoE architecture, by fields. Sizes are counts of elements."""

    architecture: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    d_ff_expert: int
    d_ff_shared: int  # of all shared experts together; 0: there are none
    d_ff_dense: int  # of dense layers; 0 where there are none
    moe_layers: tuple[bool, ...]  # by layer: MoE, or dense, or without an MLP (`blocks`)
    norm_topk_prob: bool
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    o_bias: bool = False  # of attention's output projection
    normed_whole: bool = False  # with `qk_norm`: all heads of q, or of k, as one
    turned_first: bool = False  # with `qk_norm`: heads turn before their norms
    clip_qkv: float = 0.0  # bound of q, k and v before they turn; 0: none
    shared_gate: bool = True  # whether the shared expert has a sigmoid gate
    layer_norm: bool = False  # LayerNorm with a bias in place of RMSNorm
    head_bias: bool = False  # of the output projection
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each half layer adds
    post_norms: bool = False  # what each half layer adds has an RMSNorm of its own
    logits_scaling: float = 1.0  # what logits are divided by
    unused_layers: int = 0  # of the checkpoint, behind the last: they predict further tokens
    layer_attention: tuple[AttentionKind, ...] = ()  # by layer; none: full attention
    router: Router | None = None  # None: softmax over all experts, the likeliest
    activation: Activation = SILU  # of routed, united and shared experts and of dense layers
    expert_bias: bool = False  # of routed and united experts' products
    logits_bias: bool = False  # of the router's logits
    experts_apart: bool = False  # the checkpoint has them so, where others have them joined
    mxfp4: bool = False  # the checkpoint has experts' matrices in four bits
    fp8_block: tuple[int, int] | tuple[()] = ()
    """Rows and columns of a matrix of the checkpoint in fp8 that share a scale; 0: all of them."""
    strategy: Own | None = None  # of brownout, a user's own, that programs are made with
    int4: Int4 | None = None  # how the checkpoint packs matrices in four bits, if it does
    exchange: str = "auto"
    """How rows meet experts over a mesh, by name (`jmoe.parallel.cost.MeshStep.exchange`)."""
    blocks: tuple[tuple[int, int | None], ...] = ()
    """By layer, the numbers that the checkpoint has its two halves under, where it counts these by
    themselves; None: the layer has no MLP. Empty: both have the layer's.
    """

    def __post_init__(self) -> None:
        """Raises ConfigError where fields contradict each other."""
        if not self.layer_attention:
            object.__setattr__(self, "layer_attention", (FULL,) * self.num_layers)
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_attention_heads",
            self.num_heads,
            f"a multiple of num_key_value_heads ({self.num_kv_heads})",
        )
        _require(
            1 <= self.experts_per_token <= self.num_experts,
            "num_experts_per_tok",
            self.experts_per_token,
            f"between 1 and the number of experts ({self.num_experts})",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        wanted = f"such that of head_dim ({self.head_dim}) an even part is turned"
        for rope in map(self.rope_of, self.attention_kinds):
            turned, key = rope.turned(self.head_dim), "partial_rotary_factor"
            _require(turned % 2 == 0 < turned <= self.head_dim, key, rope.partial, wanted)
        for kind in self.attention_kinds:
            beta = self.rope_of(kind).query_scaling
            wanted = f"0 in layers of {type(kind).__name__}: only latent attention reads it"
            _require(not beta or isinstance(kind, Latent), "query_scaling", beta, wanted)
        for key in ("moe_layers", "layer_attention", *(["blocks"] if self.blocks else [])):
            count = len(getattr(self, key))
            wanted = f"one entry a layer ({self.num_layers})"
            _require(count == self.num_layers, key, count, wanted)
        _require(any(self.moe_layers), "moe_layers", self.moe_layers, "at least one MoE layer")
        whole = all(map(self.has_mlp, filter(self.moe_layers.__getitem__, range(self.num_layers))))
        _require(whole, "blocks", self.blocks, "such that no MoE layer is without its experts")
        one_of = f"one of {', '.join(EXCHANGES)}"
        _require(self.exchange in EXCHANGES, "exchange", self.exchange, one_of)

    def __repr__(self) -> str:
        """Returns architecture and sizes. Equal for equal configurations only: it ends with a
        digest.
        """
        values = repr([getattr(self, field.name) for field in fields(self)])
        digest = hashlib.sha256(values.encode()).hexdigest()[:16]
        return (
            f"ModelConfig({self.architecture}, {self.num_layers} layers, {self.num_moe_layers} of "
            f"them MoE, {self.num_experts} experts, {self.experts_per_token} a token, "
            f"d_model {self.d_model}, d_ff_expert {self.d_ff_expert}, "
            f"vocab_size {self.vocab_size}, digest {digest})"
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers that have routed experts."""
        return sum(self.moe_layers)

    @property
    def num_dense_layers(self) -> int:
        """Layers that have an MLP of all rows."""
        return sum(map(self.has_mlp, range(self.num_layers))) - self.num_moe_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a second half: experts, or a dense MLP."""
        return not self.blocks or self.blocks[layer][1] is not None

    @property
    def up_matrices(self) -> int:
        """Matrices of an MLP before its activation: gate and up, or up alone."""
        return up_matrices(self.activation)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention of the layers, each once."""
        return tuple(dict.fromkeys(self.layer_attention))

    def rope_of(self, kind: AttentionKind) -> RopeConfig:
        """Returns how heads turn in layers of a kind of attention."""
        return getattr(kind, "rotary", None) or self.rope

    def attention_runs(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Runs of layers `[start, stop)` of one kind of attention: (number of the kind, first
        layer, layer behind the last, layers of other kinds before it).
        """
        runs: list[tuple[int, int, int, int]] = []
        for kind, layers in groupby(range(start, stop), self.layer_attention.__getitem__):
            first, *rest = layers
            others = first - self.layer_attention[:first].count(kind)
            runs.append((self.attention_kinds.index(kind), first, first + len(rest) + 1, others))
        return runs

    def _parameters(self, layer: int) -> tuple[Any, ...]:
        """What decides which parameters a layer has."""
        kind = self.layer_attention[layer]
        gated = bool(getattr(kind, "gated", False))
        own = kind if isinstance(kind, Recurrent) else isinstance(kind, Latent)
        return self.moe_layers[layer], self.has_mlp(layer), self.has_sinks(layer), gated, own

    def has_sinks(self, layer: int) -> bool:
        """Whether a layer's attention has a sink a head."""
        return bool(getattr(self.layer_attention[layer], "sinks", False))

    def segments(self) -> list[tuple[bool, int, int]]:
        """Runs of layers with the same parameters: (is MoE, first layer, number of layers)."""
        runs = [list(run) for _, run in groupby(range(self.num_layers), self._parameters)]
        return [(self.moe_layers[run[0]], run[0], len(run)) for run in runs]


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {value!r}; it must be {wanted}")


GENERATION_FILE = "generation_config.json"
CONFIG_FILES = ("config.json", GENERATION_FILE)
"""What `read_config` reads."""


def read_config(path: str | Path, *, allow_unknown_config: Collection[str] = ()) -> ModelConfig:
    """Reads `config.json` (and eos ids of `generation_config.json`) of a Hugging Face directory.

    Raises ConfigError for a missing or malformed file, a setting jmoe does not serve, or a key it
    does not know, but for those in `allow_unknown_config` (`KEY`, or `rope_scaling.KEY`).
    """
    directory = Path(path)
    file = directory / "config.json"
    cfg = from_hf(_read_json(file), file=str(file), allow_unknown_config=allow_unknown_config)
    fields = Fields(read_generation_config(directory), str(directory / GENERATION_FILE))
    if fields.given("eos_token_id") is None:
        return cfg
    return replace(cfg, eos_token_ids=fields.token_ids("eos_token_id", cfg.vocab_size))


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Returns what `generation_config.json` of a model's directory holds; nothing without the file.

    Raises ConfigError for a malformed one.
    """
    file = directory / GENERATION_FILE
    return _read_json(file) if file.exists() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path} does not exist; name a Hugging Face model directory{instead(path.parent)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not an object")
    return loaded


def from_hf(
    config: Mapping[str, Any],
    *,
    file: str = "config.json",
    allow_unknown_config: Collection[str] = (),
) -> ModelConfig:
    """Translates the contents of a Hugging Face `config.json`; `file` is its name in errors.

    Raises ConfigError, as `read_config` does.
    """
    fields = Fields(config, file)
    family = _family(fields)
    architecture = ARCHITECTURES[family]
    if architecture.text:
        fields = text_part(fields, architecture, allow_unknown_config)
    check_keys(fields, architecture, allow_unknown_config)
    num_layers = fields.size("num_hidden_layers", 0, most=MOST_LAYERS)
    num_heads = fields.size("num_attention_heads")
    vocab_size = fields.size("vocab_size")
    max_position = positions(fields)
    d_ff_dense = fields.size("intermediate_size", 0)
    own = architecture.translate(fields)
    num_layers = own.pop("num_layers", num_layers)
    # An architecture that says nothing of attention has it in full.
    attention = {} if "layer_attention" in own else {"layer_attention": full_or_window(fields)}
    if "activation" not in own and fields.given("hidden_act") not in (None, "silu"):
        raise fields.wrong("hidden_act", "'silu'")
    head_dim = own.pop("head_dim", None) or _head_dim(fields, num_heads)
    per_token = own.pop("experts_per_token", None) or fields.size("num_experts_per_tok")
    partial_rotary = own.pop("partial_rotary", architecture.partial_rotary)
    if architecture.kind_thetas:
        rope, kinds = _rope_by_kind(fields, own["layer_attention"], architecture.kind_thetas)
        own["layer_attention"] = kinds
    else:
        rope = _rope(fields, architecture.rope_theta, partial_rotary, max_position)
    if rope.kind == "longrope":
        if len(rope.short_factor) != head_dim // 2:
            wanted = f"as many numbers as half of head_dim ({head_dim // 2})"
            raise ConfigError(
                f"{file}: short_factor has {len(rope.short_factor)}; it must be {wanted}"
            )
        # Behind it the long factors turn all keys anew, also those in the cache.
        max_position = min(max_position, _original(fields, max_position))
    if not own.pop("turns", True):
        rope = RopeConfig(kind="none")
    rope = replace(rope, query_scaling=own.pop("query_scaling", 0.0))
    if (scale := own.pop("attention_multiplier", None)) is not None:
        # In place of head_dim ** -0.5, by what turns q and k: no kernel has to know it.
        factor = rope.attention_factor * math.sqrt(scale * math.sqrt(head_dim))
        rope = replace(rope, attention_factor=factor)
    try:
        if (dense := own.pop("d_ff_dense", None)) is None:
            dense = 0 if all(own["moe_layers"]) else d_ff_dense or fields.size("intermediate_size")
        of_all: dict[str, Any] = {
            "num_kv_heads": fields.size("num_key_value_heads", num_heads),
            "tie_embeddings": fields.flag("tie_word_embeddings", architecture.tied),
            "rms_norm_eps": fields.number("rms_norm_eps", architecture.rms_norm_eps),
            **dict.fromkeys(("qkv_bias", "qk_norm"), False),
        }
        return ModelConfig(
            architecture=family,
            vocab_size=vocab_size,
            d_model=fields.size("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            experts_per_token=per_token,
            d_ff_dense=dense,
            rope=rope,
            max_position=max_position,
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
            fp8_block=fp8_block(fields),
            int4=int4(fields),
            **{"d_ff_shared": 0, **of_all, **attention, **own},
        )
    except ConfigError as error:
        words = str(error)
        raise ConfigError(words if words.startswith(file) else f"{file}: {words}") from None


def _family(fields: Fields) -> str:
    kind = fields.given("model_type")
    served = ", ".join(sorted(ARCHITECTURES))
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        lacks = f", {LACKING[kind]}" if isinstance(kind, str) and kind in LACKING else ""
        raise ConfigError(
            f"{fields.file}: model_type is {shown(kind)}{lacks}; jmoe serves {served}; "
            "docs/new-architecture.md says how to add one"
        )
    classes = fields.given("architectures")
    wanted = ARCHITECTURES[kind].class_name
    if classes is not None and classes not in ([wanted], [ARCHITECTURES[kind].older_class]):
        raise fields.wrong("architectures", f"['{wanted}'] where model_type is {kind}")
    return kind


def _head_dim(fields: Fields, num_heads: int) -> int:
    if fields.given("head_dim") is not None:
        return fields.size("head_dim")
    d_model = fields.size("hidden_size")
    if d_model % (2 * num_heads):
        heads = f"num_attention_heads ({num_heads})"
        raise fields.wrong("hidden_size", f"an even multiple of {heads} where head_dim is absent")
    return d_model // num_heads


def _rope(
    fields: Fields, theta: float, partial_rotary: float | None, max_position: int
) -> RopeConfig:
    """Reads both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`."""
    sections = [fields.section(key) for key in ROPE_SECTIONS]
    theta = fields.number("rope_theta", theta)
    partial, key = partial_rotary or 1.0, "partial_rotary_factor"
    if partial_rotary:
        partial = fields.number(key, partial)
    original = fields.size(ORIGINAL, 0)
    ropes = [
        replace(
            _scaled(section, section.number("rope_theta", theta), original, max_position),
            partial=section.number(key, partial) if partial_rotary else partial,
        )
        for section in sections
        if section.values
    ]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise fields.wrong("rope_scaling", "absent, or say the same as rope_parameters")
    return ropes[0] if ropes else RopeConfig(theta=theta, partial=partial)


def _rope_by_kind(
    fields: Fields, kinds: tuple[Paged, ...], thetas: Mapping[str, float]
) -> tuple[RopeConfig, tuple[Paged, ...]]:
    """Reads `rope_parameters` of each kind of layer, with `thetas` where there are none. Returns
    those of full attention, or of the first layer, and the layers' attention with the others.
    """
    types = fields.given("layer_types") or ["full_attention"] * len(kinds)
    key, section = "rope_parameters", fields.section("rope_parameters")
    ropes = {kind: RopeConfig(theta=theta) for kind, theta in thetas.items()}
    if fields.given(key) is not None:
        for kind in dict.fromkeys(types):
            own = section.section(section.first(kind))
            is_scaled = rope_kind(own, ROPE_READ) in ("llama3", "yarn")
            original = own.size(ORIGINAL) if is_scaled else 0
            ropes[kind] = _scaled(own, own.number("rope_theta"), original, positions(fields))
    rope = ropes["full_attention" if "full_attention" in types else types[0]]
    rotary = {kind: None if one == rope else one for kind, one in ropes.items()}
    each = zip(kinds, types, strict=True)
    return rope, tuple(replace(kind, rotary=rotary[name]) for kind, name in each)


def _original(fields: Fields, max_position: int) -> int:
    """Returns the positions that a model was trained on before its RoPE was scaled."""
    places = [fields, *map(fields.section, ROPE_SECTIONS)]
    return next((one.size(ORIGINAL) for one in places if one.given(ORIGINAL)), max_position)


def _scaled(fields: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    kind = rope_kind(fields, ROPE_READ)
    if kind == "longrope":
        fields.numbers("long_factor")  # not used, but it has to be there
        fields.number("long_mscale")
        factors, scale = fields.numbers("short_factor"), fields.number("short_mscale")
        return RopeConfig(theta, kind, attention_factor=scale, short_factor=factors)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = fields.number("factor")
    if kind == "dynamic":  # has a factor, too, which is not used
        return RopeConfig(theta=theta, kind=kind, factor=fields.number("alpha"))
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    original = original or fields.size(ORIGINAL, max_position)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
        return RopeConfig(theta, kind, factor, original, low, high)
    if theta <= 1:
        raise ConfigError(f"{fields.file}: rope_theta is {theta:g}; it must be above 1 for yarn")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, factor),
        truncate=fields.flag("truncate", True),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """Returns YaRN's factor (arXiv 2309.00071), section 3.4: 0.1 ln(s) + 1, unless the config says
    otherwise.
    """

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.given("attention_factor") is not None:
        return fields.number("attention_factor")
    keys = ("mscale", "mscale_all_dim")
    if all(fields.given(key) for key in keys):
        return scale(fields.number(keys[0])) / scale(fields.number(keys[1]))
    return scale(1.0)
