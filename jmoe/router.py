"""How a layer's router chooses experts: a value that a config names (`ModelConfig.router`).

Without one, it is softmax over all experts and the K likeliest, which one kernel fuses with the
brownout plan and the dispatch. Any other is a `Router`, wherever experts are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


@dataclass(frozen=True)
class ScoredTopK:
    """The K experts of the highest scores, of the best groups (DeepSeek-V2 and V3, GLM-4.5). A
    layer's bias has a say in the choice and none in the weights.
    """

    scoring: Literal["softmax", "sigmoid"] = "sigmoid"
    groups: int = 1  # of experts that follow each other, of one size
    top_groups: int = 1  # from which experts are chosen
    scale: float = 1.0  # of the weights, after they are normalized (`ModelConfig.norm_topk_prob`)
    bias: bool = False
    best: int = 2  # experts whose scores add up to their group's: 1 of DeepSeek-V2, 2 of V3

    def __call__(
        self, cfg: "ModelConfig", layer: Mapping[str, Array], logits: Float[Array, "T m"]
    ) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
        """See Router."""
        scored = jax.nn.softmax if self.scoring == "softmax" else jax.nn.sigmoid
        scores = scored(logits.astype(jnp.float32))
        chosen_by = scores + layer["router_bias"][None] if "router_bias" in layer else scores
        if self.top_groups < self.groups:
            chosen_by = jnp.where(self._in_best_groups(chosen_by), chosen_by, -jnp.inf)
        _, ids = jax.lax.top_k(chosen_by, cfg.experts_per_token)
        weights = jnp.take_along_axis(scores, ids, axis=1)
        if cfg.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return self.scale * weights, ids.astype(jnp.int32)

    def _in_best_groups(self, scores: Float[Array, "T m"]) -> Array:
        by_group = scores.reshape(len(scores), self.groups, -1)
        worth = jnp.sum(jax.lax.top_k(by_group, min(self.best, by_group.shape[2]))[0], axis=2)
        _, best = jax.lax.top_k(worth, self.top_groups)
        groups = jnp.arange(self.groups, dtype=best.dtype)
        is_best = jnp.any(best[:, :, None] == groups[None, None], axis=1)
        return jnp.repeat(is_best, by_group.shape[2], axis=1)


@dataclass(frozen=True)
class SparseMixer:
    """The likeliest expert, and the likeliest but for it (Phi-3.5-MoE; arXiv 2409.12136). Each
    weighs what a softmax gives it over the experts that are near it.
    """

    jitter: float  # half of how far below an expert others are near, of the larger of both

    @property
    def bias(self) -> bool:
        """See Router."""
        return False

    def __call__(
        self, cfg: "ModelConfig", layer: Mapping[str, Array], logits: Float[Array, "T m"]
    ) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
        """See Router."""
        scores = left = logits.astype(jnp.float32)
        weights, ids = [], []
        for _ in range(cfg.experts_per_token):
            most, chosen = (each[:, 0] for each in jax.lax.top_k(left, 1))
            far = most[:, None] - scores > 2 * self.jitter * jnp.maximum(
                jnp.abs(scores), most[:, None]
            )
            near = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=1)
            weights.append(jnp.take_along_axis(near, chosen[:, None], axis=1)[:, 0])
            ids.append(chosen.astype(jnp.int32))
            numbers = jnp.arange(left.shape[1], dtype=jnp.int32)
            left = jnp.where(numbers[None] == ids[-1][:, None], -jnp.inf, left)
        return jnp.stack(weights, axis=1), jnp.stack(ids, axis=1)
