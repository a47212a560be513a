"""Sampling on the device: greedy, temperature, top-k, top-p, a seed a request."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32


class Sampling(NamedTuple):
    """Sampling parameters of B rows."""

    temperature: Float[Array, "B"]  # 0: greedy
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    seed: UInt32[Array, "B"]


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, positions: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Next token of each row and its log-probability under the unmodified distribution.

    The randomness of a row depends on its seed and the position that is being filled alone, so a
    request draws the same tokens in any batch, and again after a preemption. A batch without a
    sampled row skips the sort.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ids = lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, _draw(logits, sampling, positions), greedy),
        lambda: greedy,
    )
    return ids, token_logprobs(logits, ids)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """Log-probability of one token a row."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _draw(
    logits: Float[Array, "B V"], sampling: Sampling, positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Temperature, then top-k, then top-p on what is left, then the Gumbel maximum."""
    vocab = logits.shape[-1]
    scaled = logits / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    ranked = jnp.where((before < sampling.top_p[:, None]) | (rank == 0), ranked, -jnp.inf)

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    best = jnp.argmax(ranked + jax.vmap(noise)(sampling.seed, positions), axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)
