"""Certificates of the ports for clients, read again when their files change.

Every port has the same: gRPC by a configuration that it asks for at each connection, HTTP and
metrics by a context of Python's. Each reading makes a new context. To put another one in the place
of an old one by its callback for server names would not do: OpenSSL goes on resuming sessions
of the first, and with them lets in clients whose CA is gone.
"""

import logging
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from serving.frontend import keys
from serving.frontend.reload import Watched
from serving.settings import SettingsError

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""For a handshake; as long as gRPC's ports have."""


class Files(NamedTuple):
    """Where certificates are. Without `client_ca` clients need none."""

    cert: Path
    key: Path
    client_ca: Path | None


class Loaded(NamedTuple):
    """What was read, for each kind of port."""

    context: ssl.SSLContext
    of_grpc: grpc.ServerCertificateConfiguration


class Certificates(Watched[Loaded]):
    """Those of a server, as they are now."""

    def __init__(self, files: Files) -> None:
        """Reads them. Raises SettingsError, which names the file, for what cannot be used."""
        self._files = files
        super().__init__("certificates", [path for path in files if path is not None])
        self._now = self.read()

    @property
    def context(self) -> ssl.SSLContext:
        """For the next connection over HTTP; from any thread."""
        return self._now.context

    def for_grpc(self) -> grpc.ServerCredentials:
        """Of one port: it asks at each connection for what has changed since."""
        given = self._now

        def changed() -> Any:
            """The newest ones; None for those it has."""
            nonlocal given
            before, given = given, self._now
            return None if given is before else given.of_grpc

        return grpc.dynamic_ssl_server_credentials(
            given.of_grpc, changed, require_client_authentication=self._files.client_ca is not None
        )

    def read(self) -> Loaded:
        """See Watched. Raises SettingsError."""
        cert, key, client_ca = self._files
        chain, private = _pem(cert, "tls_cert"), _pem(key, "tls_key")
        roots = None if client_ca is None else _pem(client_ca, "tls_client_ca")
        if exposed := keys.exposure(key):
            log.warning("%s, and with it stand in for this server: chmod 600 it", exposed)
        context = _context(self._files)
        pair = grpc.ssl_server_certificate_configuration([(private, chain)], roots)
        return Loaded(context, pair)

    def use(self, found: Loaded) -> None:
        """See Watched. Connections that are there stay as they are."""
        self._now = found


def _pem(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{setting} is {str(path)!r}, which cannot be read ({error.strerror}); give a file in "
            "PEM format"
        ) from None


def _context(files: Files) -> ssl.SSLContext:
    """Python's own choice of versions and ciphers, but nothing below TLS 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def ask() -> str:
        raise SettingsError(
            f"tls_key is {str(files.key)!r}, which is encrypted; a server that starts by itself "
            "cannot be asked for a passphrase: take it away with `openssl pkey -in FILE -out FILE`"
        )

    try:
        context.load_cert_chain(files.cert, files.key, password=ask)
    except ssl.SSLError as error:
        raise SettingsError(
            f"tls_cert {str(files.cert)!r} and tls_key {str(files.key)!r} do not load "
            f"({_reason(error)}); give a certificate and its own private key, in PEM format"
        ) from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            raise SettingsError(
                f"tls_client_ca {str(files.client_ca)!r} does not load ({_reason(error)}); give "
                "certificates of CAs in PEM format"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
