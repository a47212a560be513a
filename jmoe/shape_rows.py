"""What the host tells the device of rows whose logits are changed, as small int32 arrays.

As in `jmoe.packed_rows`: floats ride as bits, and whoever plans steps needs no jax.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

MAX_BIASES = 1024
"""Tokens whose logits one request may bias."""
TOP = 20
"""Likeliest tokens that a step with shaped rows returns of each."""

# Columns of a row's shape.
SHAPED, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(5)
NUM_SHAPE_COLUMNS = 5
# The head of a seat: its slot, and how many tokens of its context are the prompt's. Ids of biases
# follow, their values, and the context.
SEAT_SLOT, NUM_PROMPT = range(2)
HEAD = 2


def pack_shape(
    *,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Int[np.ndarray, "C"]:
    """Returns a row's shape."""
    floats = [min_p, presence_penalty, frequency_penalty, repetition_penalty]
    return np.array([1, *np.array(floats, np.float32).view(np.int32)], np.int32)


def pack_seat(
    slot: int,
    prompt: Sequence[int],
    output: Sequence[int],
    biases: Sequence[tuple[int, float]],
    max_len: int,
) -> Int[np.ndarray, "1 n"]:
    """Returns a slot's tokens so far, at most `max_len`, and its biases, at most `MAX_BIASES`."""
    told = np.full((1, seat_size(max_len)), -1, np.int32)
    row = told[0]
    row[[SEAT_SLOT, NUM_PROMPT]] = slot, len(prompt)
    if biases:
        ids, values = zip(*biases, strict=True)
        row[HEAD : HEAD + len(ids)] = ids
        at = HEAD + MAX_BIASES
        row[at : at + len(ids)] = np.array(values, np.float32).view(np.int32)
    at = HEAD + 2 * MAX_BIASES
    row[at : at + len(prompt)] = prompt
    row[at + len(prompt) : at + len(prompt) + len(output)] = output
    return told


def seat_size(max_len: int) -> int:
    """Returns how many numbers a seat has."""
    return HEAD + 2 * MAX_BIASES + max_len


def everything(num_rows: int, vocab_size: int) -> Int[np.ndarray, "B W"]:
    """Returns the mask of rows that may draw any token: a bit a token, the lowest first, all
    ones.
    """
    return np.full((num_rows, num_words(vocab_size)), -1, np.int32)


def num_words(vocab_size: int) -> int:
    """Returns the number of words of 32 bits, a bit a token."""
    return -(-vocab_size // 32)
