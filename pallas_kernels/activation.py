"""Activations of feed-forward networks: frozen values `(gate, up) -> hidden` of float32."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class Activation(Protocol):
    """Joins gate and up, element by element. It is part of a config: frozen and hashable.

    One with `gated = False` gets the one product that its networks have first, and no second.
    """

    def __call__(
        self, gate: Float[Array, "*rows f"], up: Float[Array, "*rows f"]
    ) -> Float[Array, "*rows f"]:
        """Returns what the down projection gets; all float32."""
        ...


@dataclass(frozen=True)
class Silu:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202)."""

    def __call__(self, gate: Array, up: Array) -> Array:
        """See Activation."""
        return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class Gelu:
    """`gelu(gate) * up` (GEGLU, arXiv 2002.05202); `tanh`: by its approximation."""

    tanh: bool = False

    def __call__(self, gate: Array, up: Array) -> Array:
        """See Activation."""
        return jax.nn.gelu(gate, approximate=self.tanh) * up


@dataclass(frozen=True)
class ClampedSwiglu:
    """`g * sigmoid(alpha g) * (u + 1)`, g and u clamped to at most `limit`, u to at least `-limit`
    too (gpt-oss).
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Array, up: Array) -> Array:
        """See Activation."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True)
class Relu2:
    """`relu(x)^2` (arXiv 2109.08668), without a gate (Nemotron-H)."""

    gated: ClassVar[bool] = False

    def __call__(self, gate: Array, up: Array | None = None) -> Array:
        """See Activation."""
        return jnp.square(jax.nn.relu(gate))


SILU = Silu()


def up_matrices(activation: Activation) -> int:
    """Returns how many matrices, side by side, come before it: gate and up, or up alone."""
    return 2 if getattr(activation, "gated", True) else 1


def gated(hidden: Float[Array, "*rows f2"], activation: Activation) -> Float[Array, "*rows f"]:
    """Applies an activation to columns `[:f]` gate, `[f:]` up, or to all that there are without a
    gate; in float32 inside, in `hidden`'s dtype outside.
    """
    return cast(Array, _gated(hidden, activation))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gated(hidden, activation):
    return activation(*_parts(hidden, activation)).astype(hidden.dtype)


def _parts(hidden, activation):
    return jnp.split(hidden.astype(jnp.float32), up_matrices(activation), axis=-1)


def _gated_fwd(hidden, activation):
    return _gated(hidden, activation), hidden


def _gated_bwd(activation, hidden, grad):
    # Not left to autodiff: of the two halves it pads and adds, six times slower on a CPU.
    _, transposed = jax.vjp(activation, *_parts(hidden, activation))
    each = transposed(grad.astype(jnp.float32))
    return (jnp.concatenate([part.astype(hidden.dtype) for part in each], axis=-1),)


_gated.defvjp(_gated_fwd, _gated_bwd)
