"""What is evaluated: task items, text, and the brownout settings of a run."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jmoe.brownout import Brownout, OwnStrategy
from training.tasks import Task, tasks

WAYS = (2, 4, 8)
THRESHOLDS = tuple(range(100, -1, -10))
STRATEGIES = ("partial", "full")
ZERO = Brownout("zero")


def read_tasks(path: Path) -> list[Task]:
    """Reads the items of a JSON lines file: `prompt`, `answer`, and `family` (absent: the file's
    name).

    Raises ValueError for a file that cannot be read or holds no item, naming the first bad line.
    """
    items = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            items.append(_task(json.loads(line), path.stem))
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(
                f"{path}, line {number} is not a task ({error}); write "
                '{"prompt": "...", "answer": "...", "family": "..."}'
            ) from None
    if not items:
        raise ValueError(f"{path} holds no task; write one JSON object a line")
    return items


def _task(row: Any, family: str) -> Task:
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    found = {"family": family, **row}
    for key in Task._fields:
        if not isinstance(found.get(key), str) or not found[key].strip():
            raise ValueError(f"{key} is {found.get(key)!r}, not a string with text in it")
    return Task(**{key: found[key] for key in Task._fields})


def read_text(path: Path) -> str:
    """Returns a text file. Raises ValueError for one that cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}; name a text file in UTF-8") from None


def choose(data: Path | None, num: int | None, generate: int | None, seed: int) -> list[Task]:
    """Returns the items of a run, in an order drawn by `seed`: batches are then random.

    Args:
        data: task file; its first `num` items, or all.
        num: items wanted of `data`.
        generate: makes so many fresh held-out items instead; the other two are None then.
        seed: of the order, and of fresh items.

    Raises ValueError for numbers out of range, more items than there are, or both sources.
    """
    if (data is None) == (generate is None):
        raise ValueError("give either --data FILE or --generate-tasks N")
    if data is None:
        if num is not None:
            raise ValueError(f"num is {num} beside --generate-tasks {generate}; give one of them")
        if generate is None or generate < 1:
            raise ValueError(f"--generate-tasks is {generate}; it must be at least 1")
        return list(itertools.islice(tasks("eval", seed), generate))  # drawn at random as it is
    items = read_tasks(data)
    if num is not None and num < 1:
        raise ValueError(f"num is {num}; it must be at least 1")
    if num is not None and num > len(items):
        raise ValueError(
            f"num is {num}, but {data} holds {len(items)} items; lower --num, or make fresh ones "
            f"with --generate-tasks {num}"
        )
    items = items[:num]
    random.Random(seed).shuffle(items)
    return items


def grid(
    ways: Sequence[int] = WAYS,
    thresholds: Sequence[int] = THRESHOLDS,
    strategies: Sequence[str | OwnStrategy] = STRATEGIES,
    keeps: Sequence[str] = ("visits",),
) -> list[Brownout]:
    """Returns every threshold of partial brownout by each way, then of full brownout; all that for
    each of `keeps`. Then, by each way, those of users' own strategies.

    Raises ValueError for a list that is empty or repeats itself, or a value out of range.
    """
    lists = {"ways": ways, "thresholds": thresholds, "strategies": strategies, "keep": keeps}
    for name, values in lists.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} are {list(values)}; give at least one, each once")
    own = [strategy for strategy in strategies if callable(strategy)]
    for strategy in strategies:
        if strategy not in STRATEGIES and not callable(strategy):
            raise ValueError(
                f"strategy is {strategy!r}; give partial or full (zero brownout is always run), or "
                "module:Class of your own"
            )
    kinds = [("partial", way) for way in ways if "partial" in strategies]
    kinds += [("full", None)] if "full" in strategies else []
    found = [
        _setting(kind, t, way, keep) for keep in keeps for kind, way in kinds for t in thresholds
    ]
    return found + [
        _setting(kind, t, way, "visits") for kind in own for way in ways for t in thresholds
    ]


def _setting(strategy: Any, threshold: int, way: int | None, keep: Any) -> Brownout:
    if way is not None and way < 2:
        raise ValueError(f"way is {way}; a united expert stands for at least 2")
    return Brownout(strategy, threshold, way, keep)


def with_levels(settings: Sequence[Brownout]) -> list[Brownout]:
    """Returns the same settings with thresholds that are levels. Raises ValueError for one that has
    none, such as full brownout.
    """
    return [replace(setting, levels=True) for setting in settings]


def parse_only(text: str, keeps: Sequence[str] = ("visits",)) -> list[Brownout]:
    """Returns settings such as `2:0,4:20,full:40`, way (or `full`) and threshold in percent, for
    each of `keeps`.

    Raises ValueError naming the part that is no such pair, out of range, or given twice.
    """
    found: list[Brownout] = []
    for part in text.split(","):
        kind, _, threshold = part.strip().partition(":")
        if not threshold.isdecimal() or not (kind == "full" or kind.isdecimal()):
            raise ValueError(f"{part!r} of {text!r} is not WAY:PERCENT or full:PERCENT")
        way = None if kind == "full" else int(kind)
        strategy = "full" if way is None else "partial"
        settings = [_setting(strategy, int(threshold), way, keep) for keep in keeps]
        if settings[0] in found:
            raise ValueError(f"{part!r} is twice in {text!r}")
        found += settings
    return found


def integers(name: str, text: str) -> list[int]:
    """Parses integers separated by commas. Raises ValueError naming the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} is {text!r}; it must be integers with commas") from None


def kind_of(setting: Brownout) -> str:
    """Returns the name of a setting's column: `full`, `zero`, `way 4`, `way 4 by weight`, or
    `module:Class way 4`.
    """
    name = setting.name if setting.way is None else f"way {setting.way}"
    name = name if setting.own is None else f"{setting.name} {name}"
    name = name if setting.keep == "visits" else f"{name} by {setting.keep}"
    return f"{name} in levels" if setting.levels else name
