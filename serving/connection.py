"""How clients connect: who they are, and whom they trust. Light to import: no jax.

A key comes from the environment and from nowhere else: flags are shown by `ps` to everybody on the
machine, and kept in the history of shells.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

KEY_VARIABLE = "JMOE_API_KEY"
TLS_VARIABLES = {"tls_ca": "JMOE_TLS_CA", "tls_cert": "JMOE_TLS_CERT", "tls_key": "JMOE_TLS_KEY"}
_ENCRYPTED = "https://"


@dataclass(frozen=True)
class Connection:
    """Key and certificates of a client. Files are in PEM format."""

    api_key: str = field(default="", repr=False)
    tls_ca: str = ""  # who signs servers' certificates; empty: those that the system trusts
    tls_cert: str = ""  # the client's own, with its key: for mutual TLS
    tls_key: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a certificate without its key, or a key of API that is none."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key of a client go together; give both or neither")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key has characters that no key has; was it copied whole?")

    @classmethod
    def of_environment(
        cls,
        key_variable: str | None = None,
        environment: Mapping[str, str] = os.environ,
        **files: str | None,
    ) -> "Connection":
        """What the environment says, and `files` (fields of this class) that are given before it.

        `key_variable`: the one that has the key, in place of JMOE_API_KEY. Raises ValueError where
        that is empty, and as the constructor does.
        """
        key = environment.get(key_variable or KEY_VARIABLE, "").strip()
        if key_variable and not key:
            raise ValueError(f"{key_variable} is empty; --api-key-env names a variable with a key")
        found = {
            name: files.get(name) or environment.get(variable, "")
            for name, variable in TLS_VARIABLES.items()
        }
        return cls(key, **found)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call says of its caller."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def is_encrypted(self, address: str) -> bool:
        """Whether a connection is: it is to `https://...`, or a file says whom to trust."""
        return address.startswith(_ENCRYPTED) or bool(self.tls_ca or self.tls_cert)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """To `host:port` or `https://host:port`. Raises OSError for files that cannot be read."""
        if self.is_encrypted(address):
            return grpc.aio.secure_channel(bare(address), self._credentials())
        return grpc.aio.insecure_channel(bare(address))

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]] | None = None
    ) -> grpc.Channel:
        """As `aio_channel`, for threads."""
        if self.is_encrypted(address):
            return grpc.secure_channel(bare(address), self._credentials(), options)
        return grpc.insecure_channel(bare(address), options)

    def _credentials(self) -> grpc.ChannelCredentials:
        def pem(name: str) -> bytes | None:
            return Path(name).read_bytes() if name else None

        return grpc.ssl_channel_credentials(pem(self.tls_ca), pem(self.tls_key), pem(self.tls_cert))


def bare(address: str) -> str:
    """`host:port` of an address, without what says that it is encrypted."""
    return address.removeprefix(_ENCRYPTED)
