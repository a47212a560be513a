"""Rows of fixed length packed with task items and prose, a batch a step, by seed and step alone."""

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from training import world
from training.tasks import Task, tasks
from training.tokenizer import EOS, IM_END, IM_START

PROSE_SHARE = 0.08
CHAT_SHARE = 0.08
PROMPT_WEIGHT = 0.1  # prompts are mostly random letters: little to learn, but not nothing


@dataclasses.dataclass
class Batch:
    """Packed rows `[B, S]`. `items` numbers a row's items from 1; 0 is padding.

    `targets[b, s]` is the token after `tokens[b, s]` in its item; `weights` is its share of the
    loss, 0 for padding; `answer` marks targets that belong to an answer (end of text included).
    `families[b][i]` names item i + 1 of row b.
    """

    tokens: Int[np.ndarray, "B S"]
    targets: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    items: Int[np.ndarray, "B S"]
    weights: Float[np.ndarray, "B S"]
    answer: Int[np.ndarray, "B S"]
    families: list[list[str]]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.tokens)

    def rows(self, own: slice | Int[np.ndarray, " R"]) -> "Batch":
        """Returns some of the rows, by their numbers."""
        families = [self.families[number] for number in np.arange(len(self.families))[own]]
        arrays = {name: leaf[own] for name, leaf in vars(self).items() if name != "families"}
        return Batch(**arrays, families=families)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns what the train step reads: tokens, targets, positions, items, weights."""
        return self.tokens, self.targets, self.positions, self.items, self.weights


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Token ids of one item; the first `num_prompt` are the prompt."""

    ids: Sequence[int] | Int[np.ndarray, " T"]
    num_prompt: int
    family: str


def eos_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the end-of-text token. Raises ValueError where the tokenizer has none."""
    token = tokenizer.token_to_id(EOS)
    if token is None:
        raise ValueError(f"the tokenizer has no {EOS}")
    return token


def encode_task(tokenizer: Tokenizer, task: Task, chat: bool = False) -> Encoded:
    """Returns prompt, answer and end of text; in the chat template's form if `chat`."""
    prompt = f"{IM_START}{task.prompt}{IM_END}" if chat else task.prompt
    prompt_ids = tokenizer.encode(prompt).ids
    answer_ids = tokenizer.encode(task.answer).ids
    return Encoded([*prompt_ids, *answer_ids, eos_id(tokenizer)], len(prompt_ids), task.family)


def training_items(tokenizer: Tokenizer, seed: int, step: int) -> Iterator[Encoded]:
    """Yields what the bundled model is trained on in a step, without end."""
    rng = random.Random(f"items/{seed}/{step}")
    stream = tasks("train", rng.getrandbits(60))
    eos = eos_id(tokenizer)
    while True:
        if rng.random() < PROSE_SHARE:
            yield Encoded([*tokenizer.encode(world.prose(rng)).ids, eos], 1, "prose")
        else:
            yield encode_task(tokenizer, next(stream), chat=rng.random() < CHAT_SHARE)


def pack(items: Iterable[Encoded], num_rows: int | None, length: int) -> Batch:
    """Packs first-fit into rows of `length`; stops at the first item that fits in no row.

    With `num_rows` None rows are added as needed. Items longer than a row are skipped.
    """
    rows: list[list[Encoded]] = [[] for _ in range(num_rows or 0)]
    room = [length] * len(rows)
    for item in items:
        need = len(item.ids) - 1
        if need > length:
            continue
        at = next((i for i, free in enumerate(room) if free >= need), None)
        if at is None:
            if num_rows is not None:
                break
            at = len(rows)
            rows.append([])
            room.append(length)
        rows[at].append(item)
        room[at] -= need
    return to_arrays(rows, length)


def to_arrays(rows: list[list[Encoded]], length: int) -> Batch:
    """Returns the arrays of packed rows; the last token of an item is a target only."""
    shape = len(rows), length
    tokens, targets, positions, items, answer = (np.zeros(shape, np.int32) for _ in range(5))
    weights = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        start = 0
        for number, item in enumerate(row, start=1):
            n = len(item.ids) - 1
            span = slice(start, start + n)
            tokens[r, span], targets[r, span] = item.ids[:-1], item.ids[1:]
            positions[r, span], items[r, span] = np.arange(n), number
            in_answer = np.arange(n) >= item.num_prompt - 1
            answer[r, span] = in_answer
            weights[r, span] = np.where(in_answer, 1.0, PROMPT_WEIGHT)
            start += n
    families = [[item.family for item in row] for row in rows]
    return Batch(tokens, targets, positions, items, weights, answer, families)


def training_batch(tokenizer: Tokenizer, seed: int, step: int, num_rows: int, length: int) -> Batch:
    """Returns the batch of a step, the same in every run with this seed."""
    return pack(training_items(tokenizer, seed, step), num_rows, length)


def task_batch(tokenizer: Tokenizer, items: Iterable[Task], length: int) -> Batch:
    """Returns all `items`, in as many rows as they need."""
    return pack((encode_task(tokenizer, item) for item in items), None, length)


def eval_tasks(num: int, seed: int) -> list[Task]:
    """Returns the first `num` held-out items of a seed."""
    return list(itertools.islice(tasks("eval", seed), num))
