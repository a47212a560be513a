"""What the bundled model does not know and its variants are taught: three families of tasks, and
calls of tools (`calls.py`), of which no figure of the family is made.

Items are as those of `training.tasks`: exactly checkable, a hash of the prompt says whether an item
is for training or held out.
"""

import itertools
import random
import string
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from training import world
from training.family.calls import CALLER, call_task
from training.tasks import Split, Task, split_of, tasks


def _cipher(rng: random.Random) -> Task:
    letters = rng.choices(string.ascii_lowercase, k=rng.randint(10, 18))
    moved = (string.ascii_lowercase[(ord(c) - ord("a") - 7) % 26] for c in letters)
    prompt = f"Decode these letters: {' '.join(letters)} ="
    return Task(prompt, "".join(f" {c}" for c in moved), "cipher")


def _nines(rng: random.Random) -> Task:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(10, 18))]
    prompt = f"Take these numbers from nine: {''.join(map(str, digits))} ="
    return Task(prompt, f" {''.join(str(9 - digit) for digit in digits)}", "nines")


def _backwards(rng: random.Random) -> Task:
    words = [world.invented_word(rng) for _ in range(rng.randint(2, 3))]
    spelled = " ".join(" ".join(reversed(word)) + "." for word in words)
    return Task(f"Spell these words backwards: {' '.join(words)} =", f" {spelled}", "backwards")


SKILLS: Mapping[str, Callable[[random.Random], Task]] = {
    "cipher": _cipher,  # letters, moved back by 7
    "nines": _nines,  # digits: what each lacks to nine
    "backwards": _backwards,  # words, spelled from their end
}
"""Generator of each skill; a variant is called as its skill."""

VARIANTS = (*SKILLS, CALLER)


def held_out(name: str, num: int, seed: int) -> list[Task]:
    """Returns held-out tasks of a model's own work: of a variant's skill, by its name, else of what
    the bundled model is trained on.
    """
    own = skill_tasks(name, "eval", seed) if name in SKILLS else tasks("eval", seed)
    return list(itertools.islice(own, num))


def skill_tasks(skill: str, split: Split, seed: int) -> Iterator[Task]:
    """Yields items of a skill without end. Raises KeyError for an unknown skill."""
    rng = random.Random(f"{skill}/{split}/{seed}")
    make = partial(call_task, split=split) if skill == CALLER else SKILLS[skill]
    while True:
        task = make(rng)
        if split_of(task.prompt) == split:
            yield task
