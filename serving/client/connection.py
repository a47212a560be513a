"""How clients connect: their API key, and TLS certificates. Does not import jax.

The key comes only from the environment: flags are visible to everybody on the machine in `ps`, and
kept in shell histories.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

KEY_VARIABLE = "JMOE_API_KEY"
TLS_VARIABLES = {"tls_ca": "JMOE_TLS_CA", "tls_cert": "JMOE_TLS_CERT", "tls_key": "JMOE_TLS_KEY"}
_ENCRYPTED = "https://"


@dataclass(frozen=True)
class Connection:
    """Key and certificates of a client. Files are in PEM format."""

    api_key: str = field(default="", repr=False)
    tls_ca: str = ""  # CAs of server certificates; empty: the system's
    tls_cert: str = ""  # the client's certificate, with its key, for mutual TLS
    tls_key: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a certificate without its key, or an invalid API key."""
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
        """Makes a connection from environment variables; `files` (fields of this class) override
        them.

        `key_variable` names the variable with the key, instead of JMOE_API_KEY. Raises ValueError
        if that is empty, and as the constructor does.
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
        """The gRPC metadata that authenticates each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def is_encrypted(self, address: str) -> bool:
        """Returns whether a connection to `address` uses TLS: it is `https://...`, or a CA or
        certificate is set.
        """
        return address.startswith(_ENCRYPTED) or bool(self.tls_ca or self.tls_cert)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel to `host:port` or `https://host:port`.

        Raises OSError for files that cannot be read.
        """
        if not self.is_encrypted(address):
            return grpc.aio.insecure_channel(bare(address))
        files = self.tls_ca, self.tls_key, self.tls_cert
        pems = (Path(name).read_bytes() if name else None for name in files)
        return grpc.aio.secure_channel(bare(address), grpc.ssl_channel_credentials(*pems))


def bare(address: str) -> str:
    """Returns the `host:port` of an address, without `https://`."""
    return address.removeprefix(_ENCRYPTED)
