"""Texts that a model writes itself from a random first token, as data of its distillation: they
reach inputs that a user's texts do not (docs/distillation.md).

They are prompts without an answer: what is learned of a token of theirs counts as little as of one
of a prompt, or they would be most of the loss.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jmoe.api import Model, load
from jmoe.checkpoint import config_of, weights_digest
from jmoe.generate import generate
from training.distill.config import DistillConfig
from training.distill.data import check_trains
from training.distill.parallel import is_first
from training.distill.room import Room
from training.distill.sizes import model_parameters
from training.distill.store import read_began
from training.distill.stream import layers_dtype
from training.progress import Progress

BATCH = 256  # texts written together
LENGTH = 80  # tokens of one at most
SAMPLED = 10_000
BESIDE = 1.25
"""How much a model takes as it writes, over its weights."""


def with_num_texts(
    config: DistillConfig, directory: Path, room: Room, allow_unknown_config: Sequence[str] = ()
) -> DistillConfig:
    """Returns the settings with the number of texts that the model is to write: by default
    `SAMPLED` where one device holds it whole, else none. Process 0 decides for all.
    """
    if config.sampled is not None:
        return config
    cfg = config_of(directory, allow_unknown_config=allow_unknown_config)
    size = jnp.dtype(layers_dtype(config.dtype, room.platform)).itemsize
    wanted = BESIDE * size * sum(model_parameters(cfg))
    free = room.host if room.platform == "cpu" else room.device
    found = SAMPLED if free is None or wanted <= free else 0
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return dataclasses.replace(config, sampled=found)


def as_begun(config: DistillConfig, out: Path) -> DistillConfig:
    """Returns the settings with the number of texts that a run in `out` was begun with, where none
    is given: the default depends on the memory that is free. Raises as `read_began`.
    """
    began = read_began(out) if config.sampled is None else None
    if began is None:
        return config
    return dataclasses.replace(config, sampled=began.get("settings", {}).get("sampled", 0))


def write_texts(
    model: Model,
    out: Path,
    num: int,
    *,
    length: int = LENGTH,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Writes `num` texts of up to `length` tokens, at temperature 1, one JSON object a line, as
    token ids: read again, a text could have others.

    A text begins with a token drawn evenly from the tokenizer's, end tokens excepted, and ends
    before an end token. The seed and `num` decide them; `progress` is told how many there are.
    Raises ValueError for a model without a tokenizer and for numbers out of range.
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
                ids = [*prompt, *(int(token) for token in new if token not in ends)]
                file.write(json.dumps({"prompt_token_ids": ids, "token_ids": []}) + "\n")
            progress(min(at + BATCH, num))


def sampled_texts(
    directory: Path,
    out: Path,
    config: DistillConfig,
    allow_unknown_config: Sequence[str] = (),
    progress: Progress = lambda *args: None,
    *,
    need: bool = True,
) -> list[Path]:
    """Returns the file in `out` with the texts of a model, whose name says what decided them; none
    where it is to write none, or memory runs out over it and `need` is False. It is written where
    it is not there yet: of several processes, by the first one, and all wait for it.

    Raises as `write_texts` does, and ValueError for a model that cannot be trained.
    """
    if not (num := config.sampled):
        return []
    path = out / f"own-texts-{num}-{config.seed}-{weights_digest(directory)[7:15]}.jsonl"
    is_there = True
    if is_first() and not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".begun")
        dtype = layers_dtype(config.dtype)

        def wrote(done: int) -> None:
            progress("texts of its own", done, num, "")

        try:
            model = load(directory, dtype, ways=(), allow_unknown_config=allow_unknown_config)
            check_trains(model.config, config.length)
            length = min(LENGTH, model.config.max_position)
            write_texts(model, begun, num, length=length, seed=config.seed, progress=wrote)
            begun.replace(path)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if need or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
                raise
            begun.unlink(missing_ok=True)
            is_there = False
    return [path] if multihost_utils.broadcast_one_to_all(np.int32(is_there)) else []
