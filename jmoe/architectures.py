"""What sets each `model_type` apart: how its `config.json` is read, how its tensors are called.

An architecture whose arithmetic `jmoe.model` has already is one entry here, or one call of
`register` from outside (docs/new-architecture.md).
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jmoe.attention import Latent, Paged
from jmoe.config_fields import Fields
from jmoe.config_keys import (
    READ_FOR_ALL,
    READ_FOR_QWEN,
    ROPE_READ,
    ROPE_SECTIONS,
    positions,
    rope_kind,
    words,
)
from jmoe.recurrent import GatedDelta, Mamba, ShortConv
from jmoe.rope import RopeConfig
from jmoe.router import ScoredTopK, SparseMixer
from pallas_kernels.activation import ClampedSwiglu, Relu2

MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000
MOST_TAPS = 64
"""Rows that a convolution may see; programs have a line for each."""


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of Hugging Face."""

    class_name: str
    """The one entry of `architectures` that is accepted with it, but for `older_class`."""
    translate: Callable[[Fields], dict[str, Any]]
    """Fields of ModelConfig beyond those that `jmoe.config.from_hf` reads for all: `num_experts`,
    `d_ff_expert` and `moe_layers` at least. Raises ConfigError.
    """
    read: Collection[str] = READ_FOR_ALL
    """Keys of `config.json` that are read."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of the model's arithmetic that jmoe computes in one way only, and the values for it;
    they hold for keys that are read, too.
    """
    rms_norm_eps: float = 1e-6  # where the key is absent
    rope_theta: float = 1e4  # where the key is absent
    kind_thetas: Mapping[str, float] = field(default_factory=dict)
    """Thetas by kind of layer, where `rope_parameters` are apart for each and absent; none: one for
    all layers.
    """
    partial_rotary: float | None = None
    """`partial_rotary_factor` where the key is absent; None: heads turn as a whole."""
    mlp: str = "mlp"
    """Name of a layer's MLP block in the names of tensors."""
    norms: tuple[str, str, str] = ("input_layernorm", "post_attention_layernorm", "norm")
    """Names of the norms before attention and before the MLP block, and of the last one."""
    mixer: str = ""
    """Name of attention and of recurrent layers alike, where they have one."""
    embed: str = "embed_tokens"
    """Name of the embeddings."""
    post_norms: tuple[str, str] = ("post_self_attn_layernorm", "post_mlp_layernorm")
    """Names of the norms of what attention and the MLP block add (`ModelConfig.post_norms`)."""
    output: str = "o_proj"
    """Name of attention's output projection."""
    dense_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of a dense layer's gate, up and down projections."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    joined_experts: tuple[str, str] | None = None
    """Names of a layer's tensors of all experts' gates and ups, and downs, where it has such."""
    may_be_apart: bool = False
    """Whether there are checkpoints with each expert's by themselves, too."""
    interleaved: bool = False
    """Whether experts are joined as in gpt-oss: `[in, out]`, gate and up in turn, with biases."""
    quantized: Collection[str] = ("fp8", "compressed-tensors", "modelopt", "awq", "gptq")
    """Values of `quant_method` that are read (docs/quantization.md)."""
    older_class: str = ""
    rope_kinds: Collection[str] = ("default", "linear", "llama3", "yarn")
    router: str = "gate"
    """Name of the router in the MLP block."""
    router_bias: str = "gate.e_score_correction_bias"
    """Name of the bias of its scores there, where it has one."""
    row_of_bias: bool = False
    """Whether that is a matrix of one row."""
    neighbours_turn: bool = False
    """Whether heads turn neighbouring elements together, not those half a head apart."""
    tied: bool = False
    """`tie_word_embeddings` where the key is absent."""
    predicting: str = ""
    """How names of tensors begin that predict further tokens, beside those of `unused_layers`."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Names of the norms of query and of key heads, where it has them."""
    head_gate: str = ""
    """Name of what makes a gate of what heads read (`Paged.gated`); none: it lies in `q_proj`."""
    shared: str = "shared_expert"
    """Name of the shared experts in the MLP block."""
    joined_shared: tuple[str, str] | None = None
    """Names of the shared experts' gates and ups in one tensor, and of downs, in the layer."""
    text: tuple[str, ...] = ()
    """Values of `model_type` in `text_config`, where the file describes other models beside the one
    that reads text."""
    root: str = "model."
    """How names of tensors begin, but for the head's."""
    head: str = "lm_head."
    """How names of the head's tensors begin."""
    beside: tuple[str, ...] = ()
    """How names of tensors begin that text does not pass."""
    centred: bool = False
    """Whether weights of norms are in the file less 1."""
    joined_delta: bool = False
    """Whether a recurrent layer's projections lie in two tensors, key head by key head."""
    laid_out: bool = False
    """Whether joined experts are `[in, out]`, as in memory; or `[out, in]`, as transformers 5 has
    them.
    """
    apart: str = ""
    """What sets it apart, for docs/reference/models.md."""

    @property
    def embedding(self) -> str:
        """The name of the tensor of embeddings."""
        return f"{self.root}{self.embed}.weight"

    def layer(self, number: int) -> str:
        """Returns how names of a layer's tensors begin."""
        return f"{self.root}layers.{number}."


LACKING = {
    **dict.fromkeys(
        ("jamba", "minimax"),
        "whose recurrent layers are none of jmoe's",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "which has no experts"),
}
"""By `model_type`, why some are not served."""


def register(model_type: str, architecture: Architecture) -> None:
    """Makes checkpoints of `model_type` loadable. Raises ValueError for a name that is taken."""
    if model_type in ARCHITECTURES:
        raise ValueError(f"model_type {model_type!r} is registered already; choose another name")
    ARCHITECTURES[model_type] = architecture


def naming(model_type: str) -> Architecture:
    """Returns the architecture that names the tensors; Qwen's for a configuration made by hand."""
    return ARCHITECTURES.get(model_type, ARCHITECTURES["qwen3_moe"])


def _biases(fields: Fields, absent: bool = False) -> dict[str, bool]:
    """Reads whether all of attention's projections have biases."""
    bias = fields.flag("attention_bias", absent)
    return {"qkv_bias": bias, "o_bias": bias}


def _all_sparse(fields: Fields, num_experts: int | None = None) -> dict[str, Any]:
    """Reads layers that are all MoE; `num_experts` None: under either spelling."""
    return {
        "num_experts": num_experts or _expert_count(fields),
        "d_ff_expert": fields.size("intermediate_size"),
        "moe_layers": (True,) * fields.size("num_hidden_layers"),
    }


