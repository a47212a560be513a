"""TLS certificates of the client ports, read again when their files change.

All ports use the same certificates. gRPC asks for its configuration at each connection; HTTP and
metrics use an `ssl.SSLContext`, and each reading makes a new one. Swapping contexts in the
server-name callback would not do: OpenSSL would go on resuming sessions of the first context, and
so admit clients whose CA was removed.
"""

import logging
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from serving.errors import SettingsError
from serving.frontend import keys
from serving.frontend.reload import Watched

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Time limit for a handshake; the same as for gRPC ports."""


class Files(NamedTuple):
    """Paths of the certificate files. Without `client_ca` clients need no certificate."""

    cert: Path
    key: Path
    client_ca: Path | None


class Loaded(NamedTuple):
    """The loaded certificates, for each kind of port."""

    context: ssl.SSLContext
    of_grpc: grpc.ServerCertificateConfiguration


class Certificates(Watched[Loaded]):
    """A server's current certificates."""

    def __init__(self, files: Files) -> None:
        """Reads the certificates. Raises SettingsError, which names the file that cannot be
        used.
        """
        self._files = files
        super().__init__("certificates", [path for path in files if path is not None])
        self._now = self.read()

    @property
    def context(self) -> ssl.SSLContext:
        """The SSL context for the next HTTP connection. Thread-safe."""
        return self._now.context

    def for_grpc(self) -> grpc.ServerCredentials:
        """Returns the credentials of one gRPC port, which checks for changes at each connection."""
        given = self._now

        def changed() -> Any:
            """Returns the current certificates; None if the port has them already."""
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
        """See Watched. Open connections are not affected."""
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
    """Makes an SSL context with Python's default ciphers and at least TLS 1.2."""
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
