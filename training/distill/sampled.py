"""Texts that a model writes itself from a random first token, as data of its distillation.

`python -m training.distill.sampled --model DIR --num 1000 --out FILE.jsonl` writes a file for
`jmoe distill --data`. They reach inputs that a user's texts do not (docs/distillation.md).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from jmoe.api import Model, load
from jmoe.generate import generate

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


def main() -> None:
    """Writes a file of texts from the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.distill.sampled", description=__doc__)
    parser.add_argument("--model", default="bundled", help="model directory, or bundled")
    parser.add_argument("--num", type=int, default=1000, help="texts")
    parser.add_argument("--length", type=int, default=80, help="tokens of a text, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(args.model, ways=())
    write_texts(model, args.out, args.num, length=args.length, seed=args.seed)


if __name__ == "__main__":
    main()
