"""The reviewed keys of `config.json`: what jmoe reads, what has no effect, what it serves in part.

A key that is not here may change what a model computes, so `check_keys` refuses it. Reviewed
against transformers 5.23: what its three model classes and `PreTrainedConfig` do with each key.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jmoe.config_fields import MOST, ConfigError, Fields, shown


def _because(why: str, keys: str) -> dict[str, str]:
    return dict.fromkeys(keys.split(), why)


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


if TYPE_CHECKING:
    from jmoe.architectures import Architecture

READ_FOR_ALL = words(
    """
    architectures eos_token_id head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings model_type num_attention_heads num_experts_per_tok num_hidden_layers
    num_key_value_heads original_max_position_embeddings rms_norm_eps rope_parameters rope_scaling
    quantization_config rope_theta sliding_window tie_word_embeddings vocab_size
    """
)
READ_FOR_QWEN = READ_FOR_ALL | words(
    """
    decoder_sparse_step max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob
    num_experts num_local_experts use_sliding_window
    """
)
"""Keys that jmoe reads and judges; those of one family alone are in `jmoe.architectures`."""

ONLY_IN_ALL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
"""Keys of the arithmetic that jmoe computes in one way only. No value at all: only null."""

HARMLESS: Mapping[str, str] = {
    **_because(
        "training only",
        """
        attention_dropout classifier_dropout embd_pdrop gradient_checkpointing hidden_dropout
        initializer_range input_jitter_noise load_balance_coeff loss_type neftune_noise_alpha
        resid_pdrop router_aux_loss_coef router_jitter_noise
        """,
    ),
    **_because(
        "generation only: jmoe takes sampling settings from requests",
        """
        bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty
        do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
        forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences pad_token_id prefix
        remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
        suppress_tokens temperature top_k top_p typical_p use_cache
        """,
    ),
    **_because(
        "only asks for more outputs",
        "output_attentions output_hidden_states output_router_logits output_scores return_dict",
    ),
    **_because(
        "bookkeeping",
        """
        _commit_hash _name_or_path auto_map custom_pipelines dtype eod_token_id experts_per_token
        finetuning_task id2label initial_context_length is_decoder label2id name_or_path num_labels
        org_vocab_size pad_id problem_type task_specific_params
        tokenizer_class tokenizer_model_max_length tokenizer_padding_side torch_dtype
        transformers.js_config transformers_version unsloth_fixed unsloth_version
        """,
    ),
    **_because(
        "of pictures, or of heads that classify, which have tensors of their own",
        """
        anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views class_num dense_list
        im_end_id im_newline_id im_start_id image_token_id mask_init_id num_media_embeds pool_type
        skip_cls_token text_end_id text_start_id video_end_id video_start_id vit_add_patchemb_bias
        vit_input_resolution vit_mapping_type vit_norm_type vit_patch vit_path vit_remove_prenorm
        vit_token vit_type vit_used_rms_norm
        """,
    ),
    **_because(
        "of a prediction layer, which is left out",
        """
        mtp_hybrid_override_pattern mtp_layers_block_type mtp_loss_scaling_factor
        mtp_num_hidden_layers mtp_share_layers mtp_use_dedicated_embeddings
        """,
    ),
    **_because("how a scan is cut", "chunk_size mamba_chunk_size"),
    **_because(
        "how weights began",
        "init_method rescale_prenorm_residual time_step_floor time_step_max",
    ),
    **_because(
        "how weights began; transformers bounds Mamba's steps by it in prefill, not in decode, and "
        "neither vLLM nor training does",
        "time_step_min",
    ),
    **_because(
        "what recurrent states are kept in; here float32 always",
        "mamba_ssm_cache_dtype mamba_ssm_dtype",
    ),
    **_because("of Mamba layers, whose heads have sizes of their own", "expand"),
    **_because(
        "how many layers share keys and values, where `use_cla` is true", "cla_share_factor"
    ),
    **_because(
        "which implementation of the same arithmetic to use",
        """
        _attn_implementation _attn_implementation_autoset _experts_implementation
        _flash_attn_2_enabled attn_implementation enable_attention_fp32_softmax
        enable_lm_head_fp32 enable_moe_fp32_combine experts_implementation
        moe_shared_expert_overlap num_logits_to_keep pretraining_tp tf_legacy_loss torchscript
        use_bfloat16 use_grouped_mm use_mamba_kernels
        """,
    ),
}
"""Keys without effect on the logits, and why."""

ORIGINAL = "original_max_position_embeddings"
_ROPE = frozenset({"rope_type", "type", "rope_theta"})
ROPE_READ: Mapping[str, Collection[str]] = {
    "default": _ROPE,
    # Of Hunyuan, where `alpha` makes theta longer, for good, and nothing else counts.
    "dynamic": _ROPE | {"alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"},
    "linear": _ROPE | {"factor"},
    "llama3": _ROPE | {"factor", "high_freq_factor", "low_freq_factor", ORIGINAL},
    "longrope": _ROPE
    | {"attention_factor", "factor", "long_factor", "long_mscale", "short_factor", "short_mscale"}
    | {ORIGINAL},
    "yarn": _ROPE
    | {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"truncate", ORIGINAL},
}
"""Keys of `rope_scaling` and `rope_parameters` that are read, by rope type."""

ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
ROPE_ONLY: Mapping[str, tuple[Any, ...]] = {
    "llama_4_scaling_beta": (),
    "partial_rotary_factor": (1.0,),
}
"""Keys of theirs that an architecture reads, or that jmoe computes in one way only."""
ROPE_HARMLESS: Mapping[str, str] = {
    **_because("bookkeeping", f"finetuned max_position_embeddings {ORIGINAL}"),
    **_because("of text all axes have the same position", "mrope_interleaved mrope_section"),
}
BESIDE_TEXT: Mapping[str, str] = {
    **_because(
        "of images, which no request has",
        """
        ignore_index image_token_id image_token_index language_model_only
        media_placeholder_token_id multimodal_projector_bias projector_hidden_act
        spatial_merge_size use_unified_vision_chunk video_placeholder video_token_id vision_config
        vision_end_token_id vision_feature_layer vision_start_token_id
        """,
    ),
}
OF_ANY_PART = ("eos_token_id", "quantization_config")
"""Keys that a file has for all parts, or for the text's."""

