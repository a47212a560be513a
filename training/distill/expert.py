"""Experts as Flax modules: united ones are trained through them, routed ones asked."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jmoe.moe import gated_mlp
from pallas_kernels.activation import SILU, Activation
from training.dispatch import biases_of

Stacked = dict[str, Array]
"""`gate_up [n, d, 2f]` and `down [n, f, d]` of n experts; `gate_up_bias [n, 2f]` and `down_bias
[n, d]` where they have biases.
"""


class Groups(nnx.Variable):
    """The number of the united expert that stands in for each routed one, int32 `[m]`."""


class Experts(nnx.Module):
    """The gated MLPs of n experts, over stacked weights, each an `nnx.Param` by its name.

    Args:
        weights: see Stacked; of any floating dtype.
        activation: of the model.
        groups: which of them stands in for each of a layer's routed experts; None where nobody
            asks.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        activation: Activation = SILU,
        groups: Int[np.ndarray, " m"] | None = None,
    ) -> None:
        self.gate_up, self.down = nnx.Param(weights["gate_up"]), nnx.Param(weights["down"])
        if biases := biases_of(dict(weights)):
            self.gate_up_bias, self.down_bias = map(nnx.Param, biases)
        self.activation = activation
        self.groups = None if groups is None else Groups(jnp.asarray(groups, jnp.int32))

    @property
    def weights(self) -> Stacked:
        """The parameters' arrays, by name."""
        return dict(nnx.to_pure_dict(nnx.state(self, nnx.Param)))

    def __call__(self, rows: Float[Array, "n C d"]) -> Float[Array, "n C d"]:
        """Returns the output of each expert on its own rows, in the rows' dtype."""
        own = {name: jnp.asarray(leaf, rows.dtype) for name, leaf in self.weights.items()}
        return gated_mlp(rows, own["gate_up"], own["down"], self.activation, biases_of(own))

    def on_all(self, h: Float[Array, "R d"]) -> Float[Array, "n R d"]:
        """Returns the output of each expert on the same rows, in h's dtype."""
        return self(jnp.broadcast_to(h[None], (self.down.shape[0], *h.shape)))

    def in_place_of(self, h: Float[Array, "R d"], ids: Int[Array, "R K"]) -> Float[Array, "R K d"]:
        """Returns what stands in for routed experts `ids` on the rows, in h's dtype.

        Raises ValueError where it does not know the groups.
        """
        if self.groups is None:
            raise ValueError("these experts have no groups; give them, or load them as united ones")
        return self.on_all(h)[self.groups[ids], jnp.arange(len(h))[:, None]]
