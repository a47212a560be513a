"""What the next layer's router will choose, guessed one layer ahead.

Replicas have to travel while the layer before theirs runs, so their experts are guessed from the
rows that enter layer l's MoE block (after its attention):

- `lookahead` is Libra's predictor as the paper has it: layer l + 1's own norm and router, applied
  one layer early.
- `Correction` leaves the guess and repairs its sum: a moving average, by expert, of the share of
  visits that was missed.
- `jmoe.parallel.probe` has a third one, fitted offline.

Letters: T rows, d model width, m routed experts, K picks a row, G devices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jmoe.config import ModelConfig
from jmoe.moe import route
from jmoe.weights import Params

TINY = 1e-9


def lookahead(cfg: ModelConfig, next_layer: Params, x: Float[Array, "T d"]) -> Int[Array, "T K"]:
    """Returns the next layer's choices, int32, by its router on rows `x` of this one
    (Libra, 3.2).
    """
    return route(cfg, next_layer, x)[2]


class Correction(NamedTuple):
    """By how much predictions of one layer miss, averaged over the steps so far."""

    error: Float[Array, "m"]  # float32: share of all visits made, minus share predicted

    @classmethod
    def none(cls, num_experts: int) -> "Correction":
        """Returns the correction before the first step."""
        return cls(jnp.zeros((num_experts,), jnp.float32))

    def of(self, predicted: Int[Array, "G m"]) -> Int[Array, "G m"]:
        """Returns the predicted visits with every device's missing share added, int32, rounded."""
        visits = predicted.astype(jnp.float32)
        total = jnp.sum(visits, axis=1, keepdims=True)
        moved = jnp.maximum(visits + self.error[None, :] * total, 0.0)
        moved = moved * (total / jnp.maximum(jnp.sum(moved, axis=1, keepdims=True), TINY))
        return jnp.round(moved).astype(jnp.int32)

    def seen(
        self, predicted: Int[Array, "G m"], made: Int[Array, "G m"], *, decay: float = 0.9
    ) -> "Correction":
        """Returns the correction after a step: `decay` of the average so far, the rest of this
        step's error.
        """
        error = _share(made) - _share(predicted)
        return Correction(decay * self.error + (1 - decay) * error)


def count_accuracy(predicted: Int[Array, "*n"], made: Int[Array, "*n"]) -> Float[Array, ""]:
    """Returns the share of predicted visits that were made, by counts, which plans are made from.

    The sum of the lesser of both counts over visits made; both have the same total. Errors that
    cancel within a device and expert do not count.
    """
    right = jnp.sum(jnp.minimum(predicted, made), dtype=jnp.int32)
    return right / jnp.maximum(jnp.sum(made, dtype=jnp.int32), 1)


def pick_accuracy(predicted: Int[Array, "T K"], made: Int[Array, "T K"]) -> Float[Array, ""]:
    """Returns the share of each row's experts that were predicted for it: the accuracy of Libra's
    Table 1.
    """
    return jnp.mean(jnp.any(predicted[:, None, :] == made[:, :, None], axis=-1))


def _share(counts: Int[Array, "G m"]) -> Float[Array, "m"]:
    """Returns the share of all visits that each expert has, float32."""
    visits = jnp.sum(counts, axis=0, dtype=jnp.int32).astype(jnp.float32)
    return visits / jnp.maximum(jnp.sum(visits), 1.0)