UNKNOWN = "jmoe does not know this key"

QUANTIZED = ("compression_config", "quantization", "quantization_config")
"""Keys of checkpoints whose weights are quantized, as transformers, compressed-tensors and MLX
write them."""


def check_keys(fields: Fields, architecture: "Architecture", allowed: Collection[str]) -> None:
    """Checks the keys of `config.json`, also those of `rope_scaling` and `rope_parameters`.

    Raises ConfigError that names every key that jmoe would ignore though it may matter.
    """
    allowed = (allowed,) if isinstance(allowed, str) else allowed
    only = architecture.only
    read = set(architecture.read).difference(only)  # of `only` the values count
    for key in QUANTIZED:
        if fields.given(key) is None or fields.name(key) in allowed:
            continue
        method = fields.section(key).given("quant_method")
        if key not in read or method not in architecture.quantized:
            of, methods = f"weights of a {architecture.class_name}", architecture.quantized
            served = f"{of} in {' or '.join(methods)} (quant_method); give such a checkpoint, or"
            raise ConfigError(
                f"{fields.file}: {fields.name(key)} is {shown(fields.given(key))}; jmoe loads "
                f"{served if methods else f'no quantized {of}; give'} the one from which this was "
                "quantized"
            )
    faults = _faults(fields, read, {**ONLY_IN_ALL, **only}, HARMLESS, UNKNOWN, allowed)
    sections = [fields.section(key) for key in ROPE_SECTIONS]
    if by_kind := architecture.kind_thetas:
        for section in sections:
            faults |= _faults(section, by_kind, {}, {}, UNKNOWN, allowed)
        sections = [section.section(kind) for section in sections for kind in by_kind]
    for section in (one for one in sections if one.values):
        kind = rope_kind(section, architecture.rope_kinds)
        unknown = f"rope type {kind!r} as jmoe knows it does not have this key"
        own = {*ROPE_READ[kind], *(key for key in ROPE_ONLY if key in read)}
        faults |= _faults(section, own, ROPE_ONLY, ROPE_HARMLESS, unknown, allowed)
    _refuse(fields, faults)


def _refuse(fields: Fields, faults: Mapping[str, str]) -> None:
    """Raises ConfigError for the faults that there are, by the keys' names."""
    if faults:
        flags = " ".join(f"--allow-unknown-config {name}" for name in faults)
        raise ConfigError(
            f"{fields.file}: {'; '.join(faults.values())}; "
            f"if {'it changes' if len(faults) == 1 else 'they change'} nothing, pass {flags}"
        )


def text_part(fields: Fields, architecture: "Architecture", allowed: Collection[str]) -> Fields:
    """Returns the keys of the model that reads text, of a file that describes others beside it.
    Whether embeddings are tied is said for the whole.

    Raises ConfigError for a key of the whole that jmoe does not know, for a part that is none of
    `architecture.text`, and where part and whole differ.
    """
    allowed = (allowed,) if isinstance(allowed, str) else allowed
    read = {"architectures", "model_type", "text_config", "tie_word_embeddings", *OF_ANY_PART}
    harmless = {**HARMLESS, **BESIDE_TEXT}
    _refuse(fields, _faults(fields, read, ONLY_IN_ALL, harmless, UNKNOWN, allowed))
    text = fields.section(fields.first("text_config"))
    if text.given("model_type") not in architecture.text:
        raise text.wrong("model_type", " or ".join(map(repr, architecture.text)))
    values = {**text.values, "tie_word_embeddings": fields.given("tie_word_embeddings")}
    for key in OF_ANY_PART:
        own, whole = text.given(key), fields.given(key)
        if None not in (own, whole) and own != whole:
            raise text.wrong(key, f"absent, or as {key} beside it ({shown(whole)})")
        values[key] = whole if own is None else own
    return Fields(values, text.file, text.where)


