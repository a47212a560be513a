"""Experts by their arrays: united ones are trained through them, routed ones asked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmoe.moe import gated_mlp
from pallas_kernels.activation import SILU, Activation
from training.dispatch import biases_of

Stacked = dict[str, Array]
"""`gate_up [n, d, 2f]` and `down [n, f, d]` of n experts; `gate_up_bias [n, 2f]` and `down_bias
[n, d]` where they have biases.
"""


def outputs(
    params: Stacked, rows: Float[Array, "n C d"], activation: Activation = SILU
) -> Float[Array, "n C d"]:
    """Returns the output of n experts, each on its own rows, in the rows' dtype."""
    own = jax.tree.map(lambda leaf: jnp.asarray(leaf, rows.dtype), params)
    return gated_mlp(rows, own["gate_up"], own["down"], activation, biases_of(own))


def outputs_on_all(
    params: Stacked, h: Float[Array, "R d"], activation: Activation = SILU
) -> Float[Array, "n R d"]:
    """Returns the output of n experts, each on the same rows, in h's dtype."""
    rows = jnp.broadcast_to(h[None], (params["down"].shape[0], *h.shape))
    return outputs(params, rows, activation)
