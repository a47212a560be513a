"""The oracle of greedy answers: logits of whole contexts."""

from collections.abc import Sequence

import jax
import numpy as np

import jmoe
from jmoe.api import Model


def logits_after(
    model: Model, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[jax.Array]:
    """Returns the logits [tokens, V] that each answer's tokens are chosen by, in one forward pass:
    one for each length would be compiled for each.
    """
    width = max(len(prompt) + len(own) - 1 for prompt, own in zip(prompts, answers, strict=True))
    contexts = np.zeros((len(prompts), width), np.int32)
    for row, prompt, own in zip(contexts, prompts, answers, strict=True):
        row[: len(prompt) + len(own) - 1] = [*prompt, *own[:-1]]
    every = jmoe.forward(model, contexts)
    return [
        logits[len(prompt) - 1 :][: len(own)]
        for logits, prompt, own in zip(every, prompts, answers, strict=True)
    ]
