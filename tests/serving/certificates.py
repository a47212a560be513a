"""Certificates that tests make, with the `openssl` command."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*args: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, in files."""

    cert: Path
    key: Path


class Authority:
    """A CA of a test."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}-key.pem"
        subject = ("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")
        files = ("-keyout", self._key, "-out", self.cert)
        openssl("req", "-x509", *_NEW_KEY, *files, "-days", "2", *subject)

    def signs(self, name: str) -> Pair:
        """Issues a certificate for `name` and for this machine."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        request, extra = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extra.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", *_NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        by = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        files = ("-in", request, "-out", pair.cert, "-extfile", extra)
        openssl("x509", "-req", *by, *files, "-days", "2")
        return pair


def client_context(ca: Path, own: Pair | None = None) -> ssl.SSLContext:
    """Makes the context of a client that trusts `ca` and shows `own`."""
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context