FP8_KEYS = words(
    """
    activation_scheme config_groups exclude_modules fmt format global_compression_ratio ignore
    ignored_layers kv_cache_quant_algo kv_cache_scheme modules_to_not_convert producer quant_algo
    quant_method quantization_status scale_fmt version weight_block_size
    """
)
"""Keys of `quantization_config` that are read, or say nothing that the tensors do not."""


def fp8_block(fields: Fields) -> tuple[int, int] | tuple[()]:
    """Returns (rows, columns) of the blocks of a matrix in fp8 that share a scale, as
    `quantization_config` says; 0: as many as there are. Empty without such matrices.

    Raises ConfigError for a format that jmoe does not load.
    """
    section = fields.section("quantization_config")
    method, whole = section.given("quant_method"), ((0, 0), (1, 0))
    if method not in ("fp8", "compressed-tensors", "modelopt"):
        return ()
    for key in section.values.keys() - FP8_KEYS:
        is_dense = key == "sparsity_config" and section.section(key).given("format") == "dense"
        if section.given(key) and not is_dense:  # such as rotations of the weights
            raise section.wrong(key, "absent or empty: jmoe does not know this key")
    if method == "modelopt":
        if section.given("quant_algo") != "FP8":
            raise section.wrong("quant_algo", "'FP8'")
        return whole[0]
    if method == "fp8":
        if section.given("fmt") not in (None, "e4m3", "float8_e4m3fn"):
            raise section.wrong("fmt", "'e4m3'")
        return _block(section, "weight_block_size", whole[0])
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise section.wrong("config_groups", "one group, of all matrices that are quantized")
    weights = groups.section(next(iter(groups.values))).section("weights")
    if weights.given("type") == "int":  # `jmoe.int4`
        return ()
    for key, wanted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        if weights.given(key) != wanted:
            raise weights.wrong(key, f"{wanted!r}: jmoe loads compressed-tensors in fp8 and int4")
    strategy = weights.given("strategy")
    if strategy == "block":
        return _block(weights, "block_structure", (128, 128))
    if strategy not in ("tensor", "channel"):
        raise weights.wrong("strategy", "tensor, channel or block")
    return whole[strategy == "channel"]


def _block(fields: Fields, key: str, absent: tuple[int, int]) -> tuple[int, int]:
    found = fields.integers(key)
    if fields.given(key) is None:
        return absent
    if len(found) != 2 or min(found) < 1:
        raise fields.wrong(key, "two numbers of elements")
    return found[0], found[1]


def rope_kind(section: Fields, served: Collection[str]) -> str:
    """Returns the rope type of `rope_scaling` or `rope_parameters`, one of `served`.

    Raises ConfigError for one that jmoe does not serve.
    """
    kind = section.given("rope_type") or section.given("type") or "default"
    if not isinstance(kind, str) or kind not in served:
        kinds = ", ".join(served)
        raise ConfigError(
            f"{section.file}: rope type is {shown(kind)} in {section.where}; jmoe serves {kinds}"
        )
    return kind


def positions(fields: Fields) -> int:
    """Returns how many positions a model has: `max_position_embeddings`, or what YaRN makes of the
    original ones where the file names these, as vLLM reckons. Raises ConfigError.
    """
    most, everywhere = fields.size("max_position_embeddings"), fields.size(ORIGINAL, 0)
    for section in map(fields.section, ROPE_SECTIONS):
        if rope_kind(section, ROPE_READ) == "yarn":
            original = everywhere or section.size(ORIGINAL, 0)
            most = max(most, min(MOST, int(section.number("factor") * original)))
    return most


def _faults(
    fields: Fields,
    read: Collection[str],
    only: Mapping[str, tuple[Any, ...]],
    harmless: Collection[str],
    unknown: str,
    allowed: Collection[str],
) -> dict[str, str]:
    """Returns what is wrong with each key that is refused, by the key's name."""
    faults = {}
    for key, value in fields.values.items():
        name = fields.name(key)
        if value is None or key in read or key in harmless or name in allowed:
            continue
        if key not in only:
            trouble = unknown
        elif not any(_same(value, one) for one in only[key]):
            values = " or ".join(map(shown, only[key]))
            trouble = f"jmoe serves {values} only" if values else "jmoe serves models without it"
        else:
            continue
        faults[name] = f"{name} is {shown(value)}; {trouble}"
    return faults


def _same(value: object, other: object) -> bool:
    """Returns whether two values are equal, true and 1 counting as different."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
