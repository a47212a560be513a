"""The secret that the processes of one server share, and the keys that are made from it."""

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.config import EngineConfig
from serving.errors import SettingsError

VARIABLE = "JMOE_CLUSTER_SECRET"
"""Environment variable with the secret itself, used where `engine.secret_file` is empty."""
HOW_TO_MAKE_ONE = (
    "make one with `umask 077; openssl rand -hex 32 > secret`, copy it to every machine and name "
    f"it by --secret-file, or put what it holds into {VARIABLE}"
)
_LEAST_BYTES, _MOST_BYTES = 32, 4096
_PERSON = b"jmoe cluster"


@dataclass(frozen=True)
class ClusterSecret:
    """What the processes of one server know and nobody else does. Its `repr` does not show it."""

    secret: bytes = field(repr=False)

    @classmethod
    def of(
        cls, config: EngineConfig, environment: Mapping[str, str] = os.environ
    ) -> "ClusterSecret | None":
        """Reads the secret of `engine.secret_file`, else of JMOE_CLUSTER_SECRET; None without
        either.

        White space around it does not count. Raises SettingsError, which never shows the secret,
        for a file that cannot be read or that other users may read or write, and for a secret of
        less than 32 bytes.
        """
        if config.secret_file:
            where = f"engine.secret_file is {config.secret_file!r}"
            return cls(_checked(_read(Path(config.secret_file).expanduser(), where), where))
        if text := environment.get(VARIABLE, "").strip():
            return cls(_checked(os.fsencode(text), f"{VARIABLE} is set"))
        return None

    @classmethod
    def random(cls) -> "ClusterSecret":
        """Makes a secret of 256 random bits."""
        return cls(secrets.token_bytes(_LEAST_BYTES))

    def derive(self, purpose: str, num_bytes: int = 32) -> bytes:
        """Returns the key of a purpose, of up to 64 bytes; the same in every process.

        Keys of different purposes or lengths say nothing about each other or the secret.
        """
        key = hashlib.sha512(self.secret).digest()
        return hashlib.blake2b(
            purpose.encode(), digest_size=num_bytes, key=key, person=_PERSON
        ).digest()


def _read(path: Path, where: str) -> bytes:
    try:
        # Do not wait for the other end of a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError(f"{where}, which is not a regular file")
            if mode & 0o026:  # a group may read it: so Kubernetes hands secrets to a user
                raise SettingsError(
                    f"{where}, and its mode is {stat.S_IMODE(mode):04o}: other users may read or "
                    "write it; chmod 600 it, and replace it if others have had the time to read it"
                )
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"{where}, which cannot be read ({error.strerror}); {HOW_TO_MAKE_ONE}"
        ) from None


def _checked(read: bytes, where: str) -> bytes:
    found = read.strip()
    if not _LEAST_BYTES <= len(found) <= _MOST_BYTES:
        raise SettingsError(
            f"{where}, and the secret there has fewer than {_LEAST_BYTES} bytes or more than "
            f"{_MOST_BYTES}; {HOW_TO_MAKE_ONE}"
        )
    return found
