"""Tokens drawn from logits that a request changes: penalties, biases, allowed tokens, min-p.

What is sparse on the host and large on the device stays there by slot: how often a slot's tokens
occur, and its biases. A slot is seated anew when its sequence is about to draw a first token, or a
further one after an eviction; from then on the device counts what it draws, so that a step can be
launched before the host has read the tokens of the one before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.packed_rows import (
    FREQUENCY,
    HEAD,
    MAX_BIASES,
    MIN_P,
    NUM_PROMPT,
    PRESENCE,
    REPETITION,
    SEAT_SLOT,
    SHAPED,
    TOP,
)
from jmoe.sampling import Sampling, sample, token_logprobs


class Shaping(NamedTuple):
    """What slots hold. Donated to each call, returned by it."""

    counts: Int[Array, "S V"]
    """Twice how often a token is in the output, plus 1 where prompt or output have it."""
    bias: Float[Array, "S V"]  # added to logits


class Drawn(NamedTuple):
    """What comes of drawing. Log-probabilities are of the unchanged logits."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top_ids: Int[Array, "B TOP"]  # likeliest first; of equals the lower id
    top_logprobs: Float[Array, "B TOP"]


def make_shaping(num_slots: int, vocab_size: int) -> Shaping:
    """Makes a state in which nothing is counted and nothing biased."""
    shape = num_slots, vocab_size
    return Shaping(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def seat(shaping: Shaping, told: Int[Array, "1 n"]) -> Shaping:
    """Fills a slot as its sequence needs it. `told` is made by `jmoe.packed_rows.pack_seat`; a slot
    of -1 changes nothing.
    """
    told = told[0]
    num_slots, vocab = shaping.counts.shape
    slot = jnp.where(told[SEAT_SLOT] < 0, num_slots, told[SEAT_SLOT])  # out of range: dropped
    ids, values = told[HEAD : HEAD + MAX_BIASES], told[HEAD + MAX_BIASES : HEAD + 2 * MAX_BIASES]
    context = told[HEAD + 2 * MAX_BIASES :]
    places = jnp.arange(context.shape[0], dtype=jnp.int32)
    at = jnp.where(context < 0, vocab, context)
    twice = jnp.where(places >= told[NUM_PROMPT], 2, 0).astype(jnp.int32)
    counts = jnp.zeros(vocab, jnp.int32).at[at].add(twice, mode="drop")
    counts = counts | jnp.zeros(vocab, jnp.int32).at[at].max(1, mode="drop")
    bias = jnp.zeros(vocab, jnp.float32)
    bias = bias.at[jnp.where(ids < 0, vocab, ids)].set(
        lax.bitcast_convert_type(values, jnp.float32), mode="drop"
    )
    return Shaping(
        shaping.counts.at[slot].set(counts, mode="drop"),
        shaping.bias.at[slot].set(bias, mode="drop"),
    )


def draw(
    shaping: Shaping,
    logits: Float[Array, "B V"],
    sampling: Sampling,
    positions: Int[Array, "B"],
    slots: Int[Array, "B"],
    shapes: Int[Array, "B C"],
    allowed: Int[Array, "B W"],
    *,
    truncate: bool | Bool[Array, ""] = True,
) -> tuple[Shaping, Drawn]:
    """Draws the next tokens of a step in which some row is shaped; others get what `sample` gives
    them.

    In this order: tokens that are not allowed get -inf; biases are added; the repetition penalty
    divides positive logits and multiplies negative ones of tokens seen (Keskar et al., CTRL,
    2019, section 4.1); frequency and presence penalties are subtracted; temperature; min-p (Nguyen
    et al., 2024: what is less likely than `min_p` times the likeliest goes); top-k and top-p.

    Args:
        shaping: of all slots. Donate it.
        logits: float32.
        sampling: rows of temperature 0 take the likeliest of what is left.
        positions: that the tokens will have.
        slots: of rows; -1 is padding.
        shapes: by `jmoe.packed_rows.pack_shape`; zeros for a row that is not shaped.
        allowed: a bit a token, the lowest first: what a row may draw. All ones: anything.
        truncate: as in `sample`.
    """
    shaped = (shapes[:, SHAPED] > 0)[:, None]
    at = jnp.maximum(slots, 0)
    changed = _penalized(logits + shaping.bias[at], shaping.counts[at], shapes)
    changed = jnp.where(_bits(allowed, logits.shape[1]), changed, -jnp.inf)
    min_p = _floats(shapes[:, MIN_P])
    tokens, _ = sample(
        jnp.where(shaped, changed, logits), sampling, positions, truncate=truncate, min_p=min_p
    )
    slot = jnp.where(shaped[:, 0] & (slots >= 0), slots, shaping.counts.shape[0])
    counts = shaping.counts.at[slot, tokens].add(2, mode="drop")
    counts = counts.at[slot, tokens].set(counts[at, tokens] | 1, mode="drop")
    top, ids = lax.top_k(logits, min(TOP, logits.shape[1]))
    top = top - jax.nn.logsumexp(logits, axis=-1)[:, None]
    drawn = Drawn(tokens, token_logprobs(logits, tokens), ids, top)
    return shaping._replace(counts=counts), drawn


def _penalized(
    logits: Float[Array, "B V"], counts: Int[Array, "B V"], shapes: Int[Array, "B C"]
) -> Float[Array, "B V"]:
    repetition, frequency, presence = (
        _floats(shapes[:, column])[:, None] for column in (REPETITION, FREQUENCY, PRESENCE)
    )
    safe = jnp.where(repetition > 0, repetition, 1.0)  # of rows that are not shaped it is 0
    repeated = jnp.where(logits > 0, logits / safe, logits * safe)
    logits = jnp.where(counts > 0, repeated, logits)
    times = (counts // 2).astype(jnp.float32)
    return logits - frequency * times - presence * jnp.minimum(times, 1.0)


def _bits(words: Int[Array, "B W"], count: int) -> Bool[Array, "B V"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] > 0


def _floats(column: Int[Array, "B"]) -> Float[Array, "B"]:
    return lax.bitcast_convert_type(column, jnp.float32)
