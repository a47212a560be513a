"""Where figures are kept, where they are from, and how they are shown. No jax here: a benchmark
whose figures come from other processes must not hold the GPU's memory.

Of a GPU they are kept in `benchmarks/<device>/<file>.json`, a list of records, one a case.

A record has: case (its name and what tells it from others), commit, sources (a digest), date,
machine (device, driver, versions), wall_s, and what its benchmark measured. `failed` says why there
are no figures. A later record of a case replaces an earlier one; one of the same revision, that did
not fail, is not measured again. So a run that was cut short goes on where it stopped.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.bench.results import rounded
from serving.telemetry import version

ROOT = Path(__file__).parents[2]
STARTED = "it was started, and no more is known"  # a kernel may hang, a process may be killed
CALL_AGAIN = "cases left, and no time for them; call again"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "triton")


def device_folder(kind: str) -> Path:
    """Where a device's figures lie: "NVIDIA H200" is `benchmarks/h200`."""
    words = re.findall(r"[a-z0-9]+", kind.lower().replace("nvidia", ""))
    return ROOT / "benchmarks" / ("-".join(words) or "unknown")


def nvidia_smi(field: str) -> str | None:
    """Returns what the driver says of the first GPU; None where there is none."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def commit(given: str | None = None) -> str:
    """Returns the commit that was measured: `given`, or git's; "unknown" where there is neither."""
    return given or version.commit(ROOT) or "unknown"


def sources(paths: Sequence[str]) -> str:
    """Returns the digest of the code and data files at or below `paths` (from the repository root).

    It tells apart what a commit does not: a tree that was changed, or has no git.
    """
    digest = hashlib.sha256()
    for path in paths:
        top = ROOT / path
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.suffix in (".py", ".json", ".yaml", ".npz") and "__pycache__" not in file.parts:
                name = file.relative_to(ROOT).as_posix()
                digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def machine(device_kind: str) -> dict[str, str]:
    """Returns device, driver and versions."""
    found = {"device": device_kind, "python": platform.python_version()}
    if driver := nvidia_smi("driver_version"):
        found["driver"] = driver
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def origin(command: str) -> dict[str, Any]:
    """Returns what a result names of where it is from: its command, commit, date and machine."""
    cpus = f"{os.cpu_count()} CPUs, {platform.platform()}"
    return {"command": command, "commit": commit(), "date": now(), "machine": machine(cpus)}


def put_parts(found: dict[str, Any], new: dict[str, Any], command: str) -> None:
    """Puts the parts of a run into a result, which names the newest run's origin, and in `origins`
    that of every part: those that did not run keep theirs.
    """
    newest, origins = origin(command), found.pop("origins", {})
    before = {key: found.pop(key) for key in newest if key in found}
    origins = {name: origins.get(name, before) for name in found} | dict.fromkeys(new, newest)
    parts = found | new
    found.clear()
    found |= {**newest, "origins": origins, **parts}


def now() -> str:
    """Returns the date of a record: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Store:
    """The records of one folder. A file is written anew after every record, in one step."""

    def __init__(self, folder: Path, revision: dict[str, str]) -> None:
        self.folder, self.revision = folder, revision

    def records(self, file: str) -> dict[str, dict[str, Any]]:
        """Returns the records of a file by the case's name; none where there is no file."""
        path = self.folder / f"{file}.json"
        if not path.exists():
            return {}
        return {r["case"]["name"]: r for r in json.loads(path.read_text(encoding="utf-8"))}

    def has(self, file: str, name: str, failed: bool = False) -> bool:
        """Returns whether a case was measured at this revision; a failed one counts only with
        `failed`.
        """
        record = self.records(file).get(name)
        if record is None or ("failed" in record and not failed):
            return False
        return all(record.get(key) == value for key, value in self.revision.items())

    def put(self, file: str, record: dict[str, Any]) -> None:
        """Adds a record or replaces that of its case."""
        records = self.records(file)
        records[record["case"]["name"]] = record
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{file}.json"
        part = path.with_suffix(".part")
        text = json.dumps(rounded([*records.values()], 6), indent=1, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)


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


# ---- Tables, and files for people to read ----


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
    for name, value in rounded(found, 6).items():
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
