"""Hashes of files, of every byte, remembered by what the file system says of a file.

Fine-tunes of one model have files of equal names and sizes, and may differ in a few bytes.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

REMEMBERED = "~/.cache/jmoe/digests.json"
"""The user's own: hashes of large files by their paths."""

PART_BYTES = 64 << 20
"""Parts of a file are hashed side by side; a smaller file is hashed in less time than it takes to
look it up, and is not remembered."""

SETTLED_NS = 2 * 10**9
"""A file that changed so recently may change again and keep its times, which tick slowly on some
file systems: it is not remembered yet."""

_READ_BYTES = 1 << 20

log = logging.getLogger(__name__)


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Returns a SHA-256 of each file's parts, in hexadecimal digits.

    Reads every byte of a file that is not remembered with its size, inode and times of change: at
    most 1 to 2 GB/s on each processor. Raises OSError, also for a file that changes meanwhile.
    """
    files = [path.resolve(strict=True) for path in paths]
    known, stamps = _remembered(), {file: stamp_of(file) for file in files}
    found = {
        file: known[str(file)][1]
        for file, stamp in stamps.items()
        if known.get(str(file), (None,))[0] == stamp
    }
    began, unknown = time.perf_counter(), [file for file in stamps if file not in found]
    parts = [
        (file, start) for file in unknown for start in range(0, stamps[file][0] or 1, PART_BYTES)
    ]
    whole = {file: hashlib.sha256() for file in unknown}
    if parts:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for (file, _), digest in zip(parts, pool.map(_part, parts), strict=True):
                whole[file].update(digest)
    for file in unknown:
        if stamp_of(file) != stamps[file]:
            raise OSError(f"{file} changed while it was read; wait until it is written")
    found |= {file: digest.hexdigest() for file, digest in whole.items()}
    now = time.time_ns()
    new = {
        str(file): [stamps[file], found[file]]
        for file in unknown
        if stamps[file][0] >= PART_BYTES and max(stamps[file][1:3]) < now - SETTLED_NS
    }
    if new:
        size, took_s = sum(stamps[file][0] for file in unknown), time.perf_counter() - began
        log.info(
            "read %.1f GB to tell these weights from others: %.1f s, %.2f GB/s; remembered in %s",
            size / 1e9,
            took_s,
            size / 1e9 / took_s,
            REMEMBERED,
        )
        _remember(new)
    return [found[file] for file in files]


def _part(part: tuple[Path, int]) -> bytes:
    path, start = part
    digest, left = hashlib.sha256(), PART_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (read := file.read(min(left, _READ_BYTES))):
            digest.update(read)
            left -= len(read)
    return digest.digest()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(path: Path) -> list[int]:
    """Returns what the file system says of a file, which changes with what is in it: its size,
    times of change in ns, inode and device. Raises OSError.
    """
    status = path.stat()
    return [
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    ]


def _remembered() -> dict[str, Any]:
    """Returns stamp and hash by path; what is not readable is not remembered."""
    with suppress(OSError, ValueError, RuntimeError, RecursionError):
        found = json.loads(Path(REMEMBERED).expanduser().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {
                path: entry
                for path, entry in found.items()
                if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
            }
    return {}


def _remember(new: dict[str, Any]) -> None:
    """Remembers new digests and forgets those of files that are gone."""
    kept = {path: entry for path, entry in _remembered().items() if os.path.exists(path)}
    with suppress(OSError, RuntimeError):  # without it, files are read again
        path = Path(REMEMBERED).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(kept | new, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