def _qwen(fields: Fields) -> dict[str, Any]:
    return {
        "d_ff_expert": fields.size("moe_intermediate_size"),
        "moe_layers": _moe_layers(fields),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {
        **_qwen(fields),
        "layer_attention": full_or_window(
            fields,
            _qwen_window(fields),
            alternate=fields.size("max_window_layers", 28, least=0),
        ),
        # transformers reads the newer spelling for the others only.
        "num_experts": _num_experts(fields, "num_experts", "num_local_experts"),
        "d_ff_shared": fields.size("shared_expert_intermediate_size", least=0),
        "qkv_bias": fields.flag("qkv_bias", True),
    }


def _qwen3_vl(fields: Fields) -> dict[str, Any]:
    return {**_qwen3(fields), "norm_topk_prob": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {
        **_qwen(fields),
        **_biases(fields),
        "layer_attention": full_or_window(fields, _qwen_window(fields)),
        "num_experts": _expert_count(fields),
        "qk_norm": True,
    }


def _qwen3_next(fields: Fields) -> dict[str, Any]:
    """Reads layers of Gated DeltaNet, and full attention with a gate between them."""
    count, types = fields.size("num_hidden_layers"), ["linear_attention", "full_attention"]
    interval = fields.size("full_attention_interval", 4)
    kinds = _kinds(fields, "layer_types", types)
    if kinds is None:
        kinds = [types[(i + 1) % interval == 0] for i in range(count)]
    key_heads, heads, key, value = (
        fields.size(f"linear_{name}", absent)
        for name, absent in {
            "num_key_heads": 16,
            "num_value_heads": 32,
            "key_head_dim": 128,
            "value_head_dim": 128,
        }.items()
    )
    if heads % key_heads:
        name = f"a multiple of linear_num_key_heads ({key_heads})"
        raise fields.wrong("linear_num_value_heads", name)
    taps = fields.size("linear_conv_kernel_dim", 4, least=2, most=MOST_TAPS)
    each = GatedDelta(key_heads, heads, key, value, taps), Paged(gated=True)
    return {
        **_biases(fields),
        "layer_attention": tuple(each[types.index(kind)] for kind in kinds),
        "num_experts": _expert_count(fields),
        "d_ff_expert": fields.size("moe_intermediate_size"),
        "moe_layers": _moe_layers(fields),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "d_ff_shared": fields.size("shared_expert_intermediate_size", 512, least=0),
        "head_dim": fields.size("head_dim", 256),
        "num_kv_heads": fields.size("num_key_value_heads", 2),
        "qk_norm": True,
    }


def _lfm2(fields: Fields) -> dict[str, Any]:
    count, types = fields.size("num_hidden_layers"), ["conv", "full_attention"]
    if (kinds := _kinds(fields, "layer_types", types)) is None:
        raise fields.wrong("layer_types", f"a list of 'conv' or 'full_attention', {count} of them")
    if (dense := fields.size("num_dense_layers", 2, least=0)) >= count:
        raise fields.wrong("num_dense_layers", f"below num_hidden_layers ({count})")
    taps, bias = (
        fields.size("conv_L_cache", 3, least=2, most=MOST_TAPS),
        fields.flag("conv_bias", False),
    )
    each = ShortConv(fields.size("hidden_size"), taps, bias), Paged()
    return {
        "layer_attention": tuple(each[types.index(kind)] for kind in kinds),
        "num_experts": _expert_count(fields),
        "d_ff_expert": fields.size("moe_intermediate_size", 1792),
        "moe_layers": tuple(i >= dense for i in range(count)),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": ScoredTopK(
            scale=fields.number("routed_scaling_factor", 1.0),
            bias=fields.flag("use_expert_bias", True),
        ),
        # transformers adds 1e-6 to the sum of the chosen scores, which jmoe's routers do not.
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "tie_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        "qk_norm": True,
    }


def _shared(fields: Fields, dense: int, shared: int | None) -> dict[str, Any]:
    """Reads layers whose first few are dense, and experts that every row visits; `dense` and
    `shared` are how many where the keys are absent, None: the key must be there.
    """
    width, num_layers = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers")
    if (dense := fields.size("first_k_dense_replace", dense, least=0)) >= num_layers:
        raise fields.wrong("first_k_dense_replace", f"below num_hidden_layers ({num_layers})")
    return {
        "num_experts": fields.size("n_routed_experts", most=MOST_EXPERTS),
        "d_ff_expert": width,
        "d_ff_shared": width * fields.size("n_shared_experts", shared, least=0),
        "shared_gate": False,
        "moe_layers": tuple(i >= dense for i in range(num_layers)),
    }


def _glm4(fields: Fields, dense: int = 1, predicting: int = 1) -> dict[str, Any]:
    own = _shared(fields, dense, 1)
    return {
        **own,
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": scored(fields, own["num_experts"], bias=True),
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
        "unused_layers": fields.size("num_nextn_predict_layers", predicting, least=0),
    }


def _solar(fields: Fields) -> dict[str, Any]:
    own = _glm4(fields, dense=0, predicting=0)
    return {**own, "head_dim": fields.size("head_dim", 128)}


def _dots(fields: Fields) -> dict[str, Any]:
    own, window = _shared(fields, 0, None), 0
    if fields.values.get("sliding_window", 0) is not None:
        window = fields.size("sliding_window", 4096)
    first = fields.size("max_window_layers", 62, least=0)
    return {
        **own,
        **_biases(fields),
        "layer_attention": full_or_window(fields, window, first=first),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "router": scored(fields, own["num_experts"], bias=True),
        "qk_norm": True,
    }


def _deepseek2(fields: Fields) -> dict[str, Any]:
    own, greedy = _shared(fields, 0, 2), "greedy"
    if (method := fields.given("topk_method") or greedy) not in (greedy, "group_limited_greedy"):
        raise fields.wrong("topk_method", "'greedy' or 'group_limited_greedy'")
    router, groups = None, ("n_group", "topk_group")
    if method != greedy and not all(map(fields.given, groups)):
        raise fields.wrong(
            "topk_method", f"'greedy' where not both {' and '.join(groups)} are given"
        )
    if method != greedy:
        router = scored(fields, own["num_experts"], scoring="softmax", best=1)
    elif (scale := fields.number("routed_scaling_factor", 1.0)) != 1:
        router = ScoredTopK("softmax", scale=scale)
    return {**own, **_latent(fields), "norm_topk_prob": False, "router": router}


def _deepseek3(
    fields: Fields,
    dense: int = 3,
    grouping: tuple[int, int, float] = (8, 4, 2.5),
    sizes: tuple[int, int, int, int] = (512, 1536, 128, 128),
) -> dict[str, Any]:
    own = _shared(fields, dense, 1)
    return {
        **own,
        **_latent(fields, sizes, interleaved=fields.flag("rope_interleave", True)),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": scored(fields, own["num_experts"], grouping, bias=True),
        "unused_layers": fields.size("num_nextn_predict_layers", 1, least=0),
    }


def _glm4_lite(fields: Fields) -> dict[str, Any]:
    own = _deepseek3(fields, 1, (1, 1, 1.8), (512, 768, 192, 256))
    return {**own, "moe_layers": _sparse_layers(fields, dense=1)}


def _mistral4(fields: Fields) -> dict[str, Any]:
    own, section = _shared(fields, 0, 1), fields.section("rope_parameters")
    beta = "llama_4_scaling_beta"
    for key in ("rope_scaling", beta):
        if fields.given(key) is not None:
            raise fields.wrong(key, "absent: rope_parameters says it")
    if not section.values:
        wanted = "an object whose rope_type is 'yarn': mistral4 without it has YaRN of its own"
        raise fields.wrong("rope_parameters", wanted)
    sizes, interleaved = (256, 1024, 64, 128), fields.flag("rope_interleave", True)
    latent = _latent(fields, sizes, whole=True, interleaved=interleaved)
    kind, partial = latent["layer_attention"][0], "partial_rotary_factor"
    turned = kind.rope / (kind.nope + kind.rope)
    for of in (fields, section):
        if of.number(partial, turned) != turned:
            share = "qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim)"
            raise of.wrong(partial, f"absent, or {share}, {turned:g}")
    return {
        **own,
        **latent,
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": scored(fields, own["num_experts"], scoring="softmax"),
        "query_scaling": section.number(beta),
    }


def _hy3(fields: Fields) -> dict[str, Any]:
    width, scale = fields.size("moe_intermediate_size"), "router_scaling_factor"
    if fields.size(other := "expert_hidden_dim", width) != width:
        raise fields.wrong(other, f"the same as moe_intermediate_size ({width})")
    return {
        "num_experts": _expert_count(fields),
        "d_ff_expert": width,
        "d_ff_shared": width * fields.size("num_shared_experts", 1),
        "shared_gate": False,
        "moe_layers": _sparse_layers(fields, dense=1),
        **_biases(fields),
        "head_dim": fields.size("head_dim", 128),
        "norm_topk_prob": True,
        "router": ScoredTopK(scale=fields.number(scale, 2.826), bias=True),
        "qk_norm": True,
        "unused_layers": fields.size("num_nextn_predict_layers", 1, least=0),
    }


def _exaone(fields: Fields) -> dict[str, Any]:
    """Reads layers with windows, whose heads turn, and full attention, whose heads do not."""
    width, sparse = fields.size("moe_intermediate_size"), _sparse_layers(fields, 1, counted=True)
    if (given := fields.given(key := "is_moe_layer")) is not None and given != [*sparse]:
        raise fields.wrong(key, "absent, or as mlp_layer_types or first_k_dense_replace says")
    num_experts = fields.size("num_experts", most=MOST_EXPERTS)
    return {
        "num_experts": num_experts,
        "d_ff_expert": width,
        "d_ff_shared": width * fields.size("num_shared_experts", 1),
        "shared_gate": False,
        "moe_layers": sparse,
        "layer_attention": _exaone_attention(fields),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": scored(fields, num_experts, (1, 1, 2.5), key="num_experts", bias=True),
        "qk_norm": True,
        "unused_layers": fields.size("num_nextn_predict_layers", 0, least=0),
    }


def _exaone_attention(fields: Fields) -> tuple[Paged, ...]:
    kinds = ["sliding_attention", "full_attention"]
    if "sliding_window" in fields.values and fields.given("sliding_window") is None:
        raise fields.wrong("sliding_window", "1 or more")
    window = fields.size("sliding_window", 4096)
    if (types := _kinds(fields, "layer_types", kinds)) is None:
        key, count = "sliding_window_pattern", fields.size("num_hidden_layers")
        if isinstance(fields.given(key), str):
            raise fields.wrong(key, "a number of layers where layer_types is absent")
        every = fields.size(key, 4)
        types = [kinds[(i + 1) % every == 0] for i in range(count)]
    sees = window if window < positions(fields) else 0
    each = Paged(sees), Paged(rotary=RopeConfig(kind="none"))
    return tuple(each[kinds.index(kind)] for kind in types)


def _hunyuan(fields: Fields) -> dict[str, Any]:
    per_layer = "moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert"
    fields = _one_for_all(fields, *per_layer)
    own = _all_sparse(fields)
    width, head_dim = own["d_ff_expert"], fields.first("head_dim", "attention_head_dim")
    size = fields.size(head_dim, least=4)
    for key, only in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if fields.size(key, only) != only:
            raise fields.wrong(key, f"{only}, for each layer if it is a list")
    if fields.size(other := "attention_head_dim", size) != size:
        raise fields.wrong(other, f"the same as head_dim ({size})")
    return {
        **own,
        **_biases(fields),
        "experts_per_token": _num_experts(
            fields, *_either(fields, "moe_topk", "num_experts_per_tok")
        ),
        "d_ff_shared": width,
        "shared_gate": False,
        "head_dim": size,
        "norm_topk_prob": True,
        "qk_norm": True,
        "turned_first": True,
    }


def _mellum(fields: Fields) -> dict[str, Any]:
    count, window = fields.size("num_hidden_layers"), 0
    if fields.given("rope_scaling") is not None:
        raise fields.wrong(
            "rope_scaling", "absent: rope_parameters has those of each kind of layer"
        )
    if fields.values.get("sliding_window", 0) is not None:
        window = fields.size("sliding_window", 1024)
    mtp = fields.size("num_mtp_layers", 1, least=0, most=1)
    return {
        **_biases(fields),
        "num_experts": _expert_count(fields),
        "d_ff_expert": fields.size("moe_intermediate_size"),
        "moe_layers": _sparse_layers(fields, dense=0),
        "layer_attention": full_or_window(fields, window, first=count),
        "head_dim": fields.size("head_dim", 128),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "qk_norm": True,
        "unused_layers": fields.size("num_nextn_predict_layers", mtp, least=0, most=1),
    }


def _afmoe(fields: Fields) -> dict[str, Any]:
    count, types = fields.size("num_hidden_layers"), ["sliding_attention", "full_attention"]
    if (dense := fields.size("num_dense_layers", 1, least=0)) >= count:
        raise fields.wrong("num_dense_layers", f"below num_hidden_layers ({count})")
    every = fields.size("global_attn_every_n_layers", 4)
    if (kinds := _kinds(fields, "layer_types", types)) is None:
        kinds = [types[(i + 1) % every == 0] for i in range(count)]
    if "sliding_window" in fields.values and fields.given("sliding_window") is None:
        raise fields.wrong("sliding_window", "1 or more")
    window = fields.size("sliding_window", 1024)
    window = 0 if window >= positions(fields) else window
    each = Paged(window, gated=True), Paged(rotary=RopeConfig(kind="none"), gated=True)
    width = fields.size("moe_intermediate_size", 1408)
    return {
        **_biases(fields),
        "layer_attention": tuple(each[types.index(kind)] for kind in kinds),
        "num_experts": _expert_count(fields),
        "d_ff_expert": width,
        "d_ff_shared": width * fields.size("num_shared_experts", 2, least=0),
        "shared_gate": False,
        "moe_layers": tuple(i >= dense for i in range(count)),
        "head_dim": fields.size("head_dim", 128),
        "norm_topk_prob": True,
        "router": ScoredTopK(scale=fields.number("route_scale", 1.0), bias=True),
        "qk_norm": True,
        "post_norms": True,
        "embedding_multiplier": fields.size("hidden_size") ** 0.5
        if fields.flag("mup_enabled", False)
        else 1.0,
    }


def _one_for_all(fields: Fields, *keys: str) -> Fields:
    """Returns the fields, with the number itself in place of a list that has it for each layer.

    Raises ConfigError for lists of another length, or of several numbers.
    """
    count, values = fields.size("num_hidden_layers"), dict(fields.values)
    for key in keys:
        if isinstance(each := values.get(key), list):
            if len(each) != count or any(one != each[0] for one in each):
                layers = f"each of num_hidden_layers ({count})"
                raise fields.wrong(key, f"a number, or a list that has the same for {layers}")
            values[key] = each[0]
    return Fields(values, fields.file, fields.where)


def _sparse_layers(fields: Fields, dense: int, *, counted: bool = False) -> tuple[bool, ...]:
    """Returns which layers `mlp_layer_types` says to be MoE; without it, all but the first `dense`,
    or, where it is `counted`, `first_k_dense_replace`.

    Raises ConfigError where there is none, or `first_k_dense_replace` is not `counted` and says
    otherwise.
    """
    count, key = fields.size("num_hidden_layers"), "mlp_layer_types"
    first = "first_k_dense_replace"
    if counted:
        dense = fields.size(first, dense, least=0)
    types = _kinds(fields, key, ["dense", "sparse"])
    if types is None:
        types = ["dense"] * min(dense, count) + ["sparse"] * (count - dense)
    if "sparse" not in types:
        raise fields.wrong(key, "such that one layer is 'sparse' at least")
    sparse = tuple(kind == "sparse" for kind in types)
    if not counted and fields.given(first) is not None:
        number = fields.size(first, least=0)
        if sparse != tuple(i >= number for i in range(count)):
            found = f"absent, or as mlp_layer_types says ({types.index('sparse')})"
            raise fields.wrong(first, found)
    return sparse


def _latent(
    fields: Fields,
    sizes: tuple[int, int, int, int] = (512, 1536, 128, 128),
    *,
    whole: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Reads latent attention; `sizes` are its rank, its queries' rank, `nope` and values where they
    are absent. `head_dim` is the size of what turns of a head, or of the `whole` of it.
    """
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", heads) != heads:
        raise fields.wrong("num_key_value_heads", f"the same as num_attention_heads ({heads})")
    full_or_window(fields)  # which knows no other layer_types
    rope = fields.size("qk_rope_head_dim", 64)
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", "even")
    nope = fields.size("qk_nope_head_dim", sizes[2])
    size, of = (nope + rope, "qk_nope_head_dim + ") if whole else (rope, "")
    if fields.size("head_dim", size) != size:
        raise fields.wrong("head_dim", f"absent, or {of}qk_rope_head_dim ({size})")
    scale, all_dims = 1.0, "mscale_all_dim"
    for section in map(fields.section, ROPE_SECTIONS):
        if section.given(all_dims) and rope_kind(section, ROPE_READ) == "yarn":
            factor = section.number("factor")
            weight = 0.1 * section.number(all_dims) * math.log(factor) if factor > 1 else 0.0
            scale = (weight + 1.0) ** 2
    kind = Latent(
        kv_rank=fields.size("kv_lora_rank", sizes[0]),
        q_rank=_q_rank(fields, sizes[1]),
        nope=nope,
        rope=rope,
        value=fields.size("v_head_dim", sizes[3]),
        score_scale=scale,
        **given,
    )
    kinds = (kind,) * fields.size("num_hidden_layers")
    return {"layer_attention": kinds, "head_dim": kind.rope}


def _q_rank(fields: Fields, absent: int) -> int:
    """Returns the rank of the queries' latent; null is none, and an absent key has a default."""
    if "q_lora_rank" in fields.values and fields.given("q_lora_rank") is None:
        return 0
    return fields.size("q_lora_rank", absent)


def scored(
    fields: Fields,
    num_experts: int,
    absent: tuple[int, int, float] = (1, 1, 1.0),
    *,
    key: str = "n_routed_experts",
    **given: Any,
) -> ScoredTopK:
    """Returns the router of `n_group`, `topk_group` and `routed_scaling_factor`, which are `absent`
    where they are, with other fields as `given`. Raises ConfigError for groups that cannot be of
    the experts, which `key` counts.
    """
    groups, top = fields.size("n_group", absent[0]), fields.size("topk_group", absent[1])
    scale = fields.number("routed_scaling_factor", absent[2])
    router = ScoredTopK(groups=groups, top_groups=top, scale=scale, **given)
    if num_experts % groups or num_experts // groups < router.best:
        wanted = f"a divisor of {key} ({num_experts}) into groups of {router.best} or"
        raise fields.wrong("n_group", f"{wanted} more")
    least = -(-fields.size("num_experts_per_tok") * groups // num_experts)
    if not least <= top <= groups:
        wanted = f"from {least}, so that they have num_experts_per_tok, to n_group ({groups})"
        raise fields.wrong("topk_group", wanted)
    return router


def _olmoe(fields: Fields) -> dict[str, Any]:
    return {
        **_all_sparse(fields),
        **_biases(fields),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "qk_norm": True,
        "normed_whole": True,
        "clip_qkv": fields.number("clip_qkv", 0.0),
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    if not any(fields.given(key) for key in ROPE_SECTIONS):
        wanted = "an object, or there are rope_parameters: gpt_oss without them has YaRN of its own"
        raise fields.wrong("rope_scaling", wanted)
    if "sliding_window" in fields.values and fields.given("sliding_window") is None:
        raise fields.wrong("sliding_window", "1 or more")
    count = fields.size("num_hidden_layers")
    kinds = full_or_window(fields, fields.size("sliding_window", 128), alternate=count)
    return {
        **_all_sparse(fields),
        **_biases(fields, absent=True),
        "layer_attention": tuple(replace(kind, sinks=True) for kind in kinds),
        "head_dim": fields.size("head_dim", 64),
        "norm_topk_prob": True,  # as a softmax over the chosen logits is
        "logits_bias": True,
        "expert_bias": True,
        "activation": ClampedSwiglu(
            fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
        ),
        "mxfp4": fields.given("quantization_config") is not None,
    }


def _granite(fields: Fields) -> dict[str, Any]:
    scales = ("attention_multiplier", "embedding_multiplier", "logits_scaling")
    return {
        **_all_sparse(fields, fields.size("num_local_experts", most=MOST_EXPERTS)),
        **_biases(fields),
        "norm_topk_prob": True,
        **{key: fields.number(key, 1.0) for key in (*scales, "residual_multiplier")},
    }


def _granite_hybrid(fields: Fields) -> dict[str, Any]:
    count, names = fields.size("num_hidden_layers"), ("linear_attention", "full_attention")
    older = {"mamba": names[0], "attention": names[1]}
    if (kinds := _kinds(fields, "layer_types", [*older, *names])) is None:
        kinds = [names[0]] * count
    kind, turned = "position_embedding_type", {"rope": True, "nope": False, None: False}
    if fields.given(kind) not in turned:
        raise fields.wrong(kind, "'rope' or 'nope'")
    each = {names[0]: _mamba(fields), names[1]: Paged()}
    return {
        **_granite(fields),
        "layer_attention": tuple(each[older.get(one, one)] for one in kinds),
        "d_ff_shared": fields.size("shared_intermediate_size", 1024),
        "shared_gate": False,
        "turns": turned[fields.given(kind)],
    }


def _mamba(fields: Fields) -> Mamba:
    heads = fields.size("mamba_n_heads", 128)
    wide = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    if wide % heads:
        raise fields.wrong("mamba_n_heads", f"a divisor of mamba_expand times hidden_size ({wide})")
    if fields.given("mamba_d_head") not in (None, "auto", wide // heads):
        raise fields.wrong(
            "mamba_d_head",
            f"'auto', or {wide // heads}: what mamba_n_heads ({heads}) have each of mamba_expand "
            f"times hidden_size ({wide})",
        )
    if heads % (groups := fields.size("mamba_n_groups", 1)):
        raise fields.wrong("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    limits, endless = fields.given("time_step_limit"), {"__float__": "Infinity"}  # as it is written
    limits = [0.0, math.inf] if limits is None else limits
    each = [math.inf if one == endless else one for one in (limits if type(limits) is list else [])]
    if [type(one) in (int, float) for one in each] != [True] * 2 or not 0 <= each[0] <= each[1]:
        raise fields.wrong("time_step_limit", "a list of two numbers from 0 on, the least first")
    return Mamba(
        heads,
        wide // heads,
        fields.size("mamba_d_state", 256),
        groups,
        fields.size("mamba_d_conv", 4, least=2, most=MOST_TAPS),
        fields.flag("mamba_conv_bias", True),
        fields.flag("mamba_proj_bias", False),
        *map(float, each),
    )


BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Of Nemotron-H's `hybrid_override_pattern`: what a letter is in `layers_block_type`."""


def _nemotron(fields: Fields) -> dict[str, Any]:
    """Reads blocks that are attention, Mamba-2, experts or an MLP each, with a norm and a residual.
    Of the first two each is a layer, and so is what follows it, where that is one of the others.
    """
    blocks, layers = _blocks(fields), list[tuple[int, int | None]]()
    for at, kind in enumerate(blocks):
        if kind in ("linear_attention", "full_attention"):
            layers.append((at, None))
        elif layers and layers[-1] == (at - 1, None):
            layers[-1] = at - 1, at
        else:
            before = f"block {at} ({kind!r}) follows one of its kind, or nothing"
            raise fields.wrong(
                _pattern(fields), f"of blocks that follow attention or Mamba; {before}"
            )
    moe_layers = tuple(below is not None and blocks[below] == "moe" for _, below in layers)
    if not any(moe_layers):
        raise fields.wrong(_pattern(fields), "such that one block is 'moe' (E) at least")
    eps = fields.number("layer_norm_epsilon", 1e-5)
    if fields.number("norm_eps", eps) != eps:
        raise fields.wrong("norm_eps", f"the same as layer_norm_epsilon ({eps:g})")
    heads, groups = fields.size("mamba_num_heads", 128), fields.size("n_groups", 8)
    if heads % groups:
        raise fields.wrong("n_groups", f"a divisor of mamba_num_heads ({heads})")
    mamba = Mamba(
        heads,
        fields.size("mamba_head_dim", 64),
        fields.size("ssm_state_size", 128),
        groups,
        fields.size("conv_kernel", 4, least=2, most=MOST_TAPS),
        fields.flag("use_conv_bias", True),
        fields.flag("use_bias", False),
    )
    each = {"linear_attention": mamba, "full_attention": Paged()}
    num_experts = fields.size("n_routed_experts", 8, most=MOST_EXPERTS)
    per_token = fields.size("num_experts_per_tok", 2)
    return {
        "blocks": tuple(layers),
        "num_layers": len(layers),
        "layer_attention": tuple(each[blocks[at]] for at, _ in layers),
        "turns": False,
        "moe_layers": moe_layers,
        "num_kv_heads": fields.size("num_key_value_heads", 8),
        "head_dim": fields.size("head_dim", 128),
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "d_ff_expert": fields.size("moe_intermediate_size", 7688),
        "d_ff_shared": fields.size("moe_shared_expert_intermediate_size", 7688),
        "d_ff_dense": fields.size("intermediate_size", 21504) if "mlp" in blocks else 0,
        "shared_gate": False,
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "router": scored(fields, num_experts, bias=True),
        "activation": Relu2(),
        "rms_norm_eps": eps,
    }


def _pattern(fields: Fields) -> str:
    """Returns the spelling of the key that says what a block is."""
    return fields.first("layers_block_type", "hybrid_override_pattern")


def _blocks(fields: Fields) -> list[str]:
    """Reads what each block of Nemotron-H is, in the words of `BLOCKS`."""
    value, counted = fields.given(key := _pattern(fields)), "num_hidden_layers"
    kind, form, known = str, "text", BLOCKS
    if key == "layers_block_type":
        kind, form, known = list, "list", {word: word for word in BLOCKS.values()}
        known |= {"mamba": BLOCKS["M"], "attention": BLOCKS["*"]}
    is_known = isinstance(value, kind) and 0 < len(value) <= MOST_LAYERS
    if not is_known or not all(isinstance(one, str) and one in known for one in value):
        raise fields.wrong(key, f"a {form} of {', '.join(known)}, {MOST_LAYERS} at most")
    if fields.size(counted, len(value)) != len(value):
        raise fields.wrong(counted, f"absent, or how many blocks {key} has ({len(value)})")
    return [known[one] for one in value]


def _phi(fields: Fields) -> dict[str, Any]:
    if fields.size("num_experts_per_tok") != 2:
        raise fields.wrong("num_experts_per_tok", "2")
    return {
        **_all_sparse(fields, fields.size("num_local_experts", most=MOST_EXPERTS)),
        **_biases(fields),
        "layer_attention": full_or_window(fields, fields.size("sliding_window", 0)),
        "norm_topk_prob": False,
        "router": SparseMixer(fields.number("router_jitter_noise", 0.01)),
        "head_bias": fields.flag("lm_head_bias", False),
        "layer_norm": True,
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {
        **_all_sparse(fields),
        "layer_attention": full_or_window(fields, fields.size("sliding_window", 0)),
        "norm_topk_prob": True,
    }


def _minimax(fields: Fields) -> dict[str, Any]:
    if set(fields.integers("attn_type_list")) - {1}:
        raise fields.wrong("attn_type_list", "all 1: full attention")
    head_dim, partial = fields.size("head_dim", 128), "partial_rotary_factor"
    turned = fields.size("rotary_dim", head_dim) / head_dim
    for section in (fields, *map(fields.section, ROPE_SECTIONS)):
        if fields.given("rotary_dim") and section.number(partial, turned) != turned:
            raise section.wrong(partial, f"absent, or rotary_dim / head_dim ({turned:g})")
    return {
        **_all_sparse(fields),
        "norm_topk_prob": True,
        "head_dim": head_dim,
        "partial_rotary": turned,
        "qk_norm": True,
        "normed_whole": True,
        "router": ScoredTopK(bias=True),
        "unused_layers": fields.size("num_mtp_modules", 0, least=0),
    }


def _ernie(fields: Fields) -> dict[str, Any]:
    count, width = fields.size("num_hidden_layers"), fields.size("moe_intermediate_size")
    first, interval = (
        fields.size(f"moe_layer_{key}", 1, least=least)
        for key, least in (("start_index", 0), ("interval", 1))
    )
    last = fields.size("moe_layer_end_index", -1, least=-1)
    sparse = range(first, count if last < 0 else min(last + 1, count))
    layers = tuple(i in sparse and (i + 1) % interval == 0 for i in range(count))
    if not any(layers):
        wanted = "such that with moe_layer_end_index and moe_layer_interval it leaves an MoE layer"
        raise fields.wrong("moe_layer_start_index", wanted)
    num_experts, per_token = (
        _num_experts(fields, *_either(fields, *keys))
        for keys in (("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok"))
    )
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "d_ff_expert": width,
        "d_ff_shared": width * fields.size("moe_num_shared_experts", 2, least=0),
        "shared_gate": False,
        "moe_layers": layers,
        "norm_topk_prob": True,
        "router": ScoredTopK("softmax", bias=True),
        "unused_layers": fields.size("num_nextn_predict_layers", 0, least=0),
    }


def _expert_count(fields: Fields) -> int:
    """Reads the number of experts under either spelling."""
    return _num_experts(fields, *_either(fields, "num_local_experts", "num_experts"))


def _either(fields: Fields, one: str, other: str) -> tuple[str, str]:
    """Returns the spelling that is given, and the other."""
    return (one, other) if fields.first(one, other) == one else (other, one)


def _num_experts(fields: Fields, key: str, other: str) -> int:
    count = fields.size(key, most=MOST_EXPERTS)
    if fields.size(other, count) != count:
        raise fields.wrong(other, f"the same as {key} ({count})")
    return count


def _moe_layers(fields: Fields) -> tuple[bool, ...]:
    num_layers, dense = fields.size("num_hidden_layers"), set(fields.integers("mlp_only_layers"))
    step = fields.size("decoder_sparse_step", 1)
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    if not any(layers):
        raise fields.wrong(
            "decoder_sparse_step",
            f"such that of num_hidden_layers ({num_layers}) it and mlp_only_layers leave "
            "at least one MoE layer",
        )
    return layers


def _qwen_window(fields: Fields) -> int:
    """Returns the positions of the sliding window; 0: there is none."""
    if not fields.flag("use_sliding_window", False):
        return 0
    if fields.given("sliding_window") is None:
        raise fields.wrong("use_sliding_window", "false where there is no sliding_window")
    if not fields.given("sliding_window"):
        raise fields.wrong("sliding_window", "1 or more where use_sliding_window is true")
    return fields.size("sliding_window")


def full_or_window(
    fields: Fields, window: int = 0, *, alternate: int | None = None, first: int | None = None
) -> tuple[Paged, ...]:
    """Returns each layer's attention, as transformers makes it of `layer_types`. Without these,
    every other layer below `alternate` has the window, or all from `first` on, or simply all.

    Raises ConfigError for other kinds, and for those that transformers would not heed.
    """
    count = fields.size("num_hidden_layers")
    if alternate is not None or first is not None:
        slides = [
            at % 2 == 0 and at < alternate if alternate is not None else at >= (first or 0)
            for at in range(count)
        ]
        served = ["full_attention", *(["sliding_attention"] if window else [])]
    else:
        slides, served = [True] * count, ["sliding_attention" if window else "full_attention"]
    if (types := _kinds(fields, "layer_types", served)) is not None:
        slides = [kind == "sliding_attention" for kind in types]
    if window >= positions(fields):
        window = 0
    return tuple(Paged(window * has_it) for has_it in slides)


def _kinds(fields: Fields, key: str, known: list[str]) -> list[str] | None:
    """Returns what each layer is of, one of `known` words; None where the key is absent."""
    count, types = fields.size("num_hidden_layers"), fields.given(key)
    is_list = isinstance(types, list) and len(types) == count
    if types is None or (is_list and all(kind in known for kind in types)):
        return types
    names = " or ".join(map(repr, known))
    raise fields.wrong(key, f"{names} for each of num_hidden_layers ({count})")


def _and(keys: str) -> frozenset[str]:
    return READ_FOR_ALL | words(keys)


_DEEPSEEK = (
    "aux_loss_alpha ep_size first_k_dense_replace kv_lora_rank moe_intermediate_size n_group "
    "n_routed_experts n_shared_experts q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim "
    "routed_scaling_factor seq_aux topk_group topk_method v_head_dim"
)
_LATENT = {"attention_bias": (False,), "moe_layer_freq": (1,)}
_QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    _qwen3_next,
    _and(
        "attention_bias decoder_sparse_step full_attention_interval linear_conv_kernel_dim "
        "linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_local_experts "
        "partial_rotary_factor shared_expert_intermediate_size"
    ),
    {
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
        "qkv_bias": (False,),
        "use_qk_norm": (True,),
        "use_sliding_window": (False,),
    },
    partial_rotary=0.25,
    centred=True,
    joined_delta=True,
    predicting="mtp.",
    apart="three of four layers recurrent (Gated DeltaNet), the others gated; heads turn in part; "
    "a shared expert; prediction layer left out",
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    class_name="Qwen3_5MoeForCausalLM",
    only={
        **_QWEN3_NEXT.only,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "norm_topk_prob": (True,),
    },
    joined_experts=("experts.gate_up_proj", "experts.down_proj"),
    may_be_apart=True,
    joined_delta=False,
    apart="Qwen3-Next with projections by themselves; experts joined, or each by itself",
)
_DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    _deepseek3,
    _and(f"{_DEEPSEEK} norm_topk_prob num_nextn_predict_layers rope_interleave"),
    {**_LATENT, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    shared="shared_experts",
    apart="as V2, with a sigmoid router; prediction layer left out",
)
_MISTRAL4 = Architecture(
    "Mistral4ForCausalLM",
    _mistral4,
    _and(
        "first_k_dense_replace kv_lora_rank llama_4_scaling_beta moe_intermediate_size n_group "
        "n_routed_experts n_shared_experts norm_topk_prob partial_rotary_factor q_lora_rank "
        "qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor "
        "topk_group v_head_dim"
    ),
    {"attention_bias": (False,)},
    rope_kinds=("yarn",),
    joined_experts=("experts.gate_up_proj", "experts.down_proj"),
    may_be_apart=True,
    shared="shared_experts",
    apart="DeepSeek-V3 with a softmax router; queries grow with their position; experts joined, or "
    "each by itself",
)
_GLM4 = Architecture(
    "Glm4MoeForCausalLM",
    _glm4,
    _and(
        "attention_bias first_k_dense_replace moe_intermediate_size n_group n_routed_experts "
        "n_shared_experts norm_topk_prob num_nextn_predict_layers partial_rotary_factor "
        "routed_scaling_factor topk_group use_qk_norm"
    ),
    rms_norm_eps=1e-5,
    partial_rotary=0.5,
    shared="shared_experts",
    apart="sigmoid router, its bias and groups; heads turn in part; prediction layer left out",
)

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        _qwen2,
        READ_FOR_QWEN | {"qkv_bias", "shared_expert_intermediate_size"},
        {"attention_bias": (False,), "use_qk_norm": (False,)},
        apart="shared expert behind a sigmoid gate, biases on q, k and v",
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        _qwen3,
        READ_FOR_QWEN | {"attention_bias"},
        {
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (True,),
        },
        apart="RMSNorm of q and k a head",
    ),
    "qwen3_vl_moe": Architecture(
        "Qwen3VLMoeForConditionalGeneration",
        _qwen3_vl,
        READ_FOR_QWEN | {"attention_bias"},
        {
            "norm_topk_prob": (True,),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (True,),
            "use_sliding_window": (False,),
        },
        rope_theta=5e5,
        joined_experts=("experts.gate_up_proj", "experts.down_proj"),
        laid_out=True,
        quantized=(),
        text=("qwen3_vl_moe_text",),
        root="model.language_model.",
        beside=("model.visual.",),
        apart="Qwen3-MoE beside images, which are left out",
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_moe": replace(
        _QWEN3_5,
        class_name="Qwen3_5MoeForConditionalGeneration",
        text=("qwen3_5_moe_text",),
        root="model.language_model.",
        beside=("model.visual.",),
        apart="Qwen3.5 and Qwen3.6 beside images, which are left out",
    ),
    "lfm2_moe": Architecture(
        "Lfm2MoeForCausalLM",
        _lfm2,
        _and(
            "conv_L_cache conv_bias moe_intermediate_size norm_eps norm_topk_prob num_dense_layers "
            "num_experts num_local_experts routed_scaling_factor tie_embedding use_expert_bias"
        )
        - {"rms_norm_eps"},
        rope_theta=1e6,
        mlp="feed_forward",
        norms=("operator_norm", "ffn_norm", "embedding_norm"),
        output="out_proj",
        dense_names=("w1", "w3", "w2"),
        expert_names=("w1", "w3", "w2"),
        router_bias="expert_bias",
        head_norms=("q_layernorm", "k_layernorm"),
        tied=True,
        apart="short convolutions in most layers, RMSNorm of q and k a head, a sigmoid router "
        "with a bias",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        _mixtral,
        READ_FOR_ALL | {"num_local_experts", "num_experts"},
        {
            "attention_bias": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            "norm_topk_prob": (True,),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (False,),
            "use_sliding_window": (False,),
        },
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        mlp="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        apart="tensor names; gate weights always renormalised",
    ),
    "glm4_moe": _GLM4,
    "solar_open": replace(
        _GLM4,
        class_name="SolarOpenForCausalLM",
        translate=_solar,
        only={
            "first_k_dense_replace": (0,),
            "partial_rotary_factor": (1,),
            "use_qk_norm": (False,),
        },
        rope_theta=1e6,
        partial_rotary=None,
        apart="GLM-4.5's router and shared experts in every layer, no norms of heads",
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        _olmoe,
        _and("attention_bias clip_qkv norm_topk_prob num_experts num_local_experts"),
        rms_norm_eps=1e-5,
        apart="RMSNorm of all heads together, `clip_qkv`",
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        _gpt_oss,
        _and("attention_bias num_experts num_local_experts swiglu_alpha swiglu_limit"),
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        router="router",
        interleaved=True,
        quantized=("mxfp4",),
        apart="windows in turn, sinks, biases everywhere, clamped SwiGLU; experts in MXFP4",
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        _dots,
        _and(
            "attention_bias aux_loss_alpha ep_size first_k_dense_replace max_window_layers "
            "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
            "routed_scaling_factor seq_aux topk_group"
        ),
        {
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "use_qk_norm": (True,),
            "use_sliding_window": (False,),
        },
        shared="shared_experts",
        apart="RMSNorm of q and k a head, DeepSeek-V3's router; windows from a layer on",
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        _deepseek2,
        _and(_DEEPSEEK),
        {**_LATENT, "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
        shared="shared_experts",
        apart="latent attention, shared experts without a gate, groups of experts",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(
        _DEEPSEEK_V3,
        apart="DeepSeek-V3 by another `model_type`; texts need a `tokenizer.json` in place of its "
        "`tiktoken.model`",
    ),
    "kimi_k25": replace(
        _DEEPSEEK_V3,
        class_name="KimiK25ForConditionalGeneration",
        text=("kimi_k2", "deepseek_v3"),
        root="language_model.model.",
        head="language_model.lm_head.",
        beside=("vision_tower.", "mm_projector."),
        apart="Kimi-K2, also in its tokenizer, beside images, which are left out",
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        class_name="Glm4MoeLiteForCausalLM",
        translate=_glm4_lite,
        read={*_DEEPSEEK_V3.read, "mlp_layer_types"},
        only={**_DEEPSEEK_V3.only, "partial_rotary_factor": (1,)},
        rms_norm_eps=1e-5,
        apart="DeepSeek-V3 with GLM's sizes; dense layers by `mlp_layer_types`",
    ),
    "mistral4": _MISTRAL4,
    "mistral3": replace(
        _MISTRAL4,
        class_name="Mistral3ForConditionalGeneration",
        tied=True,
        text=("mistral4",),
        root="language_model.model.",
        head="language_model.lm_head.",
        beside=("vision_tower.", "multi_modal_projector."),
        apart="Mistral Small 4 beside images, which are left out",
    ),
    "hy_v3": Architecture(
        "HYV3ForCausalLM",
        _hy3,
        _and(
            "attention_bias expert_hidden_dim first_k_dense_replace mlp_layer_types "
            "moe_intermediate_size num_experts num_local_experts num_nextn_predict_layers "
            "num_shared_experts router_scaling_factor"
        ),
        dict.fromkeys(
            ("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm"),
            (True,),
        ),
        rms_norm_eps=1e-5,
        rope_theta=11158840.0,
        router="router.gate",
        router_bias="expert_bias",
        shared="shared_mlp",
        apart="sigmoid router with a bias, RMSNorm of q and k a head; dense layers by "
        "`mlp_layer_types`; prediction layer left out",
    ),
    "exaone_moe": Architecture(
        "ExaoneMoeForCausalLM",
        _exaone,
        _and(
            "first_k_dense_replace is_moe_layer mlp_layer_types moe_intermediate_size n_group "
            "norm_topk_prob num_experts num_nextn_predict_layers num_shared_experts "
            "routed_scaling_factor sliding_window_pattern topk_group"
        ),
        {
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        older_class="ExaoneMoEForCausalLM",
        rms_norm_eps=1e-5,
        router_bias="e_score_correction_bias",
        shared="shared_experts",
        predicting="mtp.",
        apart="RMSNorm of q and k a head, DeepSeek-V3's router; windows whose heads turn, full "
        "attention without positions; prediction layer left out",
    ),
    "hunyuan_v1_moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        _hunyuan,
        _and(
            "attention_bias attention_head_dim moe_intermediate_size moe_topk num_experts "
            "num_local_experts num_shared_expert"
        ),
        {
            **dict.fromkeys(
                ("add_classification_head", "group_limited_greedy", "moe_drop_tokens"), (False,)
            ),
            **dict.fromkeys(("n_group", "topk_group"), (False, 1)),
            **dict.fromkeys(
                ("moe_random_routing_dropped_token", "position_embedding_xdrope", "use_cla"),
                (False,),
            ),
            "moe_layer_num_skipped": (0,),
            "norm_topk_prob": (True,),
            "norm_type": ("rms", "hf_rms"),
            "routed_scaling_factor": (False, 1),
            "use_mla": (False,),
            **dict.fromkeys(("use_mixed_mlp_moe", "use_qk_norm", "use_rotary_pos_emb"), (True,)),
        },
        rms_norm_eps=1e-5,
        rope_kinds=("default", "dynamic", "linear", "llama3", "yarn"),
        router="gate.wg",
        head_norms=("query_layernorm", "key_layernorm"),
        shared="shared_mlp",
        apart="RMSNorm of q and k a head after they turn, a shared expert without a gate; numbers "
        "that may be lists; `dynamic` RoPE with an `alpha`",
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        _afmoe,
        _and(
            "attention_bias global_attn_every_n_layers moe_intermediate_size mup_enabled "
            "num_dense_layers num_experts num_local_experts num_shared_experts route_scale"
        ),
        {
            **dict.fromkeys(
                ("n_group", "num_expert_groups", "num_limited_groups", "topk_group"), (1,)
            ),
            "route_norm": (True,),
            "score_func": ("sigmoid",),
        },
        rms_norm_eps=1e-5,
        norms=("input_layernorm", "pre_mlp_layernorm", "norm"),
        post_norms=("post_attention_layernorm", "post_mlp_layernorm"),
        router="router.gate",
        router_bias="expert_bias",
        head_gate="gate_proj",
        shared="shared_experts",
        apart="norms before and after each half layer, a gate on attention's output, RMSNorm of q "
        "and k a head; heads turn in windows only; a sigmoid router with a bias, muP",
    ),
    "mellum": Architecture(
        "MellumForCausalLM",
        _mellum,
        _and(
            "attention_bias max_window_layers mlp_layer_types moe_intermediate_size "
            "mtp_layer_types mtp_mlp_layer_types norm_topk_prob num_experts num_local_experts "
            "num_mtp_layers num_nextn_predict_layers"
        ),
        {"use_qk_norm": (True,), "use_sliding_window": (True,)},
        kind_thetas={"full_attention": 5e5, "sliding_attention": 1e4},
        predicting="mtp.",
        apart="RMSNorm of q and k a head; windows and RoPE by kind of layer; prediction layer left "
        "out",
    ),
    "minimax_m2": Architecture(
        "MiniMaxM2ForCausalLM",
        _minimax,
        _and(
            "attn_type_list mlp_intermediate_size mtp_transformer_layers num_experts "
            "num_local_experts num_mtp_modules partial_rotary_factor rotary_dim shared_moe_mode "
            "use_mtp"
        ),
        {
            **dict.fromkeys(("attention_bias", "qkv_bias"), (False,)),
            "norm_topk_prob": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (0,)),
            **dict.fromkeys(("use_qk_norm", "use_routing_bias"), (True,)),
        },
        rope_theta=5e6,
        partial_rotary=1.0,
        mlp="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        router_bias="e_score_correction_bias",
        apart="Mixtral's names, OLMoE's norms, a sigmoid router; heads turn in part; prediction "
        "modules left out",
    ),
    "ernie4_5_moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _ernie,
        _and(
            "moe_capacity moe_intermediate_size moe_k moe_layer_end_index moe_layer_interval "
            "moe_layer_start_index moe_num_experts moe_num_shared_experts num_experts "
            "num_nextn_predict_layers"
        ),
        {
            "moe_gate": ("topk", "topk_fused"),
            "moe_gate_act": ("softmax",),
            "moe_norm_min": (1e-12,),
            **dict.fromkeys(("is_quantized", "use_bias"), (False,)),
            **dict.fromkeys(("moe_use_aux_free", "use_rmsnorm"), (True,)),
        },
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        router_bias="moe_statics.e_score_correction_bias",
        row_of_bias=True,
        neighbours_turn=True,
        tied=True,
        shared="shared_experts",
        predicting="model.mtp_",
        apart="softmax router with a bias; neighbours in a head turn; prediction layer left out",
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        _granite,
        _and(
            "attention_bias attention_multiplier embedding_multiplier logits_scaling "
            "num_local_experts residual_multiplier"
        ),
        mlp="block_sparse_moe",
        router="router.layer",
        joined_experts=("input_linear.weight", "output_linear.weight"),
        quantized=(),
        apart="multipliers of embeddings, scores, residuals and logits; joined experts",
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        _and(
            "attention_bias attention_multiplier embedding_multiplier logits_scaling "
            "mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups "
            "mamba_n_heads mamba_proj_bias num_local_experts position_embedding_type "
            "residual_multiplier shared_intermediate_size time_step_limit"
        ),
        {"normalization_function": ("rmsnorm",)},
        mlp="block_sparse_moe",
        router="router.layer",
        joined_experts=("input_linear.weight", "output_linear.weight"),
        joined_shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
        quantized=(),
        apart="Granite 3.0's with Mamba-2 in most layers and a shared expert without a gate; "
        "attention without positions",
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _nemotron,
        _and(
            "conv_kernel hybrid_override_pattern layer_norm_epsilon layers_block_type "
            "mamba_head_dim mamba_num_heads moe_intermediate_size "
            "moe_shared_expert_intermediate_size n_group n_groups n_routed_experts norm_eps "
            "norm_topk_prob num_nextn_predict_layers routed_scaling_factor ssm_state_size "
            "topk_group use_bias use_conv_bias"
        )
        - {"layer_types", "hidden_act", "rms_norm_eps"},
        {
            **dict.fromkeys(("attention_bias", "mamba_proj_bias", "residual_in_fp32"), (False,)),
            "mamba_hidden_act": ("silu",),
            "mlp_hidden_act": ("relu2",),
            "moe_latent_size": (),
            "n_shared_experts": (1,),
            "sliding_window": (),
            "tie_word_embeddings": (False,),  # transformers ties nothing, whatever it says
            "time_step_limit": ([0.0, {"__float__": "Infinity"}], [0.0, math.inf]),
        },
        mlp="mixer",
        norms=("norm", "norm", "norm_f"),
        mixer="mixer",
        embed="embeddings",
        root="backbone.",
        dense_names=("", "up_proj", "down_proj"),
        expert_names=("", "up_proj", "down_proj"),
        shared="shared_experts",
        predicting="mtp.",
        apart="blocks of Mamba-2, of attention without positions, and of experts with `relu2` and "
        "no gate; DeepSeek-V3's router",
    ),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        _phi,
        _and("attention_bias lm_head_bias num_local_experts router_jitter_noise"),
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_kinds=("default", "longrope"),
        older_class="PhiMoEForCausalLM",
        mlp="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        apart="sparsemixer, LayerNorm, biases; LongRoPE up to where it begins to stretch",
    ),
}
"""By `model_type`."""
