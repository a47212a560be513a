"""Shapes of an MoE step that tests and benchmarks share."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Shape:
    """Sizes of one model's MoE layer and attention, in elements."""

    name: str
    d_model: int
    d_ff: int  # of one routed expert
    num_experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff_shared: int = 0  # of all shared experts together; 0: there are none
    window: int = 0  # positions that attention is measured over, too; 0: over all alone
    latent: int = 0  # elements of a key that are its value; 0: values are others, as wide

    @property
    def expert_elements(self) -> int:
        """Elements of one expert: gate, up and down."""
        return 3 * self.d_model * self.d_ff


QWEN15_MOE_A27B = Shape("Qwen1.5-MoE-A2.7B", 2048, 1408, 60, 4, 16, 16, 128, 5632)
QWEN3_30B_A3B = Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 32, 4, 128)
# Its window as its config.json had it at first.
MIXTRAL_8X7B = Shape("Mixtral-8x7B", 4096, 14336, 8, 2, 32, 8, 128, window=4096)
MODELS = (QWEN15_MOE_A27B, QWEN3_30B_A3B, MIXTRAL_8X7B)
"""Models that are measured; `configs/models` has what else they are."""

# By their published config.json files. Arithmetic and compilers need no more of them.
OLMOE_1B_7B = Shape("OLMoE-1B-7B", 2048, 1024, 64, 8, 16, 16, 128)
GLM_45_AIR = Shape("GLM-4.5-Air", 4096, 1408, 128, 8, 96, 8, 128, 1408)  # layer 0 is dense
# The first layer and the first three are dense, too. Attention is multi-head latent (MLA).
DEEPSEEK_V2_LITE = Shape(
    "DeepSeek-V2-Lite", 2048, 1408, 64, 6, 16, 1, 576, d_ff_shared=2816, latent=512
)
DEEPSEEK_V3 = Shape("DeepSeek-V3", 7168, 2048, 256, 8, 128, 1, 576, d_ff_shared=2048, latent=512)
LATENT_MODELS = (DEEPSEEK_V2_LITE, DEEPSEEK_V3)
OTHER_MODELS = (OLMOE_1B_7B, GLM_45_AIR, DEEPSEEK_V2_LITE, DEEPSEEK_V3)


class Head(NamedTuple):
    """Elements of a head's key and value that are made of latents."""

    key: int  # of which those that turn are in the latent itself
    value: int


EXPANDED = Head(192, 128)
"""Of all models with latents."""

BUNDLED = Shape("bundled", 128, 96, 60, 4, 4, 2, 32)

# Small and odd: no size here is a multiple of a tile.
TINY = (
    Shape("one head", 12, 7, 3, 1, 1, 1, 4),
    Shape("multi-head", 20, 13, 5, 2, 4, 4, 8),
    Shape("grouped 7:1", 28, 17, 11, 3, 7, 1, 12),
    Shape("grouped 6:2", 36, 9, 8, 8, 6, 2, 10),
)
