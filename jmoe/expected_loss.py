"""Expected loss: what brownout costs a token, measured before it is served.

A table in a model's directory, or of each model of a family beside its map of shared experts, has
the **excess** (nats a token: the log-probability of an answer's token as it was drawn, above that
under the exact model) of answers under some thresholds, with its 95 % interval. `jmoe evaluate`
measures it, and writes the table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmoe.beside import read_rows, write_rows
from jmoe.brownout import Brownout, strategy_code

FILE = "expected_loss.json"


class Kind(NamedTuple):
    """What a threshold is of: its meaning, and so its cost, differ by kind."""

    way: int  # 0: full brownout, which drops visits
    keep: str
    levels: bool = False  # thresholds are levels (`jmoe.levels`)

    @classmethod
    def of(cls, setting: Brownout) -> "Kind":
        """Returns the kind of a setting."""
        return cls(setting.way or 0, setting.keep, setting.levels)

    def __str__(self) -> str:
        name = f"way {self.way}" if self.way else "full brownout"
        return f"{name} by {self.keep}{' in levels' if self.levels else ''}"


class Point(NamedTuple):
    """The excess of answers under one threshold, in nats a token, and its 95 % interval."""

    threshold_percent: int
    excess: float
    low: float
    high: float


@dataclass(frozen=True)
class ExpectedLoss:
    """What was measured of one kind, by falling threshold, of which the last is 0."""

    kind: Kind
    points: tuple[Point, ...]

    def curve(self) -> tuple[float, ...]:
        """Returns the expected loss under each threshold 0 to 100, in nats a token: linear between
        those that were measured, 0 at 100, and never less than under a higher threshold.
        """
        points = [Point(100, 0.0, 0.0, 0.0), *self.points][::-1]
        at, excess = [p.threshold_percent for p in points], [p.excess for p in points]
        linear = np.maximum(np.interp(np.arange(101), at, excess), 0)
        return tuple(np.maximum.accumulate(linear[::-1])[::-1].tolist())


def file_of(name: str) -> str:
    """Returns the name of the file, beside `family.json`, of a family's model that was measured
    under this name.
    """
    return f"expected_loss.{name.replace('/', '-')}.json"


def write(path: Path, tables: Sequence[ExpectedLoss], model_digest: str) -> None:
    """Writes tables of a model; others of the file that belong to it stay, of each kind the
    newest.
    """
    rows = [table.kind._asdict() | {"points": list(map(list, table.points))} for table in tables]
    write_rows(path, rows, model_digest, Kind._fields)


def read(path: Path, model_digest: str) -> dict[Kind, ExpectedLoss]:
    """Returns a model's tables by kind. Raises ValueError for a file that is missing, not what
    `write` writes, or of another model.
    """
    of_family = "" if path.name == FILE else " --family"
    rows = read_rows(path, model_digest, f"jmoe evaluate{of_family}")
    try:
        tables = [_checked(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of expected loss ({error!r}); write it anew"
        ) from None
    return {table.kind: table for table in tables}


def _checked(row: Mapping[str, Any]) -> ExpectedLoss:
    kind = Kind(*(row[name] for name in Kind._fields))
    strategy_code("partial", kind.keep)
    points = tuple(Point(*point) for point in row["points"])
    at = [point.threshold_percent for point in points]
    if at != sorted({*at}, reverse=True) or not at or at[-1] != 0 or at[0] >= 100:
        raise ValueError(f"{kind} has thresholds {at}; they fall from below 100 to 0")
    if not all(math.isfinite(value) for point in points for value in point[:2]):
        raise ValueError(f"{kind} has a value that is no number")
    return ExpectedLoss(kind, points)
