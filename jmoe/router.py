"""How a layer's router chooses experts: a value that a config names (`ModelConfig.router`).

Without one, it is softmax over all experts and the K likeliest. That, `ScoredTopK` and
`SparseMixer` are what one kernel fuses with the brownout plan and the dispatch (`fused`). Any other
is a `Router`, wherever experts are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from pallas_kernels import routing

if TYPE_CHECKING:
    from jmoe.config import ModelConfig


@runtime_checkable
class Router(Protocol):
    """Chooses experts by a layer's logits. It is part of a config: frozen and hashable."""

    @property
    def bias(self) -> bool:
        """Whether layers have a `router_bias [m]`, float32."""
        ...

    def __call__(
        self, cfg: "ModelConfig", layer: Mapping[str, Array], logits: Float[Array, "T m"]
    ) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
        """Returns each row's gate weights (float32) and experts (int32), all different.

        `layer` has the router's own parameters; it is empty where a probe guesses the logits.
        """
        ...


def fused(cfg: "ModelConfig", layer: Mapping[str, Array]) -> dict[str, Any] | None:
    """Returns what `routing.gate` and `routing.route` are told of a config's router; None for one
    that they do not know.
    """
    if cfg.router is None:
        return _options(cfg)
    if isinstance(cfg.router, Fused):
        return cfg.router.options(cfg, layer)
    return None


def _options(cfg: "ModelConfig") -> dict[str, Any]:
    return {"top_k": cfg.experts_per_token, "normalize": cfg.norm_topk_prob}


class Fused(ABC):
    """A Router of which the routing ops know how it chooses."""

    @abstractmethod
    def options(self, cfg: "ModelConfig", layer: Mapping[str, Array]) -> dict[str, Any]:
        """Returns what `routing.gate` and `routing.route` are told of it."""

    def __call__(
        self, cfg: "ModelConfig", layer: Mapping[str, Array], logits: Float[Array, "T m"]
    ) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
        """See Router."""
        return routing.gate(logits, **self.options(cfg, layer))


@dataclass(frozen=True)
class ScoredTopK(Fused):
    """The K experts of the highest scores, of the best groups (DeepSeek-V2 and V3, GLM-4.5). A
    layer's bias has a say in the choice and none in the weights.
    """

    scoring: Literal["softmax", "sigmoid"] = "sigmoid"
    groups: int = 1  # of experts that follow each other, of one size
    top_groups: int = 1  # from which experts are chosen
    scale: float = 1.0  # of the weights, after they are normalized (`ModelConfig.norm_topk_prob`)
    bias: bool = False
    best: int = 2  # experts whose scores add up to their group's: 1 of DeepSeek-V2, 2 of V3

    def options(self, cfg: "ModelConfig", layer: Mapping[str, Array]) -> dict[str, Any]:
        """See `Fused`."""
        best = min(self.best, cfg.num_experts // self.groups)
        grouping = routing.Grouping(self.groups, self.top_groups, best)
        return _options(cfg) | {
            "scoring": self.scoring,
            "bias": layer.get("router_bias"),
            "grouping": grouping if self.top_groups < self.groups else None,
            "scale": self.scale,
        }


@dataclass(frozen=True)
class SparseMixer(Fused):
    """The likeliest expert, and the likeliest but for it (Phi-3.5-MoE; arXiv 2409.12136). Each
    weighs what a softmax gives it over the experts that are near it.
    """

    jitter: float  # half of how far below an expert others are near, of the larger of both

    @property
    def bias(self) -> bool:
        """See Router."""
        return False

    def options(self, cfg: "ModelConfig", layer: Mapping[str, Array]) -> dict[str, Any]:
        """See `Fused`."""
        del layer
        own = {"normalize": False, "scoring": "sparsemixer", "jitter": self.jitter}
        return _options(cfg) | own
