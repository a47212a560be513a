"""Model configurations: one dataclass, and the translation of Hugging Face `config.json` to it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


class ConfigError(ValueError):
    """A model configuration that cannot be served; names the key and the value."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is `default`, `linear`, `llama3` or `yarn`."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
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
    d_ff_shared: int  # 0: no shared expert
    d_ff_dense: int  # of dense layers; 0 where there are none
    moe_layers: tuple[bool, ...]  # by layer: MoE or dense
    norm_topk_prob: bool
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError where fields contradict each other."""
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
        _require(
            len(self.moe_layers) == self.num_layers,
            "moe_layers",
            len(self.moe_layers),
            f"one entry a layer ({self.num_layers})",
        )
        _require(any(self.moe_layers), "moe_layers", self.moe_layers, "at least one MoE layer")

    @property
    def num_moe_layers(self) -> int:
        """Layers that have routed experts."""
        return sum(self.moe_layers)

    def segments(self) -> list[tuple[bool, int, int]]:
        """Runs of layers of one kind: (is MoE, first layer, number of layers)."""
        runs: list[tuple[bool, int, int]] = []
        for layer, moe in enumerate(self.moe_layers):
            if runs and runs[-1][0] == moe:
                runs[-1] = (moe, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((moe, layer, 1))
        return runs


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {value!r}; it must be {wanted}")


def _get(config: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(f"config.json lacks {' or '.join(keys)}")


def read_config(path: str | Path) -> ModelConfig:
    """Reads `config.json` (and eos ids of `generation_config.json`) of a Hugging Face directory.

    Raises ConfigError for a missing or malformed file, or a setting jmoe does not serve.
    """
    directory = Path(path)
    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id")
    return from_hf({**raw, "eos_token_id": raw.get("eos_token_id") if eos is None else eos})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a Hugging Face model directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not an object")
    return loaded


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Translates the contents of a Hugging Face `config.json`. Raises ConfigError."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model_type is {kind!r}; jmoe serves {', '.join(sorted(ARCHITECTURES))}")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {config['hidden_act']!r}; jmoe serves 'silu'")
    num_layers = _get(config, "num_hidden_layers")
    num_heads = _get(config, "num_attention_heads")
    d_model = _get(config, "hidden_size")
    head_dim = config.get("head_dim") or d_model // num_heads
    max_position = _get(config, "max_position_embeddings")
    moe_layers = _moe_layers(config, num_layers)
    _refuse_sliding_window(config, max_position)
    mixtral = kind == "mixtral"
    eos = config.get("eos_token_id")
    return ModelConfig(
        architecture=kind,
        vocab_size=_get(config, "vocab_size"),
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        num_experts=_get(config, "num_local_experts", "num_experts"),
        experts_per_token=_get(config, "num_experts_per_tok"),
        d_ff_expert=_get(config, "intermediate_size" if mixtral else "moe_intermediate_size"),
        d_ff_shared=config.get("shared_expert_intermediate_size") or 0,
        d_ff_dense=0 if all(moe_layers) else _get(config, "intermediate_size"),
        moe_layers=moe_layers,
        # Mixtral always renormalises; Qwen says so in its config (absent: it does not).
        norm_topk_prob=mixtral or bool(config.get("norm_topk_prob", False)),
        qkv_bias=bool(config.get("qkv_bias", True))
        if kind == "qwen2_moe"
        else bool(config.get("attention_bias", False)),
        qk_norm=kind == "qwen3_moe",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-5 if mixtral else 1e-6)),
        rope=_rope(config, max_position),
        max_position=max_position,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
    )


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    if config["model_type"] == "mixtral":
        return (True,) * num_layers
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _refuse_sliding_window(config: Mapping[str, Any], max_position: int) -> None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config["model_type"] == "mixtral")
    if used and window and window < max_position:
        raise ConfigError(f"sliding_window is {window}; jmoe attends to the whole context only")


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`."""
    newer = config.get("rope_parameters") or {}
    scaling = {**(config.get("rope_scaling") or {}), **newer}
    absent = 1e6 if config["model_type"] == "mixtral" else 1e4  # as transformers assumes
    theta = float(newer.get("rope_theta") or config.get("rope_theta") or absent)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not served")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope type is {kind!r}; jmoe serves default, linear, llama3 and yarn")
    factor = float(_get(scaling, "factor"))
    key = "original_max_position_embeddings"
    original = int(config.get(key) or scaling.get(key) or max_position)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln(s) + 1, unless the config says otherwise."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1.0)
