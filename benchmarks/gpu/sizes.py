"""Sizes of everything: the real ones, and tiny ones that let a CPU run the same code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from benchmarks.harness.store import ROOT


class Setting(NamedTuple):
    """Brownout as the paper writes it, (way, threshold); way 0 is zero brownout."""

    way: int
    threshold_percent: int

    @property
    def name(self) -> str:
        """Key in what is stored."""
        return f"way{self.way}-t{self.threshold_percent}" if self.way else "zero"


ZERO = Setting(0, 100)
EAGER = "-eager"  # after a setting's name: steps launched kernel by kernel
SETTINGS = (ZERO, Setting(2, 0), Setting(4, 20), Setting(8, 40))
"""The paper's three configurations (section V-B), and none of it."""


class Mix(NamedTuple):
    """A length mix: means of the paper's datasets, the spread of the logarithm."""

    name: str
    mean_input_tokens: float
    mean_output_tokens: float
    sigma: float


SHAREGPT, ALPACA = Mix("sharegpt", 161, 338, 1.0), Mix("alpaca", 37, 25, 0.7)


@dataclass(frozen=True)
class Sizes:
    """The full sizes. Times are seconds."""

    dry: bool = False
    model: str = "qwen1.5-moe-a2.7b"
    dtype: str = "bfloat16"
    seed: int = 0
    skew: float = 4.0  # the kernel benchmark's: exp(-4 rank / m)
    ways: tuple[int, ...] = (2, 4, 8)
    page_size: int = 64
    # decode and prefill steps
    batches: tuple[int, ...] = (64, 128, 256, 32, 8, 1)
    context: int = 512
    prefill_tokens: tuple[int, ...] = (4096, 1024, 16384)
    prefill_context: int = 4096
    copy_bytes: int = 4 << 30
    # layers against PyTorch
    layer_models: tuple[str, ...] = ("qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "mixtral-8x7b")
    layer_depth: int = 2
    layer_shapes: tuple[tuple[int, int, int], ...] = ((64, 16, 4), (2, 512, 32))
    # two models over one pool: rows of both together, and positions shared
    family_batches: tuple[int, ...] = (64, 16)
    family_shared_percent: int = 75
    # the same steps over a mesh of one device
    mesh_batches: tuple[int, ...] = (64, 1)
    # serving
    batch: int = 64
    max_model_len: int = 2048
    mixes: tuple[Mix, ...] = (SHAREGPT, ALPACA)
    loads: tuple[float, ...] = (1.5, 0.5, 0.75, 1.0)  # of the capacity without brownout
    capacity_s: float = 12.0
    ramp_s: float = 6.0
    window_s: float = 16.0
    burst_s: float = 250.0
    calibration_s: float = 8.0
    priority_loads: tuple[float, ...] = (1.2, 0.8)  # of the same capacity, both classes together
    priority_window_s: float = 60.0  # a P99 wants hundreds of latency-sensitive requests
    transformers_requests: int = 256
    # distillation of one layer: (model, way)
    distill: tuple[tuple[str, int], ...] = (
        ("qwen1.5-moe-a2.7b", 8),
        ("qwen1.5-moe-a2.7b", 2),
        ("mixtral-8x7b", 2),
    )


DRY = Sizes(
    dry=True,
    model="tiny",
    dtype="float32",
    skew=0.8,
    page_size=8,
    batches=(4,),
    context=12,
    prefill_tokens=(16,),
    prefill_context=16,
    copy_bytes=1 << 16,
    family_batches=(4,),
    mesh_batches=(4,),
    layer_models=("tiny",),
    layer_shapes=((8, 16, 6),),
    batch=4,
    max_model_len=64,
    mixes=(Mix("tiny", 6, 5, 0.5),),
    loads=(1.5,),
    capacity_s=0.5,
    ramp_s=0.2,
    window_s=0.5,
    burst_s=1.5,
    calibration_s=0.4,
    priority_loads=(1.2,),
    priority_window_s=0.8,
    transformers_requests=4,
    distill=(("tiny", 4),),
)

SIZE_HELP = "KEY=VALUE, a size of benchmarks/gpu/sizes.py, such as burst_s=60 or ways=8"


def changed(sizes: Sizes, pairs: Sequence[str]) -> Sizes:
    """Returns the sizes with some of them changed, each as KEY=VALUE; several values have commas.

    Raises ValueError for a key that is no number or row of numbers, or a value that is none.
    """
    for key, _, text in (pair.partition("=") for pair in pairs):
        old = getattr(sizes, key, None)
        if (kind := _kind(old)) not in (int, float):
            numbers = [k for k, v in vars(sizes).items() if _kind(v) in (int, float)]
            raise ValueError(f"{key!r} is none of {', '.join(numbers)}")
        try:
            values = tuple(map(kind, text.split(",")))
        except ValueError:
            raise ValueError(f"{key} is {text!r}: no {kind.__name__}s with commas") from None
        sizes = replace(sizes, **{key: values if isinstance(old, tuple) else values[0]})
    return sizes


def _kind(value: Any) -> type:
    return type(value[0] if isinstance(value, tuple) else value)


_TINY = {
    "model_type": "qwen2_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def hf_config(model: str, num_layers: int | None = None) -> dict[str, Any]:
    """Returns the config.json of a preset in configs/models, or of `tiny`, cut to `num_layers`."""
    if model == "tiny":
        config = dict(_TINY)
    else:
        path = ROOT / "configs" / "models" / f"{model}.yaml"
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return config


def skew_of(sizes: Sizes, model: str) -> float:
    """Returns the skew of a model's router: 2 of 8 experts (Mixtral) allow no steeper one."""
    return min(sizes.skew, 1.0) if model.startswith("mixtral") else sizes.skew
