"""Texts that a model writes itself from a random first token, as data of its distillation: they
reach inputs that a user's texts do not (docs/distillation.md).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmoe.api import Model, load
from jmoe.checkpoint import weights_digest
from jmoe.generate import generate
from training.distill.parallel import is_first, wait_for_all

BATCH = 256  # texts written together


def write_texts(model: Model, out: Path, num: int, *, length: int = 80, seed: int = 0) -> None:
    """Writes `num` texts of up to `length` tokens, at temperature 1, one JSON object a line.

    A text begins with a token drawn evenly from the tokenizer's, end tokens excepted, and ends
    before an end token. The seed and `num` decide them. Raises ValueError for a model without a
    tokenizer and for numbers out of range.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer.json; its texts cannot be written")
    if num < 1 or not 2 <= length <= model.config.max_position:
        raise ValueError(
            f"num is {num} and length {length}; num must be at least 1, and length 2 to "
            f"{model.config.max_position}"
        )
    ends = list(model.config.eos_token_ids)
    size = min(model.config.vocab_size, model.tokenizer.backend.get_vocab_size())
    tokens = np.setdiff1d(np.arange(size), ends)
    first = np.random.default_rng(seed).choice(tokens, num).tolist()
    with out.open("w", encoding="utf-8") as file:
        for at in range(0, num, BATCH):
            prompts = [[token] for token in first[at : at + BATCH]]
            written = generate(model, prompts, length - 1, temperature=1.0, seed=seed + at).tokens
            for prompt, new in zip(prompts, written, strict=True):
                ids = [*prompt, *(token for token in new if token not in ends)]
                row = {"prompt": model.tokenizer.decode(ids)}
                file.write(json.dumps(row) + "\n")


def sampled_texts(
    directory: Path, out: Path, num: int, *, seed: int = 0, allow_unknown_config: Sequence[str] = ()
) -> Path:
    """Returns a file in `out` with `num` texts of a model, whose name says what decided them. It is
    written where it is not there yet: of several processes, by the first one, and all wait for it.

    Raises as `write_texts` does.
    """
    path = out / f"sampled-{num}-{seed}-{weights_digest(directory)[7:15]}.jsonl"
    if is_first() and not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".begun")
        write_texts(
            load(directory, ways=(), allow_unknown_config=allow_unknown_config),
            begun,
            num,
            seed=seed,
        )
        begun.replace(path)
    wait_for_all("texts are written")
    return path
