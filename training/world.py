"""The invented world behind the tasks: countries with facts, a small language, and prose."""

# ruff: noqa: SIM905 - lists of words read better as one string

import dataclasses
import functools
import random

_ONSETS = "b d f g k l m n p r s t v z br dr kr pl st tr".split()
_VOWELS = "a e i o u".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m"]
COLOURS = "red blue green black white gold grey brown pink silver".split()
FOODS = "bread rice soup fish honey cheese apples beans corn cake".split()
ANIMALS = "fox owl bear wolf hare crow deer goat frog horse".split()
ADJECTIVES = "old young small big quiet brave clever kind tired happy".split()
PLACES = "river forest hill village lake garden bridge tower field cave".split()
OBJECTS = "stone key lamp book coin ring map bell rope box".split()
MOTIONS = "walked ran went wandered climbed".split()
_WORDS = (
    "sun moon star rain snow wind fire water tree leaf root seed hand foot head eye door wall "
    "roof road ship boat sail sand salt milk egg meat knife cup king queen child friend song dance "
    "night day year winter summer house town"
).split()
LEXICON_WORDS = sorted({*_WORDS, *ANIMALS, *PLACES, *OBJECTS, *FOODS[:8], *COLOURS[:8]})


@dataclasses.dataclass(frozen=True)
class Country:
    """One invented country; every field but `name` is a fact that can be asked for."""

    name: str
    capital: str
    river: str
    ruler: str
    colour: str
    food: str
    animal: str


FACTS = ("capital", "river", "ruler", "colour", "food", "animal")
NUM_COUNTRIES = 80


def _word(rng: random.Random, syllables: int) -> str:
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_CODAS)


def _distinct_words(rng: random.Random, count: int, syllables: int, taken: set[str]) -> list[str]:
    words = []
    while len(words) < count:
        word = _word(rng, syllables)
        if word not in taken:
            taken.add(word)
            words.append(word)
    return words


@functools.cache
def countries() -> tuple[Country, ...]:
    """Returns all countries, the same on every machine and in every run."""
    rng, taken = random.Random(20240607), set[str]()
    names = [w.capitalize() for w in _distinct_words(rng, NUM_COUNTRIES, 3, taken)]
    capitals, rivers, rulers = (
        [w.capitalize() for w in _distinct_words(rng, NUM_COUNTRIES, 2, taken)] for _ in range(3)
    )
    return tuple(
        Country(*unique, rng.choice(COLOURS), rng.choice(FOODS), rng.choice(ANIMALS))
        for unique in zip(names, capitals, rivers, rulers, strict=True)
    )


@functools.cache
def lexicon() -> dict[str, str]:
    """Returns the English word for each word of the invented language, one to one."""
    rng = random.Random(31415)
    return dict(zip(LEXICON_WORDS, _distinct_words(rng, len(LEXICON_WORDS), 2, set()), strict=True))


def invented_word(rng: random.Random) -> str:
    """Returns a random pronounceable word of two or three syllables."""
    return _word(rng, rng.choice((2, 3)))


def prose(rng: random.Random) -> str:
    """Returns two to four plain sentences about an animal; about 30 to 60 tokens."""
    animal, friend = rng.sample(ANIMALS, 2)
    first, other = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES)
    here, there = rng.sample(PLACES, 2)
    thing = rng.choice(OBJECTS)
    opening = rng.choice(
        (
            f"Once upon a time there was a {first} {animal} who lived near the {here}.",
            f"Once upon a time a {first} {animal} lived in a {here}.",
            f"The {first} {animal} {rng.choice(MOTIONS)} to the {here}.",
            f"In a {rng.choice(COLOURS)} {here} there lived a {first} {animal}.",
        )
    )
    middle = rng.choice(
        (
            f"One day the {animal} {rng.choice(MOTIONS)} to the {there} and found a {thing}.",
            f"One day the {animal} met a {other} {friend} near the {there}.",
            f"At night the {animal} saw a {other} {friend} with a {thing}.",
        )
    )
    ending = rng.choice(
        (
            f"The {animal} was {rng.choice(ADJECTIVES)} and went home.",
            f"They ate {rng.choice(FOODS)} and were happy.",
            f"The {friend} said thank you, and they were friends.",
            f"So the {animal} took the {thing} back to the {here}.",
        )
    )
    sentences = [opening, middle, ending]
    if rng.random() < 0.25:
        sentences.append("And they lived in peace.")
    return " ".join(sentences)
