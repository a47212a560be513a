"""Training data of a distillation: texts of files, packed into rows of tokens."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from jmoe.config import ModelConfig
from jmoe.tokenizer import Tokenizer
from training.packing import Batch, Encoded, to_arrays


def read_texts(data: Path) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of a data file: JSON lines (`*.jsonl`), else a text a line.

    A plain text has an empty prompt. Raises ValueError for a file that is missing, empty, not
    UTF-8, or malformed, naming the line.
    """
    try:
        lines = data.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read data file {data}: {error}") from None
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if data.suffix != ".jsonl":
            texts.append(("", line))
            continue
        try:
            row = json.loads(line)
            pair = (row["prompt"], row.get("answer", ""))
            if not all(isinstance(part, str) for part in pair):
                raise TypeError("not a string")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{data}, line {number}: expected a JSON object with string `prompt` and optional "
                f"`answer` ({error!r})"
            ) from None
        texts.append(pair if pair[1] else ("", pair[0]))
    if not texts:
        raise ValueError(f"data file {data} holds no text")
    return texts


def pack_files(
    files: Sequence[Path], cfg: ModelConfig, tokenizer: Tokenizer | None, length: int, seed: int
) -> Batch:
    """All texts of `files` in packed rows, in an order drawn from `seed`.

    Raises ValueError for unreadable data, a model without tokenizer, and a tokenizer with ids that
    the model has no embedding for.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer.json; its inputs cannot be made from text")
    if not files:
        raise ValueError("no data file was given; name at least one with --data")
    items: list[Encoded] = []
    for file in files:
        for prompt, answer in read_texts(file):
            items += _pieces(cfg, tokenizer, prompt, answer, length)
    highest = max(max(item.ids) for item in items)
    if highest >= cfg.vocab_size:
        raise ValueError(
            f"the tokenizer makes token {highest}, but the model has {cfg.vocab_size}: it is "
            "another model's tokenizer"
        )
    random.Random(f"distill/{seed}").shuffle(items)
    return to_arrays(_fill(items, length), length)


def _pieces(
    cfg: ModelConfig, tokenizer: Tokenizer, prompt: str, answer: str, length: int
) -> list[Encoded]:
    prompt_ids = tokenizer.encode(prompt) if prompt else []
    ids = [*prompt_ids, *tokenizer.encode(answer), *cfg.eos_token_ids[:1]]
    cuts = range(0, max(1, len(ids) - 1), length)
    pieces = [(ids[at : at + length + 1], len(prompt_ids) - at) for at in cuts]
    return [Encoded(piece, max(1, own), "") for piece, own in pieces if len(piece) > 1]


def _fill(items: list[Encoded], length: int) -> list[list[Encoded]]:
    """Rows filled one after another: an item that does not fit begins the next."""
    rows: list[list[Encoded]] = [[]]
    room = length
    for item in items:
        need = len(item.ids) - 1
        if need > room:
            rows.append([])
            room = length
        rows[-1].append(item)
        room -= need
    return rows


def digest(files: Sequence[Path]) -> str:
    """A hash of the files' contents, in order."""
    out = hashlib.sha256()
    for file in files:
        out.update(hashlib.sha256(file.read_bytes()).digest())
    return out.hexdigest()
