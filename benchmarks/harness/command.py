"""What benchmarks share beside the store: one case from a stored start to its record,
tables and files of figures.

No jax here: a benchmark whose figures come from other processes must not hold the GPU's memory.
"""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.store import Store, rounded

STARTED = "it was started, and no more is known"  # a kernel may hang, a process may be killed
CALL_AGAIN = "cases left, and no time for them; call again"


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
        record = record | {"failed": f"{type(error).__name__}: {str(error).strip()[:600]}"}
    record["wall_s"] = time.monotonic() - start
    kept.put(file, record)
    return record


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
