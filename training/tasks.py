"""Self-generated tasks with exactly checkable answers.

`python -m training.tasks --split eval --num 4000 --seed 1 --out FILE.jsonl` writes JSON lines
`{"prompt", "answer", "family"}`. An answer is the whole completion after the prompt, leading space
included; it is right when it equals the generated text up to the end-of-text token.

Train and eval items are disjoint by a hash of their content, facts excepted: a fact can only be
known from training, so its eval items are the facts themselves.
"""

import argparse
import itertools
import json
import random
import string
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from training import world

Split = Literal["train", "eval"]


class Task(NamedTuple):
    """A prompt, its one right completion, and the family it belongs to."""

    prompt: str
    answer: str
    family: str


def split_of(content: str) -> Split:
    """Returns the split of an item: one in ten is held out."""
    return "eval" if zlib.crc32(content.encode()) % 10 == 0 else "train"


def _letters(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.choices(string.ascii_lowercase, k=rng.randint(low, high))


def _fact(rng: random.Random, split: Split) -> Task:
    country = rng.choice(world.countries())
    attribute = rng.choice(world.FACTS)
    prompt = f"Question: what is the {attribute} of {country.name}? Answer:"
    return Task(prompt, f" {getattr(country, attribute)}", "fact")


def _translate(rng: random.Random, split: Split) -> Task:
    lexicon = world.lexicon()
    words = rng.sample(world.LEXICON_WORDS, rng.randint(5, 10))
    prompt = f"Translate these words: {' '.join(words)} ="
    return Task(prompt, "".join(f" {lexicon[w]}" for w in words), "translate")


def _add(rng: random.Random, split: Split) -> Task:
    pairs: list[tuple[int, int]] = []
    wanted = rng.randint(3, 6)
    while len(pairs) < wanted:
        pair = (rng.randint(10, 99), rng.randint(10, 99))
        if split_of(f"add {pair}") == split:
            pairs.append(pair)
    sums = ";".join(f"{a}+{b}" for a, b in pairs)
    # Echoing the sum keeps its digits near, which a small model needs.
    prompt = f"Add these numbers: {sums} ="
    return Task(prompt, " " + ";".join(f"{a}+{b}={a + b}" for a, b in pairs), "add")


def _sort(rng: random.Random, split: Split) -> Task:
    letters = _letters(rng, 12, 22)
    prompt = f"Sort these letters: {' '.join(letters)} ="
    return Task(prompt, "".join(f" {c}" for c in sorted(letters)), "sort")


def _reverse(rng: random.Random, split: Split) -> Task:
    letters = _letters(rng, 12, 22)
    prompt = f"Write these letters in reverse: {' '.join(letters)} ="
    return Task(prompt, "".join(f" {c}" for c in reversed(letters)), "reverse")


def _shift(rng: random.Random, split: Split) -> Task:
    letters = _letters(rng, 12, 24)
    step = rng.randint(1, 5)
    moved = (string.ascii_lowercase[(ord(c) - ord("a") + step) % 26] for c in letters)
    prompt = f"Move these letters by {step}: {' '.join(letters)} ="
    return Task(prompt, "".join(f" {c}" for c in moved), "shift")


def _recall(rng: random.Random, split: Split) -> Task:
    keys = rng.sample(string.ascii_lowercase, rng.randint(8, 12))
    value = {key: rng.choice(string.digits) for key in keys}
    asked = rng.sample(keys, rng.randint(6, 10 if len(keys) > 9 else 8))
    pairs = " ".join(f"{k}{v}" for k, v in value.items())
    prompt = f"Look at these pairs: {pairs}; now recall {' '.join(asked)} ="
    return Task(prompt, "".join(f" {k}{value[k]}" for k in asked), "recall")


def _spell(rng: random.Random, split: Split) -> Task:
    words = [world.invented_word(rng) for _ in range(rng.randint(2, 4))]
    spelled = " ".join(" ".join(word) + "." for word in words)
    return Task(f"Spell these words: {' '.join(words)} =", f" {spelled}", "spell")


FAMILIES: dict[str, tuple[Callable[[random.Random, Split], Task], float]] = {
    "fact": (_fact, 0.14),
    "translate": (_translate, 0.16),
    "add": (_add, 0.12),
    "sort": (_sort, 0.10),
    "reverse": (_reverse, 0.12),
    "shift": (_shift, 0.14),
    "recall": (_recall, 0.12),
    "spell": (_spell, 0.10),
}
"""Generator of each family and its share of the mix."""

_HASHED = frozenset(FAMILIES) - {"fact", "add"}  # add splits by pair of summands


def make_task(family: str, split: Split, rng: random.Random) -> Task:
    """Returns a random item of `family` that belongs to `split`. Raises KeyError for an unknown
    family.
    """
    generate = FAMILIES[family][0]
    while True:
        task = generate(rng, split)
        if family not in _HASHED or split_of(task.prompt) == split:
            return task


def tasks(split: Split, seed: int) -> Iterator[Task]:
    """Yields items without end, in the families' shares."""
    rng = random.Random(f"{split}/{seed}")
    names = list(FAMILIES)
    shares = [FAMILIES[name][1] for name in names]
    while True:
        yield make_task(rng.choices(names, shares)[0], split, rng)


def write_jsonl(path: Path, split: Split, num: int, seed: int) -> None:
    """Writes the first `num` items of a seed."""
    write_items(path, itertools.islice(tasks(split, seed), num))


def write_items(path: Path, items: Iterable[Task]) -> None:
    """Writes items, one JSON object a line."""
    lines = (json.dumps(item._asdict(), ensure_ascii=False) + "\n" for item in items)
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Writes a JSONL file of tasks from the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.tasks", description=__doc__)
    parser.add_argument("--split", choices=["train", "eval"], default="eval")
    parser.add_argument("--num", type=int, default=2000, help="items")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.num < 1:
        parser.error(f"--num is {args.num}; it must be at least 1")
    write_jsonl(args.out, args.split, args.num, args.seed)


if __name__ == "__main__":
    main()
