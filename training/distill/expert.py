"""Experts as a Flax module: united ones are trained through it, routed ones asked."""

from typing import cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmoe.moe import gated_mlp
from pallas_kernels.activation import SILU

Stacked = dict[str, Array]
"""`gate_up [n, d, 2f]` and `down [n, f, d]` of n experts: the parameters of `Experts`."""


class Experts(nn.Module):
    """SiLU-gated feed-forward networks in the routed experts' architecture, all in one product."""

    count: int
    d_ff: int

    @nn.compact
    def __call__(self, rows: Float[Array, "n C d"]) -> Float[Array, "n C d"]:
        """Returns each expert's output on its own rows, computed in the rows' dtype."""
        d_model = rows.shape[-1]
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate_up = self.param("gate_up", init, (self.count, d_model, 2 * self.d_ff))
        down = self.param("down", init, (self.count, self.d_ff, d_model))
        own = jnp.asarray(gate_up, rows.dtype), jnp.asarray(down, rows.dtype)
        return gated_mlp(rows, *own, SILU)


def outputs(params: Stacked, rows: Float[Array, "n C d"]) -> Float[Array, "n C d"]:
    """Returns the output of n experts, each on its own rows, in the rows' dtype."""
    count, d_ff, _ = params["down"].shape
    return cast(Array, Experts(count, d_ff).apply({"params": params}, rows))


def outputs_on_all(params: Stacked, h: Float[Array, "R d"]) -> Float[Array, "n R d"]:
    """Returns the output of n experts, each on the same rows, in h's dtype."""
    return outputs(params, jnp.broadcast_to(h[None], (params["down"].shape[0], *h.shape)))
