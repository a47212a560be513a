"""A benchmark's command: shared options, the clock, and one case from a stored start to its record.

No jax here: a benchmark whose figures come from other processes must not hold the GPU's memory.
"""

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.store import Store, rounded

STARTED = "it was started, and no more is known"  # a kernel may hang, a process may be killed
CALL_AGAIN = "cases left, and no time for them; call again"


def parser(prog: str, about: str) -> argparse.ArgumentParser:
    """Returns the options that every benchmark has."""
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=about, formatter_class=words)
    parser.add_argument("--match", default="", help="part of a case's name")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="be done within it")
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/<device>")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: tests this program")
    parser.add_argument("--list", action="store_true", help="print cases, run nothing")
    return parser


def add_choices(parser: argparse.ArgumentParser, flag: str, known: Sequence[str]) -> None:
    """Adds an option that takes some of `known`, separated by commas; all where it is absent."""

    def chosen(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return text.split(",")

    parser.add_argument(flag, type=chosen, default=list(known))


class Clock:
    """Tells what is left of the time, and whether a case still fits."""

    def __init__(self, limit_s: float) -> None:
        self._last = time.monotonic()
        self._end = self._last + limit_s
        self._longest_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def has_time(self, estimate_s: float | None = None) -> bool:
        """Returns whether a case of `estimate_s` would still fit; asked before each case.

        Without an estimate it is taken to be as long as the longest before it.
        """
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        return now + (self._longest_s if estimate_s is None else estimate_s) < self._end


def attempt(
    kept: Store, file: str, record: dict[str, Any], run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Runs a case, then stores and returns its record: `record` and what `run` returns.

    What goes wrong is kept in `failed`, not raised: one case must not cost the others. It is stored
    as failed before it starts, so that one that ends the process is not tried for ever.
    """
    kept.put(file, {**record, "failed": STARTED})
    start = time.monotonic()
    try:
        record = record | run()
    except Exception as error:
        traceback.print_exc(limit=-5)
        record = record | {"failed": reason(error)}
    record["wall_s"] = time.monotonic() - start
    kept.put(file, record)
    return record


def reason(error: Exception) -> str:
    """Returns an exception in a line."""
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


def markdown(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """Returns the lines of a table; None is a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def write_figures(path: Path, found: dict[str, Any]) -> None:
    """Writes JSON for people to read and to compare: a record a line, six digits a figure."""
    lines = []
    for name, value in rounded(found).items():
        text = json.dumps(value)
        if isinstance(value, list | dict) and len(text) > 100:
            records = [json.dumps(record) for record in value]
            if isinstance(value, dict):
                records = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
            ends = "[]" if isinstance(value, list) else "{}"
            text = f"{ends[0]}\n  " + ",\n  ".join(records) + f"\n {ends[1]}"
        lines.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
