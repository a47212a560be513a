"""The folder of an evaluation: its inputs, and one line of results a setting, appended."""

import hashlib
import inspect
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.brownout import Brownout, OwnStrategy
from jmoe.checkpoint import UNITED_FILE, weights_digest
from jmoe.digests import file_digests
from jmoe.expected_loss import FILE

INPUTS, RESULTS = "inputs.json", "results.jsonl"


@dataclass
class Result:
    """The scores of one setting."""

    setting: Brownout
    right: list[bool]  # by item
    degraded_share: float  # of expert visits, prefill and decode of the tasks
    output_error: list[float]  # by MoE layer
    perplexity: dict[str, float] = field(default_factory=dict)  # by text file
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)  # of each answer; none in older folders
    excess: list[float] = field(default_factory=list)  # of each answer, in nats
    others: list[int] = field(default_factory=list)  # its tokens that the exact model would not say


class Store:
    """Results by setting, in a folder that belongs to one set of inputs."""

    def __init__(
        self, folder: Path, inputs: dict[str, Any], settings: Iterable[Brownout] = ()
    ) -> None:
        """Opens or makes the folder; of users' own strategies, results of those in `settings` are
        read. Raises ValueError where it belongs to other inputs.
        """
        self.folder = folder
        self._own = {_name(each.strategy): each.strategy for each in settings if each.own}
        self.results: dict[Brownout, Result] = {}
        wanted = json.loads(json.dumps(inputs))
        known = folder / INPUTS
        if not known.exists():
            folder.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        else:
            self._check(_read_json(known), wanted)
        self._read(folder / RESULTS)

    def _check(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        keys = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if keys:
            told = ", ".join(f"{k} {found.get(k)!r} (now {wanted.get(k)!r})" for k in keys)
            raise ValueError(
                f"{self.folder} belongs to other inputs: {told}; name another folder with --out, "
                "or remove this one"
            )

    def _read(self, path: Path) -> None:
        """Reads whole lines; a last one that was cut off is dropped, and its setting runs again."""
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                bits = np.unpackbits(np.frombuffer(bytes.fromhex(row["right"]), np.uint8))
                row["right"] = bits[: row.pop("num")].astype(bool).tolist()
                row["strategy"] = self._own.get(row["strategy"], row["strategy"])
                if isinstance(row["strategy"], str) and ":" in row["strategy"]:
                    continue  # of one that is not asked for, or has changed since
                own = {name: row.pop(name) for name in ("strategy", "threshold_percent", "way")}
                own |= {name: row.pop(name) for name in ("keep", "levels") if name in row}
                result = Result(Brownout(**own), **row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is not a result ({error!r}); remove the line"
                ) from None
            self.results[result.setting] = result
        if len(whole) < len(content):
            path.write_bytes(whole)

    def add(self, result: Result) -> None:
        """Adds a result; it is on the disk before this returns."""
        packed = np.packbits(np.array(result.right, bool)).tobytes().hex()
        row = vars(result.setting) | vars(result) | {"right": packed, "num": len(result.right)}
        row["strategy"] = _name(row.pop("setting").strategy)
        with (self.folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.results[result.setting] = result


def _name(strategy: str | OwnStrategy) -> str:
    """Returns the name of a strategy, with a digest of the code of a user's own."""
    if (own := Brownout(strategy).own) is None:  # type: ignore[arg-type]
        return str(strategy)
    named = strategy if inspect.isfunction(strategy) else type(strategy)
    return f"{own.name}@{digest([inspect.getsource(named), repr(own)])}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not readable ({error}); remove the folder or name another"
        ) from None


def digest(parts: Iterable[str]) -> str:
    """Returns the short hash of strings, in order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)}:".encode() + part.encode())
    return found.hexdigest()[:16]


def model_digest(directory: Path) -> str:
    """Returns a short hash of a model's weights, united experts and settings, but not of what was
    measured of them. Raises CheckpointError, and OSError.
    """
    beside = sorted({*directory.glob("*.json"), *directory.glob(UNITED_FILE)} - {directory / FILE})
    names = [path.name for path in beside]
    return digest([weights_digest(directory), *names, *file_digests(beside)])
