"""API keys: how they are made, and the file of their hashes.

A key is 256 random bits, which cannot be guessed from a dictionary. So the slow hashes that
passwords need would only slow down the server, and SHA-256 suffices.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from serving.errors import SettingsError
from serving.request import Priority
from serving.settings.reading import read_yaml, to_yaml

PREFIX = "jmoe_"
"""Prefix of every key, so that secret scanners can find leaked keys."""
_RANDOM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HEADER = "# Keys of `jmoe serve --keys-file`, as hashes: see `jmoe keys --help`.\n"


@dataclass(frozen=True)
class Key:
    """What a key allows. Numbers are limits; 0 means no limit."""

    sha256: str  # of the key, in hexadecimal digits
    admin: bool = False  # may use the admin service, the live page and /metrics
    metrics: bool = False  # may read /metrics; without admin and what follows, nothing else
    models: tuple[str, ...] = ()  # by the names they are served under; empty: all
    classes: tuple[Priority, ...] = ()  # empty: all
    requests_per_min: int = 0
    tokens_per_min: int = 0  # of prompts and outputs together
    concurrency: int = 0  # requests running at a time

    @property
    def generates(self) -> bool:
        """Whether the key may generate: one for metrics may only if it says what or how much."""
        return self.admin or not self.metrics or self != Key(self.sha256, metrics=True)


_FILE = TypeAdapter(dict[str, Key])


def digest(key: str) -> bytes:
    """Returns the stored hash of a key: 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """Makes a new random key."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def check_name(name: str) -> None:
    """Raises SettingsError for a name that is not safe to show in logs and metrics."""
    if name.startswith(PREFIX):
        raise SettingsError(f"a name begins with {PREFIX}, as keys do; call the key otherwise")
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"{name!r} is no name of a key; use up to 64 letters, digits, dots, dashes and "
            "underscores, and begin with a letter or digit"
        )


def read(path: Path) -> dict[str, Key]:
    """Reads the keys of a file, by name.

    Raises SettingsError, which names file, key and field but repeats no value: that could be a key
    that was put where its hash belongs.
    """
    if not path.exists():
        raise SettingsError(
            f"there is no keys file {path}; `jmoe keys new NAME --admin --file {path}` makes one"
        )
    found = read_yaml(path, quotes=False)
    if found.keys() - {"keys"}:
        raise SettingsError(f"{path} must have `keys` at its top, and nothing else")
    # As JSON, since only there does strict validation take lists for tuples.
    text = json.dumps(found.get("keys") or {}, default=str)
    try:
        keys = _FILE.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise _explain(path, error) from None
    _check(path, keys)
    return keys


def _explain(path: Path, error: ValidationError) -> SettingsError:
    first, names = error.errors(include_input=False)[0], [field.name for field in fields(Key)]
    name, *inside = map(str, first["loc"] or ("keys",))
    _check_name_in(path, name)
    what = f"{'.'.join(inside)} of {name}" if inside and inside[0] in names else name
    have = ", ".join(names)
    return SettingsError(f"{path}: {what} is wrong: {first['msg']}; a key has some of {have}")


def _check_name_in(path: Path, name: str) -> None:
    try:
        check_name(name)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _check(path: Path, keys: dict[str, Key]) -> None:
    by_hash: dict[str, str] = {}
    for name, key in keys.items():
        _check_name_in(path, name)
        if not _HASH.fullmatch(key.sha256):
            raise SettingsError(
                f"{path}: sha256 of {name} is no hash of 64 hexadecimal digits; make a key with "
                "`jmoe keys new`, and never store one as it is"
            )
        if (other := by_hash.setdefault(key.sha256, name)) != name:
            raise SettingsError(f"{path}: {other} and {name} are one key; revoke one of them")
        for limit in ("requests_per_min", "tokens_per_min", "concurrency"):
            if (value := getattr(key, limit)) < 0:
                raise SettingsError(
                    f"{path}: {limit} of {name} is {value}; it must be 0 (no limit) or more"
                )


def write(path: Path, keys: dict[str, Key]) -> None:
    """Replaces a file atomically, readable by its owner only.

    The file keeps its owner, so that a server can still read a file that root changed. Comments are
    lost. Raises OSError.
    """
    plain = _FILE.dump_python(keys, mode="json", exclude_defaults=True, warnings=False)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_HEADER + to_yaml({"keys": plain}))
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and (was := path.stat()).st_uid != os.geteuid():
            os.chown(part, was.st_uid, was.st_gid)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def changing(path: Path) -> Iterator[dict[str, Key]]:
    """Yields the keys of a file to be changed, and writes them if the block ends without an error.

    A lock makes other processes that change the file wait. A missing file has no keys. Raises as
    `read` and `write` do.
    """
    path = path.resolve()  # replace the target of a link, not the link
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Lock the folder, since the file itself is replaced.
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read(path) if path.exists() else {}
        yield keys
        _check(path, keys)
        write(path, keys)
    finally:
        os.close(folder)


def exposure(path: Path) -> str:
    """Describes unsafe permissions that other users have on a file; empty if there are none."""
    mode = path.stat().st_mode
    may = [word for word, bits in (("read", 0o004), ("write", 0o022)) if mode & bits]
    if not may:
        return ""
    return f"{path} has mode {stat.S_IMODE(mode):04o}: others may {' and '.join(may)} it"
