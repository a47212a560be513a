"""Tables that lie beside a model and belong to its weights, in JSON: an object a row."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.checkpoint import UNITED_FILE, weights_digest
from jmoe.digests import file_digests
from jmoe.sharing import WEIGHTS_FILE, Sharing


def digest_of(directory: Path) -> str:
    """Returns what a table belongs to: a model's weights, united ones too. Raises CheckpointError,
    and OSError.
    """
    united = file_digests(directory.glob(UNITED_FILE))
    return sha256(repr([weights_digest(directory), united]).encode()).hexdigest()[:16]


def digest_in_family(sharing: Sharing, number: int, lender: Path) -> str:
    """Returns what a table of a family's model belongs to: its weights, the experts that serve it,
    and the united ones, of the model in the directory `lender`. `sharing` is one that was read.

    Raises OSError.
    """
    owners = np.array([*sharing.fingerprints, "merged"])[sharing.owners[number]]  # -1: the last
    files = [] if sharing.directory is None else [*sharing.directory.glob(WEIGHTS_FILE)]
    files = file_digests([*files, *lender.glob(UNITED_FILE)])
    return sha256(
        repr([sharing.fingerprints[number], owners.tolist(), files]).encode()
    ).hexdigest()[:16]


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], model_digest: str, key: Sequence[str]
) -> None:
    """Writes rows of a model; others of the file that belong to it stay, of those with the same
    values of `key` the newest.
    """
    kept = {}
    if path.exists() and (found := _read(path)).get("model") == model_digest:
        kept = {tuple(row[name] for name in key): row for row in found["tables"]}
    kept |= {tuple(row[name] for name in key): row for row in rows}
    lines = ",\n".join(json.dumps(row) for _, row in sorted(kept.items()))
    path.write_text(f'{{"model": "{model_digest}", "tables": [\n{lines}\n]}}\n', encoding="utf-8")


def read_rows(path: Path, model_digest: str, command: str) -> Sequence[Mapping[str, Any]]:
    """Returns the rows that `write_rows` wrote. Raises ValueError, which names the command that
    makes them, for a file that is missing, cannot be read, or is of another model.
    """
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name}; `{command}` measures and writes it")
    found = _read(path)
    if found.get("model") != model_digest:
        raise ValueError(
            f"{path} is of the model {found.get('model')!r}, and this one is {model_digest!r}: "
            f"weights or united experts are others; run `{command}` again"
        )
    return found.get("tables") or ()


def belongs(path: Path, model_digest: str) -> bool:
    """Returns whether this is a readable file of tables of a model."""
    try:
        return _read(path).get("model") == model_digest
    except ValueError:
        return False


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not readable ({error}); write it anew") from None
