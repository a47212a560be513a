"""Levels: thresholds by layer. A table in a model's directory has a row of thresholds for each
level t, under which as many experts are active as under the threshold t in every layer.

`jmoe evaluate --sensitivity` measures what each layer costs and saves, and writes the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jmoe.beside import read_rows, write_rows
from jmoe.brownout import strategy_code
from pallas_kernels.routing import BY_WEIGHT

FILE = "levels.json"


@dataclass(frozen=True)
class Levels:
    """The table of one way: for each level 0 to 100, a threshold of each MoE layer, in percent."""

    way: int
    keep: str
    rows: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        """What tells this table from others."""
        return sha256(repr((self.way, self.keep, self.rows)).encode()).hexdigest()[:16]

    def largest(self, level: int) -> int:
        """Returns the largest threshold of a level: a step needs room for so many experts."""
        return max(self.rows[level])


def by_code(tables: Sequence[Levels], num_layers: int) -> Int[np.ndarray, "layers codes percents"]:
    """Returns what programs read of tables of one way: each layer's threshold by strategy code and
    level; of strategies without a table, the level itself.
    """
    found = np.broadcast_to(np.arange(101, dtype=np.int32), (num_layers, 2 * BY_WEIGHT, 101)).copy()
    for table in tables:
        found[:, strategy_code("partial", table.keep)] = np.array(table.rows, np.int32).T
    return found


def write(path: Path, tables: Sequence[Levels], model_digest: str) -> None:
    """Writes tables of a model; others of the file that belong to it stay, of each way and keep the
    newest.
    """
    rows = [{"way": t.way, "keep": t.keep, "rows": [list(row) for row in t.rows]} for t in tables]
    write_rows(path, rows, model_digest, ("way", "keep"))


def read(directory: Path, num_layers: int, model_digest: str) -> dict[tuple[int, str], Levels]:
    """Returns a model's tables by way and `keep`. Raises ValueError for a file that is missing, not
    what `write` writes, or of another model.
    """
    path = directory / FILE
    raw = read_rows(path, model_digest, "jmoe evaluate --sensitivity")
    try:
        return {
            (table.way, table.keep): table for table in (_checked(each, num_layers) for each in raw)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of levels ({error!r}); write it anew") from None


def _checked(raw: Mapping[str, Any], num_layers: int) -> Levels:
    rows = np.array(raw["rows"])
    if rows.shape != (101, num_layers) or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows are {rows.dtype} {rows.shape}, not integers (101, {num_layers})")
    if rows.min() < 0 or rows.max() > 100 or (np.diff(rows, axis=0) < 0).any():
        raise ValueError("thresholds are between 0 and 100, and grow with the level")
    if rows[100].min() < 100:
        raise ValueError("level 100 degrades nothing")
    strategy_code("partial", raw["keep"])
    return Levels(int(raw["way"]), raw["keep"], tuple(map(tuple, rows.tolist())))
