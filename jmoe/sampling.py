"""Sampling on the device: greedy, temperature, top-k, top-p, a seed a request."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jmoe.packed_rows import PROMPT_TOP
from pallas_kernels.backend import backend


class Sampling(NamedTuple):
    """Sampling parameters of B rows."""

    temperature: Float[Array, "B"]  # 0: greedy
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    seed: UInt32[Array, "B"]


def greedy(logits: Float[Array, "B V"]) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Returns the likeliest token of each row, the lowest among equals, and its log-probability."""
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return ids, token_logprobs(logits, ids)


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    positions: Int[Array, "B"],
    *,
    truncate: bool | Bool[Array, ""] = True,
    min_p: Float[Array, "B"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Returns the next token of each row and its log-probability under the unmodified distribution.

    The randomness of a row depends on its seed and the position that is being filled alone, so a
    request draws the same tokens in any batch, and again after a preemption.

    Args:
        logits: float32.
        sampling: rows of temperature 0 are greedy.
        positions: that the tokens will have.
        truncate: whether any row uses top-k or top-p; without them there is nothing to sort. An
            array is a condition on the device.
        min_p: share of the likeliest token's probability, after the temperature, below which a
            token is left out; 0: none is.
    """
    scaled = logits / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    if min_p is not None:
        least = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(min_p)[:, None]  # log 0: -inf
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    if not isinstance(truncate, bool):
        scaled = lax.cond(truncate, _truncate, lambda same, _: same, scaled, sampling)
    elif truncate:
        scaled = _truncate(scaled, sampling)

    def noise(seed: Array, position: Array) -> Array:  # Gumbel's, so that the largest is a draw
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    noisy = scaled + jax.vmap(noise)(sampling.seed, positions)
    sampled = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    ids = jnp.where(sampling.temperature > 0, sampled, greedy(logits)[0])
    return ids, token_logprobs(logits, ids)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """Returns the log-probability of one token a row."""
    return scored(logits, tokens)[:, 0]


class Scored(NamedTuple):
    """Log-probabilities at T positions of prompts."""

    logprobs: Float[Array, "T 2"]  # of the token that follows, and of the likeliest one
    top_ids: Int[Array, "T PROMPT_TOP"]  # likeliest first; of equals the lower id
    top_logprobs: Float[Array, "T PROMPT_TOP"]


def score_prompts(
    logits: Float[Array, "T V"], tokens: Int[Array, "T"], top: Bool[Array, ""]
) -> Scored:
    """Returns `scored`, and the likeliest tokens at each position. Without `top` there are zeros in
    their place on a CPU, where finding them takes twice the time of all else.
    """
    if backend() != "cpu":  # a GPU's condition would have to be read by the host
        return _scored_with_top(logits, tokens)
    return lax.cond(top, _scored_with_top, _scored_alone, logits, tokens)


def _scored_alone(logits: Float[Array, "T V"], tokens: Int[Array, "T"]) -> Scored:
    shape = len(logits), min(PROMPT_TOP, logits.shape[-1])
    found = scored(logits, tokens)
    return Scored(found, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, found.dtype))


def _scored_with_top(logits: Float[Array, "T V"], tokens: Int[Array, "T"]) -> Scored:
    top, ids = lax.top_k(logits, min(PROMPT_TOP, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    all_of_them = jnp.concatenate([chosen, top], axis=-1)
    found = all_of_them - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Scored(found[:, :2], ids, found[:, 1:])


def scored(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B 2"]:
    """Returns the log-probabilities of one token a row, and of the likeliest one."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    pair = jnp.stack([chosen, jnp.max(logits, axis=-1)], axis=-1)
    return pair - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _truncate(scaled: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Returns `scaled` with -inf outside top-k, and outside top-p of the rest; ties go to the lower
    id.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # Rounding may bring `before` to 1, so that a top_p of 1 would cut beside a row that is cut.
    inside = (before < sampling.top_p[:, None]) | (sampling.top_p >= 1)[:, None] | (rank == 0)
    kept = (rank < top_k) & inside
    row = jnp.arange(scaled.shape[0], dtype=jnp.int32)[:, None]
    keep = jnp.zeros(scaled.shape, bool).at[row, order].set(kept)
    return jnp.where(keep, scaled, -jnp.inf)
