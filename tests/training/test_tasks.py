"""Task answers against solvers written from the prompt text alone."""

import itertools
import json
import re
import subprocess
import sys

import pytest

from training import world
from training.tasks import FAMILIES, make_task, tasks


def parse_list(prompt):
    return re.fullmatch(r"[^:]*: (.*) =", prompt).group(1).split(" ")


def solve_fact(prompt):
    attribute, name = re.fullmatch(
        r"Question: what is the (\w+) of (\w+)\? Answer:", prompt
    ).groups()
    (country,) = (c for c in world.countries() if c.name == name)
    return " " + getattr(country, attribute)


def solve_translate(prompt):
    return "".join(" " + world.lexicon()[word] for word in parse_list(prompt))


def solve_add(prompt):
    (sums,) = parse_list(prompt)
    return " " + ";".join(f"{s}={sum(map(int, s.split('+')))}" for s in sums.split(";"))


def solve_sort(prompt):
    left, out = parse_list(prompt), []
    while left:
        least = left[0]
        for letter in left:
            least = letter if letter < least else least
        left.remove(least)
        out.append(least)
    return " " + " ".join(out)


def solve_reverse(prompt):
    return " " + " ".join(parse_list(prompt)[::-1])


def solve_shift(prompt):
    step = int(re.match(r"Move these letters by (\d):", prompt).group(1))
    ring = "abcdefghijklmnopqrstuvwxyz" * 2
    return " " + " ".join(ring[ring.index(letter) + step] for letter in parse_list(prompt))


def solve_recall(prompt):
    pairs, asked = re.fullmatch(r"Look at these pairs: (.*); now recall (.*) =", prompt).groups()
    assert len({pair[0] for pair in pairs.split()}) == len(pairs.split())
    return "".join(
        " " + next(pair for pair in pairs.split() if pair[0] == key) for key in asked.split()
    )


def solve_spell(prompt):
    return " " + " ".join(" ".join(word) + "." for word in parse_list(prompt))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_are_right(split):
    seen = set()
    for task in itertools.islice(tasks(split, seed=5), 1500):
        assert globals()[f"solve_{task.family}"](task.prompt) == task.answer
        seen.add(task.family)
    assert seen == set(FAMILIES)


def pairs_of(task):
    return {task.prompt} if task.family != "add" else set(re.findall(r"\d+\+\d+", task.prompt))


def test_eval_items_never_appear_in_training():
    held_out, trained = set(), set()
    for split, into in (("eval", held_out), ("train", trained)):
        for task in itertools.islice(tasks(split, seed=0), 4000):
            if task.family != "fact":
                into.update(pairs_of(task))
    assert not held_out & trained


def test_every_train_sum_differs_from_every_eval_sum():
    import random

    splits = {"train": set(), "eval": set()}
    for split, seen in splits.items():
        rng = random.Random(3)
        for _ in range(1500):
            seen |= pairs_of(make_task("add", split, rng))
    assert not splits["train"] & splits["eval"]


def test_a_seed_gives_the_same_items_and_another_seed_others():
    def first(seed):
        return list(itertools.islice(tasks("eval", seed), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_facts_and_lexicon_are_unambiguous():
    assert len({c.name for c in world.countries()}) == world.NUM_COUNTRIES
    assert len(set(world.lexicon().values())) == len(world.LEXICON_WORDS)


def test_command_writes_json_lines(tmp_path):
    out = tmp_path / "items.jsonl"
    command = [sys.executable, "-m", "training.tasks", "--num", "40", "--seed", "1", "--out"]
    subprocess.run([*command, str(out)], check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 40
    assert all(set(row) == {"family", "prompt", "answer"} for row in rows)
