"""What the host tells a step, as small int32 arrays: a row a sequence, a delta a new page, and how
logits of rows are changed.

Floats ride in them as bits. A call has few arguments then, and whoever plans steps needs no jax.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

# Columns of a packed row: one row a decode sequence, one a prefill chunk.
SLOT, KV_LEN, Q_LEN, EXEMPT, SEED, TOP_K, TEMPERATURE, TOP_P, NEXT_TOKEN, TOP_PROMPT = range(10)
# The control of a step: brownout, and which layers run (a step may run in parts).
THRESHOLD_PERCENT, STRATEGY, FIRST_LAYER, STOP_LAYER = range(4)
# A delta of the block table: where, and which page. A slot of -1 is no delta. Of block b of group g
# of n groups of layers, the block is n b + g.
DELTA_SLOT, DELTA_BLOCK, DELTA_PAGE = range(3)
NUM_COLUMNS, NUM_DELTA_COLUMNS, NUM_CONTROL = 10, 3, 4
# What EXEMPT says of a row beside 0, degradable: in this step it is not degraded, or never may be.
SPARED, REFUSES = 1, 2


def empty_rows(count: int) -> np.ndarray:
    """Returns int32 [count, NUM_COLUMNS] of padding: slot -1, nothing to do."""
    rows = np.zeros((count, NUM_COLUMNS), np.int32)
    rows[:, SLOT] = -1
    rows[:, TOP_P] = np.float32(1.0).view(np.int32)
    return rows


def empty_deltas(count: int) -> np.ndarray:
    """Returns int32 [count, NUM_DELTA_COLUMNS] without a delta in it."""
    deltas = np.zeros((count, NUM_DELTA_COLUMNS), np.int32)
    deltas[:, DELTA_SLOT] = -1
    return deltas


def pack_row(
    slot: int,
    *,
    kv_len: int,
    q_len: int = 1,
    exempt: int = 0,
    seed: int = 0,
    top_k: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    next_token: int = 0,
    top_prompt: int = 0,
) -> np.ndarray:
    """Returns one packed row. `kv_len` counts the positions after the step, its own `q_len`
    included.

    `exempt` is 0, `SPARED` or `REFUSES`. `next_token` is what follows a chunk in its prompt, for
    the prompt's log-probabilities; with a `top_prompt` above 0 the likeliest tokens are found, too.
    """
    row = np.array([slot, kv_len, q_len, exempt, 0, top_k, 0, 0, next_token, top_prompt], np.int32)
    row[SEED] = np.uint32(seed & 0xFFFFFFFF).view(np.int32)
    row[TEMPERATURE] = np.float32(temperature).view(np.int32)
    row[TOP_P] = np.float32(top_p).view(np.int32)
    return row


SamplingMode = Literal["greedy", "sample", "truncate"]
"""What a step's rows ask for: none samples, none of those that do truncates, or one does."""


def sampling_mode(rows: Int[np.ndarray, "B C"]) -> SamplingMode:
    """Returns the mode of packed rows, found on the host, which chooses the program by it.

    A GPU's condition would have to be read by the host, which would wait for the step in the middle
    of launching it.
    """
    sampled = rows[rows[:, TEMPERATURE].view(np.float32) > 0]
    if not len(sampled):
        return "greedy"
    truncates = (sampled[:, TOP_K] > 0) | (sampled[:, TOP_P].view(np.float32) < 1)
    return "truncate" if truncates.any() else "sample"


MAX_BIASES = 1024
"""Tokens whose logits one request may bias."""
TOP = 20
"""Likeliest tokens that a step with shaped rows returns of each."""
PROMPT_TOP = 5
"""Likeliest tokens that a step which scores prompts returns at each of their positions."""

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
