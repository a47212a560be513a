"""Where figures are kept: one JSON file an op, `benchmarks/<device>/<op>.json`, a list of records.

A record has: case (its name and sizes), commit, sources (digest of pallas_kernels), date, seed,
machine (device, driver, versions), implementation ("mosaic" or "xla"), tile, check, count, facts,
ceilings, timing, figures, target and libraries. `failed` says why a record has no timing. A later
record of a case replaces an earlier one; one of the same commit and sources, that did not fail, is
not measured again. So a run that was cut short goes on where it stopped.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "triton", "tokamax", "vllm")


def device_folder(kind: str) -> Path:
    """Where a device's figures lie: "NVIDIA H200" is `benchmarks/h200`."""
    words = re.findall(r"[a-z0-9]+", kind.lower().replace("nvidia", ""))
    return ROOT / "benchmarks" / ("-".join(words) or "unknown")


def _output(*command: str) -> str:
    """What a command prints, or nothing where it cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def revision(commit: str | None = None) -> dict[str, str]:
    """What was measured: commit (as given, or git's), and a digest of the kernels' sources.

    The digest tells apart what a commit does not: a tree that was changed, or has no git.
    """
    if commit is None:
        commit = _output("git", "rev-parse", "HEAD") or "unknown"
        if commit != "unknown" and _output("git", "status", "--porcelain", "pallas_kernels"):
            commit += "-dirty"
    digest = hashlib.sha256()
    for path in sorted((ROOT / "pallas_kernels").rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return {"commit": commit, "sources": digest.hexdigest()[:16]}


def machine(device_kind: str) -> dict[str, str]:
    """Device, driver and versions."""
    found = {"device": device_kind, "python": platform.python_version()}
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        found["driver"] = driver.splitlines()[0]
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The date of a record: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Store:
    """The records of one folder. A file is written anew after every record, in one step."""

    def __init__(self, folder: Path, revision: dict[str, str]) -> None:
        self.folder, self.revision = folder, revision

    def records(self, file: str) -> dict[str, dict[str, Any]]:
        """Records of a file by the case's name; none where there is no file."""
        path = self.folder / f"{file}.json"
        if not path.exists():
            return {}
        return {r["case"]["name"]: r for r in json.loads(path.read_text(encoding="utf-8"))}

    def has(self, file: str, name: str, failed: bool = False) -> bool:
        """Whether a case was measured at this revision; one that `failed` only counts if asked."""
        record = self.records(file).get(name)
        if record is None or ("failed" in record and not failed):
            return False
        return all(record[key] == value for key, value in self.revision.items())

    def put(self, file: str, record: dict[str, Any]) -> None:
        """Adds a record or replaces that of its case."""
        records = self.records(file)
        records[record["case"]["name"]] = record
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{file}.json"
        part = path.with_suffix(".part")
        text = json.dumps(_rounded(list(records.values())), indent=1, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)


def _rounded(value: Any) -> Any:
    """Six digits are more than any figure has."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
