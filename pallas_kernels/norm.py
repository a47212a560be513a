"""Norms of layers, and of query and key heads."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, "d"], eps: float) -> Array:
    """Returns the root-mean-square norm, taken in float32; the weight is applied in x's dtype, or
    in float32 where it is that.
    """
    h, weight = x.astype(jnp.float32), weight.reshape((1,) * (x.ndim - 1) + (-1,))
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    if weight.dtype == jnp.float32:
        return (h * weight).astype(x.dtype)
    return h.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(
    x: Float[Array, "T d"], weight: Float[Array, "d"], bias: Float[Array, "d"], eps: float
) -> Array:
    """Returns rows of mean 0 and variance 1, with weight and bias, all in float32 until the end."""
    h = x.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * weight.astype(jnp.float32)[None] + bias.astype(jnp.float32)[None]).astype(x.dtype)
