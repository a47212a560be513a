"""Softmax over keys that arrive a chunk at a time, in float32; or all at once beside a sink."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Softmax(NamedTuple):
    """State of the running softmax of a set of rows (any leading shape)."""

    top: Float[Array, "*rows"]  # largest score seen; -inf before the first
    norm: Float[Array, "*rows"]  # sum of exp(score - top)
    acc: Float[Array, "*rows D"]  # sum of exp(score - top) * value


def start(
    rows: tuple[int, ...], head_dim: int, sinks: Float[Array, "*rows"] | None = None
) -> Softmax:
    """Returns the state before any key was seen: nothing, or a score that has no value (a sink)."""
    top = jnp.full(rows, -jnp.inf, jnp.float32) if sinks is None else sinks
    return Softmax(
        jnp.broadcast_to(top, rows).astype(jnp.float32),
        jnp.full(rows, 0.0 if sinks is None else 1.0, jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )


def update(
    state: Softmax,
    scores: Float[Array, "*rows C"],
    weigh: Callable[[Float[Array, "*rows C"]], Float[Array, "*rows D"]],
) -> Softmax:
    """Takes in C more keys; masked ones score -inf. `weigh` multiplies probabilities by values."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    # A row that has seen nothing yet keeps top = -inf; exp(-inf - 0) = 0 is what it needs.
    pivot = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp(scores - pivot[..., None])
    keep = jnp.exp(state.top - pivot)
    return Softmax(
        top, state.norm * keep + jnp.sum(p, axis=-1), state.acc * keep[..., None] + weigh(p)
    )


def finish(state: Softmax) -> Float[Array, "*rows D"]:
    """Returns the weighted mean of the values; zeros for a row that saw no key."""
    return state.acc / jnp.maximum(state.norm, 1e-30)[..., None]


def softmax(
    scores: Float[Array, "*rows C"], sinks: Float[Array, "*heads"] | None = None
) -> Float[Array, "*rows C"]:
    """Returns the weights of all keys at once. `sinks` broadcast to the rows: each is a score that
    takes weight and has no value, so that a row's weights sum to less than one.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(scores.dtype)[..., None]
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))
