"""XLA reference of the KV page write."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import fp8_pages
from pallas_kernels.norm import rms_norm


def turn(
    x: Float[Array, "T N D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T N D"]:
    """Rotates elements (i, i + half) of each head by the row's angle i, in float32; returns x's
    dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def split_heads(projection):
    """See `op.split_heads`."""
    rows, heads = projection.rows, projection.heads
    if projection.bias is not None:
        # Unfused on purpose: with the bias inside the product, XLA copies each layer's weights out
        # of a scan over layers.
        rows = lax.optimization_barrier(rows) + projection.bias.astype(rows.dtype)[None]
    q, k, v = jnp.split(rows, [heads, heads + projection.kv_heads], axis=1)
    if projection.turned_first:
        q, k = (turn(x, projection.cos, projection.sin) for x in (q, k))
    if projection.q_norm is not None:
        q = _normed(q, projection.q_norm, projection.eps)
        k = _normed(k, projection.k_norm, projection.eps)
    if projection.clip:
        q, k, v = (jnp.clip(x, -projection.clip, projection.clip) for x in (q, k, v))
    if not projection.turned_first:
        q, k = (turn(x, projection.cos, projection.sin) for x in (q, k))
    return q, k, v


def _normed(x, weight, eps):
    """Norms heads, one by one or all together: as many elements as there are weights."""
    return rms_norm(x.reshape(len(x), -1, weight.size), weight, eps).reshape(x.shape)


def write_kv(projection, k_pages, v_pages, *, layer, page, offset):
    """See `op.write_kv`."""
    q, k, v = split_heads(projection)
    at = layer, page, slice(None), offset
    return q, fp8_pages.write(k_pages, at, k), fp8_pages.write(v_pages, at, v)
