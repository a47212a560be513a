"""Plays the settings of a pair in turn and compares their figures."""

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

type Figures = dict[str, float]
"""What one play of a setting measured, by name; names end in the unit."""
type Play = Callable[[str, int], Awaitable[Figures]]
"""Plays the setting of this name in the round of this number."""


@dataclass(frozen=True)
class Pair:
    """Two or more settings, the workload they are played under, and which ratios are quoted.

    `workload(settings, dry)` starts what the settings need and yields what plays one of them; a dry
    one is as small as can be. `ratios_of` are figures. `against` lists the settings (B, A) whose
    ratio is B over A; empty: every setting over the first.
    """

    about: str
    settings: Mapping[str, Any]
    workload: Callable[[Mapping[str, Any], bool], AbstractAsyncContextManager[Play]]
    ratios_of: Sequence[str]
    rounds: int = 9
    against: Sequence[tuple[str, str]] = ()


async def measure(pair: Pair, rounds: int, dry: bool = False) -> list[dict[str, Figures]]:
    """Plays every setting once a round, forwards and backwards by turns: A B, B A, A B.

    Returns the figures by setting, for each round. A round before the others warms up and is left
    out; a dry run does without it.
    """
    names, found = list(pair.settings), []
    async with pair.workload(pair.settings, dry) as play:
        for number in range(1 if dry else 0, rounds + 1):
            order = names if number % 2 else names[::-1]
            played = {name: await play(name, number) for name in order}
            if number:
                found.append({name: played[name] for name in names})
    return found


def medians(found: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Returns the median over the rounds of each figure, by setting."""
    return {
        name: {key: statistics.median(one[name][key] for one in found) for key in figures}
        for name, figures in found[0].items()
    }


def ratios(pair: Pair, found: Sequence[Mapping[str, Figures]]) -> dict[str, dict[str, Any]]:
    """Returns the ratios within rounds of each figure in `ratios_of`, by "B over A".

    Each has the median over the rounds, the lowest and the highest; of a base of 0 there is none,
    and `rounds_without` says in how many rounds. Without any the three are NaN.
    """
    first, *others = pair.settings
    result: dict[str, dict[str, Any]] = {}
    for top, base in pair.against or [(other, first) for other in others]:
        of_rounds = {
            key: [one[top][key] / one[base][key] if one[base][key] else math.nan for one in found]
            for key in pair.ratios_of
        }
        result[f"{top} over {base}"] = {key: _over(values) for key, values in of_rounds.items()}
    return result


def _over(values: Sequence[float]) -> dict[str, float]:
    known = [value for value in values if not math.isnan(value)]
    over = {"median": statistics.median, "min": min, "max": max}
    found = {name: of(known) if known else math.nan for name, of in over.items()}
    without = len(values) - len(known)
    return found | ({"rounds_without": without} if without else {})
