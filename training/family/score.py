"""Which task items a model answers right, quickly: one forward pass over prompt and answer.

Every token of an answer being the likeliest after the right ones before it is the same as greedy
decoding giving that answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from jmoe.api import Model
from jmoe.forward import forward
from training.packing import encode_task
from training.tasks import Task

BATCH, STEP = 128, 16
"""Items of a forward pass, and what lengths are rounded up to: a program for each length."""


@dataclass(frozen=True)
class Items:
    """Task items as token rows, padded behind; `answer` marks tokens that have to be predicted."""

    tokens: Int[np.ndarray, "n S"]
    answer: Bool[np.ndarray, "n S"]
    families: tuple[str, ...]


def encode_items(tokenizer: Tokenizer, tasks: Sequence[Task]) -> Items:
    """Returns the rows of prompt, answer and end of text. Raises ValueError for no tasks."""
    if not tasks:
        raise ValueError("there are no items to score; ask for at least one")
    encoded = [encode_task(tokenizer, task) for task in tasks]
    longest = max(len(item.ids) for item in encoded)
    tokens = np.zeros((len(tasks), longest), np.int32)
    answer = np.zeros((len(tasks), longest), bool)
    for row, item in enumerate(encoded):
        tokens[row, : len(item.ids)] = item.ids
        answer[row, item.num_prompt : len(item.ids)] = True
    return Items(tokens, answer, tuple(task.family for task in tasks))


def right_items(model: Model, items: Items) -> Bool[np.ndarray, "n"]:
    """Returns which items' whole answers, end of text included, are the model's greedy ones."""
    longest = items.tokens.shape[1]
    lengths = longest - items.answer[:, ::-1].argmax(axis=1)
    order = np.argsort(lengths, kind="stable")  # short ones together: less to compute
    found = np.zeros(len(order), bool)
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = -(-int(lengths[rows].max()) // STEP) * STEP
        tokens, answer = np.zeros((BATCH, width), np.int32), np.zeros((BATCH, width), bool)
        known = min(width, longest)
        tokens[: len(rows), :known] = items.tokens[rows, :known]
        answer[: len(rows), :known] = items.answer[rows, :known]
        likeliest = np.asarray(jnp.argmax(forward(model, tokens), axis=-1))
        wrong = (likeliest[:, :-1] != tokens[:, 1:]) & answer[:, 1:]
        found[rows] = ~wrong.any(axis=1)[: len(rows)]
    return found
